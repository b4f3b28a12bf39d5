"""The decode pod's side of a hand-off: read the KV blocks, prove that they are still the right ones, release the lease.

The proof: the generation numbers are read after the data. The owner raises a block's number before a new owner writes
to it, so equal numbers mean that every byte read was of the hand-off.

Reads run on a few threads of their own, since a transfer is synchronous on some backends; the event loop never waits
for one. What a transfer owns in each state is told in `transfer.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvtransfer.descs import MemType, Rows, XferDescs
from kvtransfer.endpoint import GENERATION_BYTES, KVEndpoint
from kvtransfer.errors import nixlError, nixlRemoteDisconnectError
from kvtransfer.handles import XferHandle
from kvtransfer.memory import allocate
from kvtransfer.peers import FetchMetadata, Peer, Peers
from kvtransfer.reads import Reader
from kvtransfer.transfer import Event, GroupRead, PullPlan, Transfer, plan_pull
from proto import kv_pb2
from proto.errors import InternalError, LayoutMismatch, LeaseExpired, PeerLost, TransferFailed

log = logging.getLogger(__name__)

MIN_RENEW_S = 0.05
CONTROL_THREADS = 8
Generations = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class PullResult:
    bytes: int  # KV bytes read
    seconds: float  # from the call to the verified KV, waiting in line included


class Puller:
    """One a decode pod. `timeout_s` bounds connecting and, separately, the reads of one pull; a peer that lets them
    stall is cut off after another `settle_s`, so that they settle for certain."""

    def __init__(
        self,
        endpoint: KVEndpoint,
        fetch_metadata: FetchMetadata,
        *,
        max_transfers: int = 4,
        timeout_s: float = 10.0,
        settle_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._endpoint = endpoint
        self._max_transfers = max_transfers
        self._timeout_s = timeout_s
        self._settle_s = settle_s
        self._clock = clock
        self._sleep = sleep
        self._threads = ThreadPoolExecutor(max_transfers, thread_name_prefix="kv-pull")
        # Threads of their own for what may wait on a sick peer, so that it delays no transfer from a healthy one.
        self._control = ThreadPoolExecutor(CONTROL_THREADS, thread_name_prefix="kv-control")
        self._peers = Peers(endpoint, fetch_metadata, self._control, timeout_s)
        self._slots = asyncio.Semaphore(max_transfers)  # first come, first served
        self._scratch = allocate(endpoint.backend, max_transfers * endpoint.num_blocks * GENERATION_BYTES).view(
            np.uint64
        )
        self._free_scratch = list(range(max_transfers))
        self._transfers: set[Transfer] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._closed = False
        endpoint.agent.register_memory(self._scratch)

    @property
    def num_transfers(self) -> int:
        return len(self._transfers)

    @property
    def quarantined_block_ids(self) -> frozenset[int]:
        """Local blocks into which bytes may still land."""
        return frozenset().union(*(t.quarantined for t in self._transfers))

    async def pull(
        self, handoff: kv_pb2.KVHandoff, local_block_ids: Sequence[int], num_cached_tokens: int
    ) -> PullResult:
        """Fills local_block_ids[i] with the hand-off's block i, but for those that hold cached tokens only.

        Returns or raises, also when cancelled, only when no byte can land in the blocks any more; and releases the
        lease in the background, unless the pod is lost. Raises LayoutMismatch, LeaseExpired, PeerLost; InternalError
        for a hand-off or blocks that do not add up, and after close().
        """
        started_at = self._clock()
        if self._closed:
            raise InternalError("the puller is closed")
        try:
            plan = plan_pull(self._endpoint.layout, handoff, local_block_ids, num_cached_tokens)
            async with self._tracked(Transfer(handoff.sequence_id, plan.local_block_ids)) as transfer:
                await self._carry_out(transfer, plan, handoff)
        except PeerLost:
            raise  # nobody to tell
        except BaseException:
            self._release(handoff)
            raise
        self._release(handoff)
        return PullResult(plan.num_bytes, self._clock() - started_at)

    def connect(self, source: kv_pb2.KVSource) -> None:
        """Begins to connect in the background, so that the first pull from `source` finds it done.

        A failure is left for that pull to find again and to report.
        """
        if not self._closed:
            self._in_background(self._connect(source))

    async def _connect(self, source: kv_pb2.KVSource) -> None:
        try:
            await self._peers.get(source)
        except (TransferFailed, nixlError) as error:
            log.info("connecting ahead to pod %s: %s", source.pod_id, error)

    @asynccontextmanager
    async def _tracked(self, transfer: Transfer) -> AsyncIterator[Transfer]:
        """Lists the transfer while it lasts. Raises InternalError when another one fills one of its blocks."""
        taken = transfer.local_block_ids & {block for t in self._transfers for block in t.local_block_ids}
        if taken or any(not 0 <= b < self._endpoint.num_blocks for b in transfer.local_block_ids):
            raise InternalError(
                f"local blocks {sorted(taken or transfer.local_block_ids)}: must be ours and in no other pull"
            )
        self._transfers.add(transfer)
        try:
            yield transfer
        finally:
            transfer.fail()  # does nothing to one that is done
            self._transfers.discard(transfer)

    async def _carry_out(self, transfer: Transfer, plan: PullPlan, handoff: kv_pb2.KVHandoff) -> None:
        """Every await in here may be cancelled: `read_all` alone outlasts that, the rest has no byte in flight."""
        if not plan.groups:
            transfer.on(Event.NOTHING_TO_READ)
            return
        renewing = asyncio.create_task(self._renew(handoff))
        try:
            peer = await self._peers.get(source_of(handoff))
            check_layouts(self._endpoint, peer, handoff)
            check_blocks(plan, peer)
            transfer.on(Event.CONNECTED)
            async with self._slots:
                transfer.on(Event.ADMITTED)
                await self._read(transfer, plan, peer)
        finally:
            renewing.cancel()

    async def _read(self, transfer: Transfer, plan: PullPlan, peer: Peer) -> None:
        reader = Reader(
            self._endpoint.agent,
            self._threads,
            self._timeout_s,
            self._settle_s,
            self._clock,
            self._sleep,
            partial(self._peers.drop, peer.pod_id, peer.epoch),
        )
        slot = self._free_scratch.pop()
        try:
            await reader.read_all(transfer, [self._data_handle(group, peer) for group in plan.groups])
            transfer.on(Event.ALL_LANDED)
            await reader.read_all(transfer, [self._generations_handle(slot, plan, peer)])
            self._check_generations(slot, plan, peer)
            transfer.on(Event.VERIFIED)
        except (nixlError, TimeoutError) as error:
            if isinstance(error, (nixlRemoteDisconnectError, TimeoutError)):
                self._peers.drop(peer.pod_id, peer.epoch)
            raise PeerLost(f"pod {peer.pod_id!r}: {error}", pod_id=peer.pod_id) from error
        finally:
            self._free_scratch.append(slot)

    def _data_handle(self, group: GroupRead, peer: Peer) -> XferHandle:
        block_bytes = self._endpoint.layout.block_bytes
        base = self._endpoint.kv_memory.ctypes.data
        near = block_rows(base + group.offset, block_bytes, group.local_block_ids, group.num_bytes)
        far = block_rows(peer.kv_base_address + group.offset, block_bytes, group.source_block_ids, group.num_bytes)
        return self._handle(peer, near, far)

    def _generations_handle(self, slot: int, plan: PullPlan, peer: Peer) -> XferHandle:
        base = self._scratch_of(slot).ctypes.data
        near = block_rows(base, GENERATION_BYTES, range(len(plan.expected)), GENERATION_BYTES)
        far = block_rows(peer.generation_base_address, GENERATION_BYTES, list(plan.expected), GENERATION_BYTES)
        return self._handle(peer, near, far)

    def _handle(self, peer: Peer, near: Rows, far: Rows) -> XferHandle:
        near_descs, far_descs = (XferDescs(MemType.DRAM_SEG, rows) for rows in (near, far))
        return self._endpoint.agent.initialize_xfer("READ", near_descs, far_descs, peer.agent_name)

    def _scratch_of(self, slot: int) -> Generations:
        return self._scratch[slot * self._endpoint.num_blocks :][: self._endpoint.num_blocks]

    def _check_generations(self, slot: int, plan: PullPlan, peer: Peer) -> None:
        found = self._scratch_of(slot)[: len(plan.expected)].tolist()
        for (block, expected), generation in zip(plan.expected.items(), found, strict=True):
            if generation != expected:
                raise LeaseExpired(
                    f"block {block} of pod {peer.pod_id!r} has generation {generation}, the hand-off named {expected}",
                    pod_id=peer.pod_id,
                )

    # --- what the source pod is told ---

    async def _renew(self, handoff: kv_pb2.KVHandoff) -> None:
        """Keeps the lease alive, in line as well as in transfer. Ends by being cancelled."""
        while True:
            await self._sleep(max(handoff.lease_remaining_ms / 3000, MIN_RENEW_S))
            await self._notify(handoff, kv_pb2.LeaseNotification.ACTION_RENEW)

    async def _notify(self, handoff: kv_pb2.KVHandoff, action: kv_pb2.LeaseNotification.Action.ValueType) -> None:
        """Best effort: when it cannot be delivered, the lease expires."""
        message = kv_pb2.LeaseNotification(action=action, lease_id=handoff.lease_id, owner_epoch=handoff.source_epoch)
        try:
            peer = await self._peers.get(source_of(handoff))
            send = partial(self._endpoint.agent.send_notif, peer.agent_name, message.SerializeToString())
            await asyncio.get_running_loop().run_in_executor(self._control, send)
        except (TransferFailed, nixlError) as error:
            log.info("lease %s: %s not sent: %s", handoff.lease_id, action, error)

    def _release(self, handoff: kv_pb2.KVHandoff) -> None:
        self._in_background(self._notify(handoff, kv_pb2.LeaseNotification.ACTION_RELEASE))

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # --- end ---

    def check_invariants(self) -> None:
        """Raises AssertionError: no block in two transfers, and every slot free or in use by one."""
        for transfer in self._transfers:
            transfer.check_invariants()
        blocks = [block for t in self._transfers for block in t.local_block_ids]
        assert len(blocks) == len(set(blocks)), f"a block is in two transfers: {sorted(blocks)}"
        assert self._transfers or len(self._free_scratch) == self._max_transfers, (
            f"idle, but only {len(self._free_scratch)} of {self._max_transfers} slots are free"
        )

    async def close(self) -> None:
        """Waits for the releases under way, for `timeout_s` at most. Pulls must have returned or raised before."""
        self._closed = True
        if self._background:
            _, late = await asyncio.wait(self._background, timeout=self._timeout_s)
            for task in late:
                task.cancel()
        await self._peers.close()
        for threads in (self._threads, self._control):
            await asyncio.get_running_loop().run_in_executor(None, threads.shutdown)


def source_of(handoff: kv_pb2.KVHandoff) -> kv_pb2.KVSource:
    return kv_pb2.KVSource(pod_id=handoff.source_pod_id, epoch=handoff.source_epoch, address=handoff.source_address)


def block_rows(base: int, stride: int, indices: Sequence[int], num_bytes: int) -> Rows:
    """uint64 [N, 3]: `num_bytes` at base + index * stride on device 0."""
    rows = np.zeros((len(indices), 3), np.uint64)
    rows[:, 0] = np.uint64(base) + np.asarray(indices, np.uint64) * np.uint64(stride)
    rows[:, 1] = num_bytes
    return rows


def check_blocks(plan: PullPlan, peer: Peer) -> None:
    """Raises InternalError for a block that the source does not have."""
    for block in plan.expected:
        if not 0 <= block < peer.num_blocks:
            raise InternalError(f"block_id = {block} in the hand-off: pod {peer.pod_id!r} has {peer.num_blocks} blocks")


def check_layouts(endpoint: KVEndpoint, peer: Peer, handoff: kv_pb2.KVHandoff) -> None:
    """Raises LayoutMismatch naming the field."""
    field = endpoint.layout.mismatch(peer.layout)
    if field is None and handoff.layout_fingerprint != endpoint.layout.fingerprint:
        field = f"layout_fingerprint {endpoint.layout.fingerprint} != {handoff.layout_fingerprint} in the hand-off"
    if field is not None:
        raise LayoutMismatch(
            f"pod {endpoint.pod_id!r} cannot take KV of pod {peer.pod_id!r}: {field}", pod_id=peer.pod_id
        )
