"""Where a request's time went. The stages add up to the wall time by construction. Pure: `now` is an argument.

The ledger keeps one mark. Each call accounts for the time from the mark to `now`, and moves the mark: nothing is
counted twice and nothing is left out. What a pod reports of an interval is clipped to it; the rest is "other".
"""

from __future__ import annotations

from collections.abc import Mapping

from proto import inference_pb2

STAGES = ("queue", "credit", "prefill_queue", "prefill", "transfer", "decode_queue", "first_decode", "decode", "other")


class Ledger:
    """Owned by one request. Times are seconds of one monotonic clock."""

    def __init__(self, started_at: float) -> None:
        self._started_at = started_at
        self._mark = started_at
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._attempts: list[inference_pb2.Attempt] = []
        self._ttft_s = 0.0
        self.transfer_bytes = 0
        self.num_preemptions = 0
        self.num_drafts = 0
        self.num_accepted = 0

    def account(self, stage: str, now: float) -> None:
        """The time since the mark was `stage`."""
        self._seconds[stage] += self._advance(now)

    def account_parts(self, parts: Mapping[str, float], now: float) -> None:
        """The time since the mark was made of `parts`, seconds that a pod reports; the remainder is "other"."""
        left = self._advance(now)
        for stage, seconds in parts.items():
            part = min(max(seconds, 0.0), left)
            self._seconds[stage] += part
            left -= part
        self._seconds["other"] += left

    def _advance(self, now: float) -> float:
        elapsed = max(0.0, now - self._mark)
        self._mark += elapsed
        return elapsed

    def first_token(self, now: float) -> None:
        """The first token was sent to the client; later calls change nothing."""
        self._ttft_s = self._ttft_s or now - self._started_at

    def begin_attempt(self, prefill_pod: str, decode_pod: str, reason: str) -> None:
        self._attempts.append(inference_pb2.Attempt(prefill_pod=prefill_pod, decode_pod=decode_pod, reason=reason))

    def fail_attempt(self, failure: str) -> None:
        if self._attempts:
            self._attempts[-1].failure = failure

    @property
    def num_attempts(self) -> int:
        return len(self._attempts)

    @property
    def ttft_s(self) -> float:
        """0 until the first token."""
        return self._ttft_s

    @property
    def wall_s(self) -> float:
        return self._mark - self._started_at

    def to_proto(self, request_id: str, client_request_id: str, outcome: str) -> inference_pb2.Ledger:
        """Covers the time up to the last call that accounted for some. Stages of no time are left out."""
        entries = [inference_pb2.LedgerEntry(stage=s, seconds=t) for s, t in self._seconds.items() if t > 0]
        return inference_pb2.Ledger(
            request_id=request_id,
            client_request_id=client_request_id,
            wall_s=self.wall_s,
            ttft_s=self._ttft_s,
            entries=entries,
            attempts=self._attempts,
            transfer_bytes=self.transfer_bytes,
            num_preemptions=self.num_preemptions,
            num_drafts=self.num_drafts,
            num_accepted=self.num_accepted,
            outcome=outcome,
        )
