"""Decode steps computed by replaying captured work: launching a step's kernels one by one keeps a GPU waiting.

A capture is bound to shapes and memory. So there is one for each of a few numbers of rows (buckets), all over the same
input memory: a step takes the smallest bucket that holds its rows, copies its inputs there, pads the rest, replays, and
reads the logits. A padding row writes to no slot (slot -1) and attends to nothing (context length 0); rows do not see
one another, so padding changes no answer.

What captures and replays is behind `Graph`: CUDA graphs (engine/device.py), or `EagerGraph`, which computes anew at
each replay and gives the same answers on any device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from kernels.flat_batch import FlatBatch

Forward = Callable[[FlatBatch], torch.Tensor]  # logits [R, V] of the batch's sample rows
Progress = Callable[[list[int]], Iterable[int]]  # yields the same buckets and shows how many are done

PADDING_SLOT = -1


class Graph(Protocol):
    """Captured work over fixed input memory."""

    @property
    def output(self) -> torch.Tensor:
        """What the latest replay computed; the next one overwrites it."""
        ...

    def replay(self) -> None:
        """Computes again from what the input memory now holds."""
        ...


Capture = Callable[[Callable[[], torch.Tensor]], Graph]  # the work may run several times before this returns


class EagerGraph:
    """Computes its work at each replay."""

    def __init__(self, work: Callable[[], torch.Tensor]) -> None:
        self._work = work
        self.output = work()

    def replay(self) -> None:
        self.output.copy_(self._work())


class DecodeInputs:
    """Fixed memory for the inputs of up to `max_rows` decode rows, and the memory of the host that it is filled from.

    The host's is pinned where the device is a GPU, so copies wait for nothing. It must not be filled again before the
    copies are done: they are once the step's logits have been read.
    """

    def __init__(self, max_rows: int, table_width: int, device: torch.device) -> None:
        self._device = device
        self._longs, self._host_longs = self._pair((3, max_rows), torch.int64)
        self._tables, self._host_tables = self._pair((max_rows, table_width), torch.int32)
        self._lengths, self._host_lengths = self._pair((max_rows,), torch.int32)
        self._rows = torch.arange(max_rows, device=device)
        self._host_longs[2] = self._longs[2] = PADDING_SLOT

    def batch(self, rows: int) -> FlatBatch:
        """The first `rows` rows as a batch, over the fixed memory; logits of every row are wanted."""
        return FlatBatch(
            token_ids=self._longs[0, :rows],
            positions=self._longs[1, :rows],
            slot_mapping=self._longs[2, :rows],
            sample_rows=self._rows[:rows],
            decode_block_tables=self._tables[:rows],
            decode_context_lens=self._lengths[:rows],
            prefill_block_tables=self._tables[:0],
            prefill_context_lens=self._lengths[:0],
            prefill_cu_seqlens=torch.zeros(1, dtype=torch.int32, device=self._device),
        )

    def fill(self, batch: FlatBatch, rows: int) -> None:
        """Copies the inputs of a batch of decodes in, and pads it to `rows`.

        Table entries past those of the batch stay what they were: attention reads none past a context length.
        """
        used, width = batch.num_decodes, min(batch.decode_block_tables.shape[1], self._tables.shape[1])
        for source, host, padding in zip(
            (batch.token_ids, batch.positions, batch.slot_mapping), self._host_longs, (0, 0, PADDING_SLOT), strict=True
        ):
            host[:used] = source
            host[used:rows] = padding
        self._host_tables[:used, :width] = batch.decode_block_tables[:, :width]
        self._host_lengths[:used] = batch.decode_context_lens
        self._host_lengths[used:rows] = 0
        self._longs[:, :rows].copy_(self._host_longs[:, :rows], non_blocking=True)
        self._tables[:used, :width].copy_(self._host_tables[:used, :width], non_blocking=True)
        self._lengths[:rows].copy_(self._host_lengths[:rows], non_blocking=True)

    def _pair(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        pinned = self._device.type == "cuda"
        return torch.zeros(shape, dtype=dtype, device=self._device), torch.zeros(shape, dtype=dtype, pin_memory=pinned)


class DecodeGraphs:
    """`forward` for batches that are decodes alone, by one graph a bucket, all captured when this is made.

    max_rows: decode rows of the largest batch, drafts included; table_width: blocks of the longest context.
    """

    def __init__(
        self,
        forward: Forward,
        capture: Capture,
        *,
        max_rows: int,
        table_width: int,
        device: torch.device,
        progress: Progress = iter,
    ) -> None:
        self._buckets = buckets(max_rows)
        self._inputs = DecodeInputs(max_rows, table_width, device)
        self._graphs: dict[int, Graph] = {}
        for rows in progress(self._buckets[::-1]):  # the largest first: the others fit into memory that it needed
            inputs = self._inputs.batch(rows)
            self._graphs[rows] = capture(lambda inputs=inputs: forward(inputs))  # type: ignore[misc]  # bound at once

    def take(self, batch: FlatBatch) -> bool:
        """Whether `forward` can compute it."""
        return batch.num_prefills == 0 and 0 < batch.num_decodes <= self._buckets[-1]

    @torch.inference_mode()
    def forward(self, batch: FlatBatch) -> torch.Tensor:
        """Logits [R, V] of the batch's sample rows. batch: on the host, one that `take` accepts."""
        rows = self._buckets[bisect_left(self._buckets, batch.num_decodes)]
        self._inputs.fill(batch, rows)
        graph = self._graphs[rows]
        graph.replay()
        return graph.output[batch.sample_rows]


def buckets(max_rows: int) -> list[int]:
    """Powers of two below `max_rows`, then `max_rows` itself. Raises ValueError for less than one row."""
    if max_rows < 1:
        raise ValueError(f"max_rows = {max_rows}: must be at least 1")
    return [*(1 << i for i in range((max_rows - 1).bit_length())), max_rows]
