"""Decides for each step how many drafts each decoding sequence gets, asks for them, and learns what came of them.

Answers are the same whatever is guessed (engine/speculation/verify.py): all of this is a matter of time alone, so it
may go by what steps took.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from engine.sequence import Sequence
from engine.speculation.policy import Acceptance, StepTimes, plan_depths
from engine.speculation.proposer import DraftRequest, Proposer

PROBE_EVERY = 32  # steps after which a sequence that gets no drafts is tried again, where guessing costs something


@dataclass(slots=True)
class _Track:
    """What is known of one sequence."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    guess: tuple[int, ...] = ()  # at its next tokens, whether or not they are verified
    num_idle: int = 0  # steps since there was one


class Speculator:
    """Owned by one engine core and used by its scheduler. Pure but for its proposer."""

    def __init__(self, proposer: Proposer, *, max_drafts: int, max_model_len: int) -> None:
        """`max_drafts`: of one sequence in one step. Raises ValueError below 1."""
        if max_drafts < 1:
            raise ValueError(f"num_draft_tokens = {max_drafts}: must be at least 1")
        self._proposer = proposer
        self._max_drafts = max_drafts
        self._max_model_len = max_model_len
        self._tracks: dict[str, _Track] = {}
        self._times = StepTimes()

    def depths(self, sequences: Seq[Sequence]) -> list[int]:
        """How many drafts each decoding sequence should get in this step."""
        tracks = [self._tracks.setdefault(seq.id, _Track()) for seq in sequences]
        limits = [self._limit(seq) for seq in sequences]
        step_s = self._times.predict(len(sequences), sum(limits))
        depths = plan_depths(
            [track.acceptance.rate for track in tracks], limits, step_s, depth_s=self._proposer.draft_s
        )
        probes = [self._probe(track, limit) for track, limit in zip(tracks, limits, strict=True)]
        return [max(*pair) for pair in zip(depths, probes, strict=True)]

    def propose(self, requests: Seq[DraftRequest]) -> list[tuple[int, ...]]:
        """At most `num_drafts` guesses each."""
        guesses = self._proposer.propose([self._at_least_one(request) for request in requests])
        for request, guess in zip(requests, guesses, strict=True):
            track = self._tracks[request.sequence_id]
            track.guess = guess
            track.num_idle = 0 if guess else track.num_idle + 1
        return [guess[: request.num_drafts] for request, guess in zip(requests, guesses, strict=True)]

    def observe(self, sequence_id: str, token_ids: Seq[int]) -> None:
        """What a step gave for a sequence."""
        track = self._tracks.get(sequence_id)
        if track is None:
            return
        track.acceptance.see(track.guess, token_ids)
        track.guess = ()

    def record(self, num_rows: int, duration_s: float) -> None:
        """What the computation of a step of decodes alone took."""
        self._times.record(num_rows, duration_s)

    def forget(self, sequence_id: str) -> None:
        """It has left the engine."""
        self._tracks.pop(sequence_id, None)
        self._proposer.forget(sequence_id)

    def check_invariants(self, sequence_ids: Iterable[str]) -> None:
        """AssertionError naming sequences that are not among `sequence_ids`, all that the engine has."""
        leaked = self._tracks.keys() - set(sequence_ids)
        assert not leaked, f"drafts of sequences that are gone: {sorted(leaked)}"

    def _limit(self, seq: Sequence) -> int:
        """Drafts that may become tokens; the step gives one token more. A held sequence wants one token alone."""
        if seq.hold:
            return 0
        max_tokens = min(seq.num_prompt + seq.spec.params.max_tokens, self._max_model_len)
        return max(0, min(self._max_drafts, max_tokens - seq.num_tokens - 1))

    def _probe(self, track: _Track, limit: int) -> int:
        is_due = not self._proposer.is_free and track.num_idle >= PROBE_EVERY
        return min(1, limit) if is_due else 0

    def _at_least_one(self, request: DraftRequest) -> DraftRequest:
        """Where guesses are free one is made anyway, to see whether drafts would be right."""
        if request.num_drafts > 0 or not self._proposer.is_free:
            return request
        return replace(request, num_drafts=1)
