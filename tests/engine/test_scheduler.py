from __future__ import annotations

import pytest

from engine.batch import Batch
from engine.block_manager import BlockManager
from engine.scheduler import Scheduler
from engine.sequence import SequenceState
from tests.engine.pure import spec

BLOCK_SIZE = 4


class Driver:
    """A scheduler whose batches are computed at once; every sampled token is 7. Nothing ever finishes by itself."""

    def __init__(self, num_blocks: int, *, max_num_seqs: int = 4, max_batched_tokens: int = 8) -> None:
        self.blocks = BlockManager(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(self.blocks, max_num_seqs=max_num_seqs, max_batched_tokens=max_batched_tokens)

    def add(self, sequence_id: str, num_tokens: int, *, priority: int = 0, start: int = 0, hold: bool = False) -> None:
        """Prompts of different `start` share no prefix."""
        self.scheduler.add(spec(sequence_id, range(start, start + num_tokens), priority=priority), hold=hold)

    def step(self) -> dict[str, tuple[int, int]]:
        """The tokens computed, as {sequence: (start, end)}."""
        return {s.sequence_id: (s.start, s.end) for s in self.batch().sequences}

    def batch(self) -> Batch:
        batch = self.scheduler.schedule()
        self.scheduler.check_invariants()
        for scheduled in batch.sequences:
            seq = self.scheduler.running[scheduled.sequence_id]
            assert scheduled.token_ids == tuple(seq.token_ids[scheduled.start : scheduled.end])
            assert len(scheduled.block_table) * BLOCK_SIZE >= scheduled.end
            self.scheduler.computed(seq, scheduled.end)
            if scheduled.sample:
                seq.token_ids.append(7)
        self.scheduler.check_invariants()
        return batch


def test_a_prompt_is_prefilled_in_chunks_of_the_budget_and_then_decodes() -> None:
    driver = Driver(8, max_batched_tokens=8)
    driver.add("a", 18)
    assert [driver.step() for _ in range(5)] == [
        {"a": (0, 8)},
        {"a": (8, 16)},
        {"a": (16, 18)},
        {"a": (18, 19)},
        {"a": (19, 20)},
    ]


def test_only_the_chunk_with_the_last_token_samples() -> None:
    driver = Driver(8, max_batched_tokens=8)
    driver.add("a", 10)
    assert [driver.batch().sequences[0].sample for _ in range(3)] == [False, True, True]


def test_decodes_go_first_and_prefills_share_the_rest() -> None:
    driver = Driver(20, max_batched_tokens=8)
    driver.add("a", 3)
    driver.step()
    driver.add("b", 5, start=100)
    driver.add("c", 9, start=200)
    assert driver.step() == {"a": (3, 4), "b": (0, 5), "c": (0, 2)}
    assert driver.step() == {"a": (4, 5), "b": (5, 6), "c": (2, 8)}


def test_prefills_run_by_priority_then_arrival() -> None:
    driver = Driver(20, max_batched_tokens=8)
    driver.add("late", 8, priority=1)
    driver.add("first", 6, start=100)
    driver.add("second", 6, start=200)
    assert driver.step() == {"first": (0, 6), "second": (0, 2)}


def test_a_more_urgent_prompt_overtakes_a_running_prefill() -> None:
    driver = Driver(20, max_batched_tokens=8)
    driver.add("slow", 16, priority=1)
    driver.step()
    driver.add("urgent", 6, start=100)
    assert driver.step() == {"urgent": (0, 6), "slow": (8, 10)}


def test_no_more_than_max_num_seqs_run() -> None:
    driver = Driver(20, max_num_seqs=2)
    for index in range(3):
        driver.add(str(index), 2, start=100 * index)
    driver.step()
    assert set(driver.scheduler.running) == {"0", "1"}
    driver.scheduler.remove("0")
    driver.step()
    assert set(driver.scheduler.running) == {"1", "2"}


def test_decodes_cannot_starve_a_prefill_of_the_budget() -> None:
    driver = Driver(20, max_num_seqs=4, max_batched_tokens=4)
    for index in range(3):
        driver.add(str(index), 1, start=100 * index)
    driver.step()
    driver.add("prompt", 5, start=300)
    for start in range(5):
        assert driver.step()["prompt"] == (start, start + 1)


def test_a_budget_that_could_starve_prefills_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_num_seqs = 9: must be 1 \.\. max_batched_tokens \(8\)"):
        Driver(4, max_num_seqs=9, max_batched_tokens=8)


def test_a_large_prompt_that_does_not_fit_is_not_passed_by_later_ones() -> None:
    driver = Driver(5)
    driver.add("running", 7)
    driver.step()
    driver.add("large", 16, start=100)
    driver.add("small", 1, start=200)
    for _ in range(2):
        assert set(driver.step()) == {"running"}
    driver.scheduler.remove("running")
    assert set(driver.step()) == {"large"}


def test_admission_leaves_a_block_for_every_running_decode() -> None:
    driver = Driver(3)
    driver.add("a", 4)
    driver.step()
    driver.add("b", 8, start=100)
    assert set(driver.step()) == {"a"}


def fill_two_blocks_each(driver: Driver, *sequence_ids: str, priorities: tuple[int, ...] = (0, 0)) -> None:
    """Runs sequences of 7 tokens until the first needs a third block."""
    for index, (sequence_id, priority) in enumerate(zip(sequence_ids, priorities, strict=True)):
        driver.add(sequence_id, 6, priority=priority, start=100 * index)
    while all(seq.num_tokens < 9 for seq in driver.scheduler.running.values()):
        driver.step()


def test_when_blocks_run_out_the_latest_gives_way_and_keeps_its_tokens() -> None:
    driver = Driver(5, max_batched_tokens=16)
    fill_two_blocks_each(driver, "a", "b")
    assert driver.step() == {
        "a": (8, 9),
    }
    [waiting] = driver.scheduler.waiting
    assert (waiting.id, waiting.state, waiting.num_preemptions) == ("b", SequenceState.WAITING, 1)
    assert (waiting.num_tokens, waiting.num_computed) == (9, 0)
    driver.scheduler.remove("a")
    assert driver.step() == {"b": (8, 9)}  # its full blocks were still cached


def test_the_lowest_priority_gives_way_first_though_it_came_first() -> None:
    driver = Driver(5, max_batched_tokens=16)
    fill_two_blocks_each(driver, "low", "high", priorities=(1, 0))
    assert set(driver.step()) == {"high"}
    assert [seq.id for seq in driver.scheduler.waiting] == ["low"]


def test_a_sequence_may_have_to_preempt_itself() -> None:
    driver = Driver(4, max_batched_tokens=16)
    assert driver.scheduler.reserve(spec("credit", range(200, 204)), 2) is not None
    driver.add("a", 8)
    driver.step()
    assert driver.step() == {}
    assert [seq.id for seq in driver.scheduler.waiting] == ["a"]
    assert "credit" in driver.scheduler.reserved
    had_work = driver.scheduler.has_work
    driver.scheduler.remove("credit")
    assert (had_work, driver.scheduler.has_work) == (False, True)  # only giving up blocks makes work of it
    assert driver.step() == {"a": (8, 9)}


def test_a_preempted_sequence_goes_before_later_arrivals() -> None:
    driver = Driver(5, max_batched_tokens=16)
    fill_two_blocks_each(driver, "a", "b")
    driver.add("c", 1, start=300)
    driver.step()
    assert [seq.id for seq in driver.scheduler.waiting] == ["b", "c"]


def test_cached_tokens_are_counted_once_and_only_of_the_prompt() -> None:
    driver = Driver(12)
    driver.add("a", 8)
    driver.step()
    tokens = tuple(driver.scheduler.running["a"].token_ids)
    driver.scheduler.remove("a")
    driver.scheduler.add(spec("replay", tokens[:6], output=tokens[6:]))
    driver.step()
    assert driver.scheduler.running["replay"].num_cached == 6


def test_a_full_hit_computes_one_token_on_a_copy() -> None:
    driver = Driver(8)
    driver.add("a", 8)
    driver.step()
    driver.add("b", 8)
    batch = driver.batch()
    [copy] = batch.copies
    [source] = driver.blocks.match(driver.scheduler.running["a"].block_hashes)[1:]
    b = next(s for s in batch.sequences if s.sequence_id == "b")
    assert (b.start, b.end, b.sample) == (7, 8, True)
    assert (copy.source, copy.target) == (source, b.block_table[1])


def test_a_salt_separates_prefixes() -> None:
    driver = Driver(12)
    driver.scheduler.add(spec("a", range(5), cache_salt="one"))
    driver.step()
    driver.scheduler.add(spec("b", range(5), cache_salt="two"))
    driver.scheduler.add(spec("c", range(5), cache_salt="one"))
    assert driver.step() == {"a": (5, 6), "b": (0, 5), "c": (4, 5)}


def test_a_reservation_is_granted_only_with_a_block_left_for_every_decode() -> None:
    driver = Driver(4)
    driver.add("a", 4)
    driver.step()
    assert driver.scheduler.reserve(spec("r", range(100, 110)), 3) is None
    assert driver.scheduler.reserve(spec("r", range(100, 104)), 2) is not None


def test_a_reservation_does_not_pass_waiting_sequences_that_come_before_it() -> None:
    driver = Driver(6)
    driver.add("running", 8)
    driver.step()
    driver.add("waiting", 16, start=100)
    assert driver.step() == {"running": (8, 9)}
    assert driver.scheduler.reserve(spec("r", [1]), 1) is None
    assert driver.scheduler.reserve(spec("urgent", [1], priority=-1), 1) is not None


def test_a_reservation_keeps_its_place_among_max_num_seqs() -> None:
    driver = Driver(8, max_num_seqs=2)
    assert driver.scheduler.reserve(spec("r", range(4)), 2) is not None
    driver.add("a", 1, start=100)
    driver.add("b", 1, start=200)
    driver.step()
    assert set(driver.scheduler.running) == {"a"}
    assert driver.scheduler.reserve(spec("r2", range(4)), 2) is None
    driver.scheduler.activate(spec("r", range(4), output=[9]))
    assert driver.step() == {"a": (1, 2), "r": (4, 5)}


def test_a_reservation_shares_a_cached_prefix_and_needs_no_copy() -> None:
    driver = Driver(8)
    driver.add("a", 8)
    driver.step()
    reservation = driver.scheduler.reserve(spec("r", range(8)), 3)
    assert reservation is not None
    assert reservation.num_cached == 8
    assert reservation.block_ids[:2] == driver.blocks.table("a")[:2]
    driver.scheduler.activate(spec("r", range(8), output=[9]))
    batch = driver.batch()
    assert batch.copies == ()
    assert next(s.start for s in batch.sequences if s.sequence_id == "r") == 8


def test_activated_blocks_enter_the_prefix_cache() -> None:
    driver = Driver(8)
    driver.scheduler.reserve(spec("r", range(8)), 3)
    hashes = driver.scheduler.reserved["r"].block_hashes
    assert len(hashes) == 2
    assert driver.blocks.match(hashes) == []  # not before its KV has arrived
    driver.scheduler.activate(spec("r", range(8), output=[9]))
    driver.add("after", 9)
    assert driver.step()["after"] == (8, 9)


def test_an_activated_sequence_that_is_preempted_is_computed_again_here() -> None:
    driver = Driver(5, max_batched_tokens=16)
    driver.add("a", 6)
    driver.step()
    driver.scheduler.reserve(spec("r", range(100, 106)), 2)
    driver.scheduler.activate(spec("r", range(100, 106), output=[9]))
    while "r" in driver.scheduler.running:
        driver.step()
    [waiting] = driver.scheduler.waiting
    assert (waiting.id, waiting.num_computed, waiting.num_preemptions) == ("r", 0, 1)
    assert waiting.token_ids[:7] == [*range(100, 106), 9]
    driver.scheduler.remove("a")
    assert driver.step()["r"][1] == waiting.num_tokens - 1


@pytest.mark.parametrize("state", ["waiting", "running", "held", "reserved"])
def test_remove_frees_everything_in_every_state(state: str) -> None:
    driver = Driver(8)
    if state == "reserved":
        driver.scheduler.reserve(spec("x", range(6)), 2)
    else:
        driver.add("x", 6)
    if state in {"running", "held"}:
        driver.step()
    if state == "held":
        driver.scheduler.hold(driver.scheduler.running["x"])
    assert "x" in driver.scheduler
    assert driver.scheduler.remove("x")
    assert "x" not in driver.scheduler
    assert not driver.scheduler.remove("x")
    assert driver.blocks.num_free == 8
    driver.scheduler.check_invariants()


def test_the_invariants_name_a_leaked_table() -> None:
    driver = Driver(8)
    driver.add("x", 6)
    driver.step()
    del driver.scheduler.running["x"]
    with pytest.raises(AssertionError, match="x"):
        driver.scheduler.check_invariants()
