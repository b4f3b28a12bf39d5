"""Checks that every op makes of its arguments before it computes. They look at shapes, never at values on a device."""

from __future__ import annotations

import torch


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    """Raises ValueError unless `tensor` has `shape`; None matches any size."""
    sizes = tensor.shape
    if len(sizes) == len(shape):
        for size, want in zip(sizes, shape, strict=True):  # a loop, as any() over a generator takes three times as long
            if want is not None and size != want:
                break
        else:
            return
    wanted = ", ".join("*" if size is None else str(size) for size in shape)
    raise ValueError(f"{name} has shape {tuple(sizes)}, expected ({wanted})")


def check_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises TypeError unless `tensor` has `dtype`."""
    if tensor.dtype != dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}, expected {dtype}")


def check_rows(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError unless the last dimension is contiguous, which every kernel reads as vectors."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension, expected 1")


def check_scoring(sliding_window: int | None, soft_cap: float | None) -> None:
    """What limits attention beyond causality; None does not."""
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window = {sliding_window}: must be at least 1")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap = {soft_cap}: must be above 0")


def check_context(block_tables: torch.Tensor, context_lens: torch.Tensor, num_sequences: int) -> None:
    """block_tables int32 [S, M] and context_lens int32 [S], as both attention ops take them."""
    check_shape("block_tables", block_tables, (num_sequences, None))
    check_dtype("block_tables", block_tables, torch.int32)
    check_rows("block_tables", block_tables)
    check_shape("context_lens", context_lens, (num_sequences,))
    check_dtype("context_lens", context_lens, torch.int32)


def check_rope_tables(cos: torch.Tensor, sin: torch.Tensor, head_dim: int) -> None:
    """cos, sin: float32 [P, R / 2], contiguous, with R at most head_dim."""
    check_shape("cos", cos, (None, None))
    if 2 * cos.shape[1] > head_dim:
        raise ValueError(f"cos has {cos.shape[1]} pairs, expected at most {head_dim // 2}")
    check_shape("sin", sin, tuple(cos.shape))
    for name, tensor in (("cos", cos), ("sin", sin)):
        check_dtype(name, tensor, torch.float32)
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}, expected contiguous rows")
