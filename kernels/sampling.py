"""From logits to a token: penalties, bias, bans, filters, the draw. Every step is deterministic, ties included.

Tokens are ordered by (logit descending, id ascending) everywhere, so the first of equal logits wins on any device. The
per-request numbers come as Python sequences, one entry a row, because that is where requests keep them; rows whose
parameters are neutral are not touched. A sampler calls the steps in this order:

    apply_penalties -> add_bias -> ban -> greedy, or sample = divide by temperature -> filter_logits -> softmax -> draw

Uniform numbers come from kernels.uniform.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kernels.checks import check_dtype, check_rows, check_shape
from kernels.dispatch import Backend, implementation


def greedy(logits: torch.Tensor, *, backend: Backend | None = None) -> list[int]:
    """The most likely token of each row, the lowest id among equals. logits: float32 or bfloat16 [B, V], V > 0.

    Raises ValueError or TypeError for shapes and dtypes.
    """
    return prepared_greedy(logits, backend=backend)()


def prepared_greedy(logits: torch.Tensor, *, backend: Backend | None = None) -> Callable[[], list[int]]:
    """`greedy` of memory that is used again: each call looks at what `logits` then holds. Checked once, like a step."""
    _check_logits(logits)
    prepare: Callable[[torch.Tensor], Callable[[], list[int]]] = _implementation("prepared_greedy", logits, backend)
    return prepare(logits)


def apply_penalties(
    logits: torch.Tensor,
    prompt_ids: Sequence[Sequence[int]],
    output_ids: Sequence[Sequence[int]],
    repetition: Sequence[float],
    presence: Sequence[float],
    frequency: Sequence[float],
) -> None:
    """Lowers the logits of tokens that occurred, in place.

    logits: float32 [B, V]; every other argument has B entries. For each row, once for each token of prompt or output:
    a positive logit is divided by `repetition`, any other multiplied (Keskar et al., 2019, as in transformers).
    Then, for tokens of the OUTPUT only, `presence` is subtracted once and `frequency` as often as the token occurred
    (as OpenAI defines them). Neutral: 1, 0, 0. Raises ValueError for a batch size, IndexError for a token id.
    """
    _check_batch(logits, prompt_ids, output_ids, repetition, presence, frequency)
    for row, row_logits in enumerate(logits):
        if repetition[row] != 1.0:
            _penalise_repetition(row_logits, {*prompt_ids[row], *output_ids[row]}, repetition[row])
        if presence[row] != 0.0 or frequency[row] != 0.0:
            counts = Counter(output_ids[row])
            penalty = {token: -(presence[row] + frequency[row] * count) for token, count in counts.items()}
            _add(row_logits, penalty)


def add_bias(logits: torch.Tensor, biases: Sequence[Mapping[int, float]]) -> None:
    """Adds `biases[row][token]` to logits float32 [B, V], in place. Raises like the penalties."""
    _check_batch(logits, biases)
    for row_logits, bias in zip(logits, biases, strict=True):
        _add(row_logits, bias)


def ban(logits: torch.Tensor, banned: Sequence[Collection[int]]) -> None:
    """Makes tokens impossible: their logits in float32 [B, V] become -inf, in place. Raises like the penalties."""
    _check_batch(logits, banned)
    for row_logits, ids in zip(logits, banned, strict=True):
        if ids:
            row_logits[_indices(ids, row_logits)] = -torch.inf


def filter_logits(
    logits: torch.Tensor,
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
    *,
    backend: Backend | None = None,
) -> None:
    """Sets the logits of tokens that may not be drawn to -inf, in place.

    logits: float32 [B, V], already divided by the temperature. In this order, as in transformers: `top_k` keeps the k
    first tokens (0: all); `top_p` keeps a token when those before it have, among the survivors, less than p of the
    probability (1: all; Holtzman et al., 2020); `min_p` keeps tokens with at least that fraction of the first one's
    probability (0: all; Nguyen et al., 2024). The first token, the one `greedy` takes, always survives.
    Raises ValueError for a batch size or a number outside its range.
    """
    _check_batch(logits, top_k, top_p, min_p)
    _check_ranges(top_k, top_p, min_p)
    active = [row for row in range(len(top_k)) if top_k[row] > 0 or top_p[row] < 1.0 or min_p[row] > 0.0]
    if active:
        run = implementation("sampling", "filter_logits", logits, backend)
        run(logits, active, top_k, top_p, min_p)


def draw(probs: torch.Tensor, uniforms: Sequence[float], *, backend: Backend | None = None) -> torch.Tensor:
    """The first token at which the cumulative probability exceeds uniform * total (inverse CDF). Returns int64 [B].

    probs: float32 [B, V], each row with a positive sum, which need not be 1. uniforms: B numbers in [0, 1). A token of
    probability 0 is never drawn. Raises ValueError for a batch size or a number outside [0, 1).
    """
    _check_batch(probs, uniforms)
    _check_uniforms(uniforms)
    out = torch.empty(probs.shape[0], dtype=torch.int64, device=probs.device)
    numbers = torch.tensor(uniforms, dtype=torch.float64, device=probs.device)
    implementation("sampling", "draw", probs, backend)(probs, numbers, out)
    return out


class Draws(NamedTuple):
    """How B rows are drawn; a sequence has an entry a row. `filter_logits` and `draw` say what the numbers mean."""

    temperature: Sequence[float]  # above 0
    top_k: Sequence[int]
    top_p: Sequence[float]
    min_p: Sequence[float]
    uniforms: Sequence[float]


Sample = Callable[[Draws], list[int]]


def sample(logits: torch.Tensor, draws: Draws, *, backend: Backend | None = None) -> list[int]:
    """Divides by the temperatures, filters as `filter_logits`, draws as `draw`: B token ids.

    logits: float32 or bfloat16 [B, V], V > 0, left as they are; quotients that are not finite count as the most extreme
    number, so that any parameters give a token. Implementations may differ where a sum is within float32 rounding of
    its bound. Raises ValueError for a batch size or a number outside its range.
    """
    return prepared_sample(logits, backend=backend)(draws)


def prepared_sample(logits: torch.Tensor, *, backend: Backend | None = None) -> Sample:
    """`sample` from memory that is used again: each call looks at what `logits` then holds."""
    _check_logits(logits)
    run: Sample = _implementation("prepared_sample", logits, backend)(logits)

    def checked(draws: Draws) -> list[int]:
        _check_entries(logits, *draws)
        _check_ranges(draws.top_k, draws.top_p, draws.min_p)
        _check_uniforms(draws.uniforms)
        if not all(number > 0.0 for number in draws.temperature):
            raise ValueError(f"temperature is {list(draws.temperature)}, expected numbers above 0")
        return run(draws)

    return checked


def _implementation(op: str, logits: torch.Tensor, backend: Backend | None) -> Callable[..., Any]:
    """On GPUs the reference of these two ops, which torch and the other ops compute there."""
    if backend == "triton":
        raise ValueError(f"backend='triton' has no {op}: on GPUs torch and the ops that it consists of compute")
    if backend is None and logits.is_cuda:
        backend = "reference"
    return implementation("sampling", op, logits, backend)


def _penalise_repetition(row_logits: torch.Tensor, ids: Collection[int], penalty: float) -> None:
    index = _indices(ids, row_logits)
    old = row_logits[index]
    row_logits[index] = torch.where(old > 0, old / penalty, old * penalty)


def _add(row_logits: torch.Tensor, amounts: Mapping[int, float]) -> None:
    if amounts:
        values = torch.tensor(list(amounts.values()), dtype=row_logits.dtype, device=row_logits.device)
        row_logits[_indices(amounts, row_logits)] += values


def _indices(ids: Collection[int], row_logits: torch.Tensor) -> torch.Tensor:
    vocab_size = row_logits.shape[0]
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise IndexError(f"token ids {min(ids)} .. {max(ids)} leave the vocabulary 0 .. {vocab_size - 1}")
    return torch.tensor(list(ids), dtype=torch.int64, device=row_logits.device)


def _check_logits(logits: torch.Tensor) -> None:
    check_shape("logits", logits, (None, None))
    check_rows("logits", logits)
    if logits.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"logits has dtype {logits.dtype}, expected torch.float32 or torch.bfloat16")


def _check_batch(logits: torch.Tensor, *per_row: Sequence[object]) -> None:
    check_shape("logits", logits, (None, None))
    check_dtype("logits", logits, torch.float32)
    _check_entries(logits, *per_row)


def _check_entries(logits: torch.Tensor, *per_row: Sequence[object]) -> None:
    for values in per_row:
        if len(values) != logits.shape[0]:
            raise ValueError(f"got {len(values)} entries for {logits.shape[0]} rows of logits")


def _check_ranges(top_k: Sequence[int], top_p: Sequence[float], min_p: Sequence[float]) -> None:
    if any(k < 0 for k in top_k):
        raise ValueError(f"top_k is {list(top_k)}, expected numbers >= 0")
    if not all(0.0 < p <= 1.0 for p in top_p):
        raise ValueError(f"top_p is {list(top_p)}, expected numbers in (0, 1]")
    if not all(0.0 <= p <= 1.0 for p in min_p):
        raise ValueError(f"min_p is {list(min_p)}, expected numbers in [0, 1]")


def _check_uniforms(uniforms: Sequence[float]) -> None:
    if not all(0.0 <= number < 1.0 for number in uniforms):
        raise ValueError(f"uniforms are {list(uniforms)}, expected numbers in [0, 1)")
