"""How state machines are explored, and bugs that several of them must notice."""

from __future__ import annotations

from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from engine.block_manager import BlockManager, Demand

allocate = BlockManager.allocate


def explore(machine: type[RuleBasedStateMachine], max_examples: int, phases: tuple[Phase, ...] = tuple(Phase)) -> None:
    """Raises what an invariant or a rule of `machine` raised."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=50,
            derandomize=True,
            phases=phases,
            report_multiple_bugs=False,
        ),
    )


def find_planted(machine: type[RuleBasedStateMachine]) -> None:
    """Ends at the first failure, which comes late or soon: what is drawn depends on which modules are loaded."""
    explore(machine, 4000, (Phase.generate,))


def take_without_growing_the_generation(self: BlockManager) -> int:
    """In place of BlockManager._take: a block's new owner is not told apart from the old one."""
    block = self._free.popleft() if self._free else self._evict()
    self._num_refs[block] = 1
    return block


def allocate_and_name_at_once(self: BlockManager, sequence_id: str, demand: Demand) -> int | None:
    """In place of BlockManager.allocate: blocks have their hashes before their content."""
    num_cached = allocate(self, sequence_id, demand)
    if num_cached is not None:
        self.commit(sequence_id, demand.hashes)
    return num_cached
