"""What every backend must refuse and how it tells of itself: a test class to derive from, see test_conformance.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvtransfer import errors as e
from kvtransfer.agent import Agent, AgentConfig
from kvtransfer.descs import MemType, RegDescs, XferDescs
from kvtransfer.memory import allocate
from tests.kvtransfer.conformance import CHUNK, SIZE, Conformance, Side


class ApiConformance(Conformance):
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
