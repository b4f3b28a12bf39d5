"""What the ranks of one pod tell each other while they compute a batch, through torch.distributed.

Sums are added in the order of the ranks, on each rank alike: all of them then hold the same bits, the same ones at
every run, and those of a token do not depend on what else is in the batch. A ring's sum would depend on where in the
message a number lies.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from engine.shard import WHOLE, Shard

LOCALHOST = "127.0.0.1"


class Exchange(Protocol):
    """`shard` says which of the ranks this one is."""

    @property
    def shard(self) -> Shard: ...

    def summed(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' [T, H], in float32 and rounded once. All ranks must call it."""
        ...

    def joined(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """[R, width] from all ranks' columns of it, on the first rank; on the others `part`. All ranks must call it."""
        ...


class Alone:
    """Of a pod that is one process."""

    shard = WHOLE

    def summed(self, partial: torch.Tensor) -> torch.Tensor:
        return partial

    def joined(self, part: torch.Tensor, width: int) -> torch.Tensor:
        return part


ALONE = Alone()


class GroupExchange:
    """Over a process group: gloo, or NCCL between GPUs.

    A rank that dies fails the others' calls at once, one that is frozen after the group's timeout: RuntimeError.
    """

    def __init__(self, group: Any, shard: Shard) -> None:
        """`group`: a torch.distributed backend of `shard.size` processes, of which this one is `shard.rank`."""
        self._group = group
        self.shard = shard

    def summed(self, partial: torch.Tensor) -> torch.Tensor:
        size, (rows, columns) = self.shard.size, partial.shape
        every = partial.new_empty((size * rows, columns))
        self._group._allgather_base(every, partial.contiguous()).wait()
        first, *others = every.view(size, rows, columns)
        total: torch.Tensor = first.float()
        for other in others:
            total = total + other
        return total.to(partial.dtype)

    def joined(self, part: torch.Tensor, width: int) -> torch.Tensor:
        shard = self.shard
        if shard.rank > 0:
            self._group.send([part.contiguous()], 0, shard.rank).wait()
            return part
        whole = part.new_empty((part.shape[0], width))
        whole[:, : part.shape[1]] = part
        for rank in range(1, shard.size):
            columns = Shard(rank, shard.size).part(width)
            received = part.new_empty((part.shape[0], len(columns)))
            self._group.recv([received], rank, rank).wait()
            whole[:, columns.start : columns.stop] = received
        return whole


def connect(store_file: Path, shard: Shard, device: torch.device, timeout_s: float) -> GroupExchange:
    """Returns when all ranks have called it; then and in every exchange nobody waits longer than `timeout_s`.

    The ranks find each other through `store_file`, which none of them may have used before. Raises RuntimeError. The
    group is no default group of the process: one process may be part of several.
    """
    distributed: Any = dist  # most of whose names are not declared
    store = distributed.FileStore(str(store_file), shard.size)
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        nccl = distributed.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timeout
        return GroupExchange(nccl(store, shard.rank, shard.size, options), shard)
    gloo = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=LOCALHOST)]
    options._threads = 1
    return GroupExchange(gloo(store, shard.rank, shard.size, options), shard)
