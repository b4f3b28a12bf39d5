"""What is computed again, after a pod was lost or a prefix was cached, has the bits that it had at first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.batch import Batch, ScheduledSequence
from engine.checkpoint import model_info
from engine.kv_format import kv_block_bytes
from engine.runner import TorchRunner
from engine.sequence import SampledToken, SamplingParams
from tests.engine.tiny_llama import BLOCK_SIZE, make_checkpoint, random_ids

NUM_PROMPT, NUM_OUTPUT, NUM_BLOCKS = 21, 12, 48
PARAMS = SamplingParams(temperature=0.8, seed=5, num_logprobs=3)
TABLE, ANOTHER = tuple(range(20)), tuple(range(20, 40))


class Engine:
    def __init__(self, folder: Path, dtype: str, kv_dtype: str) -> None:
        block_bytes = kv_block_bytes(model_info(folder, dtype, kv_dtype=kv_dtype), BLOCK_SIZE)
        self._memory = np.zeros(NUM_BLOCKS * block_bytes, np.uint8)
        self._runner = TorchRunner(
            folder, kv_memory=self._memory, block_size=BLOCK_SIZE, dtype=dtype, kv_dtype=kv_dtype, num_threads=1
        )
        self._prompt = tuple(random_ids(NUM_PROMPT, 3))

    def run(self, start: int, output_ids: tuple[int, ...], table: tuple[int, ...]) -> SampledToken:
        """Computes prompt and output from `start` on and draws the next token."""
        tokens = (*self._prompt, *output_ids)[start:]
        run = ScheduledSequence("s", tokens, start, table, True, PARAMS, self._prompt, output_ids)
        [(token,)] = self._runner.execute(Batch((run,)))
        return token

    def answer(self) -> list[SampledToken]:
        """A step a token."""
        drawn = [self.run(0, (), TABLE)]
        while len(drawn) < NUM_OUTPUT:
            drawn.append(self.run(NUM_PROMPT + len(drawn) - 1, tuple(t.token_id for t in drawn), TABLE))
        return drawn

    def blocks(self, table: tuple[int, ...]) -> np.ndarray:
        """Whole ones alone: what lies behind a sequence's end is another's."""
        whole = (NUM_PROMPT + NUM_OUTPUT - 1) // BLOCK_SIZE
        return self._memory.reshape(NUM_BLOCKS, -1)[list(table[:whole])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay") / "tiny"
    make_checkpoint(folder)
    return folder


@pytest.fixture(params=[("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int8")], ids="-".join)
def engine(folder: Path, request: pytest.FixtureRequest) -> Engine:
    return Engine(folder, *request.param)


@pytest.mark.parametrize("start", [0, 1, NUM_PROMPT - 1, NUM_PROMPT, NUM_PROMPT + 4])
def test_a_replay(engine: Engine, start: int) -> None:
    """From any place on: behind it the KV is what steps of one token wrote, and so is the next token."""
    drawn = engine.answer()
    output_ids = tuple(token.token_id for token in drawn[:-1])
    if start:
        engine.run(0, (), ANOTHER)
        for done in range(1, start - NUM_PROMPT + 1):
            engine.run(NUM_PROMPT + done - 1, output_ids[:done], ANOTHER)
    assert engine.run(start, output_ids, ANOTHER) == drawn[-1]
    np.testing.assert_array_equal(engine.blocks(ANOTHER), engine.blocks(TABLE))


@pytest.mark.parametrize("num_left", [1, 2, 5])
def test_the_end_of_a_prompt_whose_prefix_was_cached(engine: Engine, num_left: int) -> None:
    first = engine.run(0, (), TABLE)
    assert engine.run(NUM_PROMPT - num_left, (), TABLE) == first
