"""One pod put together: plan, KV endpoint, engine thread, role, gRPC server, metrics, registration; and taken apart.

    start   resolve, build, listen, publish, SERVING, READY line
    drain   DRAINING is published and health says NOT_SERVING; nothing new is taken; what runs finishes, leased KV stays
            until it was pulled or its lease expired; at the latest after the deadline
    stop    what is left fails with PodUnavailable, the record goes, sockets and threads end

A crash of the engine fails all pending calls and sets `ended`; the process reports it and exits with code 1.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable

from engine.batch import TokenEvent
from engine.tensor_parallel.errors import RankLost
from kvtransfer.endpoint import KVEndpoint
from pod.build import Engine, build_engine, make_endpoint
from pod.engine_thread import EngineThread
from pod.errors import StartupError
from pod.kv_service import SERVICE_NAME as KV_SERVICE_NAME
from pod.kv_service import KVService
from pod.messages import pod_load
from pod.metrics import PodMetrics
from pod.plan import PodPlan
from pod.registration import Registration
from pod.role import PodContext, Role
from pod.self_check import SelfCheck, checked_load
from pod.team_watch import TeamWatch
from proto import kv_pb2_grpc, registry_pb2
from proto.errors import PdserveError, PodUnavailable
from proto.metrics_server import MetricsServer
from proto.service import Server

log = logging.getLogger(__name__)

STOP_GRACE_S = 1.0  # for calls that write their last message


class Pod:
    """Build with `Pod.start`. Everything public is for tests and the process's main."""

    def __init__(
        self,
        plan: PodPlan,
        endpoint: KVEndpoint,
        engine: Engine,
        make_role: Callable[[PodContext], Role],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self.endpoint = endpoint
        self.crash: BaseException | None = None
        self.ended = asyncio.Event()  # set by a crash
        self.state: registry_pb2.PodState.ValueType = registry_pb2.POD_STATE_READY
        self.metrics = PodMetrics(self.load)
        self.engine = EngineThread(
            engine.core, self._on_events, on_crash=self._on_crash, on_step=self.metrics.step_s.observe
        )
        self.role = make_role(
            PodContext(
                plan=plan,
                engine=self.engine,
                endpoint=endpoint,
                metrics=self.metrics,
                clock=clock,
                address=lambda: self.address,
            )
        )
        self.server = Server((*self.role.service_names, KV_SERVICE_NAME))
        self.metrics_server = MetricsServer(self.metrics.registry)
        self.registration = Registration(
            plan.settings.registry_url, plan.settings.cluster, self.record, plan.settings.heartbeat_interval_s
        )
        self.self_check = SelfCheck(
            self.engine, self.role, self.metrics.invariant_violations.inc, plan.settings.heartbeat_interval_s
        )
        self._team = TeamWatch(engine.team, self.engine)
        self._max_model_len = engine.core.max_sequence_tokens
        self._metrics_port = 0

    @classmethod
    async def start(cls, plan: PodPlan, make_role: Callable[[PodContext], Role]) -> Pod:
        """A pod that serves and is registered. Raises StartupError; then nothing is left running."""
        _check_port("--port", plan.settings.host, plan.settings.port)
        _check_port("--metrics-port", plan.settings.host, plan.settings.metrics_port)
        endpoint = make_endpoint(plan)
        try:
            engine = await asyncio.to_thread(build_engine, plan, endpoint)
            pod = cls(plan, endpoint, engine, make_role)
        except BaseException:
            endpoint.close()
            raise
        try:
            await pod._listen()
        except BaseException:
            await pod.stop(PodUnavailable("this pod did not start"))
            raise
        return pod

    @property
    def address(self) -> str:
        return f"{self.plan.advertise_host}:{self.server.port}"

    @property
    def token_address(self) -> str:
        """Empty for a role that streams no tokens."""
        port = self.role.token_port
        return "" if port is None else f"{self.plan.advertise_host}:{port}"

    @property
    def metrics_address(self) -> str:
        return f"{self.plan.advertise_host}:{self._metrics_port}"

    async def drain(self, timeout_s: float) -> None:
        """Takes nothing new and waits until nothing is owed, but at most `timeout_s`."""
        self.state = registry_pb2.POD_STATE_DRAINING
        self.role.begin_drain()
        await self.server.set_serving(False)
        self.registration.publish()
        try:
            await asyncio.wait_for(self.role.drained(), timeout_s)
        except TimeoutError:
            load, owed = self.engine.load, self.role.owed()
            num_sequences = load.num_waiting + load.num_running
            log.warning("not drained after %.1f s: giving up on %d sequences, %s", timeout_s, num_sequences, owed)

    async def stop(self, error: PdserveError | None = None) -> None:
        """Ends everything; what was still owed fails with `error`."""
        await self.self_check.stop()
        await self.registration.stop()
        await self.role.close(error or PodUnavailable("this pod has stopped", pod_id=self.plan.pod_id))
        await self.server.stop(STOP_GRACE_S)
        await self.metrics_server.stop()
        self._team.stop()
        await self.engine.stop()
        await self._team.close()
        self.endpoint.close()

    def load(self) -> registry_pb2.PodLoad:
        owed = self.role.owed()
        return pod_load(
            self.engine.load,
            num_leases=owed.num_leases,
            num_credits=owed.num_credits,
            num_transfers=owed.num_transfers,
        )

    def record(self) -> registry_pb2.PodRecord:
        return registry_pb2.PodRecord(
            pod_id=self.plan.pod_id,
            epoch=self.plan.epoch,
            role=self.role.role,
            state=self.state,
            address=self.address,
            metrics_address=self.metrics_address,
            token_address=self.token_address,
            model_id=self.plan.model.model_id,
            max_model_len=self._max_model_len,
            layout=self.plan.layout.to_proto(),
            max_num_seqs=self.plan.settings.max_num_seqs,
            load=self.load(),
        )

    async def check_invariants(self) -> None:
        """Raises AssertionError naming what leaked. Meaningful when no call is under way."""
        load = await self.engine.call(checked_load)
        self.role.check_invariants(load)

    async def _listen(self) -> None:
        settings = self.plan.settings
        self.engine.start()
        self._team.start()
        self.self_check.start()
        self.role.register(self.server.grpc)
        kv_pb2_grpc.add_KVTransferServicer_to_server(KVService(self.endpoint), self.server.grpc)
        try:
            await self.role.start()
        except OSError as error:
            raise _cannot_listen("--token-port", settings.host, settings.token_port, error) from None
        try:
            await self.server.start(settings.host, settings.port)
            self._metrics_port = await self.metrics_server.start(settings.host, settings.metrics_port)
        except OSError as error:
            raise StartupError(str(error)) from None
        await self.registration.start()
        await self.server.set_serving(True)

    def _on_events(self, events: list[TokenEvent]) -> None:
        self.self_check.note_activity()
        self.metrics.on_events(events)
        self.role.on_events(events)

    def _on_crash(self, error: BaseException) -> None:
        if isinstance(error, RankLost):  # no fault in our code that a traceback would help to find
            log.critical("the engine crashed: %s", error)
        else:
            log.critical("the engine crashed", exc_info=error)
        self.crash = error
        self.ended.set()


def _check_port(flag: str, host: str, port: int) -> None:
    """Before the model is loaded, and because gRPC would log a line of its own."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise _cannot_listen(flag, host, port, error) from None


def _cannot_listen(flag: str, host: str, port: int, error: OSError) -> StartupError:
    text = f"{flag} {port}: cannot listen on {host}: {error.strerror}; choose another or 0 for any free port"
    return StartupError(text)
