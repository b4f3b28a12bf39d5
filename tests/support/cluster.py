"""Prefill and decode pods on the fake engine, in this process or in processes of their own, over real channels."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from decode_service.servicer import DecodeService
from decode_service.token_server import TokenServer
from pod.plan import resolve
from pod.pod import Pod
from pod.role import PodContext, Role
from pod.settings import PodSettings
from prefill_service.servicer import PrefillService
from proto.errors import PodUnavailable
from tests.support.pod_client import PodClient

ROLES: Mapping[str, Callable[[PodContext], Role]] = {"prefill": PrefillService, "decode": DecodeService}
IDLE_S = 15.0  # a killed router's leases last 10 s, those that tests ask for 30
_numbers = itertools.count(1)


class Cluster:
    """Owns the in-process pods of one test. `close()` checks that each one that lives has come back to rest."""

    def __init__(self, registry_url: str, runtime_dir: Path, *, name: str = "") -> None:
        self.registry_url = registry_url
        self.name = name or f"test-{next(_numbers)}"
        self.pods: list[Pod] = []
        self._runtime_dir = runtime_dir
        self._clients: list[PodClient] = []

    def settings(self, **overrides: object) -> PodSettings:
        """Small pods with fast heartbeats; `overrides` are PodSettings fields."""
        values: dict[str, object] = {
            "model": "fake",
            "cluster": self.name,
            "registry_url": self.registry_url,
            "runtime_dir": self._runtime_dir,
            "transfer_backend": "inproc",
            "heartbeat_interval_s": 0.1,
            "num_blocks": 64,
            "num_threads": 1,
        }
        return PodSettings.model_validate(values | overrides)

    def client(self, pod: Pod, router_id: str = "router-1") -> PodClient:
        """A client that is closed with the cluster."""
        client = PodClient(pod.address, router_id)
        self._clients.append(client)
        return client

    async def decode_client(self, pod: Pod, router_id: str = "router-1") -> PodClient:
        """A client with an open stream."""
        client = self.client(pod, router_id)
        await client.open_stream(pod.record())
        return client

    async def start(self, role: str, **overrides: object) -> Pod:
        """`role` is "prefill" or "decode"."""
        pod = await Pod.start(resolve(self.settings(**overrides), role), ROLES[role])
        self.pods.append(pod)
        return pod

    async def stop(self, pod: Pod) -> None:
        """A clean stop without a drain."""
        self.pods.remove(pod)
        await pod.stop()

    async def kill(self, pod: Pod) -> None:
        """As kill -9 looks from outside: connections break, nothing is said to anybody, the record stays to expire."""
        self.pods.remove(pod)
        await pod.registration.stop(remove=False)
        if isinstance(pod.role, DecodeService):
            break_streams(tokens_of(pod))
        await pod.server.grpc.stop(None)
        await pod.stop(PodUnavailable("killed"))

    async def restart(self, pod: Pod) -> Pod:
        """A new incarnation of `pod` on the same address, under the same id, after a kill."""
        role = "prefill" if isinstance(pod.role, PrefillService) else "decode"
        settings = pod.plan.settings.model_copy(update=ports_of(pod) | {"pod_id": pod.plan.pod_id})
        if pod in self.pods:
            await self.kill(pod)
        fresh = await Pod.start(resolve(settings, role), ROLES[role])
        self.pods.append(fresh)
        return fresh

    async def assert_idle(self) -> None:
        for pod in self.pods:
            await assert_idle(pod)

    async def close(self) -> None:
        try:
            await self.assert_idle()
        finally:
            await self.abandon()

    async def abandon(self) -> None:
        """Ends everything, whatever it still owes."""
        await asyncio.gather(*(client.close() for client in self._clients))
        await asyncio.gather(*(pod.stop() for pod in self.pods))
        self.pods.clear()


def tokens_of(pod: Pod) -> TokenServer:
    assert isinstance(pod.role, DecodeService)
    return pod.role.tokens


def break_streams(tokens: TokenServer) -> None:
    """Nobody is told why, and nobody can connect again."""
    assert tokens.listener is not None, "the pod was started"
    tokens.listener.close()
    for stream in list(tokens.connections):
        stream.connection.abort("killed")


def ports_of(pod: Pod) -> dict[str, object]:
    """Settings for a pod at the same addresses."""
    return {"port": pod.server.port, "token_port": pod.role.token_port or 0}


async def assert_idle(pod: Pod) -> None:
    """Waits until `pod` owes nothing, then checks that nothing leaked."""
    try:
        await asyncio.wait_for(pod.role.drained(), IDLE_S)
    except TimeoutError:
        raise AssertionError(f"{pod.plan.pod_id} still owes after {IDLE_S} s: {pod.load()}") from None
    await pod.check_invariants()
    load = pod.load()
    assert load.num_free_blocks == load.num_blocks, f"{pod.plan.pod_id}: blocks leaked: {load}"
    busy = (load.num_waiting, load.num_running, load.num_leases, load.num_credits, load.num_transfers)
    assert busy == (0, 0, 0, 0, 0), f"{pod.plan.pod_id}: leaked: {load}"


@asynccontextmanager
async def running_cluster(registry_url: str, runtime_dir: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(registry_url, runtime_dir)
    try:
        yield cluster
    except BaseException:
        await cluster.abandon()
        raise
    await cluster.close()
