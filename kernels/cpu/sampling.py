"""CPU implementations for kernels/sampling.py: like the references, but sorting only the likeliest tokens of a row.

Sorting 49,152 logits takes milliseconds, longer than the model's share of a decode step; few tokens are ever kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.reference import sampling as reference

_FIRST_CANDIDATES = 1024


def filter_logits(
    logits: torch.Tensor, rows: Sequence[int], top_k: Sequence[int], top_p: Sequence[float], min_p: Sequence[float]
) -> None:
    """Filters the given rows of logits float32 [B, V] in place; the parameters have B entries."""
    for row in rows:
        kept = _surviving(logits[row], top_k[row], top_p[row], min_p[row])
        saved = logits[row, kept]
        logits[row] = -torch.inf
        logits[row, kept] = saved


def _surviving(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Ids of the tokens of one row float32 [V] that survive."""
    if top_k > 0:
        values, ids = _likeliest(logits, top_k)
        return ids[reference.surviving(values[:top_k], 0, top_p, min_p).nonzero().squeeze(1)]
    if top_p == 1.0:
        return (logits.double() >= logits.max().double() + torch.tensor(min_p, dtype=torch.float64).log()).nonzero()[
            :, 0
        ]
    return _nucleus(logits, top_p, min_p)


def _nucleus(logits: torch.Tensor, top_p: float, min_p: float) -> torch.Tensor:
    """top_p over the whole vocabulary: the candidates suffice when they hold more than top_p of the probability."""
    total = logits.double().logsumexp(0)
    values, ids = _likeliest(logits, _FIRST_CANDIDATES)
    cumulative = (values - total).exp().cumsum(0)
    if cumulative[-1] < top_p:
        values, ids = _likeliest(logits, logits.shape[0])
        cumulative = (values - total).exp().cumsum(0)
    keep = torch.ones(values.shape, dtype=torch.bool)
    keep[1:] = cumulative[:-1] < top_p
    if min_p > 0.0:
        keep &= values >= values[0] + torch.tensor(min_p, dtype=torch.float64).log()
    return ids[keep]


def _likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """At least min(count, V) tokens in the order (logit descending, id ascending): float64 values and ids.

    All tokens that tie with the last are candidates, as topk alone would choose among them as it likes.
    """
    if count < logits.shape[0]:
        ids = (logits >= logits.topk(count, sorted=False).values.min()).nonzero().squeeze(1)
    else:
        ids = torch.arange(logits.shape[0])
    values, order = logits[ids].double().sort(descending=True, stable=True)
    return values, ids[order]


draw = reference.draw
