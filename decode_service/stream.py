"""The one stream between a decode pod and a router: a message an engine step, with every sequence's new tokens.

A reader that falls behind gets several steps in one message. What it has not read is bounded: beyond MAX_PENDING_TOKENS
the stream ends, and with it everything that was started for it.
"""

from __future__ import annotations

import asyncio

from proto import pods_pb2
from proto.errors import PdserveError

HEARTBEAT_S = 0.5
MAX_PENDING_TOKENS = 65_536


class TokenStream:
    def __init__(self, router_id: str, epoch: str, *, max_pending_tokens: int = MAX_PENDING_TOKENS) -> None:
        self.router_id = router_id
        self.ended = False
        self._epoch = epoch
        self._max_pending_tokens = max_pending_tokens
        self._step = 0
        self._pending: dict[str, pods_pb2.SequenceTokens] = {}
        self._num_pending_tokens = 0
        self._error: PdserveError | None = None
        self._wake = asyncio.Event()
        self._beat: asyncio.TimerHandle | None = None  # from the first next() to the end

    @property
    def overflown(self) -> bool:
        return self._num_pending_tokens > self._max_pending_tokens

    def push(self, step: int, message: pods_pb2.SequenceTokens) -> None:
        """Adds one sequence's news of engine step `step` to the next message; does nothing once ended."""
        if self.ended:
            return
        self._step = step
        self._num_pending_tokens += len(message.tokens)
        if (pending := self._pending.get(message.sequence_id)) is None:
            self._pending[message.sequence_id] = message
        else:
            pending.MergeFrom(message)
        self._wake.set()

    def end(self, error: PdserveError | None = None) -> None:
        """No more tokens: the reader gets what is pending, then the end, or `error` at once."""
        if self.ended:
            return
        self.ended = True
        self._error = error
        if self._beat is not None:
            self._beat.cancel()
        self._wake.set()

    async def next(self) -> pods_pb2.StepTokens | None:
        """The next message, without tokens (a heartbeat) when it is time; None at the end. Raises end()'s error."""
        if self._beat is None and not self.ended:
            self._keep_beating()
        await self._wake.wait()
        if self._error is not None:
            self._pending.clear()
            raise self._error
        if self.ended and not self._pending:
            return None
        return self._take()

    def _keep_beating(self) -> None:
        """Wakes the reader in fixed intervals: a timeout for each message would cost more than the message."""
        self._beat = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._on_beat)

    def _on_beat(self) -> None:
        self._wake.set()
        self._keep_beating()

    def _take(self) -> pods_pb2.StepTokens:
        message = pods_pb2.StepTokens(epoch=self._epoch, step=self._step, sequences=self._pending.values())
        self._pending.clear()
        self._num_pending_tokens = 0
        if not self.ended:
            self._wake.clear()
        return message
