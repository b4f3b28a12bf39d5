"""The pods that a puller reads from: who they are, connected once an incarnation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import grpc

from kvtransfer.endpoint import KVEndpoint
from kvtransfer.errors import nixlError
from kvtransfer.layout import KVLayout
from proto import kv_pb2
from proto.errors import LeaseExpired, PdserveError, PeerLost

MAX_PEERS = 256  # that stay connected

FetchMetadata = Callable[[str], Awaitable[kv_pb2.GetAgentMetadataResponse]]
PeerKey = tuple[str, str]  # pod id, epoch


@dataclass(frozen=True, slots=True)
class Peer:
    pod_id: str
    epoch: str
    agent_name: str
    layout: KVLayout
    kv_base_address: int
    generation_base_address: int
    num_blocks: int


class Peers:
    """Connects on first use; concurrent users of one pod share the attempt."""

    def __init__(self, endpoint: KVEndpoint, fetch: FetchMetadata, threads: Executor, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._fetch = fetch
        self._threads = threads
        self._timeout_s = timeout_s
        self._peers: dict[PeerKey, asyncio.Task[Peer]] = {}

    async def get(self, source: kv_pb2.KVSource) -> Peer:
        """Raises PeerLost when the pod cannot be reached, LeaseExpired when another epoch answers."""
        key = (source.pod_id, source.epoch)
        task = self._peers.pop(key, None)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = asyncio.create_task(self._connect(source.address, key))
            task.add_done_callback(retrieve)
        self._peers[key] = task  # now the last one in the dictionary: the most recently used
        return await asyncio.shield(task)

    async def _connect(self, address: str, key: PeerKey) -> Peer:
        pod_id, epoch = key
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._fetch(address)
        except (PdserveError, grpc.RpcError, OSError) as error:  # TimeoutError is an OSError
            raise PeerLost(f"pod {pod_id!r} at {address}: {str(error) or 'no answer'}", pod_id=pod_id) from error
        if (answer.pod_id, answer.epoch) != key:
            raise LeaseExpired(
                f"pod {pod_id!r} epoch {epoch!r} is gone: {address} is pod {answer.pod_id!r} epoch {answer.epoch!r}",
                pod_id=pod_id,
            )
        peer = checked_peer(answer)
        await asyncio.get_running_loop().run_in_executor(self._threads, self._attach, peer, answer.agent_metadata)
        self._forget(key)
        return peer

    def _attach(self, peer: Peer, metadata: bytes) -> None:
        """On a thread: a peer that does not answer takes until the backend's timeout."""
        try:
            name = self._endpoint.agent.add_remote_agent(metadata).decode()
            if name != peer.agent_name:
                raise PeerLost(f"pod {peer.pod_id!r}: its metadata is of agent {name!r}, not {peer.agent_name!r}")
            self._endpoint.agent.make_connection(name)
        except nixlError as error:
            raise PeerLost(f"pod {peer.pod_id!r}: {error}", pod_id=peer.pod_id) from error

    def _forget(self, newest: PeerKey) -> None:
        """Its earlier incarnations, and the least recently used ones of too many."""
        superseded = [key for key in self._peers if key[0] == newest[0] and key != newest]
        for key in [*superseded, *list(self._peers)[:-MAX_PEERS]]:
            self.drop(*key)

    def drop(self, pod_id: str, epoch: str) -> None:
        """Disconnects: after it, nothing lands from there any more. The next use connects again."""
        task = self._peers.pop((pod_id, epoch), None)
        if task is not None and task.done() and not task.cancelled() and task.exception() is None:
            self._endpoint.agent.remove_remote_agent(task.result().agent_name)

    async def close(self) -> None:
        tasks, self._peers = list(self._peers.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def retrieve(task: asyncio.Task[Any]) -> None:
    """Marks a failure as seen: when everybody who waits was cancelled, nobody is left to hear of it."""
    if not task.cancelled():
        task.exception()


def checked_peer(answer: kv_pb2.GetAgentMetadataResponse) -> Peer:
    """Raises PeerLost when the answer makes no sense."""
    try:
        layout = KVLayout.from_proto(answer.layout)
        end = max(answer.kv_base_address, answer.generation_base_address) + answer.num_blocks * layout.block_bytes
        if answer.num_blocks < 1 or answer.block_bytes != layout.block_bytes or end > 1 << 64:
            raise ValueError(f"{answer.num_blocks} blocks of {answer.block_bytes} bytes do not fit its layout")
    except ValueError as error:
        raise PeerLost(f"pod {answer.pod_id!r}: {error}", pod_id=answer.pod_id) from None
    return Peer(
        pod_id=answer.pod_id,
        epoch=answer.epoch,
        agent_name=answer.agent_name,
        layout=layout,
        kv_base_address=answer.kv_base_address,
        generation_base_address=answer.generation_base_address,
        num_blocks=answer.num_blocks,
    )
