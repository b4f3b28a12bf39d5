"""One router's connection to a decode pod: a hello comes in, then a message an engine step goes out, with new tokens.

    connected ──hello──> open ──> ended      no hello within HELLO_S, or one that is refused: ended without being open

Nothing stands between a step and the socket: `flush` writes. A router that falls behind gets several steps in one
message; what it has not read is bounded: beyond MAX_PENDING_TOKENS the stream ends. Both sides beat. A router that has
frozen or vanished is silent, and its stream ends after MAX_SILENT_BEATS of ours; counted so that the time in which
this process itself stood still is one beat at most.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from proto import pods_pb2
from proto.errors import Overloaded, PdserveError, PodUnavailable
from proto.frames import FrameConnection

log = logging.getLogger(__name__)

HELLO_S = 5.0
HEARTBEAT_S = 0.5
MAX_SILENT_BEATS = 16
MAX_HELLO_BYTES = 4096
MAX_PENDING_TOKENS = 65_536


class TokenStream:
    """Owned by a TokenServer. `on_hello` answers with `open` or `end`; `on_end` is called once, while it ends."""

    def __init__(
        self,
        epoch: str,
        on_hello: Callable[[TokenStream, pods_pb2.StreamTokensRequest], None],
        on_end: Callable[[TokenStream], None],
        *,
        max_pending_tokens: int = MAX_PENDING_TOKENS,
    ) -> None:
        self.router_id = ""  # until it is open
        self.ended = False
        self.connection = FrameConnection(
            pods_pb2.StreamTokensRequest, self._on_message, max_bytes=MAX_HELLO_BYTES, on_writable=self.flush
        )
        self.connection.closed.add_done_callback(self._on_closed)
        self._on_hello = on_hello
        self._on_end = on_end
        self._max_pending_tokens = max_pending_tokens
        self._epoch = epoch
        self._news = pods_pb2.StepTokens(epoch=epoch)  # the next message
        self._by_sequence: dict[str, pods_pb2.SequenceTokens] = {}  # what is in it
        self._num_silent = 0  # of our beats
        self._timer = asyncio.get_running_loop().call_later(HELLO_S, self._no_hello)

    def open(self, router_id: str) -> None:
        """Says so to the router, and begins to beat."""
        self.router_id = router_id
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._beat)
        self._send()

    def news_of(self, step: int, sequence_id: str) -> pods_pb2.SequenceTokens:
        """Where to add what engine step `step` has made of a sequence; `flush` sends it."""
        self._news.step = step
        news = self._by_sequence.get(sequence_id)
        if news is None:
            news = self._by_sequence[sequence_id] = self._news.sequences.add()
            news.sequence_id = sequence_id
        return news

    def flush(self) -> None:
        """Sends the news, if any and if the router keeps up. Ends the stream when there is too much of it."""
        if not self._by_sequence:
            return
        if self.connection.can_write:
            self._send()
        elif self._num_pending_tokens > self._max_pending_tokens:
            self.end(Overloaded("the router reads its token stream too slowly"))

    @property
    def _num_pending_tokens(self) -> int:
        return sum(len(news.tokens) for news in self._by_sequence.values())

    def end(self, error: PdserveError | None = None) -> None:
        """No more tokens: the router gets the news, then the end; or `error` at once. Idempotent."""
        if self.ended:
            return
        self.ended = True
        self._timer.cancel()
        if error is not None:
            self._clear()
            self._news.error.CopyFrom(error.to_info())
        if error is not None or self._by_sequence:
            self._send()
        self.connection.close(error.message if error is not None else "this pod ended it")
        self._on_end(self)

    def _send(self) -> None:
        """A message without sequences is a beat."""
        self.connection.send(self._news)
        self._clear()

    def _clear(self) -> None:
        """Makes a message anew: protobuf frees what was ever put into one only with the whole of it."""
        self._news = pods_pb2.StepTokens(epoch=self._epoch)
        self._by_sequence.clear()

    def _beat(self) -> None:
        self._num_silent = 0 if self.connection.heard else self._num_silent + 1
        self.connection.heard = False
        if self._num_silent >= MAX_SILENT_BEATS:
            self.end(PodUnavailable(f"no word from the router for {MAX_SILENT_BEATS * HEARTBEAT_S:.0f} s"))
            return
        if self.connection.can_write:
            self._send()
        self._timer = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._beat)

    def _no_hello(self) -> None:
        self.end(PodUnavailable(f"no hello within {HELLO_S:.0f} s"))

    def _on_message(self, request: pods_pb2.StreamTokensRequest) -> None:
        """The first is the hello; all others are beats, which the connection counts."""
        if not self.router_id:
            self._on_hello(self, request)

    def _on_closed(self, closed: asyncio.Future[str]) -> None:
        peer, why = self.connection.peer, closed.result()
        if self.router_id:
            log.info("router %r at %s: its token stream ended: %s", self.router_id, peer, why)
        else:
            log.warning("refused %s on the token port: %s", peer, why)
        self.end(PodUnavailable("the connection has ended"))
