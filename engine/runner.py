"""Computes the scheduler's batches with torch: flattens them, runs the model over the paged cache, draws tokens."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import Batch, ModelInfo, ScheduledSequence
from engine.checkpoint import model_info
from engine.decode_graphs import Capture, DecodeGraphs
from engine.decode_rows import DecodeSteps, Step, only_decodes
from engine.device import capture_progress, device_capture, uploaded
from engine.kv_cache import kv_cache
from engine.model import Model
from engine.sampler import SampleRow, sample
from engine.sequence import SampledToken
from engine.speculation.verify import verified
from engine.tensor_parallel.exchange import ALONE, Exchange
from kernels.flat_batch import FlatBatch


class TorchRunner:
    """An `engine.batch.Runner`; belongs to the one thread that calls `execute`.

    Borrows `kv_memory`, uint8 [num_bytes], as its KV cache (engine/kv_format.py), and computes where that memory lies:
    on the CPU, or on the current CUDA device if it is a tensor there. On CUDA, decode steps of up to `max_decode_rows`
    rows (sequences and their drafts) are captured as graphs, which takes a second each; `capture` says how to capture
    elsewhere. `exchange` is the first rank's of a tensor-parallel pod, whose other ranks compute what it announces.
    Raises CheckpointError for the model, ValueError for a memory that is not a whole number of blocks.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        kv_memory: NDArray[np.uint8] | torch.Tensor,
        block_size: int,
        dtype: str,
        kv_dtype: str = "auto",
        quantization: str = "none",
        num_threads: int,
        exchange: Exchange = ALONE,
        max_decode_rows: int = 64,
        capture: Capture | None = None,
    ) -> None:
        self._model_info = model_info(model_dir, dtype, kv_dtype=kv_dtype, quantization=quantization)
        self._block_size = block_size
        self._decode_steps = DecodeSteps(block_size, self._prepared, self._model_info.eos_token_ids)
        self._num_threads = num_threads
        self._kv = kv_cache(kv_memory, self._model_info, block_size)
        torch.set_num_threads(num_threads)
        self._device = self._kv.blocks.device
        self._torch_model = Model.load(model_dir, dtype, exchange, self._device, quantization)
        self._caches = self._kv.of_heads(self._torch_model.kv_heads)
        self._graphs = self._decode_graphs(capture or device_capture(self._device), max_decode_rows)

    @property
    def model(self) -> ModelInfo:
        return self._model_info

    def execute(self, batch: Batch) -> list[tuple[SampledToken, ...]]:
        if torch.get_num_threads() != self._num_threads:  # OpenMP's count belongs to the calling thread
            torch.set_num_threads(self._num_threads)
        if batch.copies:
            self._kv.copy_blocks(batch.copies)
        if not batch.sequences:
            return []
        if only_decodes(batch.sequences):
            return [(token,) for token in self._decode_steps.tokens(batch.sequences)]
        logits = self._logits(flatten(batch.sequences, self._block_size))
        rows = [row for s in batch.sequences if s.sample for row in sample_rows(s)]
        drawn = iter(sample(logits, rows, self._model_info.eos_token_ids))
        return [
            verified(s.draft_ids, tuple(islice(drawn, 1 + len(s.draft_ids)))) if s.sample else ()
            for s in batch.sequences
        ]

    def _prepared(self, batch: FlatBatch) -> Step:
        """Of a batch on the host. On a GPU what is prepared is a graph, over memory of its own."""
        if self._device.type == "cpu" and self._graphs is None:
            return self._torch_model.prepared(batch, self._caches)
        return partial(self._logits, batch)

    def _logits(self, batch: FlatBatch) -> torch.Tensor:
        """[R, V] on the device. batch: on the host."""
        if self._graphs is not None and self._graphs.take(batch):
            return self._graphs.forward(batch)
        return self._forward(uploaded(batch, self._device))

    def _forward(self, batch: FlatBatch) -> torch.Tensor:
        return self._torch_model.forward(batch, self._caches)

    def _decode_graphs(self, capture: Capture | None, max_rows: int) -> DecodeGraphs | None:
        if capture is None or not self._torch_model.capturable:
            return None
        longest = -(-self._model_info.max_model_len // self._block_size)
        return DecodeGraphs(
            self._forward,
            capture,
            max_rows=max_rows,
            table_width=min(longest, self._kv.blocks.shape[0]),
            device=self._device,
            progress=capture_progress,
        )


def sample_rows(scheduled: ScheduledSequence) -> list[SampleRow]:
    """How to draw after the last token and after each draft, which then counts as output."""
    params, prompt_ids, output_ids = scheduled.params, scheduled.prompt_ids, scheduled.output_ids
    rows = [SampleRow(params, prompt_ids, output_ids)]
    for num_drafts in range(1, len(scheduled.draft_ids) + 1):
        rows.append(SampleRow(params, prompt_ids, (*output_ids, *scheduled.draft_ids[:num_drafts])))
    return rows


def flatten(sequences: Seq[ScheduledSequence], block_size: int) -> FlatBatch:
    """One batch of all tokens; `sample_rows` follow the order of `sequences`.

    A prompt's tokens go through prefill attention and all others through decode attention, even where a run of them is
    computed again: a draft, or a replayed token, has the same block table and a context of one more than the one before
    it. So each is computed to the bit as in any other step, though the two kinds of attention round differently.
    """
    prompts: list[_Token] = []
    decodes: list[_Token] = []
    prefills: list[ScheduledSequence] = []
    sampled: list[tuple[list[_Token], int]] = []
    for s in sequences:
        num_of_prompt = s.num_of_prompt
        if num_of_prompt > 0:
            prefills.append(s)
        for i, token_id in enumerate((*s.token_ids, *s.draft_ids)):
            kind = prompts if i < num_of_prompt else decodes
            if s.sample and i >= len(s.token_ids) - 1:
                sampled.append((kind, len(kind)))
            kind.append(_Token(s, s.start + i, token_id))
    tokens = (*decodes, *prompts)
    return FlatBatch(
        token_ids=_longs(t.token_id for t in tokens),
        positions=_longs(t.position for t in tokens),
        slot_mapping=_longs(
            t.sequence.block_table[t.position // block_size] * block_size + t.position % block_size for t in tokens
        ),
        sample_rows=_longs(row if kind is decodes else len(decodes) + row for kind, row in sampled),
        decode_block_tables=_block_tables([t.sequence for t in decodes]),
        decode_context_lens=torch.tensor([t.position + 1 for t in decodes], dtype=torch.int32),
        prefill_block_tables=_block_tables(prefills),
        prefill_context_lens=torch.tensor([s.start + s.num_of_prompt for s in prefills], dtype=torch.int32),
        prefill_cu_seqlens=torch.tensor(
            list(accumulate((s.num_of_prompt for s in prefills), initial=0)), dtype=torch.int32
        ),
    )


class _Token(NamedTuple):
    sequence: ScheduledSequence
    position: int
    token_id: int


def _longs(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def _block_tables(sequences: Seq[ScheduledSequence]) -> torch.Tensor:
    """int32 [S, M], padded with block 0, which is never read past a context."""
    width = max((len(s.block_table) for s in sequences), default=0)
    tables = np.zeros((len(sequences), width), dtype=np.int32)
    for row, sequence in zip(tables, sequences, strict=True):
        row[: len(sequence.block_table)] = sequence.block_table
    return torch.from_numpy(tables)
