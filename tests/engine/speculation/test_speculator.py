from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from engine.sequence import Sequence
from engine.speculation.proposer import DraftRequest
from engine.speculation.speculator import PROBE_EVERY, Speculator
from tests.engine.pure import spec


class Guesser:
    """Always guesses 7, as often as it is asked."""

    def __init__(self, is_free: bool, draft_s: float = 0.0) -> None:
        self.is_free = is_free
        self.draft_s = draft_s
        self.asked: list[int] = []

    def propose(self, requests: Seq[DraftRequest]) -> list[tuple[int, ...]]:
        self.asked += [request.num_drafts for request in requests]
        return [(7,) * request.num_drafts for request in requests]

    def forget(self, sequence_id: str) -> None:
        pass


class Driver:
    """Steps of one sequence."""

    def __init__(self, *, is_free: bool = True, draft_s: float = 0.0, max_tokens: int = 1000) -> None:
        self.guesser = Guesser(is_free, draft_s)
        self.speculator = Speculator(self.guesser, max_drafts=4, max_model_len=2000)
        self.seq = Sequence(spec("a", [1, 2], max_tokens=max_tokens), 0)

    def step(self, tokens: list[int], step_s: float = 0.02) -> int:
        """How many drafts a step verified that gave `tokens`, or as many of them as it had drafts for."""
        [depth] = self.speculator.depths([self.seq])
        [guess] = self.speculator.propose([DraftRequest("a", self.seq.token_ids, 2, self.seq.spec.params, (0,), depth)])
        assert len(guess) == depth
        self.seq.token_ids += tokens[: depth + 1]
        self.speculator.observe("a", tokens[: depth + 1])
        self.speculator.record(1 + depth, step_s * (1 + 0.1 * depth))
        return depth


def test_drafts_deepen_while_they_are_right_and_end_when_they_are_wrong() -> None:
    driver = Driver()
    right = [driver.step([7] * 5) for _ in range(10)]
    assert (right[0], right[-1]) == (2, 4)
    wrong = [driver.step([5]) for _ in range(30)]
    assert wrong[-1] == 0


def test_free_guesses_are_watched_without_being_verified() -> None:
    driver = Driver()
    for _ in range(30):
        driver.step([5])
    driver.guesser.asked.clear()
    depths = [driver.step([7] * 5) for _ in range(20)]
    assert depths[0] == 0
    assert depths[-1] == 4
    assert min(driver.guesser.asked) == 1


def test_dear_guesses_are_tried_again_now_and_then() -> None:
    driver = Driver(is_free=False)
    for _ in range(40):
        driver.step([5])
    depths = [driver.step([5]) for _ in range(3 * PROBE_EVERY)]
    assert set(depths) == {0, 1}
    assert 2 <= sum(depths) <= 3


def test_a_draft_model_as_slow_as_the_target_is_not_asked() -> None:
    driver = Driver(is_free=False, draft_s=0.03)
    depths = [driver.step([7] * 5) for _ in range(20)]
    assert depths[-1] == 0


def test_no_draft_can_become_a_token_behind_the_last() -> None:
    driver = Driver(max_tokens=3)
    assert driver.step([7]) == 2  # with the token drawn after them these would be all three
    assert driver.step([7]) == 1
    assert driver.step([7]) == 0


def test_held_sequences_get_none_and_forgotten_ones_leave_nothing() -> None:
    driver = Driver()
    assert driver.speculator.depths([Sequence(spec("h", [1]), 0, hold=True)]) == [0]
    driver.speculator.observe("unknown", [1])
    with pytest.raises(AssertionError, match=r"gone: \['h'\]"):
        driver.speculator.check_invariants(["a"])
    driver.speculator.forget("h")
    driver.speculator.check_invariants(["a"])


def test_it_must_be_allowed_a_draft() -> None:
    with pytest.raises(ValueError, match="num_draft_tokens = 0: must be at least 1"):
        Speculator(Guesser(True), max_drafts=0, max_model_len=10)
