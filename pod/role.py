"""What a pod asks of its role. A role owns the table of all sequences that its pod owes something to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc.aio

from engine.batch import EngineLoad, TokenEvent
from kvtransfer.endpoint import KVEndpoint
from pod.engine_thread import EngineThread
from pod.metrics import PodMetrics
from pod.plan import PodPlan
from proto import registry_pb2
from proto.errors import PdserveError


@dataclass(frozen=True, slots=True)
class Owed:
    """How much the pod owes to others."""

    num_leases: int = 0
    num_credits: int = 0
    num_transfers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PodContext:
    """What a role gets from its pod. `address` is known only once the server listens."""

    plan: PodPlan
    engine: EngineThread
    endpoint: KVEndpoint
    metrics: PodMetrics
    clock: Callable[[], float]
    address: Callable[[], str]


class Role(Protocol):
    @property
    def role(self) -> registry_pb2.Role.ValueType: ...

    @property
    def service_names(self) -> Sequence[str]: ...

    def register(self, server: grpc.aio.Server) -> None: ...

    async def start(self) -> None:
        """Begins background work on the running loop, and listens on ports of its own. Raises OSError if it cannot."""
        ...

    @property
    def token_port(self) -> int | None:
        """Where routers fetch tokens, once started; None for a role that streams none."""
        ...

    def on_events(self, events: list[TokenEvent]) -> None: ...

    def owed(self) -> Owed: ...

    def begin_drain(self) -> None:
        """From now on nothing new is taken."""
        ...

    @property
    def is_idle(self) -> bool:
        """Nothing is owed to anybody."""
        ...

    async def drained(self) -> None:
        """Returns when nothing is owed to anybody."""
        ...

    async def close(self, error: PdserveError) -> None:
        """Ends what is left with `error`, and all background work."""
        ...

    def check_invariants(self, load: EngineLoad) -> None:
        """Raises AssertionError naming what disagrees between the role's table and the engine's `load`."""
        ...
