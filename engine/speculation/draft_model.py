"""Guesses by a second, smaller checkpoint with the same vocabulary (Leviathan et al., https://arxiv.org/abs/2211.17192).

It draws with the same parameters and the same uniform numbers of (seed, position) as the target will, from its own
logits: common random numbers make sampled tokens agree far more often than independent draws would.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from engine.batch import ScheduledSequence
from engine.block_manager import Generations
from engine.checkpoint import model_info
from engine.kv_cache import kv_cache
from engine.kv_format import kv_block_bytes
from engine.model import Model
from engine.runner import flatten, sample_rows
from engine.sampler import sample
from engine.speculation.draft_kv import DraftSlots
from engine.speculation.proposer import DraftRequest

CATCH_UP_TOKENS = 256  # computed at most in one step, so that a long prompt does not hold up other sequences
USUAL_TOKENS = 16  # of a sequence that was drafted for in the step before: all those accepted
_PAST = 0.9  # weight of the past in the average time of a pass


class DraftModel:
    """An `engine.speculation.proposer.Proposer`; belongs to the thread that calls `propose`, as its runner does."""

    is_free = False

    def __init__(
        self,
        model_dir: Path,
        *,
        num_blocks: int,
        block_size: int,
        generations: Generations,
        dtype: str,
        num_threads: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`generations`: the engine's own. Raises CheckpointError."""
        self._info = model_info(model_dir, dtype)
        self._block_size = block_size
        self._num_threads = num_threads
        self._clock = clock
        # Not np.zeros, which begins inside of a cache line, so that each vector that is read would lie in two.
        memory = np.frombuffer(mmap.mmap(-1, num_blocks * kv_block_bytes(self._info, block_size)), np.uint8)
        self._kv = kv_cache(memory, self._info, block_size)
        self._slots = DraftSlots(generations, block_size)
        self._model = Model.load(model_dir, dtype)
        self.draft_s = 0.0

    @torch.inference_mode()
    def propose(self, requests: Seq[DraftRequest]) -> list[tuple[int, ...]]:
        torch.set_num_threads(self._num_threads)  # OpenMP's count belongs to the calling thread
        drafts: dict[str, tuple[int, ...]] = {}
        ready = self._catch_up([request for request in requests if self._fits(request)], drafts)
        for depth in range(1, max((request.num_drafts for request in ready), default=0)):
            deeper = [request for request in ready if request.num_drafts > depth]
            self._extend(deeper, drafts, [len(request.token_ids) + depth - 1 for request in deeper])
        return [drafts.get(request.sequence_id, ()) for request in requests]

    def forget(self, sequence_id: str) -> None:
        """What it has of a sequence lies in the engine's blocks."""

    def _fits(self, request: DraftRequest) -> bool:
        return 0 < request.num_drafts < self._info.max_model_len - len(request.token_ids)

    def _catch_up(self, requests: Seq[DraftRequest], drafts: dict[str, tuple[int, ...]]) -> list[DraftRequest]:
        """Computes the KV of all tokens that lack it and one draft each; those it could not finish get none."""
        budget = CATCH_UP_TOKENS
        ready: list[DraftRequest] = []
        starts: list[int] = []
        unfinished: list[ScheduledSequence] = []
        for request in requests:
            num_tokens = len(request.token_ids)
            start = min(self._slots.num_ready(request.block_table, num_tokens), num_tokens - 1)
            end = min(num_tokens, start + budget)
            budget -= end - start
            if end == num_tokens:
                ready.append(request)
                starts.append(start)
            elif end > start:
                unfinished.append(_scheduled(request, start, end, ()))
            self._slots.wrote(request.block_table, start, end)
        if ready or unfinished:
            self._extend(ready, drafts, starts, unfinished)
        return ready

    def _extend(
        self,
        requests: Seq[DraftRequest],
        drafts: dict[str, tuple[int, ...]],
        starts: Seq[int],
        unfinished: Seq[ScheduledSequence] = (),
    ) -> None:
        """Computes each request's tokens and drafts from its start on and appends one draft more."""
        started_at = self._clock()
        scheduled = [
            _scheduled(request, start, None, drafts.get(request.sequence_id, ()))
            for request, start in zip(requests, starts, strict=True)
        ]
        scheduled += unfinished
        logits = self._model.forward(flatten(scheduled, self._block_size), self._kv.layers)
        sampled = [s for s in scheduled if s.sample]
        rows = [row for s in sampled for row in sample_rows(s)]
        for s, token in zip(sampled, sample(logits, rows, self._info.eos_token_ids), strict=True):
            drafts[s.sequence_id] = (*drafts.get(s.sequence_id, ()), token.token_id)
        if all(len(s.token_ids) <= USUAL_TOKENS for s in scheduled):
            duration_s = self._clock() - started_at
            self.draft_s = _PAST * self.draft_s + (1 - _PAST) * duration_s if self.draft_s > 0 else duration_s


def _scheduled(request: DraftRequest, start: int, end: int | None, drafts: tuple[int, ...]) -> ScheduledSequence:
    """Tokens and drafts from `start` to `end`; with no end to the last, and the next one is drawn."""
    token_ids = (*request.token_ids, *drafts)
    return ScheduledSequence(
        sequence_id=request.sequence_id,
        token_ids=tuple(token_ids[start:end]),
        start=start,
        block_table=request.block_table,
        sample=end is None,
        params=replace(request.params, num_logprobs=None),
        prompt_ids=token_ids[: request.num_prompt],
        output_ids=token_ids[request.num_prompt :],
    )
