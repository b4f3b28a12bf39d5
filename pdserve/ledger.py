"""A request's ledger as a table that adds up."""

from __future__ import annotations

from dataclasses import dataclass

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from proto import inference_pb2 as pb

BAR_WIDTH = 16  # the whole table fits into 80 columns

# What each stage of proto/inference.proto's LedgerEntry is, in words.
MEANING = {
    "queue": "waits at the router",
    "credit": "decode blocks reserved",
    "prefill_queue": "waits at the prefill pod",
    "prefill": "prompt computed",
    "transfer": "KV blocks moved",
    "decode_queue": "waits at the decode pod",
    "first_decode": "first decode step",
    "decode": "all other decode steps",
    "other": "between the stages",
}


@dataclass(frozen=True, slots=True)
class Row:
    stage: str
    seconds: float
    begins_s: float  # the sum of the rows before
    share: float  # of the wall time


def rows(ledger: pb.Ledger) -> list[Row]:
    result: list[Row] = []
    begins_s = 0.0
    for entry in ledger.entries:
        share = entry.seconds / ledger.wall_s if ledger.wall_s > 0 else 0.0
        result.append(Row(entry.stage, entry.seconds, begins_s, share))
        begins_s += entry.seconds
    return result


def difference_s(ledger: pb.Ledger) -> float:
    """Wall time minus the sum of the stages: under a millisecond, or the ledger is wrong."""
    return ledger.wall_s - sum(entry.seconds for entry in ledger.entries)


def bar(begins: float, share: float, width: int = BAR_WIDTH) -> str:
    """A Gantt bar: `share` of `width`, beginning at `begins` (both 0..1); whatever took time shows at least a mark."""
    first = min(round(begins * width), width - 1)
    length = max(1 if share > 0 else 0, round(share * width))
    return (" " * first + "█" * min(length, width - first)).ljust(width)


def render(ledger: pb.Ledger) -> RenderableType:
    title = Text(f"request {ledger.request_id}: {ledger.outcome}")
    return Group(title, _table(ledger), *(Text(line) for line in notes(ledger)))


def _table(ledger: pb.Ledger) -> Table:
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), show_footer=True)
    total_s = sum(entry.seconds for entry in ledger.entries)
    table.add_column("stage", footer="sum", no_wrap=True)
    table.add_column("ms", justify="right", footer=f"{total_s * 1e3:.2f}", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("when", no_wrap=True)
    table.add_column("what", no_wrap=True)
    for row in rows(ledger):
        begins = row.begins_s / ledger.wall_s if ledger.wall_s > 0 else 0.0
        cells = (f"{row.seconds * 1e3:.2f}", f"{row.share:.1%}", bar(begins, row.share), MEANING.get(row.stage, ""))
        table.add_row(row.stage, *cells)
    return table


def notes(ledger: pb.Ledger) -> list[str]:
    """The lines under the table: whether it adds up, first token, transfer, who served it."""
    wall_ms, difference_ms = ledger.wall_s * 1e3, abs(difference_s(ledger)) * 1e3
    lines = [f"wall time {wall_ms:.2f} ms; it differs from the sum by {difference_ms:.3f} ms"]
    if ledger.ttft_s > 0:
        lines.append(f"time to first token {ledger.ttft_s * 1e3:.1f} ms from the request's arrival at the router")
    if ledger.transfer_bytes:
        lines.append(f"transferred {ledger.transfer_bytes / 1e6:.2f} MB of KV")
    if ledger.num_preemptions:
        lines.append(f"preempted {ledger.num_preemptions} times")
    if ledger.num_drafts:
        lines.append(f"{ledger.num_accepted} of {ledger.num_drafts} drafts were right, and saved a step each")
    return lines + [_attempt(i, attempt) for i, attempt in enumerate(ledger.attempts, 1)]


def _attempt(number: int, attempt: pb.Attempt) -> str:
    who = f"prefill on {attempt.prefill_pod}, decode on {attempt.decode_pod}"
    if not attempt.prefill_pod:
        who = f"prefill and decode on {attempt.decode_pod}"
    failure = f"; failed: {attempt.failure}" if attempt.failure else ""
    return f"attempt {number}: {who} ({attempt.reason}){failure}"
