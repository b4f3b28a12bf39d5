"""CPU implementation of kernels/decoder.py: decoder.h, one call for a whole step or as many stages as it can take."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from weakref import WeakKeyDictionary

import torch

import kernels.cpu.library as c
from kernels.cpu.library import PreparedCall, library
from kernels.cpu.linear import runs_in_cpp, weights_struct
from kernels.decoder import Activation, AttentionStage, Decoder, Ends, ExpertsStage, MlpStage, Stage
from kernels.flat_batch import FlatBatch
from kernels.kv_cache import PagedKV
from kernels.linear import LinearWeights
from kernels.reference import decoder as reference

_ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1}


def run_stages(
    decoder: Decoder,
    first: int,
    last: int,
    delta: torch.Tensor,
    residual: torch.Tensor,
    batch: FlatBatch,
    caches: Sequence[PagedKV],
    new_delta: torch.Tensor,
    new_residual: torch.Tensor,
) -> None:
    """Fills new_delta and new_residual, both [T, H]. Experts and what the C++ does not take are computed op by op.

    Raises IndexError for a position, slot, context or block outside its table.
    """
    described = _description_of(decoder)
    for in_cpp, begin, end in described.spans(first, last):
        arguments = (begin, end, delta, residual, batch, caches, new_delta, new_residual)
        if not in_cpp or not described.run(*arguments):
            reference.run_stages(decoder, *arguments)  # which also says what was wrong with a batch that was refused
        delta, residual = new_delta, new_residual


def prepared(
    decoder: Decoder, ends: Ends, batch: FlatBatch, caches: Sequence[PagedKV], logits: torch.Tensor
) -> Callable[[], None]:
    """What it returns fills logits [R, words of the head]; op by op where any part is nothing for the C++."""
    op_by_op = partial(reference.forward, decoder, ends, batch, caches, logits)
    described = _description_of(decoder)
    if not described.takes_all or not _ends_in_cpp(ends, logits):
        return op_by_op
    in_cpp = described.forward(ends, batch, caches, logits)

    def compute() -> None:
        if in_cpp() != c.OK:
            op_by_op()  # which also says what was wrong with a batch that was refused

    return compute


class _Description:
    """A decoder as ops.h has it, with the memory that its steps use. Must not outlive the decoder."""

    def __init__(self, decoder: Decoder) -> None:
        self._dtype = decoder.dtype
        heads = (decoder.num_heads, decoder.num_kv_heads, decoder.head_dim)
        self._query = torch.empty((0, decoder.num_heads, decoder.head_dim), dtype=decoder.dtype)
        self._in_cpp = [_stage_in_cpp(decoder, stage) for stage in decoder.stages]
        self.takes_all = all(self._in_cpp)
        self._attentions = [_attention(s) if isinstance(s, AttentionStage) else None for s in decoder.stages]
        self._stages = (c.Stage * len(decoder.stages))(*map(_stage, decoder.stages, self._attentions))
        linears = [pair for stage in decoder.stages if (pair := _linears(stage)) is not None]
        wide = max((first.rows for first, _ in linears), default=0)
        narrow = max((second.columns for _, second in linears), default=0)
        self._decoder = c.Decoder(
            self._stages, len(decoder.stages), decoder.hidden_size, *heads, wide, narrow, decoder.eps
        )
        self._row_size = 3 * decoder.hidden_size + wide + narrow
        self._dtype_code = c.DTYPES[decoder.dtype]
        self._workspace = torch.empty(0, dtype=self._dtype)
        self._caches: Sequence[PagedKV] = ()
        self._cache_structs = (c.Cache * 0)()

    def spans(self, first: int, last: int) -> list[tuple[bool, int, int]]:
        """Runs of stages, each with whether the C++ takes it."""
        if self.takes_all:
            return [(True, first, last)]
        groups = groupby(range(first, last), lambda stage: self._in_cpp[stage])
        runs = [(in_cpp, list(stages)) for in_cpp, stages in groups]
        return [(in_cpp, stages[0], stages[-1] + 1) for in_cpp, stages in runs]

    def forward(self, ends: Ends, batch: FlatBatch, caches: Sequence[PagedKV], logits: torch.Tensor) -> PreparedCall:
        """Not OK: something leaves its table, and nothing was written."""
        workspace = self._grown_workspace(batch.num_tokens)
        arguments = (
            self._dtype_code,
            self._decoder,
            _ends_struct(ends),
            _step(batch),
            self._described_caches(caches),
            logits.data_ptr(),
            workspace.data_ptr(),
            torch.get_num_threads(),
        )
        return PreparedCall(library().forward, arguments, (batch, caches, logits, workspace))

    def run(
        self,
        first: int,
        last: int,
        delta: torch.Tensor,
        residual: torch.Tensor,
        batch: FlatBatch,
        caches: Sequence[PagedKV],
        new_delta: torch.Tensor,
        new_residual: torch.Tensor,
    ) -> bool:
        """False: something leaves its table, and nothing was written."""
        done: int = library().run_stages(
            self._dtype_code,
            self._decoder,
            first,
            last,
            _step(batch),
            self._described_caches(caches),
            c.Stream(delta.data_ptr(), residual.data_ptr()),
            c.Stream(new_delta.data_ptr(), new_residual.data_ptr()),
            self._grown_workspace(batch.num_tokens).data_ptr(),
            torch.get_num_threads(),
        )
        return done == c.OK

    def _described_caches(self, caches: Sequence[PagedKV]) -> ctypes.Array[c.Cache]:
        """Made once for the same tuple, which a runner passes at every step."""
        if caches is not self._caches:
            for kv in caches:
                kv.check_query(self._query)
            self._cache_structs = (c.Cache * len(caches))(*map(c.cache_of, caches))
            self._caches = caches
        return self._cache_structs

    def _grown_workspace(self, num_tokens: int) -> torch.Tensor:
        """Kept between steps: fresh memory would cost a page fault for every 4 KB of it."""
        if self._workspace.numel() < num_tokens * self._row_size:
            self._workspace = torch.empty(num_tokens * self._row_size, dtype=self._dtype)
        return self._workspace


_described: WeakKeyDictionary[Decoder, _Description] = WeakKeyDictionary()
_described_ends: WeakKeyDictionary[Ends, c.Ends] = WeakKeyDictionary()


def _description_of(decoder: Decoder) -> _Description:
    found = _described.get(decoder)
    if found is None:
        found = _described[decoder] = _Description(decoder)
    return found


def _ends_struct(ends: Ends) -> c.Ends:
    found = _described_ends.get(ends)
    if found is None:
        found = _described_ends[ends] = c.Ends(
            c.dtype_code(ends.embedding),
            ends.embedding.data_ptr(),
            ends.embedding.shape[0],
            ends.embedding.stride(0),
            ends.embedding_scale,
            _pointer(ends.delta_norm),
            ends.norm.data_ptr(),
            _linear(ends.head),
        )
    return found


def _ends_in_cpp(ends: Ends, logits: torch.Tensor) -> bool:
    known = ends.embedding.dtype in (torch.bfloat16, logits.dtype)
    return known and runs_in_cpp(ends.head)


def _linear(weights: LinearWeights) -> c.Linear:
    return c.Linear(weights_struct(weights), _pointer(weights.bias))


def _linears(stage: Stage) -> tuple[LinearWeights, LinearWeights] | None:
    """The two of a stage that the C++ knows."""
    match stage:
        case AttentionStage():
            return stage.qkv, stage.output
        case MlpStage():
            return stage.weights.gate_up, stage.weights.down
        case ExpertsStage():
            return None


def _stage_in_cpp(decoder: Decoder, stage: Stage) -> bool:
    """The others are computed op by op."""
    linears = _linears(stage)
    if linears is None or (isinstance(stage, AttentionStage) and decoder.head_dim > c.MAX_HEAD_DIM):
        return False
    return all(map(runs_in_cpp, linears))


def _attention(stage: AttentionStage) -> c.Attention:
    return c.Attention(
        _pointer(stage.query_norm),
        _pointer(stage.key_norm),
        stage.cos.data_ptr(),
        stage.sin.data_ptr(),
        *stage.cos.shape,
        c.scoring_of(stage.scale, stage.window, stage.soft_cap),
    )


def _stage(stage: Stage, attention: c.Attention | None) -> c.Stage:
    """Zeros for one that is always computed op by op."""
    linears = _linears(stage)
    if linears is None:
        return c.Stage()
    return c.Stage(
        _pointer(stage.delta_norm),
        stage.norm.data_ptr(),
        *map(_linear, linears),
        None if attention is None else ctypes.pointer(attention),
        _ACTIVATIONS[stage.activation] if isinstance(stage, MlpStage) else 0,
    )


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@functools.lru_cache(maxsize=1)
def _step(batch: FlatBatch) -> c.Step:
    """Made once for all calls of a step."""
    return c.Step(
        batch.num_tokens,
        batch.token_ids.data_ptr(),
        batch.positions.data_ptr(),
        batch.slot_mapping.data_ptr(),
        c.context_of(batch.decode_block_tables, batch.decode_context_lens),
        c.context_of(batch.prefill_block_tables, batch.prefill_context_lens),
        batch.prefill_cu_seqlens.data_ptr(),
        batch.sample_rows.data_ptr(),
        batch.sample_rows.shape[0],
    )
