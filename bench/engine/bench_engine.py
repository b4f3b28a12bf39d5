"""The whole path against its peers, server against server, with one client: `python -m bench.engine.bench_engine`.

    --peers DIR     where `make bench-peers` put vLLM and llama.cpp (or PDSERVE_BENCH_PEERS); without it only we run
    --only A,B      cases: single eight streams prefill memory pd steady chunks
    --arms A,B      arms, of those that the chosen cases have
    --rounds N      every arm has its turn in every round; values are medians over rounds
    --json FILE     everything measured

All on the default model with the same prompts, greedy, ignore_eos, on two cores, which the client shares: it is
measured too (`client` cores), as are those that other processes take (`others`): with more than a few hundredths there
the figures are worth little. Who is not in turn is frozen, or idle (ours). Bars: `BAR name value op threshold
PASS|FAIL|INFO|NOT-RUN (why)`, one a line; those that the chosen cases and arms cannot tell are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import uvloop

from bench.arguments import exit_code, new_file, positive
from bench.bars import Bar, report
from bench.engine.arms import Makers
from bench.engine.catalogue import ARMS, CASE_ARMS, VLLM_CHUNKS, goals
from bench.engine.goals import ABSENT, evaluate
from bench.engine.paths import PEERS_VARIABLE, Peers
from bench.engine.session import Record, Session, own_cores
from engine.checkpoint import DEFAULT_MODEL, resolve_model
from kernels.cpu.build import build

NUM_CORES = 2


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=os.environ.get(PEERS_VARIABLE))
    parser.add_argument("--only", type=names_of(CASE_ARMS), default=list(CASE_ARMS), metavar="CASE,...")
    parser.add_argument("--arms", type=names_of(ARMS), default=list(ARMS), metavar="ARM,...")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--json", type=new_file)
    arguments = parser.parse_args(argv)
    if arguments.peers and not arguments.peers.is_dir():
        parser.error(f"--peers {arguments.peers}: no such directory; make bench-peers DIR={arguments.peers} makes it")
    return arguments


class names_of:  # noqa: N801 - used like a function, as argparse's types are
    """A comma-separated list of `known` names."""

    def __init__(self, known: Sequence[str] | dict[str, tuple[str, ...]]) -> None:
        self._known = tuple(known)

    def __call__(self, text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in self._known]:
            allowed = ", ".join(self._known)
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: must be of {allowed}")
        return names


async def measure(arguments: argparse.Namespace, run_dir: Path) -> Record:
    """Ctrl-C and SIGTERM stop what was started and raise CancelledError."""
    main = asyncio.current_task()
    assert main is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, main.cancel)
    peers = Peers(arguments.peers.resolve()) if arguments.peers else None
    makers = Makers(peers, resolve_model(DEFAULT_MODEL), run_dir, own_cores(NUM_CORES))
    session = Session(makers.make, lambda text: print(text, file=sys.stderr, flush=True))
    await session.run(arguments.only, arguments.arms, arguments.rounds)
    return session.record


def bars_of(record: Record) -> list[Bar]:
    """Without those that the chosen cases and arms cannot tell."""
    measured = {arm for each in record.rounds for arm, metric in each if metric.startswith("steady.")}
    chosen = goals([arm for arm in VLLM_CHUNKS if arm in measured])
    return [bar for bar in evaluate(chosen, record.rounds, record.not_run) if bar.why_not != ABSENT]


def table(record: Record) -> list[str]:
    """`metric arm median (least..most)` of everything measured."""
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for each in record.rounds:
        for (arm, metric), value in each.items():
            values[metric, arm].append(value)
    return [
        f"{metric} {arm} {statistics.median(found):.4g} ({min(found):.4g}..{max(found):.4g})"
        for (metric, arm), found in sorted(values.items())
    ]


def main() -> int:
    arguments = parse()
    if len(own_cores(NUM_CORES)) < NUM_CORES:
        print(f"error: needs {NUM_CORES} cores, and this process may use {len(own_cores(NUM_CORES))}", file=sys.stderr)
        return 2
    build()
    run_dir = Path(tempfile.mkdtemp(prefix="pdserve-bench-"))
    try:
        record: Record = uvloop.run(measure(arguments, run_dir))
    except asyncio.CancelledError:
        print(f"interrupted; everything was stopped; logs are in {run_dir}", file=sys.stderr)
        return 130
    if record.not_run:
        print(f"logs of what did not run are in {run_dir}", file=sys.stderr)
    else:
        shutil.rmtree(run_dir)
    print("\n".join(table(record)))
    rounds = [{f"{arm} {metric}": value for (arm, metric), value in each.items()} for each in record.rounds]
    report(bars_of(record), arguments.json, rounds=rounds, not_run=record.not_run)
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
