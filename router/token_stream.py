"""The one stream of tokens from a decode pod, taken apart into one queue for each sequence.

The stream is opened as soon as the pod is known and again whenever it breaks. Every connection has a router id of its
own, so nothing that was started for a broken one can speak into its successor. When it breaks, stays silent for
SILENCE_S (the pod beats every 0.5 s) or speaks for another epoch, every sequence on it fails. Tokens of a sequence
that nobody waits for (its pod was given up and came back, say) are discarded, and the pod is told once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

from proto import pods_pb2, pods_pb2_grpc
from proto.errors import PodUnavailable, from_rpc
from router.background import Background, current_task_is_cancelled
from router.failures import PodLost
from router.mailbox import Mailbox
from router.snapshot import PodView

log = logging.getLogger(__name__)

SILENCE_S, SILENCE_SLICES = 2.0, 4
FIRST_RETRY_S, MAX_RETRY_S = 0.05, 1.0
MAX_REMEMBERED = 4096  # closed sequences, whose last tokens may still be on their way


SequenceStream = Mailbox[pods_pb2.SequenceTokens]  # one sequence's messages, in order; PodLost once the stream broke


class StreamReader:
    """Owned by one DecodeClient. `abort` tells the pod; `on_change` hears why a connection broke, or None: it is up."""

    def __init__(
        self,
        pod: PodView,
        router_id: str,
        stub: pods_pb2_grpc.DecodePodAsyncStub,
        abort: Callable[[str], Awaitable[None]],
        on_change: Callable[[str | None], None],
    ) -> None:
        self.connected = False
        self.router_id = ""  # of the present connection
        self.num_discarded = 0
        self._spoke = False  # in this slice
        self._call: Any = None  # the present connection
        self._cut_off = ""  # why we cancelled it
        self._pod = pod
        self._router_ids = (f"{router_id}/{number}" for number in itertools.count(1))
        self._stub = stub
        self._abort = abort
        self._on_change = on_change
        self._open: dict[str, SequenceStream] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._background = Background()
        self._task = asyncio.create_task(self._run(), name=f"tokens of {pod.pod_id}")

    def open(self, sequence_id: str) -> SequenceStream:
        """Where this sequence's tokens will arrive. Raises PodUnavailable while there is no connection."""
        if not self.connected:
            raise PodUnavailable(f"pod {self._pod.pod_id}: no token stream", pod_id=self._pod.pod_id)
        stream = self._open[sequence_id] = SequenceStream()
        return stream

    def close_sequence(self, sequence_id: str) -> None:
        """Tokens that still come are discarded. Idempotent."""
        if self._open.pop(sequence_id, None) is not None:
            self._remember(sequence_id)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        self._break("the connection was closed")
        await self._background.close(grace_s=0)

    def check_invariants(self, live: set[str]) -> None:
        """Raises AssertionError naming a sequence whose request is gone."""
        assert self._open.keys() <= live, f"streams without a request: {sorted(self._open.keys() - live)}"

    async def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            why = await self._read()
            retry_s = FIRST_RETRY_S if self.connected else min(2 * retry_s, MAX_RETRY_S)
            self._break(why)
            await asyncio.sleep(retry_s)

    async def _read(self) -> str:
        """Reads one connection to its end, and returns why it ended."""
        self.router_id = next(self._router_ids)
        call = self._stub.StreamTokens(pods_pb2.StreamTokensRequest(router_id=self.router_id))
        self._call, self._cut_off = call, ""
        silence = asyncio.create_task(self._watch_for_silence(), name=f"silence of {self._pod.pod_id}")
        try:
            while True:
                message = await call.read()
                self._spoke = True
                if not isinstance(message, pods_pb2.StepTokens):  # grpc.aio.EOF
                    return "the pod ended the token stream"
                if message.epoch != self._pod.epoch:
                    return f"another epoch answers at {self._pod.address}: {message.epoch} != {self._pod.epoch}"
                self._deliver(message)
        except asyncio.CancelledError:
            if not self._cut_off or current_task_is_cancelled():
                raise
            return self._cut_off
        except grpc.aio.AioRpcError as error:
            return f"the token stream broke: {from_rpc(error).message}"
        finally:
            silence.cancel()
            call.cancel()

    def reconnect(self, why: str) -> None:
        """Everything on the present connection fails now, unread messages included, and another one is opened."""
        if self.connected:
            self._cut_off = why
            self._break(why)
            self._call.cancel()

    async def _watch_for_silence(self) -> None:
        """Ends the connection after SILENCE_S, in slices: what this process slept through is one slice at most."""
        num_silent = 0
        while num_silent < SILENCE_SLICES:
            self._spoke = False
            await asyncio.sleep(SILENCE_S / SILENCE_SLICES)
            num_silent = 0 if self._spoke else num_silent + 1
        self._cut_off = f"no word on the token stream for {SILENCE_S} s"
        self._call.cancel()

    def _deliver(self, message: pods_pb2.StepTokens) -> None:
        if not self.connected:
            log.info("pod %s: token stream is up", self._pod.pod_id)
            self.connected = True
            self._on_change(None)
        for tokens in message.sequences:
            if (stream := self._open.get(tokens.sequence_id)) is not None:
                stream.put(tokens)
            else:
                self._discard(tokens.sequence_id)

    def _discard(self, sequence_id: str) -> None:
        self.num_discarded += 1
        if sequence_id not in self._closed:
            self._remember(sequence_id)
            self._background.spawn(self._tell(sequence_id), f"abort unknown {sequence_id}")

    async def _tell(self, sequence_id: str) -> None:
        await self._abort(sequence_id)

    def _remember(self, sequence_id: str) -> None:
        self._closed[sequence_id] = None
        while len(self._closed) > MAX_REMEMBERED:
            self._closed.popitem(last=False)

    def _break(self, why: str) -> None:
        if not self.connected:
            return
        log.warning("pod %s: %s; %d sequences on it", self._pod.pod_id, why, len(self._open))
        self.connected = False
        error = PodLost(f"pod {self._pod.pod_id}: {why}", pod_id=self._pod.pod_id)
        for stream in self._open.values():
            stream.end(error)
        self._on_change(why)
