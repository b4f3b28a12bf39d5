"""References of the steps of kernels/sampling.py that have several implementations: one stable sort of everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kernels import sampling as ops


def prepared_greedy(logits: torch.Tensor) -> Callable[[], list[int]]:
    """What it returns gives B token ids."""

    def compute() -> list[int]:
        token_ids: list[int] = torch.argmax(logits, dim=-1).tolist()
        return token_ids

    return compute


def prepared_sample(logits: torch.Tensor) -> ops.Sample:
    """What it returns gives B token ids. The steps choose their own implementations, so GPUs run this too."""

    def compute(draws: ops.Draws) -> list[int]:
        scaled = logits.float() / torch.tensor(draws.temperature, dtype=torch.float32, device=logits.device)[:, None]
        largest = torch.finfo(scaled.dtype).max
        scaled.nan_to_num_(nan=-largest, posinf=largest, neginf=-torch.inf)  # a row without a number gives a token too
        ops.filter_logits(scaled, draws.top_k, draws.top_p, draws.min_p)
        token_ids: list[int] = ops.draw(torch.softmax(scaled, dim=-1), draws.uniforms).tolist()
        return token_ids

    return compute


def filter_logits(
    logits: torch.Tensor, rows: Sequence[int], top_k: Sequence[int], top_p: Sequence[float], min_p: Sequence[float]
) -> None:
    """Filters the given rows of logits float32 [B, V] in place; the parameters have B entries."""
    for row in rows:
        values, order = logits[row].double().sort(descending=True, stable=True)
        kept = order[surviving(values, top_k[row], top_p[row], min_p[row])]
        saved = logits[row, kept]
        logits[row] = -torch.inf
        logits[row, kept] = saved


def surviving(values: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Which of one row's logits, float64 [V] in descending order, survive. Returns bool [V]."""
    keep = torch.ones(values.shape, dtype=torch.bool, device=values.device)
    if top_k > 0:
        keep[top_k:] = False
    if top_p < 1.0:
        cumulative = values.masked_fill(~keep, -torch.inf).softmax(0).cumsum(0)
        keep[1:] &= cumulative[:-1] < top_p
    if min_p > 0.0:
        keep &= values >= values[0] + torch.tensor(min_p, dtype=torch.float64).log()
    return keep


def draw(probs: torch.Tensor, uniforms: torch.Tensor, out: torch.Tensor) -> None:
    """Fills out int64 [B] from probs [B, V] and uniforms float64 [B], with float64 sums."""
    cumulative = probs.double().cumsum(-1)
    total = cumulative[:, -1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))  # so that rounding never passes the last token
    target = torch.minimum(uniforms.unsqueeze(1) * total, below_total)
    out.copy_(torch.searchsorted(cumulative, target, right=True).squeeze(1))
