"""Small engines on the fake model, and an oracle that knows every right answer without a cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.batch import HeldBlocks, TokenEvent
from engine.core import EngineConfig, EngineCore
from engine.fake import BYTES_PER_TOKEN, EOS_ID, FakeRunner, fake_generate
from engine.sequence import FinishReason, SamplingParams, SequenceSpec
from engine.speculation.proposer import Proposer


def spec(
    sequence_id: str,
    prompt: Iterable[int],
    *,
    output: Iterable[int] = (),
    priority: int = 0,
    cache_salt: str = "",
    **params: Any,
) -> SequenceSpec:
    """Greedy, stopping at the fake model's end of text, unless `params` say otherwise."""
    return SequenceSpec(
        sequence_id=sequence_id,
        prompt_ids=tuple(prompt),
        output_ids=tuple(output),
        params=SamplingParams(**{"temperature": 0.0, "stop_token_ids": frozenset({EOS_ID}), **params}),
        priority=priority,
        cache_salt=cache_salt,
    )


class Clock:
    """Advances only when told, or by the pacing of the fake runner."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, duration_s: float) -> None:
        self.now += duration_s


class FakePod:
    """An engine with its KV memory and generations, as a pod has them."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 4,
        *,
        max_num_seqs: int = 4,
        max_batched_tokens: int = 16,
        prefix_cache: bool = True,
        step_s: float = 0.0,
        prefill_s_per_token: float = 0.0,
        proposer: Proposer | None = None,
        num_draft_tokens: int = 3,
    ) -> None:
        self.clock = Clock()
        self.kv_memory: NDArray[np.uint8] = np.full(num_blocks * block_size * BYTES_PER_TOKEN, 0xA5, np.uint8)
        self.kv_blocks = self.kv_memory.reshape(num_blocks, -1)
        self.generations = np.zeros(num_blocks, np.uint64)
        self.runner = FakeRunner(
            self.kv_memory,
            block_size,
            step_s=step_s,
            prefill_s_per_token=prefill_s_per_token,
            sleep=self.clock.sleep,
        )
        self.config = EngineConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=max_batched_tokens,
            prefix_cache=prefix_cache,
            num_draft_tokens=num_draft_tokens,
        )
        self.core = EngineCore(
            self.runner, self.config, generations=self.generations, proposer=proposer, clock=self.clock
        )

    def step(self) -> list[TokenEvent]:
        events = self.core.step()
        self.core.check_invariants()
        return events

    def run(self, max_steps: int = 10_000) -> list[TokenEvent]:
        """Steps until there is no more work."""
        events: list[TokenEvent] = []
        for _ in range(max_steps):
            if not self.core.has_work:
                return events
            events += self.step()
        raise AssertionError(f"still at work after {max_steps} steps")

    def assert_idle(self) -> None:
        """Zero leaked blocks, sequences, holds and reservations."""
        self.core.check_invariants()
        load = self.core.load()
        assert (load.num_waiting, load.num_running, load.num_held, load.num_reserved) == (0, 0, 0, 0)
        assert load.num_free_blocks == load.num_blocks


def pull(source: FakePod, held: HeldBlocks, target: FakePod, block_ids: Iterable[int], num_cached: int) -> bool:
    """Copies the blocks past the cached ones as the transfer layer does; False: a generation no longer matches."""
    first = num_cached // source.config.block_size
    pairs = list(zip(held.block_ids, block_ids, strict=False))[first:]
    for remote, local in pairs:
        target.kv_blocks[local] = source.kv_blocks[remote]
    seen = [int(source.generations[block]) for block in held.block_ids[first:]]
    return seen == list(held.generations[first:])


def tokens_of(events: Iterable[TokenEvent]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for event in events:
        tokens.setdefault(event.sequence_id, []).append(event.token.token_id)
    return tokens


class Oracle:
    """Checks every event against the right answer."""

    def __init__(self) -> None:
        self._answers: dict[str, tuple[tuple[int, ...], FinishReason]] = {}
        self._num_seen: dict[str, int] = {}
        self.finished: dict[str, FinishReason] = {}

    def expect(self, spec: SequenceSpec) -> None:
        self._answers[spec.sequence_id] = fake_generate(spec.prompt_ids, spec.params, spec.output_ids)
        self._num_seen[spec.sequence_id] = len(spec.output_ids)

    def expect_all(self, specs: Mapping[str, SequenceSpec]) -> None:
        for each in specs.values():
            self.expect(each)

    def see(self, events: Iterable[TokenEvent]) -> None:
        for event in events:
            self._see(event)

    def _see(self, event: TokenEvent) -> None:
        name = event.sequence_id
        output_ids, reason = self._answers[name]
        index = self._num_seen[name]
        self._num_seen[name] += 1
        assert event.token.token_id == output_ids[index], f"{name}: token {index} is wrong"
        is_last = index == len(output_ids) - 1
        assert event.finish_reason is (reason if is_last else None), f"{name}: token {index}: {event.finish_reason}"
        if event.finish_reason is not None:
            self.finished[name] = event.finish_reason
