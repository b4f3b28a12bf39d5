"""Drafts through the whole engine on the fake model: the answers are those without, in fewer steps."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest

from engine.batch import Batch
from engine.core import EngineFailed
from engine.fake import EOS_ID, VOCAB_SIZE, FakeProposer, fake_generate
from engine.sequence import SequenceSpec
from engine.speculation.ngram import NgramProposer
from engine.speculation.proposer import DraftRequest, Proposer
from tests.engine.pure import FakePod, Oracle, pull, spec, tokens_of

ANSWERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 5},
    "stopped in the middle": {"stop_token_ids": frozenset(fake_generate((3, 4, 5), spec("", [1]).params)[0][4:5])},
    "not before min_tokens": {"stop_token_ids": frozenset(range(VOCAB_SIZE - 9)), "min_tokens": 7},
    "penalties see every token": {"presence_penalty": 0.5, "logit_bias": {8: 100.0, 9: 100.0, 11: 100.0}},
    "logprobs": {"num_logprobs": 2},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
}


class AlwaysRight:
    """Guesses what comes, also behind the end of text."""

    is_free = False
    draft_s = 0.0

    def propose(self, requests: Seq[DraftRequest]) -> list[tuple[int, ...]]:
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> tuple[int, ...]:
        spec_ = request.params
        prompt, output = request.token_ids[: request.num_prompt], request.token_ids[request.num_prompt :]
        answer = fake_generate(prompt, spec_, tuple(output)).output_ids[len(output) :]
        return (*answer, EOS_ID, EOS_ID, EOS_ID)[: request.num_drafts]

    def forget(self, sequence_id: str) -> None:
        pass


def pod(proposer: Proposer | None, num_blocks: int = 24, **config: Any) -> FakePod:
    return FakePod(num_blocks, proposer=proposer, **config)


@pytest.mark.parametrize("proposer", [AlwaysRight(), FakeProposer(), NgramProposer(1, 3)])
@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_the_same(name: str, proposer: Proposer) -> None:
    each = spec("a", (3, 4, 5), **{"max_tokens": 16} | ANSWERS[name])
    plain, drafted = pod(None), pod(proposer)
    oracle = Oracle()
    oracle.expect(each)
    events = []
    for engine in (plain, drafted):
        engine.core.add(each)
        events.append(engine.run())
    oracle.see(events[1])
    assert [(e.token, e.finish_reason) for e in events[1]] == [(e.token, e.finish_reason) for e in events[0]]
    drafted.assert_idle()


def test_right_drafts_save_steps_and_are_counted() -> None:
    engine = pod(AlwaysRight(), step_s=1.0)
    engine.core.add(spec("a", (3, 4, 5), max_tokens=16))
    num_steps = [len(engine.step()) for _ in range(6) if engine.core.has_work]
    assert num_steps == [1, 3, 4, 4, 4]
    load = engine.core.load()
    assert (load.num_drafts, load.num_accepted) == (11, 11)
    assert load.step_s == 1.0
    assert load.prefill_tokens_per_s == 3.0


def test_tokens_of_a_step_come_in_order_and_the_last_one_ends_it() -> None:
    engine = pod(AlwaysRight())
    engine.core.add(spec("a", (3, 4, 5), max_tokens=3))
    engine.step()
    events = engine.step()
    assert [event.finish_reason is not None for event in events] == [False, True]
    assert len({event.at for event in events}) == 1
    engine.assert_idle()


def test_wrong_drafts_are_never_found_in_the_prefix_cache() -> None:
    """The blocks that an answer leaves are those of its own tokens, whatever was written past them."""
    engine = pod(FakeProposer(), block_size=2)
    answer = fake_generate((3, 4, 5), spec("", [1], max_tokens=12).params).output_ids
    engine.core.add(spec("a", (3, 4, 5), max_tokens=12))
    engine.run()
    engine.core.add(spec("b", (3, 4, 5, *answer), max_tokens=4))
    [first, *_] = engine.run()
    assert first.num_cached == 14
    wrong = (*answer[:2], (answer[2] + 1) % VOCAB_SIZE, *answer[3:])
    each = spec("c", (3, 4, 5, *wrong), max_tokens=4)
    engine.core.add(each)
    oracle = Oracle()
    oracle.expect(each)
    events = engine.run()
    oracle.see(events)
    assert events[0].num_cached == 4


def test_a_sequence_continues_here_after_a_hand_off_and_elsewhere_after_a_failure() -> None:
    each = spec("a", range(20, 31), max_tokens=14, temperature=1.0, seed=9)
    prefill, decode, other = pod(None), pod(AlwaysRight()), pod(FakeProposer())
    answer = fake_generate(each.prompt_ids, each.params).output_ids
    reservation = decode.core.reserve(each)
    assert reservation is not None
    prefill.core.add(each, hold=True)
    prefill.run()
    assert pull(prefill, prefill.core.held("a"), decode, reservation.block_ids, reservation.num_cached)
    decode.core.activate(with_output(each, answer[:1]))
    seen = [*answer[:1]]
    while len(seen) < 8:
        seen += [event.token.token_id for event in decode.step()]
    assert tuple(seen) == answer[: len(seen)]
    decode.core.abort("a")
    decode.assert_idle()
    other.core.add(with_output(each, tuple(seen)))
    assert tokens_of(other.run())["a"] == list(answer[len(seen) :])


def with_output(each: SequenceSpec, output: tuple[int, ...]) -> SequenceSpec:
    return SequenceSpec(sequence_id=each.sequence_id, prompt_ids=each.prompt_ids, output_ids=output, params=each.params)


def test_drafts_preempt_nobody_and_keep_nobody_waiting() -> None:
    """Little memory: as many steps with a preemption, and as long a wait, as without drafts."""
    counts = []
    for proposer in (None, AlwaysRight()):
        engine = pod(proposer, num_blocks=9, block_size=2, max_num_seqs=3, max_batched_tokens=32)
        oracle = Oracle()
        for i in range(4):
            each = spec(f"s{i}", range(10 * i, 10 * i + 3), max_tokens=6)
            oracle.expect(each)
            engine.core.add(each)
        events = engine.run()
        oracle.see(events)
        counts.append(max(event.num_preemptions for event in events))
        engine.assert_idle()
    assert counts[1] <= counts[0]


def batches(engine: FakePod) -> list[Batch]:
    """Every batch that the engine computes from now on."""
    seen: list[Batch] = []
    execute = engine.runner.execute

    def record(batch: Batch) -> Any:
        seen.append(batch)
        return execute(batch)

    engine.runner.execute = record  # type: ignore[method-assign]  # to look, not to change
    return seen


def test_drafts_leave_half_of_the_budget_to_prefills() -> None:
    engine = pod(AlwaysRight(), num_blocks=64, max_batched_tokens=10)
    for name in ("a", "b"):
        engine.core.add(spec(name, (3, 4), max_tokens=100))
    for _ in range(8):
        engine.step()
    seen = batches(engine)
    engine.core.add(spec("long", range(40)))
    engine.step()
    [batch] = seen
    drafts = {s.sequence_id: len(s.draft_ids) for s in batch.sequences}
    assert drafts == {"a": 2, "b": 2, "long": 0}  # (10 - 2) // 2
    assert batch.num_tokens == 10


@pytest.mark.parametrize(("somebody_waits", "num_drafts"), [(False, 3), (True, 2)])
def test_while_somebody_waits_for_blocks_drafts_take_none(somebody_waits: bool, num_drafts: int) -> None:
    engine = pod(AlwaysRight(), num_blocks=6, block_size=4)
    engine.core.add(spec("a", range(6), max_tokens=12))
    assert [len(engine.step()), len(engine.step())] == [1, 3]  # ten tokens, the last of them without KV yet
    if somebody_waits:
        engine.core.add(spec("b", range(50, 68), max_tokens=4))  # 5 blocks, 3 are free
    seen = batches(engine)
    engine.step()
    assert [len(scheduled.draft_ids) for scheduled in seen[0].sequences] == [num_drafts]


def test_blocks_of_wrong_drafts_are_given_back_at_once() -> None:
    class Wrong(AlwaysRight):
        def _propose(self, request: DraftRequest) -> tuple[int, ...]:
            return tuple((token + 1) % VOCAB_SIZE for token in super()._propose(request))

    engine = pod(Wrong(), num_blocks=8, block_size=2)
    engine.core.add(spec("a", range(3), max_tokens=9))
    num_used = []
    while engine.core.has_work:
        engine.step()
        load = engine.core.load()
        num_used.append(load.num_blocks - load.num_free_blocks)
    assert num_used == [2, 2, 3, 3, 4, 4, 5, 5, 0]


def test_a_proposer_that_fails_stops_the_engine() -> None:
    class Broken(AlwaysRight):
        def propose(self, requests: Seq[DraftRequest]) -> list[tuple[int, ...]]:
            raise RuntimeError("no idea")

    engine = pod(Broken())
    engine.core.add(spec("a", range(3)))
    engine.step()
    with pytest.raises(EngineFailed, match="a proposer of drafts failed: RuntimeError: no idea") as failed:
        engine.step()
    assert failed.value.sequence_ids == ("a",)
    assert engine.core.abort("a")
    engine.core.check_invariants()
