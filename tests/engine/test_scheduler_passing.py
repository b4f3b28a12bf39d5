"""Short prompts pass long ones: who may, how far, and that nobody starves."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.test_scheduler import Driver

MAX_TOKENS = 60  # of a prompt


def test_short_prompts_pass_a_long_one_in_half_of_the_budget() -> None:
    driver = Driver(30, max_batched_tokens=8)
    driver.add("long", 24)
    driver.add("a", 3, start=100)
    driver.add("b", 2, start=200)
    driver.add("c", 1, start=300)
    assert driver.step() == {"a": (0, 3), "c": (0, 1), "long": (0, 4)}
    assert driver.step() == {"a": (3, 4), "c": (1, 2), "b": (0, 2), "long": (4, 8)}  # half of what decodes leave


def test_a_short_prompt_passes_one_that_is_under_way() -> None:
    driver = Driver(30, max_batched_tokens=8)
    driver.add("long", 20)
    assert driver.step() == {"long": (0, 8)}
    driver.add("short", 3, start=100)
    assert driver.step() == {"short": (0, 3), "long": (8, 13)}


def test_a_prompt_that_half_a_budget_does_not_finish_waits_for_its_turn() -> None:
    driver = Driver(30, max_batched_tokens=8)
    driver.add("long", 15, hold=True)
    driver.add("medium", 5, start=100)
    assert driver.step() == {"long": (0, 8)}
    assert driver.step() == {"long": (8, 15), "medium": (0, 1)}


def test_what_the_step_finishes_is_passed_by_nobody() -> None:
    driver = Driver(30, max_batched_tokens=8)
    driver.add("long", 8)
    driver.add("short", 1, start=100)
    assert driver.step() == {"long": (0, 8)}


def test_behind_prompts_that_are_finished_half_of_what_they_leave_is_shared() -> None:
    driver = Driver(30, max_batched_tokens=8)
    driver.add("first", 3)
    driver.add("long", 20, start=100)
    driver.add("short", 2, start=200)
    assert driver.step() == {"first": (0, 3), "short": (0, 2), "long": (0, 3)}


def test_what_is_cached_of_a_prompt_does_not_count() -> None:
    driver = Driver(30, max_batched_tokens=16)
    driver.add("before", 12)
    driver.step()
    driver.scheduler.remove("before")
    driver.add("long", 40, start=100)
    driver.add("cached", 14)
    driver.add("whole", 12)
    assert driver.step() == {"cached": (12, 14), "whole": (11, 12), "long": (0, 13)}


def test_a_cached_block_that_there_is_no_room_to_copy_counts() -> None:
    driver = Driver(8, max_batched_tokens=4)
    driver.add("before", 4)
    driver.step()
    driver.scheduler.remove("before")
    driver.add("long", 24, start=100)
    driver.add("whole", 4)
    assert driver.step() == {"long": (0, 4)}
    assert driver.scheduler.running["whole"].num_cached == 0


def test_only_prompts_of_the_same_priority_pass() -> None:
    driver = Driver(30, max_batched_tokens=8)
    driver.add("long", 30, priority=1)
    driver.add("later", 1, priority=2, start=100)
    driver.add("same", 1, priority=1, start=200)
    driver.add("urgent", 20, priority=0, start=300)
    driver.add("urgent and short", 2, priority=0, start=400)
    assert driver.step() == {"urgent and short": (0, 2), "urgent": (0, 6)}
    driver.scheduler.remove("urgent")
    driver.scheduler.remove("urgent and short")
    assert driver.step() == {"same": (0, 1), "long": (0, 7)}


def test_nobody_passes_a_prompt_that_waits_for_blocks() -> None:
    driver = Driver(8, max_batched_tokens=4)
    driver.add("under way", 18, priority=1)
    driver.step()
    driver.add("large", 16, start=100)
    driver.add("short", 1, priority=1, start=200)
    assert driver.step() == {"under way": (4, 8)}
    driver.scheduler.remove("large")
    assert driver.step() == {"short": (0, 1), "under way": (8, 11)}


@settings(deadline=None)
@given(
    budget=st.integers(2, 16),
    prompts=st.lists(st.tuples(st.integers(0, 4), st.integers(1, MAX_TOKENS)), min_size=1, max_size=12),
)
def test_every_prompt_of_a_prefill_pod_is_finished_in_time(budget: int, prompts: list[tuple[int, int]]) -> None:
    """`prompts`: steps since the one before, tokens. No step is too large, or smaller than what there is to do."""
    driver = Driver(len(prompts) * MAX_TOKENS, max_num_seqs=budget, max_batched_tokens=budget)
    missing: dict[str, int] = {}  # tokens of the prompts here, oldest first
    last_step: dict[str, int] = {}  # in which they must be finished
    now = 0

    def step() -> None:
        nonlocal now
        now += 1
        batch = driver.batch()
        assert batch.num_tokens == min(budget, sum(missing.values()))
        for each in batch.sequences:
            missing[each.sequence_id] -= len(each.token_ids)
            if each.sample:
                assert missing.pop(each.sequence_id) == 0
                driver.scheduler.remove(each.sequence_id)
        late = {name: now - last_step[name] for name in missing if now >= last_step[name]}
        assert not late, f"steps that prompts are late: {late}"

    for index, (num_steps, num_tokens) in enumerate(prompts):
        for _ in range(num_steps):
            step()
        name = str(index)
        driver.add(name, num_tokens, start=100 * index, hold=True)
        num_before = len(missing)
        missing[name] = num_tokens
        last_step[name] = now + sum(-(-tokens // -(-budget // 2)) for tokens in missing.values())
        if num_tokens <= budget // 2:
            last_step[name] = min(last_step[name], now + num_before + 1)
    while missing:
        step()
