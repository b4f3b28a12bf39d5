from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.batch import Batch, HeldBlocks
from engine.core import EngineConfig, EngineCore, EngineFailed
from engine.fake import EOS_ID, fake_generate
from engine.sequence import FinishReason, SampledToken, SequenceSpec
from tests.engine.pure import FakePod, Oracle, pull, spec, tokens_of


def answer(each: SequenceSpec) -> list[int]:
    return list(fake_generate(each.prompt_ids, each.params, each.output_ids).output_ids)


def hand_off(source: FakePod, target: FakePod, each: SequenceSpec) -> HeldBlocks:
    """Prefills on `source` and activates on `target`, which reserved before."""
    source.core.add(each, hold=True)
    [event] = source.run()
    held = source.core.held(each.sequence_id)
    reservation = target.core.reserve(each)
    assert reservation is not None
    assert pull(source, held, target, reservation.block_ids, reservation.num_cached)
    target.core.activate(
        SequenceSpec(
            sequence_id=each.sequence_id,
            prompt_ids=each.prompt_ids,
            output_ids=(*each.output_ids, event.token.token_id),
            params=each.params,
        )
    )
    assert source.core.release_held(each.sequence_id)
    return held


PROMPTS = [range(1), range(3), range(4), range(5), range(7, 15), range(3, 40)]


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_path_gives_the_same_answer(prompt: range, temperature: float) -> None:
    each = spec("s", prompt, temperature=temperature, seed=7, max_tokens=9)
    alone, source, target = FakePod(16), FakePod(16), FakePod(16)
    alone.core.add(each)
    assert tokens_of(alone.run()) == {"s": answer(each)}
    held = hand_off(source, target, each)
    assert held.num_tokens == len(prompt)
    events = target.run()
    assert tokens_of(events) == {"s": answer(each)[1:]}
    assert events[-1].finish_reason is FinishReason.LENGTH
    for pod in (alone, source, target):
        pod.assert_idle()


def test_a_replay_continues_the_answer_on_every_path() -> None:
    whole = answer(spec("s", range(6), max_tokens=10, frequency_penalty=1.0))
    replay = spec("s", range(6), output=whole[:4], max_tokens=10, frequency_penalty=1.0)
    pod = FakePod(16)
    pod.core.add(replay)
    assert tokens_of(pod.run()) == {"s": whole[4:]}
    target = FakePod(16)
    hand_off(FakePod(16), target, replay)
    assert tokens_of(target.run()) == {"s": whole[5:]}


def test_replayed_tokens_count_for_min_tokens() -> None:
    whole = answer(spec("s", [511], min_tokens=3, max_tokens=6))
    pod = FakePod(8)
    pod.core.add(spec("s", [511], output=whole[:2], min_tokens=3, max_tokens=6))
    assert tokens_of(pod.run()) == {"s": whole[2:]}


FIRST_TOKEN_ENDS: list[tuple[SequenceSpec, FinishReason]] = [
    (spec("s", [511]), FinishReason.STOP),
    (spec("s", [65, 66], stop_token_ids=frozenset({197})), FinishReason.STOP),
    (spec("s", [65, 66], max_tokens=1), FinishReason.LENGTH),
    (spec("s", [511], max_tokens=1), FinishReason.STOP),
    (spec("s", [1] * 4095, max_tokens=50), FinishReason.LENGTH),
    (spec("s", [65, 66], output=[197, 276], max_tokens=3), FinishReason.LENGTH),
]


@pytest.mark.parametrize(("each", "reason"), FIRST_TOKEN_ENDS)
@pytest.mark.parametrize("hold", [False, True])
def test_a_first_token_that_ends_the_answer_holds_nothing(each: SequenceSpec, reason: FinishReason, hold: bool) -> None:
    pod = FakePod(1024, max_batched_tokens=512)
    pod.core.add(each, hold=hold)
    [event] = pod.run()
    assert event.finish_reason is reason
    pod.assert_idle()
    with pytest.raises(KeyError):
        pod.core.held("s")


