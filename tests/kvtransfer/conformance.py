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
from kvtransfer.descs import MemType, RegDescs, XferDescs
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

    # --- what is refused ---

    @pytest.mark.parametrize(
        ("offset", "length", "device"),
        [(SIZE - 4, CHUNK, 0), (-1, CHUNK, 0), (SIZE, 1, 0), (0, SIZE + 1, 0), (0, CHUNK, 1), (0, (1 << 64) - 1, 0)],
    )
    def test_out_of_range_is_refused_on_both_sides(
        self, initiator: Side, target: Side, offset: int, length: int, device: int
    ) -> None:
        agent = initiator.agent
        bad_far = XferDescs(MemType.DRAM_SEG, [(target.address(offset), length, device)])
        bad_near = XferDescs(MemType.DRAM_SEG, [(initiator.address(offset), length, device)])
        same_length = XferDescs(MemType.DRAM_SEG, [(initiator.address(0), min(length, CHUNK), 0)])
        with pytest.raises(e.nixlNotFoundError):
            agent.initialize_xfer("READ", same_length, bad_far, "target")
        with pytest.raises(e.nixlNotFoundError):
            agent.initialize_xfer("WRITE", bad_near, target.descs(0), "target")
        with pytest.raises(e.nixlNotFoundError):
            agent.prep_xfer_dlist("target", bad_far)

    def test_wrapping_addresses_are_refused(self, initiator: Side) -> None:
        descs = XferDescs(MemType.DRAM_SEG, [((1 << 64) - 100, CHUNK, 0)])
        with pytest.raises(e.nixlNotFoundError):
            initiator.agent.initialize_xfer("READ", initiator.descs(0), descs, "target")

    def test_the_two_sides_must_fit(self, initiator: Side, target: Side) -> None:
        agent = initiator.agent
        with pytest.raises(e.nixlInvalidParamError, match="1 local and 2 remote"):
            agent.initialize_xfer("READ", initiator.descs(0), target.descs(0, 1), "target")
        with pytest.raises(e.nixlInvalidParamError, match="4096 bytes locally, 2048 remotely"):
            agent.initialize_xfer("READ", initiator.descs(0), target.descs(0, length=2048), "target")

    def test_names_that_are_not_known(self, initiator: Side, target: Side) -> None:
        agent, near, far = initiator.agent, initiator.descs(0), target.descs(0)
        with pytest.raises(KeyError):
            agent.initialize_xfer("SWAP", near, far, "target")
        with pytest.raises(KeyError):
            agent.initialize_xfer("READ", near, far, "target", b"", ["ZZ"])
        with pytest.raises(KeyError):
            agent.get_new_notifs(["ZZ"])
        calls: list[Callable[[], object]] = [
            lambda: agent.initialize_xfer("READ", near, far, "nobody"),
            lambda: agent.initialize_xfer("READ", near, far, ""),
            lambda: agent.prep_xfer_dlist("nobody", far),
            lambda: agent.send_notif("nobody", b"x"),
            lambda: agent.make_connection("nobody"),
        ]
        for call in calls:
            with pytest.raises(e.nixlNotFoundError):
                call()
        assert agent.remove_remote_agent("nobody") is None  # type: ignore[func-returns-value]  # as NIXL

    def test_types_that_make_no_sense(self, initiator: Side, target: Side) -> None:
        agent: Any = initiator.agent
        calls: list[Callable[[], object]] = [
            lambda: agent.initialize_xfer("READ", None, target.descs(0), "target"),
            lambda: agent.register_memory([(1, 2, 0)], "DRAM"),
            lambda: agent.deregister_memory(None),
            lambda: agent.add_remote_agent(5),
            lambda: agent.send_notif("target", 5),
            lambda: agent.initialize_xfer("READ", initiator.descs(0), target.descs(0), "target", None),
        ]
        for call in calls:
            with pytest.raises(TypeError):
                call()

    # --- memory ---

    def test_deregistered_memory_is_gone_for_new_transfers(self, initiator: Side, target: Side) -> None:
        target.agent.deregister_memory(target.registered)
        with pytest.raises(e.nixlNotFoundError):
            target.agent.deregister_memory(target.registered)
        with pytest.raises(e.nixlNotFoundError):
            target.agent.initialize_xfer("READ", target.descs(0), target.descs(1), "target")
        initiator.agent.remove_remote_agent("target")
        initiator.agent.add_remote_agent(target.agent.get_agent_metadata())
        with pytest.raises(e.nixlNotFoundError):
            initiator.agent.initialize_xfer("READ", initiator.descs(0), target.descs(0), "target")

    def test_memory_registered_after_the_first_transfer(self, initiator: Side, target: Side) -> None:
        initiator.agent.transfer(initiator.agent.initialize_xfer("READ", initiator.descs(0), target.descs(0), "target"))
        more = Side(target.agent, allocate(self.backend, SIZE), 77)
        assert not initiator.agent.check_remote_metadata("target", more.descs(0))
        assert initiator.agent.add_remote_agent(target.agent.get_agent_metadata()) == b"target"
        assert initiator.agent.check_remote_metadata("target", more.descs(0))
        handle = initiator.agent.initialize_xfer("READ", initiator.descs(1), more.descs(3), "target")
        assert initiator.agent.transfer(handle) == "DONE"
        assert (initiator.chunk(1) == 77).all()

    @pytest.mark.parametrize("mem_type", ["FILE", "VRAM", "OBJ", "BLOCK"])
    def test_memory_of_other_kinds(self, initiator: Side, mem_type: str) -> None:
        with pytest.raises(e.nixlNotFoundError):
            initiator.agent.register_memory([(initiator.address(0), 8, 0, "")], mem_type)

    def test_registrations_that_make_no_sense(self, initiator: Side) -> None:
        with pytest.raises(e.nixlInvalidParamError):
            initiator.agent.register_memory([(initiator.address(0), 0, 0, "")], "DRAM")
        with pytest.raises(e.nixlInvalidParamError):
            initiator.agent.register_memory([((1 << 64) - 8, 16, 0, "")], "DRAM")
        with pytest.raises(KeyError):
            initiator.agent.register_memory([(initiator.address(0), 8, 0, "")], "DRAM", ["ZZ"])

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

    # --- metadata ---

    def test_partial_metadata(self, make_agent: Callable[..., Agent], target: Side) -> None:
        third = make_agent("third")
        memory = Side(target.agent, allocate(self.backend, SIZE), 5)
        without = target.agent.get_partial_agent_metadata(memory.registered)
        with pytest.raises(e.nixlNotFoundError):
            third.add_remote_agent(without)
        assert not third.check_remote_metadata("target")
        third.add_remote_agent(target.agent.get_partial_agent_metadata(target.registered, inc_conn_info=True))
        assert third.check_remote_metadata("target", target.descs(0))
        assert not third.check_remote_metadata("target", memory.descs(0))
        third.add_remote_agent(without)
        assert third.check_remote_metadata("target", memory.descs(0))
        with pytest.raises(e.nixlNotFoundError):
            target.agent.get_partial_agent_metadata(RegDescs(MemType.DRAM_SEG, [(8, 8, 0, b"")]))

    def test_metadata_of_others_is_checked(self, initiator: Side, target: Side) -> None:
        good = target.agent.get_agent_metadata()
        for bad in (b"", b"garbage", good[:-5], good[:6], b"x" + good, good.replace(b"DRAM_SEG", b"MOON_SEG")):
            with pytest.raises(e.nixlMismatchError):
                initiator.agent.add_remote_agent(bad)
        assert initiator.agent.check_remote_metadata("target", target.descs(0))
        with pytest.raises(e.nixlInvalidParamError):
            initiator.agent.add_remote_agent(initiator.agent.get_agent_metadata())

    def test_another_agent_cannot_take_a_name_over(self, make_agent: Callable[..., Agent], initiator: Side) -> None:
        double = make_agent("target")
        with pytest.raises(e.nixlNotAllowedError):
            initiator.agent.add_remote_agent(double.get_agent_metadata())
        initiator.agent.remove_remote_agent("target")
        assert initiator.agent.add_remote_agent(double.get_agent_metadata()) == b"target"

    def test_a_removed_agent(self, initiator: Side, target: Side) -> None:
        agent = initiator.agent
        handle = agent.initialize_xfer("READ", initiator.descs(0), target.descs(0), "target")
        metadata = target.agent.get_agent_metadata()
        agent.remove_remote_agent(b"target")
        for again in (False, True):
            with pytest.raises(e.nixlNotFoundError):
                agent.transfer(handle)
            assert agent.check_remote_metadata("target") is again
            agent.add_remote_agent(metadata)

    def test_a_closed_peer_is_a_lost_peer(self, initiator: Side, target: Side) -> None:
        agent = initiator.agent
        handle = agent.initialize_xfer("READ", initiator.descs(0), target.descs(0), "target")
        agent.transfer(handle)
        target.agent.close()
        calls: list[Callable[[], object]] = [
            lambda: agent.transfer(handle),
            lambda: agent.send_notif("target", b"x"),
            lambda: agent.make_connection("target"),
        ]
        for call in calls:
            with pytest.raises(e.nixlRemoteDisconnectError):
                call()
        with pytest.raises(e.nixlRemoteDisconnectError):
            agent.check_xfer_state(handle)

    # --- set-up ---

    def test_backends_and_plugins(self, initiator: Side) -> None:
        agent = initiator.agent
        assert (agent.name, list(agent.backends)) == ("initiator", [self.backend])
        assert self.backend in agent.get_plugin_list()
        assert agent.get_plugin_mem_types(self.backend) == agent.get_backend_mem_types(self.backend) == ["DRAM_SEG"]
        assert set(agent.get_backend_params(self.backend)) == set(agent.get_plugin_params(self.backend))
        assert agent.get_plugin_mem_types("ZZ") == agent.get_backend_mem_types("ZZ") == []
        assert agent.get_plugin_params("ZZ") == agent.get_backend_params("ZZ") == {}
        with pytest.raises(e.nixlNotFoundError):
            agent.create_backend("ZZ")
        with pytest.raises(e.nixlInvalidParamError):
            agent.create_backend(self.backend)

    def test_what_no_backend_does_is_refused(self, initiator: Side) -> None:
        agent, descs = initiator.agent, initiator.registered
        calls: list[Callable[[], object]] = [
            lambda: agent.send_local_metadata("127.0.0.1"),
            lambda: agent.send_partial_agent_metadata(descs),
            lambda: agent.fetch_remote_metadata("target"),
            agent.invalidate_local_metadata,
            lambda: agent.prep_mem_view(descs),
            lambda: agent.release_mem_view(0),
            lambda: agent.get_remote_descs([(1, 2, 0, "target")], "DRAM"),
            lambda: agent.query_memory(descs, self.backend),
            lambda: Agent("x", AgentConfig(enable_listen_thread=True)),
        ]
        for call in calls:
            with pytest.raises(e.nixlNotSupportedError):
                call()

    def test_create_backend_refuses_parameters_it_does_not_know(self, make_agent: Callable[..., Agent]) -> None:
        agent = Agent("lonely", AgentConfig(backends=[]))
        with pytest.raises(e.nixlInvalidParamError, match="colour"):
            agent.create_backend(self.backend, {"colour": "red"})
        with pytest.raises(e.nixlInvalidParamError, match="no backend"):
            agent.get_agent_metadata()
