"""Plants every known mistake in the Triton kernels and shows which test notices it: `make mutants`.

    python -m tests.kernels.mutants [PART OF A NAME ...] [--jobs N]

Prints a line a mutant; ends with 1 when one survives. First the tests must pass in the tree as it is.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.kernels.mutants.catalogue import MUTANTS, ROOT
from tests.kernels.mutants.runner import first_failure, judge


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only mutants whose name holds this (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants judged at once (default: 2)")
    arguments = parser.parse_args()
    chosen = [m for m in MUTANTS if not arguments.names or any(name in m.name for name in arguments.names)]
    if not chosen:
        parser.error(f"no mutant's name holds {' or '.join(arguments.names)}")

    failure = first_failure(ROOT, sorted({mutant.tests for mutant in chosen}))
    if failure is not None:
        print(f"without any mutant {failure} fails: mend that first", file=sys.stderr)
        return 1
    survivors = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for verdict in pool.map(judge, chosen):
            survivors += verdict.caught_by is None
            print(f"{verdict.mutant.name:50} {verdict.caught_by or 'SURVIVED':60} {verdict.seconds:4.0f} s", flush=True)
    print(f"{len(chosen)} mutants, {survivors} survived")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
