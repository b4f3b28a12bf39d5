"""Rows of the compile table: made for a target, judged, and kept as Markdown that the next run is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast, get_args

from tests.kernels.compiled.configurations import Configuration, configurations
from tests.kernels.compiled.driver import Compiled, compiled_launches
from tests.kernels.compiled.expectations import broken
from tests.kernels.compiled.machine_code import Figures, figures
from tests.kernels.compiled.targets import TARGETS, Matrix, Target

HEADER = "| target | kernel | configuration | warps | registers | spilled | shared | matrix | wide loads |"
RULE = "|---|---|---|---|---|---|---|---|---|"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kernel of one configuration on one target."""

    target: str
    kernel: str
    configuration: str
    figures: Figures

    @property
    def name(self) -> str:
        return f"{self.target} {self.kernel} ({self.configuration})"

    def markdown(self) -> str:
        f = self.figures
        matrix = "none" if f.matrix == "none" else f"{f.matrix} x {f.num_matrix}"
        cells = (self.target, self.kernel, self.configuration, f.warps, f.registers, f.spill_bytes, f.shared_bytes)
        return f"| {' | '.join(map(str, cells))} | {matrix} | {f.wide_share:.0%} |"


@dataclass(frozen=True, slots=True)
class Result:
    """What one target's compilation gave: its rows, and what is wrong with them, a line each."""

    rows: list[Row]
    violations: list[str]


def compile_rows(target_name: str, quick: bool, only: str) -> Result:
    """Compiles for a target what has `only` in its name, or the part of it that CI does. Takes seconds a row."""
    target = TARGETS[target_name]
    rows, violations = [], []
    with ThreadPoolExecutor(max_workers=2) as disassemblers:  # they are processes of their own
        pending = [
            (configuration, kernel, disassemblers.submit(figures, compiled))
            for configuration in _configurations(target_name, quick, only)
            for kernel, compiled in _compiled(target, configuration)
        ]
        for configuration, kernel, future in pending:
            row = Row(target=target_name, kernel=kernel, configuration=configuration.name, figures=future.result())
            rows.append(row)
            violations += [f"{row.name}: {text}" for text in broken(target, kernel, configuration, row.figures)]
    return Result(rows, violations)


def _configurations(target_name: str, quick: bool, only: str) -> Iterator[Configuration]:
    for configuration in configurations():
        targets = configuration.quick_on if quick else configuration.targets
        if only in configuration.name and (targets is None or target_name in targets):
            yield configuration


def _compiled(target: Target, configuration: Configuration) -> list[Compiled]:
    try:
        return compiled_launches(target, configuration.launch)
    except Exception as error:
        error.add_note(f"while compiling {configuration.name} for {target.name}")
        raise


def to_markdown(rows: Iterable[Row]) -> str:
    return "\n".join((HEADER, RULE, *(row.markdown() for row in rows))) + "\n"


def from_markdown(text: str) -> list[Row]:
    """The rows that `to_markdown` wrote, wherever they stand. Raises ValueError for a line it did not write."""
    lines = text.splitlines()
    if HEADER not in lines:
        raise ValueError(f"the table's header is missing: expected {HEADER!r}")
    start = lines.index(HEADER) + 2
    return [_parse(line) for line in lines[start:] if line.startswith("|")]


def merged(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """`old` with the rows of `new` in place of those of the same name, in the order of targets and configurations."""
    rows = {row.name: row for row in (*old, *new)}
    order = [configuration.name for configuration in configurations()]
    known = [row for row in rows.values() if row.target in TARGETS and row.configuration in order]
    return sorted(known, key=lambda row: (list(TARGETS).index(row.target), order.index(row.configuration)))


def regressions(rows: Iterable[Row], reference: Iterable[Row]) -> Iterator[str]:
    """Where `rows` are worse than the table says, beyond what a compiler's mood explains, or not in it."""
    known = {row.name: row.figures for row in reference}
    for row in rows:
        if row.name not in known:
            yield f"{row.name}: not in the table; write it anew with `make compile-table ARGS=--write`"
            continue
        yield from (f"{row.name}: {reason}" for reason in _worse(row.figures, known[row.name]))


def stale(rows: Iterable[Row], reference: Iterable[Row]) -> Iterator[str]:
    """Rows of the table that a complete run did not produce any more."""
    names = {row.name for row in rows}
    yield from (f"{row.name}: in the table, but no longer compiled" for row in reference if row.name not in names)


def _worse(new: Figures, old: Figures) -> Iterator[str]:
    for name, value, limit in (
        ("registers", new.registers, old.registers * 1.1 + 4),
        ("spilled bytes", new.spill_bytes, old.spill_bytes),
        ("shared bytes", new.shared_bytes, old.shared_bytes * 1.02),
    ):
        if value > limit:
            yield f"{name} = {value}, in the table it was at most {limit:.0f} with tolerance"
    order = get_args(Matrix)
    if order.index(new.matrix) < order.index(old.matrix):
        yield f"matrix = {new.matrix}, in the table it was {old.matrix}"
    if new.wide_share < old.wide_share - 0.02:
        yield f"wide loads = {new.wide_share:.0%}, in the table {old.wide_share:.0%}"


def _parse(line: str) -> Row:
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    if len(cells) != HEADER.count("|") - 1:
        raise ValueError(f"a row of {len(cells)} cells in the table: {line!r}")
    target, kernel, configuration, *numbers, matrix, wide = cells
    kind, _, count = matrix.partition(" x ")
    if kind not in get_args(Matrix):
        raise ValueError(f"matrix = {kind!r} in the table: must be one of {', '.join(get_args(Matrix))}")
    warps, registers, spill_bytes, shared_bytes = map(int, numbers)
    return Row(
        target=target,
        kernel=kernel,
        configuration=configuration,
        figures=Figures(
            warps=warps,
            registers=registers,
            spill_bytes=spill_bytes,
            shared_bytes=shared_bytes,
            matrix=cast(Matrix, kind),
            num_matrix=int(count or 0),
            wide_share=int(wide.removesuffix("%")) / 100,
        ),
    )
