"""Floating-point weights to small integers.

int8: one scale an output channel, from its largest weight. int4: a scale and an offset for each group of columns. The
range of a group is divided into a few more or fewer than 15 steps; for each, scale and offset are fitted to the rounded
weights by least squares, and the one that leaves the least squared error wins. Rounding is to nearest: no calibration
data, so the same checkpoint always gives the same integers.
"""

from __future__ import annotations

import torch

from kernels.quantized import QuantizedMatrix, pack

INT4_GROUP = 32
_LARGEST_INT8 = 127
_LARGEST_INT4 = 15
_STEPS = (13.5, 14.25, 15.0, 15.75, 16.5, 17.25)  # more than 15: the largest weights of a group are clipped
_CHUNK_ELEMENTS = 1 << 17  # the search passes over them a hundred times: they stay in a cache


def quantize_int8(weight: torch.Tensor) -> QuantizedMatrix:
    """weight: floating point [N, K]."""
    parts = [_int8_rows(rows) for rows in torch.split(weight, _rows_at_once(weight))]
    levels, scales = (torch.cat(values) for values in zip(*parts, strict=True))
    return pack(levels, bits=8, row_scales=scales)


def quantize_int4(weight: torch.Tensor, group: int = INT4_GROUP) -> QuantizedMatrix:
    """weight: floating point [N, K]."""
    parts = [_int4_rows(rows, group) for rows in torch.split(weight, _rows_at_once(weight))]
    levels, scales, offsets, row_scales = (torch.cat(values) for values in zip(*parts, strict=True))
    return pack(levels, bits=4, row_scales=row_scales, scales=scales, offsets=offsets)


def half_scales(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [N, G] as float16 [N, G] times a power of two a row [N], so that none is too small for float16."""
    largest = scales.abs().amax(1)
    powers = torch.exp2(torch.frexp(largest).exponent.float())
    powers = torch.where(largest > 0, powers, torch.ones_like(powers))
    return (scales / powers[:, None]).half(), powers


def _rows_at_once(weight: torch.Tensor) -> int:
    return max(1, _CHUNK_ELEMENTS // weight.shape[1])


def _int8_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels and row scales."""
    values = weight.float()
    scales = values.abs().amax(1) / _LARGEST_INT8
    levels = (values * _inverse(scales)[:, None]).round_().clamp_(-_LARGEST_INT8, _LARGEST_INT8)
    return levels.to(torch.int8), scales


def _int4_rows(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, ...]:
    """Levels 0 .. 15, group scales, group offsets and row scales."""
    rows, columns = weight.shape
    values = weight.float()
    values = torch.cat((values, values[:, -1:].expand(-1, -columns % group)), dim=1)  # no new extremes
    groups = values.view(rows, -1, group)
    exact_scales, exact_offsets = _best_fit(groups)
    scales, row_scales = half_scales(exact_scales)
    offsets = (exact_offsets / row_scales[:, None]).half()
    shifted = groups - (offsets.float() * row_scales[:, None])[..., None]
    inverse = _inverse(scales.float() * row_scales[:, None])
    levels = (shifted * inverse[..., None]).round_().clamp_(0, _LARGEST_INT4)
    return levels.to(torch.uint8).view(rows, -1)[:, :columns], scales, offsets, row_scales


def _best_fit(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and offsets [N, G] of groups [N, G, group]."""
    low, high = groups.aminmax(dim=-1, keepdim=True)
    mean = groups.mean(-1, keepdim=True)
    centred = groups - mean
    per_value = _inverse(high - low)
    best_scale, best_offset = torch.zeros_like(mean[..., 0]), mean[..., 0]
    most_explained = torch.zeros_like(best_scale)
    for steps in _STEPS:
        levels = ((groups - low) * (steps * per_value)).round_().clamp_(0, _LARGEST_INT4)
        mean_level = levels.mean(-1, keepdim=True)
        levels -= mean_level
        product, square = (centred * levels).sum(-1), (levels * levels).sum(-1)
        scale = product * _inverse(square)  # by least squares; it explains product * scale of the squared weights
        better = product * scale > most_explained
        most_explained = torch.where(better, product * scale, most_explained)
        best_scale = torch.where(better, scale, best_scale)
        best_offset = torch.where(better, (mean - mean_level * scale[..., None])[..., 0], best_offset)
    return best_scale, best_offset


def _inverse(values: torch.Tensor) -> torch.Tensor:
    """1 / values, and 0 for 0."""
    return torch.where(values == 0, torch.zeros_like(values), 1 / values)
