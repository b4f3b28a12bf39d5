"""From descriptor lists to a checked copy plan. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtransfer.backends.base import CopyPlan, Region
from kvtransfer.descs import MemType, Rows, XferDescs
from kvtransfer.errors import nixlInvalidParamError, nixlNotFoundError

MAX_DESCS = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """Descriptors of one side of transfers, each inside one of `regions`."""

    rows: Rows
    region_of: npt.NDArray[np.intp]
    regions: tuple[Region, ...]

    def select(self, indices: Sequence[int] | npt.NDArray[np.integer]) -> Side:
        """Raises nixlInvalidParamError for an empty selection or an index out of range."""
        chosen = np.asarray(indices)
        if chosen.ndim != 1 or not chosen.size or not np.issubdtype(chosen.dtype, np.integer):
            raise nixlInvalidParamError(f"indices = {indices!r}: must be a list of at least one integer")
        if chosen.min() < 0 or chosen.max() >= len(self.rows):
            raise nixlInvalidParamError(
                f"indices {chosen.min()} .. {chosen.max()}: the prepared list has {len(self.rows)} descriptors"
            )
        return Side(self.rows[chosen], self.region_of[chosen], self.regions)


def locate(descs: XferDescs, regions: Sequence[Region]) -> Side:
    """Raises nixlNotFoundError naming the first descriptor that no region holds."""
    rows = descs.rows
    address, length, device = rows[:, 0], rows[:, 1], rows[:, 2]
    region_of = np.full(len(rows), -1, np.intp)
    for i, region in enumerate(regions):
        if region.mem_type is not descs.getType():
            continue
        begin, size = np.uint64(region.address), np.uint64(region.num_bytes)
        offset = address - begin  # wraps below the region
        inside = (address >= begin) & (offset <= size) & (length <= size - offset) & (device == region.device)
        region_of[inside & (region_of < 0)] = i
    lost = np.flatnonzero(region_of < 0)
    if lost.size:
        where = rows[lost[0]].tolist()
        raise nixlNotFoundError(
            f"descriptor {lost[0]} (address {where[0]:#x}, {where[1]} bytes, device {where[2]}, "
            f"{descs.getType().name}): not inside registered memory"
        )
    return Side(rows, region_of, tuple(regions))


def expand_strided(array: npt.NDArray[np.uint64], mem_type: MemType) -> XferDescs:
    """Rows of (address, length, device, stride, count) as one descriptor a block. Raises nixlInvalidParamError."""
    num_blocks = sum(array[:, 4].tolist())
    if num_blocks > MAX_DESCS:
        raise nixlInvalidParamError(f"{num_blocks} strided blocks: at most {MAX_DESCS} are allowed")
    counts = array[:, 4].astype(np.intp)
    rows = np.repeat(array[:, :3], counts, axis=0)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows[:, 0] += within.astype(np.uint64) * np.repeat(array[:, 3], counts)
    return XferDescs(mem_type, rows)


def plan_copy(read: bool, local: Side, remote: Side, peer: str | None) -> CopyPlan:
    """Neighbours that are contiguous on both sides become one span. Raises nixlInvalidParamError when sides differ."""
    if len(local.rows) != len(remote.rows) or not len(local.rows):
        raise nixlInvalidParamError(
            f"{len(local.rows)} local and {len(remote.rows)} remote descriptors: must be equally many, at least one"
        )
    unequal = np.flatnonzero(local.rows[:, 1] != remote.rows[:, 1])
    if unequal.size:
        i = unequal[0]
        raise nixlInvalidParamError(
            f"descriptor {i}: {local.rows[i, 1]} bytes locally, {remote.rows[i, 1]} remotely; must be equal"
        )
    return _merge(read, local, remote, peer)


def _merge(read: bool, local: Side, remote: Side, peer: str | None) -> CopyPlan:
    starts, far, lengths = local.rows[:, 0], remote.rows[:, 0], local.rows[:, 1]
    follows = (
        (starts[1:] == starts[:-1] + lengths[:-1])
        & (far[1:] == far[:-1] + lengths[:-1])
        & (local.region_of[1:] == local.region_of[:-1])
        & (remote.region_of[1:] == remote.region_of[:-1])
    )
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    return CopyPlan(
        read=read,
        peer=peer,
        local=starts[first],
        remote=far[first],
        lengths=np.add.reduceat(lengths, first),
        region_of=remote.region_of[first],
        regions=remote.regions,
    )
