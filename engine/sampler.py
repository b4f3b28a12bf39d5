"""Draws each sequence's next token from its logits, and reports log-probabilities.

Reported log-probabilities are those of the model itself: the log-softmax of its raw logits, before penalties, bias,
temperature and filters (as vLLM and OpenAI report them). A draw depends on the logits, the seed and the output position
alone, never on what else is in the batch, so any pod that continues a sequence draws the same.

Every finite parameter gives a token: one extreme request must not fail the step of all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import torch

from engine.sequence import Logprob, SampledToken, SamplingParams
from engine.stopping import suppressed_ids
from kernels.sampling import Draws, Sample, add_bias, apply_penalties, ban, prepared_greedy, prepared_sample
from kernels.uniform import uniform

GREEDY_BELOW = 1e-5  # a temperature at which float32 probabilities are 0 or 1


class Row(Protocol):
    """How to draw one row. The length of `output_ids` is the output position of the token drawn."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def prompt_ids(self) -> Seq[int]: ...
    @property
    def output_ids(self) -> Seq[int]: ...


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A row that is no scheduled sequence as it stands: one after a draft."""

    params: SamplingParams
    prompt_ids: Seq[int]
    output_ids: Seq[int]


def sample(logits: torch.Tensor, rows: Seq[Row], eos_token_ids: frozenset[int]) -> list[SampledToken]:
    """One token a row. logits: float32 or bfloat16 [B, V], left as they are. Temperature 0, or near it, is greedy.

    Before a row's `min_tokens` neither its stop ids nor `eos_token_ids` can be drawn. Raises IndexError for a logit
    bias or stop id outside the vocabulary.
    """
    return Sampler(logits, eos_token_ids).sample(rows)


class Sampler:
    """`sample` for logits in memory that is used again: each call looks at what they then are."""

    def __init__(self, logits: torch.Tensor, eos_token_ids: frozenset[int]) -> None:
        self.logits = logits
        self._eos_token_ids = eos_token_ids

    @cached_property
    def _greedy(self) -> Callable[[], list[int]]:
        return prepared_greedy(self.logits)

    @cached_property
    def _finite(self) -> Callable[[Seq[int]], list[bool]]:
        return _finite_at(self.logits)

    @cached_property
    def _draw(self) -> Sample:
        return prepared_sample(self.logits)

    def sample(self, rows: Seq[Row]) -> list[SampledToken]:
        if all(map(_is_plain, rows)):
            return self._marked(list(map(SampledToken, self._greedy())))
        shaped = _shaped(self.logits, rows, self._eos_token_ids)
        sampler = self if shaped is self.logits else Sampler(shaped, self._eos_token_ids)
        return self._marked(_with_logprobs(self.logits, sampler._chosen(rows), rows))

    def _marked(self, sampled: list[SampledToken]) -> list[SampledToken]:
        """Those whose logits are not finite say so."""
        finite = self._finite([token.token_id for token in sampled])
        if all(finite) and not any(token.logprob is not None and math.isnan(token.logprob) for token in sampled):
            return sampled  # as nearly always
        return [
            token._replace(finite=is_finite and not math.isnan(token.logprob or 0.0))
            for token, is_finite in zip(sampled, finite, strict=True)
        ]

    def _chosen(self, rows: Seq[Row]) -> list[int]:
        """From logits to which nothing is to be done any more but what a draw does."""
        random = [i for i, row in enumerate(rows) if row.params.temperature >= GREEDY_BELOW]
        if len(random) == len(rows):
            return self._drawn(rows)
        tokens = self._greedy()
        if random:
            drawn = Sampler(self.logits[random], self._eos_token_ids)._drawn([rows[i] for i in random])
            for i, token in zip(random, drawn, strict=True):
                tokens[i] = token
        return tokens

    def _drawn(self, rows: Seq[Row]) -> list[int]:
        """No row's temperature is near 0."""
        params = [row.params for row in rows]
        draws = Draws(
            temperature=[p.temperature for p in params],
            top_k=[p.top_k for p in params],
            top_p=[p.top_p for p in params],
            min_p=[p.min_p for p in params],
            uniforms=[uniform(row.params.seed, len(row.output_ids)) for row in rows],
        )
        return self._draw(draws)


def _is_plain(row: Row) -> bool:
    """Whether it takes the arg-max of the raw logits and wants nothing else."""
    params = row.params
    return params.temperature < GREEDY_BELOW and params.num_logprobs is None and not _shapes_logits(row)


def _shaped(logits: torch.Tensor, rows: Seq[Row], eos_token_ids: frozenset[int]) -> torch.Tensor:
    """`logits` itself when no row changes them, else a float32 copy with penalties, bias and bans applied."""
    if not any(map(_shapes_logits, rows)):
        return logits
    shaped = logits.to(torch.float32, copy=True)
    params = [row.params for row in rows]
    apply_penalties(
        shaped,
        [row.prompt_ids for row in rows],
        [row.output_ids for row in rows],
        [p.repetition_penalty for p in params],
        [p.presence_penalty for p in params],
        [p.frequency_penalty for p in params],
    )
    add_bias(shaped, [p.logit_bias for p in params])
    ban(shaped, [suppressed_ids(row.params, len(row.output_ids), eos_token_ids) for row in rows])
    return shaped


def _shapes_logits(row: Row) -> bool:
    """Whether the arg-max of the raw logits may not be the greedy choice."""
    p = row.params
    return (
        p.repetition_penalty != 1.0
        or p.presence_penalty != 0.0
        or p.frequency_penalty != 0.0
        or bool(p.logit_bias)
        or len(row.output_ids) < p.min_tokens
    )


def _finite_at(logits: torch.Tensor) -> Callable[[Seq[int]], list[bool]]:
    """Tells, of a token id a row, whether its logit then is finite. A NaN within a model makes all logits NaN.

    On a CPU without an op of torch: each takes 60 us in a step whose weights have emptied the caches.
    """
    if logits.is_cuda:
        return partial(_finite_on_a_gpu, logits)
    exponent, whole = (0x7F80, torch.int16) if logits.dtype == torch.bfloat16 else (0x7F800000, torch.int32)
    bits = logits.view(whole).numpy().data
    return lambda ids: [bits[row, token] & exponent != exponent for row, token in enumerate(ids)]


def _finite_on_a_gpu(logits: torch.Tensor, token_ids: Seq[int]) -> list[bool]:
    ids = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    finite: list[bool] = logits.gather(1, ids.unsqueeze(1)).isfinite().flatten().tolist()
    return finite


def _with_logprobs(logits: torch.Tensor, tokens: list[int], rows: Seq[Row]) -> list[SampledToken]:
    sampled = [SampledToken(token) for token in tokens]
    for i, row in enumerate(rows):
        if (count := row.params.num_logprobs) is not None:
            sampled[i] = _with_logprob(torch.log_softmax(logits[i].float(), dim=-1), sampled[i].token_id, count)
    return sampled


def _with_logprob(logprobs: torch.Tensor, token: int, count: int) -> SampledToken:
    """logprobs: [V]. `token` with its own logprob, and the `count` most likely tokens, best first."""
    values, ids = logprobs.topk(min(count, logprobs.shape[0]))
    top = tuple(Logprob(i, value) for i, value in zip(ids.tolist(), values.tolist(), strict=True))
    return SampledToken(token, float(logprobs[token]), top)
