"""How an agent is set up."""

from __future__ import annotations

import enum
from collections.abc import Sequence

DEFAULT_COMM_PORT = 8888


class ThreadSync(enum.Enum):
    """NIXL's nixl_thread_sync_t. This agent always synchronises."""

    NIXL_THREAD_SYNC_NONE = 0
    NIXL_THREAD_SYNC_STRICT = 1
    NIXL_THREAD_SYNC_RW = 2
    NIXL_THREAD_SYNC_DEFAULT = 0  # noqa: PIE796 - an alias in NIXL too


class AgentConfig:
    """NIXL's nixl_agent_config. Its default backend is UCX, ours is shm."""

    def __init__(
        self,
        enable_prog_thread: bool = True,
        enable_listen_thread: bool = False,
        listen_port: int = DEFAULT_COMM_PORT,
        capture_telemetry: bool = False,
        num_threads: int = 0,
        backends: Sequence[str] = ("shm",),
        sync_mode: ThreadSync | None = None,
    ) -> None:
        if sync_mode is not None and not isinstance(sync_mode, ThreadSync):
            raise TypeError(f"sync_mode must be a ThreadSync (got {type(sync_mode).__name__!r})")
        self.backends = list(backends)
        self.enable_pthread = enable_prog_thread
        self.enable_listen = enable_listen_thread
        self.port = listen_port
        self.capture_telemetry = capture_telemetry
        self.num_threads = num_threads
        self.sync_mode = sync_mode
