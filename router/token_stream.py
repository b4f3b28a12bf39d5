"""The one stream of tokens from a decode pod, taken apart into one queue for each sequence.

The stream is a connection of its own (frames of `pods.proto`, no gRPC), opened as soon as the pod is known and answers
calls, and again whenever it breaks. Every connection has a router id of its own, so nothing that was started for a
broken one can speak into its successor. When it breaks, stays silent for SILENCE_S (the pod beats every 0.5 s, and so
do we) or speaks for another epoch, every sequence on it fails; likewise when the pod ends it because this router stood
still, but then nothing is wrong with the pod. Tokens of a sequence that nobody waits for (its pod was given up and came
back, say) are discarded, and the pod is told once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from proto import pods_pb2
from proto.errors import PodUnavailable
from proto.frames import FrameConnection, connect
from proto.service import MAX_MESSAGE_BYTES
from router.background import Background
from router.failures import CutOff, PodLost
from router.mailbox import Mailbox
from router.snapshot import PodView

log = logging.getLogger(__name__)

SILENCE_S, SILENCE_SLICES = 2.0, 4
FIRST_RETRY_S, MAX_RETRY_S = 0.05, 1.0
MAX_REMEMBERED = 4096  # closed sequences, whose last tokens may still be on their way
BEAT = pods_pb2.StreamTokensRequest()


SequenceStream = Mailbox[pods_pb2.SequenceTokens]  # one sequence's messages, in order; why it broke at the end


class StreamReader:
    """Owned by one DecodeClient. `answers` returns once the pod answers calls; `abort` tells it to end a sequence.

    `on_change` hears why a connection broke, or None: it is up.
    """

    def __init__(
        self,
        pod: PodView,
        router_id: str,
        answers: Callable[[], Awaitable[None]],
        abort: Callable[[str], Awaitable[None]],
        on_change: Callable[[PodUnavailable | None], None],
    ) -> None:
        self.connected = False
        self.router_id = ""  # of the present connection
        self._connection = self._new_connection()  # the present one
        self._pod = pod
        self._router_ids = (f"{router_id}/{number}" for number in itertools.count(1))
        self._answers = answers
        self._abort = abort
        self._on_change = on_change
        self._why_down = PodUnavailable(f"pod {pod.pod_id}: no token stream", pod_id=pod.pod_id)
        self._open: dict[str, SequenceStream] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._retry_s = FIRST_RETRY_S
        self._background = Background()
        self._task = asyncio.create_task(self._run(), name=f"tokens of {pod.pod_id}")

    def open(self, sequence_id: str) -> SequenceStream:
        """Where this sequence's tokens will arrive. While there is no connection, raises why the last one broke."""
        if not self.connected:
            raise self._why_down
        stream = self._open[sequence_id] = SequenceStream()
        return stream

    def close_sequence(self, sequence_id: str) -> None:
        """Tokens that still come are discarded. Idempotent."""
        if self._open.pop(sequence_id, None) is not None:
            self._remember(sequence_id)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        self._break(PodLost, "the connection was closed")
        await self._background.close(grace_s=0)

    def check_invariants(self, live: set[str]) -> None:
        """Raises AssertionError naming a sequence whose request is gone."""
        assert self._open.keys() <= live, f"streams without a request: {sorted(self._open.keys() - live)}"

    async def _run(self) -> None:
        while True:
            why = await self._read()
            self._break(PodLost, why)
            await asyncio.sleep(self._retry_s)
            self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)

    def _new_connection(self) -> FrameConnection[pods_pb2.StepTokens]:
        return FrameConnection(pods_pb2.StepTokens, self._on_message, max_bytes=MAX_MESSAGE_BYTES)

    async def _read(self) -> str:
        """Opens one connection, lives through it, and returns why it ended."""
        self.router_id = next(self._router_ids)
        connection = self._connection = self._new_connection()
        try:
            async with asyncio.timeout(SILENCE_S):
                await self._answers()
                await connect(connection, self._pod.token_address)
            connection.send(pods_pb2.StreamTokensRequest(router_id=self.router_id, epoch=self._pod.epoch))
            return await self._until_closed(connection)
        except (OSError, TimeoutError) as error:
            return f"cannot open the token stream at {self._pod.token_address}: {error}"
        finally:
            connection.abort("the router has ended it")

    def cut_off(self, why: str) -> None:
        """The pod has ended the present connection: all on it fails, what is unread included; another one is opened."""
        why = f"the pod has ended the token stream: {why}"
        self._break(CutOff, why)
        self._connection.abort(why)

    async def _until_closed(self, connection: FrameConnection[pods_pb2.StepTokens]) -> str:
        """Waits SILENCE_S for a word, in slices: what this process slept through is one slice at most."""
        num_silent = 0
        while num_silent < SILENCE_SLICES:
            connection.heard = False
            await asyncio.wait([connection.closed], timeout=SILENCE_S / SILENCE_SLICES)
            if connection.closed.done():
                return connection.closed.result()
            num_silent = 0 if connection.heard else num_silent + 1
            connection.send(BEAT)
        return f"no word on the token stream for {SILENCE_S} s"

    def _on_message(self, message: pods_pb2.StepTokens) -> None:
        if message.HasField("error"):
            self.cut_off(message.error.message)
        elif message.epoch != self._pod.epoch:
            answers = f"another epoch answers at {self._pod.token_address}"
            self._connection.abort(f"{answers}: {message.epoch} != {self._pod.epoch}")
        else:
            self._deliver(message)

    def _deliver(self, message: pods_pb2.StepTokens) -> None:
        if not self.connected:
            log.info("pod %s: token stream is up", self._pod.pod_id)
            self.connected = True
            self._retry_s = FIRST_RETRY_S
            self._on_change(None)
        for tokens in message.sequences:
            if (stream := self._open.get(tokens.sequence_id)) is not None:
                stream.put(tokens)
            else:
                self._discard(tokens.sequence_id)

    def _discard(self, sequence_id: str) -> None:
        if sequence_id not in self._closed:
            self._remember(sequence_id)
            self._background.spawn(self._tell(sequence_id), f"abort unknown {sequence_id}")

    async def _tell(self, sequence_id: str) -> None:
        await self._abort(sequence_id)

    def _remember(self, sequence_id: str) -> None:
        self._closed[sequence_id] = None
        while len(self._closed) > MAX_REMEMBERED:
            self._closed.popitem(last=False)

    def _break(self, kind: type[PodUnavailable], why: str) -> None:
        if not self.connected:
            return
        log.warning("pod %s: %s; %d sequences on it", self._pod.pod_id, why, len(self._open))
        self.connected = False
        error = self._why_down = kind(f"pod {self._pod.pod_id}: {why}", pod_id=self._pod.pod_id)
        for stream in self._open.values():
            stream.end(error)
        self._on_change(error)
