"""What the ranks of one pod tell each other while they compute a batch, through torch.distributed.

Sums are added in the order of the ranks, on each rank alike: all of them then hold the same bits, the same ones at
every run, and those of a token do not depend on what else is in the batch. A ring's sum would depend on where in the
message a number lies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from engine.shard import WHOLE, Shard
from engine.tensor_parallel.errors import RankLost
from kernels.flat_batch import FlatBatch

log = logging.getLogger(__name__)

LOCALHOST = "127.0.0.1"


class Exchange(Protocol):
    """`shard` says which of the ranks this one is."""

    @property
    def shard(self) -> Shard: ...

    def announce(self, batch: FlatBatch) -> None:
        """The first rank tells the others what to compute with it now."""
        ...

    def summed(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' [T, H], in float32 and rounded once. All ranks must call it."""
        ...

    def joined(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """[R, width] from all ranks' words of it, on the first rank; on the others `part`. All ranks must call it."""
        ...


class Alone:
    """Of a pod that is one process."""

    shard = WHOLE

    def announce(self, batch: FlatBatch) -> None:
        pass

    def summed(self, partial: torch.Tensor) -> torch.Tensor:
        return partial

    def joined(self, part: torch.Tensor, width: int) -> torch.Tensor:
        return part


ALONE = Alone()


class GroupExchange:
    """Through a process group: gloo, or NCCL between GPUs. For nothing but `shard` before `connect`.

    Calls raise RankLost: at once when another rank dies, after the group's timeout when one is frozen. A group cannot
    tell which one that was (its own text names the connection at which this rank noticed), so `lost` is asked.
    """

    def __init__(
        self,
        shard: Shard,
        announce: Callable[[FlatBatch], None] = ALONE.announce,
        lost: Callable[[], RankLost] = lambda: RankLost("another rank is lost"),
    ) -> None:
        self.shard = shard
        self.announce = announce
        self._lost = lost
        self._group: Any = None

    def connect(self, store_file: Path, device: torch.device, timeout_s: float) -> None:
        """Returns when all ranks are connected; then and in every exchange nobody waits longer than `timeout_s`.

        They find each other through `store_file`, which is not needed any more afterwards. The group is no default
        group of the process: one process may be part of several.
        """
        try:
            self._group = _make_group(store_file, self.shard, device, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise self._explained(error) from None
        self._wait(self._group.barrier)

    def summed(self, partial: torch.Tensor) -> torch.Tensor:
        size, (rows, columns) = self.shard.size, partial.shape
        every = partial.new_empty((size * rows, columns))
        self._wait(lambda: self._group._allgather_base(every, partial.contiguous()))
        first, *others = every.view(size, rows, columns)
        total: torch.Tensor = first.float()
        for other in others:
            total = total + other
        return total.to(partial.dtype)

    def joined(self, part: torch.Tensor, width: int) -> torch.Tensor:
        shard = self.shard
        if shard.rank > 0:
            self._wait(lambda: self._group.send([part.contiguous()], 0, shard.rank))
            return part
        whole = part.new_empty((part.shape[0], width))
        whole[:, : part.shape[1]] = part
        for rank in range(1, shard.size):
            words = Shard(rank, shard.size).words(width)
            whole[:, words.start : words.stop] = self._received(rank, part.new_empty((part.shape[0], len(words))))
        return whole

    def _received(self, rank: int, into: torch.Tensor) -> torch.Tensor:
        self._wait(lambda: self._group.recv([into], rank, rank))
        return into

    def _wait(self, post: Callable[[], Any]) -> None:
        try:
            post().wait()
        except RuntimeError as error:
            raise self._explained(error) from None

    def _explained(self, error: RuntimeError) -> RankLost:
        log.debug("rank %d of %d: %s", self.shard.rank, self.shard.size, error)
        return self._lost()


def _make_group(store_file: Path, shard: Shard, device: torch.device, timeout: timedelta) -> Any:
    distributed: Any = dist  # most of whose names are not declared
    store = distributed.FileStore(str(store_file), shard.size)
    if device.type == "cuda":
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return distributed.ProcessGroupNCCL(store, shard.rank, shard.size, options)
    gloo = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=LOCALHOST)]
    options._threads = 1
    return gloo(store, shard.rank, shard.size, options)
