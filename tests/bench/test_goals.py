"""What goals of bench/engine/goals.py make of measurements, and the catalogue of goals."""

from __future__ import annotations

from bench.bars import Bar
from bench.engine.catalogue import ARMS, CASE_ARMS, PHASES, VLLM_CHUNKS, goals
from bench.engine.goals import ABSENT, Goal, evaluate, ratio
from bench.engine.session import arms_of

KEYS = (("ours", "tok_s"), ("peer", "tok_s"))


GOAL = Goal(name="b", needs=KEYS, value=ratio, threshold=2.0)


def one_round(ours: float, peer: float) -> dict[tuple[str, str], float]:
    return {KEYS[0]: ours, KEYS[1]: peer}


def only(rounds: list[dict[tuple[str, str], float]], not_run: dict[str, str] | None = None) -> Bar:
    (bar,) = evaluate([GOAL], rounds, not_run or {})
    return bar


def test_numbers_are_divided_within_rounds() -> None:
    assert only([one_round(4, 2), one_round(30, 10), one_round(9, 1)]) == Bar("b", (2, 3, 9), ">=", 2.0)


def test_a_round_that_lacks_one_of_both_counts_nothing() -> None:
    assert only([one_round(4, 2), {KEYS[0]: 9}]).values == (2,)


def test_what_did_not_run_says_why() -> None:
    bar = only([{KEYS[0]: 1}], {"peer": "is not installed"})
    assert bar == Bar("b", (), ">=", 2.0, "peer: is not installed")


def test_what_was_not_asked_for_is_told_apart() -> None:
    assert only([{KEYS[0]: 1}]).why_not == ABSENT


def test_numbers_that_never_met_in_a_round_are_not_divided() -> None:
    bar = only([{KEYS[0]: 1}, {KEYS[1]: 1}])
    assert (bar.values, bar.why_not) == ((), "no round measured all of it")


# The catalogue


def test_names_are_unique_and_arms_known() -> None:
    names = [each.name for each in goals([])]
    assert len(set(names)) == len(names)
    assert {arm for each in goals([]) for arm, _ in each.needs} <= set(ARMS)
    assert {arm for arms in CASE_ARMS.values() for arm in arms} == set(ARMS)


def test_every_case_has_its_phase() -> None:
    assert sorted(case for phase in PHASES for case in phase) == sorted(CASE_ARMS)


def test_both_sides_of_a_goal_meet_in_one_phase() -> None:
    for each in goals([]):
        arms = {arm for arm, _ in each.needs}
        assert any(arms <= set(arms_of(phase, ARMS)) for phase in PHASES), each.name


def test_the_best_chunk_of_those_that_ran_counts() -> None:
    (itl,) = [each for each in goals(list(VLLM_CHUNKS)[:2]) if each.name == "engine_pd_itl_p99_to_vllm_colocated"]
    assert len(itl.needs) == 3
    assert itl.value(10, 40, 20) == 0.5


def test_bars_of_issue_3() -> None:
    told = {each.name.removeprefix("engine_"): (each.op, each.threshold) for each in goals([]) if each.threshold}
    assert told == {
        "single_bf16_to_vllm": (">=", 2.0),
        "single_bf16_share_of_read": (">=", 0.75),
        "single_int4_to_llama_cpp_q4": (">=", 1.4),
        "streams_bf16_to_vllm": (">=", 1.8),
        "streams_int8_to_vllm": (">=", 2.5),
        "prefill_1024_to_vllm": (">=", 1.6),
        "prefill_1024_share_of_matmul": (">=", 0.5),
        "prefill_4096_to_vllm": (">=", 1.25),
        "pd_streams_to_vllm_pd": (">=", 2.2),
        "pd_itl_p99_to_vllm_colocated": ("<=", 1 / 3),
        "pd_itl_p99_to_vllm_pd": ("<=", 0.5),
        "growth_1_to_8_streams": ("<=", 1.25),
        "memory_of_a_pod_to_vllm": ("<=", 0.5),
    }
