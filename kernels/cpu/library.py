"""Loads the compiled CPU kernels through ctypes. Mirrors ops.h, field by field."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels.cpu.build import build
from kernels.kv_cache import PagedKV
from kernels.panels import PanelMatrix
from kernels.quantized import QuantizedMatrix

OK = -1
MAX_HEAD_DIM = 256
MAX_DEPTH = 32768
_MAX_WINDOW = 2**63 - 1

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.uint8: 4}  # uint8: two of 4 bits
_CACHE_FORMATS = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.bfloat16: 3}  # 0: the dtype of the computation
ArrangedPart = PanelMatrix | QuantizedMatrix  # weights in the order in which the C++ reads them
_INT64, _INT32, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_void_p


class Cache(ctypes.Structure):
    """A paged cache's base pointers, shape, strides and format."""

    _fields_ = (
        ("k", _POINTER),
        ("v", _POINTER),
        *((name, _INT64) for name in ("num_blocks", "kv_heads", "block_size", "head_dim")),
        *((name, _INT64) for name in ("block_stride", "head_stride", "slot_stride")),
        ("k_scales", _POINTER),
        ("v_scales", _POINTER),
        ("scale_block_stride", _INT64),
        ("scale_head_stride", _INT64),
        ("format", _INT32),
    )


class Context(ctypes.Structure):
    """Block tables and context lengths."""

    _fields_ = (
        ("block_tables", _POINTER),
        *((name, _INT64) for name in ("table_stride", "max_blocks", "num_sequences")),
        ("context_lens", _POINTER),
    )


class Heads(ctypes.Structure):
    """Rows of heads: [tokens, heads, head_dim]."""

    _fields_ = (("data", _POINTER), *((name, _INT64) for name in ("tokens", "heads", "token_stride", "head_stride")))


class Matrix(ctypes.Structure):
    """Weights [rows, columns]; `stride`: from a panel to the next; the last three of quantised ones alone."""

    _fields_ = (
        ("data", _POINTER),
        ("rows", _INT64),
        ("stride", _INT64),
        *((name, _POINTER) for name in ("scales", "offsets", "row_scales")),
    )


class Weights(ctypes.Structure):
    """Linear layers that share their input."""

    _fields_ = (
        ("dtype", _INT32),
        ("matrices", ctypes.POINTER(Matrix)),
        *((name, _INT64) for name in ("count", "depth", "group")),
        ("offsets_dtype", _INT32),
    )


class Scoring(ctypes.Structure):
    """How scores are made and which keys a query sees."""

    _fields_ = (("scale", _FLOAT), ("soft_cap", _FLOAT), ("window", _INT64))


class Linear(ctypes.Structure):
    """A linear layer."""

    _fields_ = (("weights", Weights), ("bias", _POINTER))


class Attention(ctypes.Structure):
    """What an attention stage does between its linears."""

    _fields_ = (
        *((name, _POINTER) for name in ("query_norm", "key_norm", "cos", "sin")),
        ("num_positions", _INT64),
        ("rotary_pairs", _INT64),
        ("scoring", Scoring),
    )


class Stage(ctypes.Structure):
    """Half of a decoder layer."""

    _fields_ = (
        ("delta_norm", _POINTER),
        ("norm", _POINTER),
        ("first", Linear),
        ("second", Linear),
        ("attention", ctypes.POINTER(Attention)),
        ("activation", _INT32),
    )


class Decoder(ctypes.Structure):
    """All stages of a decoder."""

    _fields_ = (
        ("stages", ctypes.POINTER(Stage)),
        *(
            (name, _INT64)
            for name in ("num_stages", "hidden", "heads", "kv_heads", "head_dim", "max_wide", "max_narrow")
        ),
        ("eps", _FLOAT),
    )


class Ends(ctypes.Structure):
    """What stands before and behind a decoder's stages."""

    _fields_ = (
        ("embedding_dtype", _INT32),
        ("embedding", _POINTER),
        *((name, _INT64) for name in ("vocab", "embedding_stride")),
        ("embedding_scale", _FLOAT),
        *((name, _POINTER) for name in ("delta_norm", "norm")),
        ("head", Linear),
    )


