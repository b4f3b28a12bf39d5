"""A pod's end of KV transfers: its KV memory, its blocks' generation numbers, the agent that offers both to peers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from kvtransfer.agent import Agent, AgentConfig
from kvtransfer.layout import KVLayout
from kvtransfer.memory import Bytes, allocate, shared_files
from proto import kv_pb2

log = logging.getLogger(__name__)

GENERATION_BYTES = 8


class KVEndpoint:
    """`kv_memory` is uint8 [num_blocks * block_bytes], `generations` uint64 [num_blocks]; the engine writes both.

    A block's generation must grow before its new owner writes KV, so that a reader who got any new byte sees it.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        *,
        backend: str = "shm",
        pod_id: str,
        epoch: str,
        runtime_dir: Path | None = None,
    ) -> None:
        """Raises ValueError for `num_blocks` or `backend`, nixlBackendError when `runtime_dir` cannot be used."""
        if num_blocks < 1:
            raise ValueError(f"num_blocks = {num_blocks}: must be at least 1")
        self.layout = layout
        self.num_blocks = num_blocks
        self.backend = backend
        self.pod_id = pod_id
        self.epoch = epoch
        self.kv_memory: Bytes = allocate(backend, num_blocks * layout.block_bytes)
        self.generations: npt.NDArray[np.uint64] = allocate(backend, num_blocks * GENERATION_BYTES).view(np.uint64)
        self.agent = Agent(f"{pod_id}/{epoch}", AgentConfig(backends=()))
        self.agent.create_backend(
            backend, {"runtime_dir": str(runtime_dir)} if runtime_dir and backend == "shm" else {}
        )
        self.agent.register_memory([self.kv_memory, self.generations])

    @property
    def kv_file(self) -> int | None:
        """A descriptor of the file that `kv_memory` is, for processes of this pod; None where it is no file."""
        span = shared_files.find(self.kv_memory.ctypes.data, self.kv_memory.nbytes)
        return None if span is None else span.file.fd

    def describe(self) -> kv_pb2.GetAgentMetadataResponse:
        """What a peer needs to read from here."""
        return kv_pb2.GetAgentMetadataResponse(
            pod_id=self.pod_id,
            epoch=self.epoch,
            agent_name=self.agent.name,
            agent_metadata=self.agent.get_agent_metadata(),
            layout=self.layout.to_proto(),
            kv_base_address=self.kv_memory.ctypes.data,
            block_bytes=self.layout.block_bytes,
            generation_base_address=self.generations.ctypes.data,
            num_blocks=self.num_blocks,
        )

    def poll_notifications(self) -> list[kv_pb2.LeaseNotification]:
        """What readers of our leases sent since the last call. Cheap: call it often. Those meant for an earlier
        incarnation of this pod, and what cannot be read, are dropped."""
        received = []
        for sender, messages in self.agent.get_new_notifs().items():
            for message in messages:
                notification = parse_notification(sender, message)
                if notification is not None and notification.owner_epoch == self.epoch:
                    received.append(notification)
        return received

    def close(self) -> None:
        """Ends all links. The memory lives as long as the arrays do."""
        self.agent.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def parse_notification(sender: str, message: bytes) -> kv_pb2.LeaseNotification | None:
    try:
        return kv_pb2.LeaseNotification.FromString(message)
    except DecodeError:
        log.warning("a notification of %r cannot be read: %r", sender, message[:32])
        return None
