"""What every backend that reaches other processes must do, as a test class to derive from: see test_conformance.py.

The peer is `python -m tests.kvtransfer.peer_process`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtransfer import errors as e
from kvtransfer.agent import Agent
from kvtransfer.descs import MemType, XferDescs
from kvtransfer.memory import allocate
from tests.kvtransfer.conformance import CHUNK, SIZE, Conformance, Side
from tests.kvtransfer.support import PeerProcess, drain


class ProcessConformance(Conformance):
    """The target is another OS process."""

    @pytest.fixture
    def peer(self, runtime_dir: Path) -> Iterator[PeerProcess]:
        peer = PeerProcess(self.backend, self.params(runtime_dir), SIZE, fill=1)
        yield peer
        peer.kill()

    @pytest.fixture
    def reader(self, make_agent: Callable[..., Agent], peer: PeerProcess) -> Side:
        side = Side(make_agent("reader"), allocate(self.backend, SIZE), 2)
        assert side.agent.add_remote_agent(peer.metadata) == b"peer"
        return side

    def read(self, reader: Side, peer: PeerProcess, operation: str = "READ", notif: bytes = b"") -> str:
        far = XferDescs(MemType.DRAM_SEG, [(peer.address + CHUNK, CHUNK, 0)])
        handle = reader.agent.initialize_xfer(operation, reader.descs(4), far, "peer", notif)
        return reader.agent.transfer(handle)

    def test_read_and_write_across_processes(self, reader: Side, peer: PeerProcess) -> None:
        assert self.read(reader, peer, notif=b"read") == "DONE"
        assert (reader.chunk(4) == 1).all()
        assert int((reader.memory == 1).sum()) == CHUNK
        reader.chunk(4)[:] = 9
        assert self.read(reader, peer, "WRITE", b"written") == "DONE"
        assert peer.ask("notifs", 2) == [["reader", b"read".hex()], ["reader", b"written".hex()]]
        assert peer.ask("count", 9) == CHUNK

    def test_both_directions_at_once(self, reader: Side, peer: PeerProcess) -> None:
        peer.ask("add", reader.agent.get_agent_metadata().hex())
        peer.ask("send", "reader", b"hello".hex())
        reader.agent.send_notif("peer", b"hello too")
        assert drain(reader.agent) == {"peer": [b"hello"]}
        assert peer.ask("notifs", 1) == [["reader", b"hello too".hex()]]

    def test_kill_before_the_first_contact(self, reader: Side, peer: PeerProcess) -> None:
        peer.kill()
        with pytest.raises(e.nixlRemoteDisconnectError):
            self.read(reader, peer)

    def test_kill_after_a_transfer(self, reader: Side, peer: PeerProcess) -> None:
        assert self.read(reader, peer) == "DONE"
        peer.kill()
        with pytest.raises(e.nixlRemoteDisconnectError):
            self.read(reader, peer)
        with pytest.raises(e.nixlRemoteDisconnectError):
            reader.agent.send_notif("peer", b"x")

    def test_a_stopped_peer_that_is_not_connected(self, reader: Side, peer: PeerProcess) -> None:
        with peer.stopped(), pytest.raises(e.nixlBackendError, match="'peer'"):
            self.read(reader, peer)
        assert self.read(reader, peer) == "DONE"

    def test_a_stopped_peer_that_is_connected(self, reader: Side, peer: PeerProcess) -> None:
        """It neither delays transfers nor takes notifications without end; what it took, it has when it is back."""
        reader.agent.make_connection("peer")
        sent: list[int] = []

        def flood() -> None:
            for i in range(10_000):
                reader.agent.send_notif("peer", b"y" * 10_000)
                sent.append(i)

        with peer.stopped():
            assert self.read(reader, peer) == "DONE"
            with pytest.raises(e.nixlBackendError):
                flood()
        assert len(peer.ask("notifs", len(sent))) == len(sent)

    def test_a_peer_that_dies_while_stopped(self, reader: Side, peer: PeerProcess) -> None:
        reader.agent.make_connection("peer")
        with peer.stopped():
            os.kill(peer.pid, signal.SIGKILL)
            peer.wait()
        with pytest.raises(e.nixlRemoteDisconnectError):
            self.read(reader, peer)

    def test_the_peer_restarts_under_its_name(self, reader: Side, peer: PeerProcess, runtime_dir: Path) -> None:
        self.read(reader, peer)
        peer.kill()
        again = PeerProcess(self.backend, self.params(runtime_dir), SIZE, fill=3)
        try:
            with pytest.raises(e.nixlNotAllowedError):
                reader.agent.add_remote_agent(again.metadata)
            reader.agent.remove_remote_agent("peer")
            reader.agent.add_remote_agent(again.metadata)
            assert self.read(reader, again) == "DONE"
            assert (reader.chunk(4) == 3).all()
        finally:
            again.kill()
