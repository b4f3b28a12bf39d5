from __future__ import annotations

import numpy as np
import pytest

from engine.batch import Batch, BlockCopy, ScheduledSequence
from engine.fake import BYTES_PER_TOKEN, EOS_ID, FakeRunner, fake_generate, fake_next_token
from engine.sequence import FinishReason, Logprob, SampledToken, SamplingParams
from tests.engine.pure import Clock

GREEDY = SamplingParams(temperature=0.0, max_tokens=3)
BLOCK_SIZE = 2


def scheduled(
    token_ids: tuple[int, ...],
    table: tuple[int, ...],
    *,
    start: int = 0,
    sample: bool = True,
    params: SamplingParams = GREEDY,
    output_ids: tuple[int, ...] = (),
) -> ScheduledSequence:
    return ScheduledSequence("s", token_ids, start, table, sample, params, prompt_ids=(), output_ids=output_ids)


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner(np.full(6 * BLOCK_SIZE * BYTES_PER_TOKEN, 0x5A, np.uint8), BLOCK_SIZE)


def execute(runner: FakeRunner, *sequences: ScheduledSequence, copies: tuple[BlockCopy, ...] = ()) -> list[int | None]:
    """The one token of each sequence, None where none was drawn."""
    drawn = runner.execute(Batch(sequences, copies))
    assert all(len(tokens) <= 1 for tokens in drawn)
    return [tokens[0].token_id if tokens else None for tokens in drawn]


def test_the_example_worked_by_hand() -> None:
    assert fake_generate((65, 66), GREEDY) == ((197, 276, 356), FinishReason.LENGTH)


def test_the_runner_gives_the_example_from_its_bytes(runner: FakeRunner) -> None:
    assert execute(runner, scheduled((65, 66), (3, 1))) == [197]
    assert execute(runner, scheduled((197,), (3, 1), start=2)) == [276]
    assert execute(runner, scheduled((276,), (3, 1), start=3)) == [356]


def test_a_batch_of_different_lengths_and_chunks(runner: FakeRunner) -> None:
    assert execute(runner, scheduled((1, 2, 3), (5, 0), sample=False), scheduled((7,), (2,))) == [None, 7]
    assert execute(runner, scheduled((4,), (5, 0), start=3), scheduled((9,), (2,), start=1)) == [30, 25]


@pytest.mark.parametrize(
    ("drafts", "tokens"),
    [((276, 356), [276, 356, 88]), ((276, 3), [276, 356]), ((3, 356), [276]), ((), [276])],
)
def test_drafts_give_the_example_up_to_the_first_wrong_one(
    runner: FakeRunner, drafts: tuple[int, ...], tokens: list[int]
) -> None:
    execute(runner, scheduled((65, 66), (3, 1)))
    [drawn] = runner.execute(Batch((scheduled((197,), (3, 1, 4), start=2)._replace(draft_ids=drafts),)))
    assert [token.token_id for token in drawn] == tokens


@pytest.mark.parametrize("table", [(1, 3, 4), (3, 1, 5), (3, 0, 4), (2, 1, 4)])
def test_a_swapped_or_wrong_block_changes_the_token(runner: FakeRunner, table: tuple[int, ...]) -> None:
    execute(runner, scheduled((10, 11, 12, 13), (3, 1)), scheduled((90, 91), (2,)))
    right = execute(runner, scheduled((14, 15), (3, 1, 4), start=4))
    assert right == [fake_next_token((10, 11, 12, 13, 14, 15), GREEDY, num_prompt=6)]
    nothing_new = scheduled((), table, start=6)  # reads the context and writes nothing
    assert execute(runner, nothing_new) != right