class Step(ctypes.Structure):
    """Tokens of one step."""

    _fields_ = (
        ("tokens", _INT64),
        *((name, _POINTER) for name in ("token_ids", "positions", "slot_mapping")),
        ("decodes", Context),
        ("prefills", Context),
        *((name, _POINTER) for name in ("cu_seqlens", "sample_rows")),
        ("samples", _INT64),
    )


class Stream(ctypes.Structure):
    """The residual stream and what is still to be added to it."""

    _fields_ = (("delta", _POINTER), ("residual", _POINTER))


class Draw(ctypes.Structure):
    """How a row's token is drawn."""

    _fields_ = (
        ("temperature", _FLOAT),
        ("top_k", _INT64),
        *((name, ctypes.c_double) for name in ("top_p", "min_gap", "uniform")),
    )


def _op(*arguments: type) -> type:
    return ctypes.CFUNCTYPE(_INT64, *arguments)


_HEADS, _CACHE, _CONTEXT = ctypes.POINTER(Heads), ctypes.POINTER(Cache), ctypes.POINTER(Context)
_SCORING, _WEIGHTS = ctypes.POINTER(Scoring), ctypes.POINTER(Weights)
_DECODER, _ENDS = ctypes.POINTER(Decoder), ctypes.POINTER(Ends)
_STEP, _STREAM = ctypes.POINTER(Step), ctypes.POINTER(Stream)


class _Ops(ctypes.Structure):
    _fields_ = (
        ("isa", ctypes.c_char_p),
        ("paged_decode", _op(_INT32, _HEADS, _CACHE, _CONTEXT, _SCORING, _HEADS, _INT32)),
        ("paged_prefill", _op(_INT32, _HEADS, _CACHE, _CONTEXT, _POINTER, _SCORING, _HEADS, _INT32)),
        ("kv_write", _op(_INT32, _HEADS, _HEADS, _CACHE, _POINTER, _INT32)),
        (
            "rms_norm",
            _op(
                *(_INT32, _POINTER, _INT64, _POINTER, _INT64, _POINTER, _FLOAT),
                *(_POINTER, _POINTER, _INT64, _INT64, _INT32),
            ),
        ),
        ("rope", _op(_INT32, _HEADS, _HEADS, _INT64, _POINTER, _POINTER, _POINTER, _INT64, _INT32)),
        ("silu_mul", _op(_INT32, _POINTER, _INT64, _POINTER, _INT64, _INT64, _INT32)),
        ("gelu_mul", _op(_INT32, _POINTER, _INT64, _POINTER, _INT64, _INT64, _INT32)),
        ("linear", _op(_INT32, _POINTER, _INT64, _INT64, _WEIGHTS, _POINTER, _POINTER, _INT32)),
        (
            "run_stages",
            _op(_INT32, _DECODER, _INT64, _INT64, _STEP, _CACHE, _STREAM, _STREAM, _POINTER, _INT32),
        ),
        ("forward", _op(_INT32, _DECODER, _ENDS, _STEP, _CACHE, _POINTER, _POINTER, _INT32)),
        (
            "copy_rows",
            _op(
                *(_POINTER, _INT64, _POINTER, _INT64, _INT64),
                *(_POINTER, _POINTER, _INT64, _INT32),
            ),
        ),
        ("sample", _op(_INT32, _POINTER, _INT64, _INT64, _INT64, ctypes.POINTER(Draw), _POINTER, _POINTER, _INT32)),
    )


@dataclass(frozen=True, slots=True)
class Library:
    """The kernels for one instruction set. Each op returns OK or the index of the row that was refused."""

    isa: str
    paged_decode: Callable[..., int]
    paged_prefill: Callable[..., int]
    kv_write: Callable[..., int]
    rms_norm: Callable[..., int]
    rope: Callable[..., int]
    silu_mul: Callable[..., int]
    gelu_mul: Callable[..., int]
    linear: Callable[..., int]
    run_stages: Callable[..., int]
    forward: Callable[..., int]
    copy_rows: Callable[..., int]
    sample: Callable[..., int]


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """An op's call to make as often as wanted; `owners` keep the memory that its arguments point to."""

    op: Callable[..., int]
    arguments: tuple[object, ...]
    owners: tuple[object, ...]

    def __call__(self) -> int:
        return self.op(*self.arguments)


