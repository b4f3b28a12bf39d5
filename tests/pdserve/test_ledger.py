"""The ledger as a table: it adds up, bars follow one another, failures are told."""

from __future__ import annotations

import pytest
from rich.console import Console

from pdserve import ledger
from proto import inference_pb2 as pb


def make(**stages: float) -> pb.Ledger:
    entries = [pb.LedgerEntry(stage=stage, seconds=seconds) for stage, seconds in stages.items()]
    attempt = pb.Attempt(prefill_pod="p0", decode_pod="d0", reason="least loaded")
    return pb.Ledger(
        request_id="r1",
        wall_s=sum(stages.values()),
        ttft_s=0.2,
        entries=entries,
        attempts=[attempt],
        transfer_bytes=1_500_000,
        outcome="stop",
    )


def shown(value: pb.Ledger) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(ledger.render(value))
    return capture.get()


def test_rows_follow_one_another() -> None:
    rows = ledger.rows(make(queue=0.1, prefill=0.3, decode=0.6))
    assert [row.stage for row in rows] == ["queue", "prefill", "decode"]
    assert [row.begins_s for row in rows] == pytest.approx([0.0, 0.1, 0.4])
    assert [row.share for row in rows] == pytest.approx([0.1, 0.3, 0.6])


def test_the_difference_is_what_the_stages_leave_out() -> None:
    value = make(queue=0.1, prefill=0.3)
    value.wall_s += 0.005
    assert ledger.difference_s(value) == pytest.approx(0.005)


@pytest.mark.parametrize(
    ("begins", "share", "expected"),
    [(0.0, 1.0, "██████████"), (0.5, 0.2, "     ██   "), (0.0, 0.001, "█         "), (1.0, 0.001, "         █")],
)
def test_bars(begins: float, share: float, expected: str) -> None:
    assert ledger.bar(begins, share, width=10) == expected


def test_bar_of_nothing_is_blank() -> None:
    assert ledger.bar(0.3, 0.0, width=10).strip() == ""


def test_rendered_table_says_everything() -> None:
    text = shown(make(prefill=0.25, decode=0.75))
    for part in ("request r1: stop", "250.00", "75.0%", "1000.00", "wall time 1000.00 ms", "the sum by 0.000 ms"):
        assert part in text
    assert "time to first token 200.0 ms" in text
    assert "transferred 1.50 MB of KV" in text
    assert "attempt 1: prefill on p0, decode on d0 (least loaded)" in text


def test_a_failed_attempt_and_a_colocated_one() -> None:
    value = make(prefill=1.0)
    value.attempts[0].failure = "pod lost"
    value.attempts.append(pb.Attempt(decode_pod="d1", reason="no prefill pod"))
    text = shown(value)
    assert "failed: pod lost" in text
    assert "attempt 2: prefill and decode on d1 (no prefill pod)" in text


def test_an_empty_ledger_divides_by_nothing() -> None:
    assert ledger.rows(pb.Ledger(entries=[pb.LedgerEntry(stage="queue")]))[0].share == 0.0
    assert "request" in shown(pb.Ledger())