def test_min_tokens_keeps_the_first_token_of_a_prefill_pod_from_ending_the_answer() -> None:
    pod = FakePod(8)
    pod.core.add(spec("s", [511], min_tokens=1), hold=True)
    [event] = pod.run()
    assert event.finish_reason is None
    assert event.token.token_id != EOS_ID
    assert pod.core.held("s").num_tokens == 1


def test_held_blocks_stay_until_released_and_then_remain_cached() -> None:
    pod = FakePod(8)
    pod.core.add(spec("s", range(10)), hold=True)
    [event] = pod.run()
    held = pod.core.held("s")
    assert event.held == held
    assert len(held.block_ids) == 3
    assert held.generations == tuple(int(pod.generations[b]) for b in held.block_ids)
    assert (pod.core.load().num_held, pod.core.load().num_free_blocks) == (1, 5)
    assert not pod.core.has_work
    assert pod.core.release_held("s")
    assert not pod.core.release_held("s")
    pod.assert_idle()
    pod.core.add(spec("t", range(10)), hold=True)
    [event] = pod.run()
    assert event.num_cached == 8


def test_release_held_does_not_touch_other_states() -> None:
    pod = FakePod(8)
    pod.core.add(spec("s", range(4)))
    assert not pod.core.release_held("s")
    pod.step()
    assert not pod.core.release_held("s")
    assert tokens_of(pod.run())["s"]


def test_a_full_hit_on_the_decode_pod_transfers_nothing() -> None:
    source, target = FakePod(8), FakePod(8)
    hand_off(source, target, spec("first", range(8), max_tokens=3))
    target.run()
    source.core.add(spec("again", range(8), max_tokens=5), hold=True)
    [event] = source.run()
    assert event.num_cached == 7
    reservation = target.core.reserve(spec("again", range(8), max_tokens=5))
    assert reservation is not None
    assert reservation.num_cached == 8
    target.core.activate(spec("again", range(8), output=[event.token.token_id], max_tokens=5))
    events = target.run()
    assert tokens_of(events) == {"again": answer(spec("again", range(8), max_tokens=5))[1:]}
    assert {e.num_cached for e in events} == {8}


def test_a_reservation_holds_its_tokens_and_one_block_of_output() -> None:
    pod = FakePod(8)
    for length, num_blocks in ((3, 2), (4, 2), (5, 3)):
        reservation = pod.core.reserve(spec(str(length), range(length), max_tokens=20))
        assert reservation is not None
        assert len(reservation.block_ids) == num_blocks
        pod.core.abort(str(length))
    short = pod.core.reserve(spec("short", range(3), max_tokens=2))
    assert short is not None
    assert len(short.block_ids) == 1  # the whole answer fits into the first block
    assert pod.core.abort("short")
    pod.assert_idle()


def test_a_reservation_that_does_not_fit_now_is_none_and_leaves_nothing() -> None:
    pod = FakePod(4)
    assert pod.core.reserve(spec("a", range(8), max_tokens=2)) is not None
    assert pod.core.reserve(spec("b", range(50, 58), max_tokens=2)) is None
    pod.core.check_invariants()
    assert pod.core.load().num_reserved == 1
    assert pod.core.abort("a")
    assert pod.core.reserve(spec("b", range(50, 58), max_tokens=2)) is not None


@pytest.mark.parametrize("act", ["add", "reserve"])
def test_what_can_never_fit_is_refused(act: str) -> None:
    pod = FakePod(4)
    call: Callable[[SequenceSpec], object] = pod.core.add if act == "add" else pod.core.reserve
    with pytest.raises(ValueError, match=r"prompt_ids has 10 tokens and max_tokens = 8: .* 17 slots, this pod has 16"):
        call(spec("s", range(10), max_tokens=8))
    with pytest.raises(ValueError, match="prompt_ids"):
        call(spec("s", []))
    pod.assert_idle()
    call(spec("s", range(10), max_tokens=7))


