"""The fake model: a runner without torch whose every token depends on every KV byte it should.

Token ids 0 .. 255 are raw bytes, 256 .. 510 stand for themselves, 511 ends the text. The KV of a token is two int64:
K = its id, V = its position + 1. A block holds its tokens' K, then their V (the layout of one layer, one head of
dimension one). The next token after a context of n tokens, all read from the KV bytes:

    next = (sum of K * V  +  number of tokens whose V is not their position + 1, at most 511) mod 512

The second part is 0 unless a block is lost or in the wrong place. With temperature > 0, (31 * seed + 17 * position)
is added, where position counts output tokens from 0. Ids that may not be drawn are passed over, upwards and from 511
to 0: before min_tokens the ids that would end the answer, always those with a logit bias of -100, and with any
penalty on those in the output already. A logit bias of 100 forces its id (the smallest, if several).

By hand: the prompt "AB" is tokens 65 and 66.

    1st token   65*1 + 66*2               = 197            -> 197
    2nd token   197 + 197*3               = 788  = 512+276 -> 276
    3rd token   788 + 276*4               = 1892 = 3*512+356 -> 356

so `fake_generate((65, 66), SamplingParams(temperature=0, max_tokens=3))` is (197, 276, 356), finished by length.

Logprobs: a token t has -(t mod 8 + 1) / 8, and as alternatives t, t+1, t+2 ... (mod 512), each 1 less than the one
before it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.batch import Batch, ModelInfo, ScheduledSequence
from engine.sequence import FinishReason, Logprob, SampledToken, SamplingParams
from engine.speculation.proposer import DraftRequest
from engine.speculation.verify import verified
from engine.stopping import finish_reason, suppressed_ids

VOCAB_SIZE = 512
EOS_ID = 511
MAX_MODEL_LEN = 4096
BYTES_PER_TOKEN = 16  # K and V, int64 each

FAKE_MODEL = ModelInfo(
    model_id="fake",
    weights_revision="1",
    vocab_size=VOCAB_SIZE,
    max_model_len=MAX_MODEL_LEN,
    eos_token_ids=frozenset({EOS_ID}),
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    dtype="int64",
    kv_dtype="int64",
)


class FakeAnswer(NamedTuple):
    output_ids: tuple[int, ...]
    finish_reason: FinishReason


class _Context(NamedTuple):
    """What one token is drawn from."""

    block_table: tuple[int, ...]
    num_tokens: int


class FakeRunner:
    """Implements engine.batch.Runner over `kv_memory`. `step_s` and `prefill_s_per_token` pace it through `sleep`."""

    model = FAKE_MODEL

    def __init__(
        self,
        kv_memory: NDArray[np.uint8],
        block_size: int,
        *,
        step_s: float = 0.0,
        prefill_s_per_token: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`kv_memory`: one-dimensional and contiguous; ValueError unless it holds at least one block."""
        num_blocks = kv_memory.nbytes // (block_size * BYTES_PER_TOKEN)
        if num_blocks < 1:
            raise ValueError(
                f"kv_memory has {kv_memory.nbytes} bytes: must hold {block_size} tokens of {BYTES_PER_TOKEN}"
            )
        used = kv_memory[: num_blocks * block_size * BYTES_PER_TOKEN]
        self._kv: NDArray[np.int64] = used.view(np.int64).reshape(num_blocks, 2, block_size)
        self._block_size = block_size
        self._step_s = step_s
        self._prefill_s_per_token = prefill_s_per_token
        self._sleep = sleep

    def execute(self, batch: Batch) -> list[tuple[SampledToken, ...]]:
        self._pace(batch)
        if batch.copies:
            self._kv[[copy.target for copy in batch.copies]] = self._kv[[copy.source for copy in batch.copies]]
        for scheduled in batch.sequences:
            self._write(scheduled)
        contexts = [_Context(s.block_table, s.end + i) for s in batch.sequences if s.sample for i in _draws(s)]
        sums = iter(self._read(contexts) if contexts else ())
        return [self._verify(s, sums) if s.sample else () for s in batch.sequences]

    def _verify(self, scheduled: ScheduledSequence, sums: Iterator[int]) -> tuple[SampledToken, ...]:
        drafts, output_ids = scheduled.draft_ids, tuple(scheduled.output_ids)
        drawn = [_sample(next(sums), scheduled.params, output_ids + drafts[:i]) for i in _draws(scheduled)]
        return verified(drafts, drawn)

    def _pace(self, batch: Batch) -> None:
        num_prefill_tokens = sum(len(s.token_ids) for s in batch.sequences if len(s.token_ids) > 1)
        duration_s = self._step_s + self._prefill_s_per_token * num_prefill_tokens
        if duration_s > 0:
            self._sleep(duration_s)

    def _write(self, scheduled: ScheduledSequence) -> None:
        token_ids = scheduled.token_ids + scheduled.draft_ids
        positions = np.arange(scheduled.start, scheduled.start + len(token_ids))
        blocks = np.asarray(scheduled.block_table)[positions // self._block_size]
        offsets = positions % self._block_size
        self._kv[blocks, 0, offsets] = token_ids
        self._kv[blocks, 1, offsets] = positions + 1

    def _read(self, contexts: Seq[_Context]) -> list[int]:
        """What each context's KV bytes add up to, mod 512. One gather for the whole batch."""
        lengths = np.array([-(-c.num_tokens // self._block_size) for c in contexts])  # blocks of each
        firsts = np.cumsum(lengths) - lengths
        tables = [c.block_table[:length] for c, length in zip(contexts, lengths, strict=True)]
        kv = self._kv[np.fromiter(itertools.chain.from_iterable(tables), np.int64)]
        index = np.arange(len(kv)) - np.repeat(firsts, lengths)  # of each block in its context
        positions = index[:, None] * self._block_size + np.arange(self._block_size)
        in_context = positions < np.repeat([c.num_tokens for c in contexts], lengths)[:, None]
        products = np.where(in_context, kv[:, 0] * kv[:, 1], 0).sum(axis=1)
        misplaced = np.where(in_context, kv[:, 1] != positions + 1, False).sum(axis=1)
        sums = np.add.reduceat(products, firsts) + np.minimum(np.add.reduceat(misplaced, firsts), VOCAB_SIZE - 1)
        return [int(total) for total in sums % VOCAB_SIZE]


class FakeProposer:
    """A draft model for the fake one (an `engine.speculation.proposer.Proposer`): right but at every third position."""

    is_free = False
    draft_s = 0.0

    def propose(self, requests: Seq[DraftRequest]) -> list[tuple[int, ...]]:
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> tuple[int, ...]:
        token_ids = list(request.token_ids)
        for _ in range(request.num_drafts):
            right = fake_next_token(token_ids, request.params, num_prompt=request.num_prompt)
            token_ids.append((right + (len(token_ids) % 3 == 0)) % VOCAB_SIZE)
        return tuple(token_ids[len(request.token_ids) :])

    def forget(self, sequence_id: str) -> None:
        """It remembers none."""


def fake_next_token(token_ids: Seq[int], params: SamplingParams, *, num_prompt: int) -> int:
    """The right token after `token_ids` (prompt, then output), computed without any cache."""
    total = sum(token_id * (position + 1) for position, token_id in enumerate(token_ids))
    return _sample(total % VOCAB_SIZE, params, token_ids[num_prompt:]).token_id


def fake_generate(prompt_ids: Seq[int], params: SamplingParams, output_ids: Seq[int] = ()) -> FakeAnswer:
    """The right answer to a prompt, `output_ids` included, whichever pods compute it."""
    token_ids = [*prompt_ids, *output_ids]
    for num_output in itertools.count(len(output_ids) + 1):
        token_ids.append(fake_next_token(token_ids, params, num_prompt=len(prompt_ids)))
        reason = finish_reason(
            params,
            token_ids[-1],
            num_prompt=len(prompt_ids),
            num_output=num_output,
            max_model_len=MAX_MODEL_LEN,
        )
        if reason is not None:
            return FakeAnswer(tuple(token_ids[len(prompt_ids) :]), reason)
    raise AssertionError("every answer ends")


def _draws(scheduled: ScheduledSequence) -> range:
    """One after the last token and one after each draft."""
    return range(1 + len(scheduled.draft_ids))


def _sample(total: int, params: SamplingParams, output_ids: Seq[int]) -> SampledToken:
    if params.temperature > 0:
        total += 31 * params.seed + 17 * len(output_ids)
    token_id = _skip_banned(total % VOCAB_SIZE, params, output_ids)
    if params.num_logprobs is None:
        return SampledToken(token_id)
    logprob = -(token_id % 8 + 1) / 8
    top = tuple(Logprob((token_id + rank) % VOCAB_SIZE, logprob - rank) for rank in range(params.num_logprobs))
    return SampledToken(token_id, logprob, top)


def _skip_banned(token_id: int, params: SamplingParams, output_ids: Seq[int]) -> int:
    banned = suppressed_ids(params, len(output_ids), FAKE_MODEL.eos_token_ids)
    banned |= {biased for biased, bias in params.logit_bias.items() if bias <= -100}
    if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
        banned |= set(output_ids)
    forced = [biased for biased, bias in params.logit_bias.items() if bias >= 100 and biased not in banned]
    if forced:
        return min(forced)
    candidates = ((token_id + step) % VOCAB_SIZE for step in range(VOCAB_SIZE))
    return next((candidate for candidate in candidates if candidate not in banned), token_id)