def test_copies_come_before_the_computation_and_read_their_sources_first(runner: FakeRunner) -> None:
    execute(runner, scheduled((10, 11), (0,)), scheduled((20, 21), (1,)))
    copies = (BlockCopy(0, 2), BlockCopy(1, 0))  # the first source is reused by the second copy
    first, second = execute(runner, scheduled((12,), (2, 3), start=2), scheduled((22,), (0, 4), start=2), copies=copies)
    assert first == fake_next_token((10, 11, 12), GREEDY, num_prompt=3)
    assert second == fake_next_token((20, 21, 22), GREEDY, num_prompt=3)


def test_a_temperature_adds_a_draw_of_seed_and_output_position() -> None:
    params = SamplingParams(temperature=0.7, seed=3)
    assert fake_next_token((65, 66), params, num_prompt=2) == 197 + 31 * 3
    assert fake_next_token((65, 66), params, num_prompt=1) == 197 + 31 * 3 + 17


def test_min_tokens_keeps_ending_ids_away_and_then_they_stop() -> None:
    # 511 * 1 = 511: the first token would end the text.
    stop = frozenset({EOS_ID})
    free = SamplingParams(temperature=0.0, stop_token_ids=stop)
    assert fake_generate((511,), free) == ((511,), FinishReason.STOP)
    held = SamplingParams(temperature=0.0, stop_token_ids=stop, min_tokens=1, max_tokens=2)
    assert fake_generate((511,), held).output_ids[0] == 0  # the next id upwards


def test_bias_and_penalties_ban_and_force() -> None:
    def token(**params: object) -> int:
        return fake_next_token(
            (65, 66, 7),
            SamplingParams(temperature=0.0, **params),  # type: ignore[arg-type] # any field
            num_prompt=2,
        )

    assert token() == 197 + 21
    assert token(logit_bias={218: -100.0, 219: -100.0}) == 220
    assert token(logit_bias={9: 100.0, 8: 100.0}) == 8
    assert token(logit_bias={7: 100.0}, presence_penalty=0.5) == 218  # 7 is in the output
    assert token(logit_bias=dict.fromkeys(range(512), -100.0)) == 218  # nothing left to pass to


def test_logprobs_follow_their_formula(runner: FakeRunner) -> None:
    params = SamplingParams(temperature=0.0, num_logprobs=2)
    [(token,)] = runner.execute(Batch((scheduled((65, 66), (0,), params=params),)))
    # 197 mod 8 = 5
    assert token == SampledToken(197, -0.75, (Logprob(197, -0.75), Logprob(198, -1.75)))
    [(plain,)] = runner.execute(Batch((scheduled((65, 66), (0,)),)))
    assert plain == SampledToken(197)
    [(chosen,)] = runner.execute(
        Batch((scheduled((65, 66), (0,), params=SamplingParams(temperature=0.0, num_logprobs=0)),))
    )
    assert chosen == SampledToken(197, -0.75)


def test_pacing_charges_steps_and_prefilled_tokens() -> None:
    clock = Clock()
    memory = np.zeros(4 * BLOCK_SIZE * BYTES_PER_TOKEN, np.uint8)
    runner = FakeRunner(memory, BLOCK_SIZE, step_s=1.0, prefill_s_per_token=0.25, sleep=clock.sleep)
    execute(runner, scheduled((1, 2, 3), (0, 1)), scheduled((9,), (2,)))
    assert clock.now == 1.75
    execute(runner, scheduled((4,), (0, 1), start=3))
    assert clock.now == 2.75


def test_a_replayed_start_gives_the_same_rest() -> None:
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=12, frequency_penalty=1.0)
    whole = fake_generate((1, 2, 3), params)
    assert fake_generate((1, 2, 3), params, whole.output_ids[:5]) == whole


def test_the_context_length_ends_an_answer() -> None:
    answer = fake_generate((1,) * 4094, SamplingParams(temperature=0.0, max_tokens=100))
    assert (len(answer.output_ids), answer.finish_reason) == (2, FinishReason.LENGTH)


def test_memory_must_hold_a_block() -> None:
    with pytest.raises(ValueError, match="must hold 2 tokens"):
        FakeRunner(np.zeros(31, np.uint8), 2)