def test_a_prefill_pod_needs_room_for_the_prompt_only() -> None:
    pod = FakePod(4)
    assert pod.core.max_sequence_tokens == 17
    pod.core.add(spec("s", range(16), max_tokens=100), hold=True)
    [event] = pod.run()
    assert event.finish_reason is None
    with pytest.raises(ValueError, match="17 slots"):
        pod.core.add(spec("t", range(17), max_tokens=100), hold=True)


@pytest.mark.parametrize("state", ["waiting", "running", "held", "reserved"])
def test_an_id_in_use_is_refused_in_every_state(state: str) -> None:
    pod = FakePod(8)
    if state == "reserved":
        pod.core.reserve(spec("s", range(4)))
    else:
        pod.core.add(spec("s", range(4)), hold=state == "held")
    if state in {"running", "held"}:
        pod.step()
    for call in (pod.core.add, pod.core.reserve):
        with pytest.raises(ValueError, match="'s': is in use"):
            call(spec("s", range(4)))
    assert pod.core.abort("s")
    assert not pod.core.abort("s")
    pod.assert_idle()


def test_activation_is_checked_against_the_reservation() -> None:
    pod = FakePod(8)
    with pytest.raises(KeyError):
        pod.core.activate(spec("s", range(4), output=[1]))
    pod.core.reserve(spec("s", range(4), max_tokens=3))
    for wrong in (
        spec("s", range(4), max_tokens=3),
        spec("s", range(5), output=[1], max_tokens=3),
        spec("s", range(4), output=[1, 2], max_tokens=3),
    ):
        with pytest.raises(ValueError, match="one output token more"):
            pod.core.activate(wrong)
    with pytest.raises(ValueError, match="511: that token finished"):
        pod.core.activate(spec("s", range(4), output=[511], max_tokens=3))
    assert pod.core.load().num_reserved == 1
    pod.core.check_invariants()


def test_preemption_in_a_tiny_cache_changes_no_answer() -> None:
    pod = FakePod(7, max_batched_tokens=6)
    oracle = Oracle()
    specs = {name: spec(name, range(i, i + 6), max_tokens=14) for i, name in enumerate("abcd")}
    oracle.expect_all(specs)
    for each in specs.values():
        pod.core.add(each)
    events = pod.run()
    oracle.see(events)
    assert oracle.finished.keys() == specs.keys()
    assert max(event.num_preemptions for event in events) > 0
    pod.assert_idle()


def test_an_activated_sequence_recomputes_locally_after_preemption() -> None:
    source, target = FakePod(8), FakePod(6)
    first, second = spec("first", range(6), max_tokens=12), spec("second", range(50, 56), max_tokens=12)
    target.core.add(first)
    target.step()
    hand_off(source, target, second)
    source.kv_memory[:] = 0  # nothing of the remote KV is left
    events = target.run()
    assert tokens_of(events)["second"] == answer(second)[1:]
    assert tokens_of(events)["first"][-1] == answer(first)[-1]
    assert max(e.num_preemptions for e in events if e.sequence_id == "second") > 0
    target.assert_idle()


def test_times_and_load_follow_the_clock() -> None:
    pod = FakePod(16, step_s=1.0, prefill_s_per_token=0.5, max_num_seqs=1)
    pod.core.add(spec("a", range(4), max_tokens=2))
    pod.clock.now = 10.0
    pod.core.add(spec("b", [9], max_tokens=1))
    load = pod.core.load()
    assert (load.num_waiting, load.num_waiting_tokens, load.step_s, load.prefill_tokens_per_s) == (2, 5, 0.0, 0.0)
    first, second, third = pod.run()
    assert (first.arrived_at, first.first_scheduled_at, first.at) == (0.0, 10.0, 13.0)
    assert (second.first_scheduled_at, second.at) == (10.0, 14.0)
    assert (third.arrived_at, third.first_scheduled_at, third.at) == (10.0, 14.0, 15.0)
    assert pod.core.load().prefill_tokens_per_s == pytest.approx(4 / 3)
    assert 1.0 < pod.core.load().step_s < 3.0


