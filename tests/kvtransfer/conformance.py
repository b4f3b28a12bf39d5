"""What every backend must do within one process, as a test class to derive from: see test_conformance.py.

Expected results are those of NIXL 1.5.1, observed with its UCX backend, except where docs/kvtransfer.md says that we
are stricter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from kvtransfer import errors as e
from kvtransfer.agent import Agent, AgentConfig
from kvtransfer.descs import XferDescs
from kvtransfer.memory import Bytes, allocate
from tests.kvtransfer.support import drain, until

SIZE = 1 << 16
CHUNK = 4096


class Side:
    """An agent with 64 KiB of registered memory, full of one byte."""

    def __init__(self, agent: Agent, memory: Bytes, fill: int) -> None:
        self.agent = agent
        self.memory = memory
        self.memory[:] = fill
        self.registered = agent.register_memory([(self.address(0), SIZE, 0, "")], "DRAM")

    def address(self, offset: int) -> int:
        return int(self.memory.ctypes.data) + offset

    def descs(self, *chunks: int, length: int = CHUNK) -> XferDescs:
        """The chunks of this number."""
        descs = self.agent.get_xfer_descs([(self.address(c * CHUNK), length, 0) for c in chunks], "DRAM")
        assert descs is not None
        return descs

    def chunk(self, number: int) -> Bytes:
        return self.memory[number * CHUNK : (number + 1) * CHUNK]


class Conformance:
    backend: ClassVar[str]

    @pytest.fixture
    def make_agent(self, runtime_dir: Path) -> Iterator[Callable[..., Agent]]:
        agents: list[Agent] = []

        def make(name: str, **config: Any) -> Agent:
            agent = Agent(name, AgentConfig(backends=[], **config))
            agents.append(agent)
            agent.create_backend(self.backend, self.params(runtime_dir))
            return agent

        yield make
        for agent in agents:
            agent.close()

    def params(self, runtime_dir: Path) -> dict[str, str]:
        return {}

    @pytest.fixture
    def target(self, make_agent: Callable[..., Agent]) -> Side:
        return Side(make_agent("target"), allocate(self.backend, SIZE), 1)

    @pytest.fixture
    def initiator(self, make_agent: Callable[..., Agent], target: Side) -> Side:
        """Knows the target already; the target does not know it."""
        side = Side(make_agent("initiator", capture_telemetry=True), allocate(self.backend, SIZE), 2)
        assert side.agent.add_remote_agent(target.agent.get_agent_metadata()) == b"target"
        return side


class AgentConformance(Conformance):
    # --- moving bytes ---

    def test_read_brings_the_right_bytes_to_the_right_places(self, initiator: Side, target: Side) -> None:
        for number in range(16):
            target.chunk(number)[:] = 100 + number
        handle = initiator.agent.initialize_xfer("READ", initiator.descs(3, 0, 9), target.descs(7, 8, 2), "target")
        assert initiator.agent.transfer(handle) == "DONE"
        assert initiator.agent.check_xfer_state(handle) == "DONE"
        got = [int(initiator.chunk(n)[0]) for n in range(16)]
        assert got == [108, 2, 2, 107, 2, 2, 2, 2, 2, 102, 2, 2, 2, 2, 2, 2]
        assert all(len(set(initiator.chunk(n).tolist())) == 1 for n in range(16))

    def test_write_goes_the_other_way(self, initiator: Side, target: Side) -> None:
        handle = initiator.agent.initialize_xfer("WRITE", initiator.descs(0), target.descs(5), "target")
        assert initiator.agent.transfer(handle) == "DONE"
        assert [n for n in range(16) if (target.chunk(n) == 2).all()] == [5]
        assert (initiator.memory == 2).all()

    def test_random_scatter_equals_a_plain_copy(self, initiator: Side, target: Side) -> None:
        rng = np.random.default_rng(7)
        target.memory[:] = rng.integers(0, 256, SIZE)
        lengths = rng.integers(0, 200, 100)
        near = rng.permutation(SIZE // 256)[:100] * 256
        far = rng.permutation(SIZE // 256)[:100] * 256
        expected = initiator.memory.copy()
        for n, f, length in zip(near, far, lengths, strict=True):
            expected[n : n + length] = target.memory[f : f + length]
        near_descs, far_descs = (
            side.agent.get_xfer_descs(
                np.stack([offsets + side.address(0), lengths, np.zeros(100, np.int64)], axis=1), "DRAM"
            )
            for side, offsets in ((initiator, near), (target, far))
        )
        assert near_descs is not None
        assert far_descs is not None
        handle = initiator.agent.initialize_xfer("READ", near_descs, far_descs, "target")
        assert initiator.agent.transfer(handle) == "DONE"
        assert np.array_equal(initiator.memory, expected)

    def test_loopback(self, initiator: Side) -> None:
        initiator.chunk(0)[:] = 42
        handle = initiator.agent.initialize_xfer("WRITE", initiator.descs(0), initiator.descs(9), "initiator", b"loop")
        assert initiator.agent.transfer(handle) == "DONE"
        assert (initiator.chunk(9) == 42).all()
        assert drain(initiator.agent) == {"initiator": [b"loop"]}

    def test_a_tensor_over_registered_memory(self, initiator: Side, target: Side) -> None:
        tensor = torch.from_numpy(initiator.memory[:CHUNK])
        near = initiator.agent.get_xfer_descs([tensor])
        assert near == initiator.descs(0)
        assert near is not None
        handle = initiator.agent.initialize_xfer("READ", near, target.descs(0), "target")
        assert initiator.agent.transfer(handle) == "DONE"
        assert bool((tensor == 1).all())

    # --- handles ---

    def test_a_handle_can_be_posted_again(self, initiator: Side, target: Side) -> None:
        handle = initiator.agent.initialize_xfer("READ", initiator.descs(0), target.descs(0), b"target", b"first")
        for value in (10, 11):
            target.chunk(0)[:] = value
            assert initiator.agent.transfer(handle) == "DONE"
            assert (initiator.chunk(0) == value).all()
        initiator.agent.transfer(handle, b"second")
        initiator.agent.transfer(handle)
        initiator.agent.transfer(handle, "text")
        assert drain(target.agent, 5) == {"initiator": [b"first", b"first", b"second", b"second", b"text"]}

    def test_before_it_is_posted_it_has_no_state(self, initiator: Side, target: Side) -> None:
        handle = initiator.agent.initialize_xfer("READ", initiator.descs(0), target.descs(0), "target")
        with pytest.raises(e.nixlNotPostedError):
            initiator.agent.check_xfer_state(handle)
        with pytest.raises(e.nixlNotPostedError):
            initiator.agent.get_xfer_telemetry(handle)

    def test_released_handles_cannot_be_used(self, initiator: Side, target: Side) -> None:
        agent = initiator.agent
        handle = agent.initialize_xfer("READ", initiator.descs(0), target.descs(0), "target")
        near = agent.prep_xfer_dlist("", initiator.descs(0))
        far = agent.prep_xfer_dlist("target", target.descs(0))
        for _ in range(2):
            agent.release_xfer_handle(handle)
            agent.release_dlist_handle(far)
        with pytest.raises(e.nixlInvalidParamError, match="released"):
            agent.transfer(handle)
        with pytest.raises(e.nixlInvalidParamError, match="released"):
            agent.make_prepped_xfer("READ", near, [0], far, [0])

    def test_telemetry(self, initiator: Side, target: Side) -> None:
        handle = initiator.agent.initialize_xfer("READ", initiator.descs(0, 1, 5), target.descs(2, 3, 4), "target")
        initiator.agent.transfer(handle)
        telemetry = initiator.agent.get_xfer_telemetry(handle)
        assert (telemetry.totalBytes, telemetry.descCount) == (3 * CHUNK, 2)  # 0, 1 <- 2, 3 were merged
        assert 0 <= telemetry.xferDuration <= 10_000_000
        assert telemetry.startTime > 1_700_000_000_000_000
        loop = target.agent.initialize_xfer("READ", target.descs(0), target.descs(1), "target")
        target.agent.transfer(loop)
        with pytest.raises(e.nixlNoTelemetryError):
            target.agent.get_xfer_telemetry(loop)

    def test_cost_and_backend(self, initiator: Side, target: Side) -> None:
        handle = initiator.agent.initialize_xfer("READ", initiator.descs(0), target.descs(0), "target")
        assert initiator.agent.estimate_xfer_cost(handle) == (0, 0, "UNKNOWN")
        assert initiator.agent.query_xfer_backend(handle) == self.backend

    # --- prepared lists ---

    def test_prepared_lists(self, initiator: Side, target: Side) -> None:
        for number in range(16):
            target.chunk(number)[:] = 100 + number
        agent = initiator.agent
        near = agent.prep_xfer_dlist("NIXL_INIT_AGENT", initiator.descs(*range(16)))
        far = agent.prep_xfer_dlist(
            "target", [(target.address(n * CHUNK), CHUNK, 0) for n in range(16)], mem_type="DRAM"
        )
        handle = agent.make_prepped_xfer("READ", near, [0, 1, 2], far, np.array([9, 4, 5], np.int32), b"p")
        assert agent.transfer(handle) == "DONE"
        assert [int(initiator.chunk(n)[0]) for n in range(4)] == [109, 104, 105, 2]
        assert drain(target.agent) == {"initiator": [b"p"]}

    def test_strided_lists(self, initiator: Side, target: Side) -> None:
        for number in range(16):
            target.chunk(number)[:] = 100 + number
        agent = initiator.agent
        near = agent.prep_xfer_dlist("", initiator.descs(0, 1, 2, 3))
        strided = np.array([[target.address(0), CHUNK, 0, 2 * CHUNK, 4]], np.uint64)
        far = agent.prep_xfer_dlist("target", strided, "DRAM")
        agent.transfer(agent.make_prepped_xfer("READ", near, [0, 1, 2, 3], far, [0, 1, 2, 3]))
        assert [int(initiator.chunk(n)[0]) for n in range(5)] == [100, 102, 104, 106, 2]
        strided[0, 4] = 9
        with pytest.raises(e.nixlNotFoundError):
            agent.prep_xfer_dlist("target", strided, "DRAM")
        with pytest.raises(ValueError, match="mem type"):
            agent.prep_xfer_dlist("target", strided)
        strided[0, 4] = 1 << 63
        with pytest.raises(e.nixlInvalidParamError, match="at most"):
            agent.prep_xfer_dlist("target", strided, "DRAM")

    @pytest.mark.parametrize(
        ("near", "far"), [([0, 99], [0, 1]), ([0, -1], [0, 1]), ([0, 1], [0]), ([], []), ([0.5], [0])]
    )
    def test_bad_indices(self, initiator: Side, target: Side, near: list[int], far: list[int]) -> None:
        agent = initiator.agent
        near_list = agent.prep_xfer_dlist("", initiator.descs(0, 1))
        far_list = agent.prep_xfer_dlist("target", target.descs(0, 1))
        with pytest.raises(e.nixlInvalidParamError):
            agent.make_prepped_xfer("READ", near_list, near, far_list, far)

    def test_sides_cannot_be_swapped(self, initiator: Side, target: Side) -> None:
        agent = initiator.agent
        near = agent.prep_xfer_dlist("", initiator.descs(0))
        far = agent.prep_xfer_dlist("target", target.descs(0))
        for local, remote in ((far, near), (near, near), (far, far)):
            with pytest.raises(e.nixlInvalidParamError):
                agent.make_prepped_xfer("READ", local, [0], remote, [0])

    # --- notifications ---

    def test_notifications_come_in_order_and_once(self, initiator: Side, target: Side) -> None:
        for message in (b"one", "two", b"", bytes(range(256)), b"x" * 60_000):
            initiator.agent.send_notif("target", message)
        expected = [b"one", b"two", b"", bytes(range(256)), b"x" * 60_000]
        assert drain(target.agent, 5) == {"initiator": expected}
        assert target.agent.get_new_notifs() == {}

    def test_a_notification_follows_its_data(self, initiator: Side, target: Side) -> None:
        for value in range(50):
            initiator.chunk(0)[:] = value
            handle = initiator.agent.initialize_xfer("WRITE", initiator.descs(0), target.descs(0), "target", b"done")
            initiator.agent.transfer(handle)
            drain(target.agent)
            assert (target.chunk(0) == value).all()

    def test_looking_up_notifications(self, initiator: Side, target: Side) -> None:
        agent = target.agent
        initiator.agent.send_notif("target", b"tag-1")
        initiator.agent.send_notif("target", b"tag-2")
        until(lambda: agent.check_remote_xfer_done("initiator", b"tag-2"))
        assert agent.notifs == {"initiator": [b"tag-1"]}
        assert not agent.check_remote_xfer_done("initiator", b"g-1")
        assert agent.check_remote_xfer_done("initiator", b"g-1", tag_is_prefix=False)
        assert not agent.check_remote_xfer_done("nobody", b"")
        initiator.agent.send_notif("target", b"u")
        until(lambda: agent.update_notifs() == {"initiator": [b"u"]})
        assert agent.update_notifs() == {"initiator": [b"u"]}
        assert agent.get_new_notifs() == {}