@functools.cache
def library() -> Library:
    """The kernels for this processor, built on first use. Raises CompilerMissing or BuildFailed."""
    return load(None)


def load(isa: str | None) -> Library:
    """The kernels of one instruction set: "baseline", "avx2", "avx512", "avx512bf16", "amx", or None for the best
    this processor has.

    Raises ValueError for one that cannot run here.
    """
    shared = ctypes.CDLL(str(build()))
    _share_pool(shared)
    shared.pdserve_ops.restype = ctypes.POINTER(_Ops)
    pointer = shared.pdserve_ops(None if isa is None else isa.encode())
    if not pointer:
        raise ValueError(f"isa={isa!r} is unknown or cannot run on this processor")
    table = pointer.contents
    names = [name for name in Library.__dataclass_fields__ if name != "isa"]
    return Library(isa=table.isa.decode(), **{name: getattr(table, name) for name in names})


def _share_pool(shared: ctypes.CDLL) -> None:
    """Lets the kernels run on torch's own OpenMP threads; a torch without OpenMP leaves them on the calling thread.

    A second thread pool would fight the first, whose idle threads spin for a while after each of torch's operations.
    """
    process = ctypes.CDLL(torch._C.__file__)
    names = ("GOMP_parallel", "omp_get_num_threads")
    if all(hasattr(process, name) for name in names):
        shared.pdserve_use_pool(*(ctypes.cast(getattr(process, name), _POINTER) for name in names))


def dtype_code(tensor: torch.Tensor) -> int:
    """The enum value of a tensor's dtype."""
    return DTYPES[tensor.dtype]


def cache_of(kv: PagedKV) -> Cache:
    """Must not outlive `kv`."""
    plain = (kv.k.data_ptr(), kv.v.data_ptr(), *kv.k.shape, *kv.k.stride()[:3])
    scales = tuple(None if part is None else part.data_ptr() for part in (kv.k_scales, kv.v_scales))
    return Cache(*plain, *scales, *kv.scale_strides, _CACHE_FORMATS.get(kv.k.dtype, 0))


def context_of(block_tables: torch.Tensor, context_lens: torch.Tensor) -> Context:
    """block_tables: int32 [S, M]; context_lens: int32 [S], contiguous."""
    num_sequences, max_blocks = block_tables.shape
    stride = block_tables.stride(0)
    return Context(block_tables.data_ptr(), stride, max_blocks, num_sequences, context_lens.data_ptr())


def heads_of(tensor: torch.Tensor) -> Heads:
    """tensor: [tokens, heads, head_dim]."""
    num_tokens, num_heads, _ = tensor.shape
    return Heads(tensor.data_ptr(), num_tokens, num_heads, tensor.stride(0), tensor.stride(1))


def scoring_of(scale: float, sliding_window: int | None, soft_cap: float | None) -> Scoring:
    """None: no limit."""
    return Scoring(scale, soft_cap or 0.0, _MAX_WINDOW if sliding_window is None else sliding_window)


def weights_of(parts: Sequence[ArrangedPart]) -> Weights:
    """parts: [rows, columns] of one kind and equal columns; they must outlive the result."""
    matrices = (Matrix * len(parts))(*map(_matrix_of, parts))
    first = parts[0]
    if not isinstance(first, QuantizedMatrix):
        return Weights(DTYPES[first.dtype], matrices, len(parts), first.columns)
    offsets_dtype = 0 if first.offsets is None else dtype_code(first.offsets)
    return Weights(dtype_code(first.packed), matrices, len(parts), first.columns, first.group or 0, offsets_dtype)


def _matrix_of(part: ArrangedPart) -> Matrix:
    if isinstance(part, PanelMatrix):
        return Matrix(part.packed.data_ptr(), part.rows, part.packed.stride(0))
    scales, offsets = (None if t is None else t.data_ptr() for t in (part.scales, part.offsets))
    return Matrix(part.packed.data_ptr(), part.rows, 0, scales, offsets, part.row_scales.data_ptr())