def test_what_waits_for_held_blocks_is_no_work() -> None:
    pod = FakePod(3)
    pod.core.add(spec("a", range(8)), hold=True)
    pod.run()
    pod.core.add(spec("b", range(50, 58)), hold=True)
    had_work = pod.core.has_work
    assert pod.core.step() == []
    pod.core.release_held("a")
    assert (had_work, pod.core.has_work) == (False, True)
    pod.run()
    assert pod.core.held("b").num_tokens == 8


class BrokenRunner:
    """Fails at its second batch, by raising or by breaking the contract."""

    def __init__(self, pod: FakePod, failure: Callable[[], list[tuple[SampledToken, ...]]]) -> None:
        self._runner = pod.runner
        self.model = pod.runner.model
        self._failure = failure
        self._num_batches = 0

    def execute(self, batch: Batch) -> list[tuple[SampledToken, ...]]:
        self._num_batches += 1
        return self._failure() if self._num_batches == 2 else self._runner.execute(batch)


def test_a_sequence_without_finite_logits_ends_alone() -> None:
    pod = FakePod(16)
    core = EngineCore(BrokenRunner(pod, lambda: [(SampledToken(0, finite=False),)]), pod.config)
    core.add(spec("bad", range(4)))
    assert [event.finish_reason for event in (*core.step(), *core.step())] == [None, FinishReason.FAILED]
    core.check_invariants()
    core.add(spec("next", range(4)))
    assert [event.finish_reason for event in core.step()] == [None]


def raise_it() -> list[tuple[SampledToken, ...]]:
    raise RuntimeError("the device is gone")


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (raise_it, "RuntimeError: the device is gone"),
        (list, "ValueError"),
        (lambda: [()], r"sample = True, tokens = \(\)"),
        (lambda: [(SampledToken(512),)], r"token_ids = \(512,\): must be below 512"),
        (lambda: [(SampledToken(5), SampledToken(6))], r"must be drafts \(\) and one more"),
    ],
)
def test_a_failed_runner_stops_the_engine_and_loses_nothing(
    failure: Callable[[], list[tuple[SampledToken, ...]]], message: str
) -> None:
    pod = FakePod(16, max_num_seqs=3)
    core = EngineCore(BrokenRunner(pod, failure), pod.config)
    core.add(spec("held", range(4)), hold=True)
    core.step()
    core.reserve(spec("reserved", range(4)))
    core.add(spec("running", range(16)))
    with pytest.raises(EngineFailed, match=message) as failed:
        core.step()
    assert set(failed.value.sequence_ids) == {"running", "reserved"}
    core.check_invariants()
    assert not core.has_work
    for call in (core.add, core.reserve, core.activate):
        with pytest.raises(EngineFailed):
            call(spec("new", [1]))
    with pytest.raises(EngineFailed):
        core.step()
    assert core.held("held").num_tokens == 4
    assert core.release_held("held")
    assert core.abort("running")
    assert core.abort("reserved")
    assert core.load().num_free_blocks == 16
    core.check_invariants()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_blocks": 0}, "num_blocks = 0"),
        ({"num_blocks": 1, "block_size": 0}, "block_size = 0"),
        ({"num_blocks": 1, "max_num_seqs": 0}, "max_num_seqs = 0"),
        ({"num_blocks": 1, "max_num_seqs": 8, "max_batched_tokens": 7}, "max_batched_tokens = 7"),
    ],
)
def test_a_config_out_of_range_is_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**sizes)  # type: ignore[arg-type] # all sizes are int
