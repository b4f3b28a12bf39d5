"""The port on which routers fetch their tokens: whose streams are open, and none twice. Not gRPC: decision 0019."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from decode_service.stream import TokenStream
from pod.spec import MAX_ID_CHARS
from proto import pods_pb2
from proto.errors import InvalidRequest, PdserveError, PodUnavailable
from proto.frames import FrameConnection


class TokenServer:
    """`on_end` is called with each open stream that ends, for whatever reason: what it was given is nobody's now."""

    def __init__(self, pod_id: str, epoch: str, on_end: Callable[[TokenStream], None]) -> None:
        self.port = 0
        self.streams: dict[str, TokenStream] = {}  # the open ones, by router id
        self.connections: set[TokenStream] = set()  # all, from accept to the end of the connection
        self.listener: asyncio.Server | None = None
        self._pod_id = pod_id
        self._epoch = epoch
        self._on_end = on_end

    async def start(self, host: str, port: int) -> None:
        """Raises OSError when it cannot listen. For port 0 a free one is taken."""
        self.listener = await asyncio.get_running_loop().create_server(self._accept, host, port)
        self.port = self.listener.sockets[0].getsockname()[1]

    def stream_of(self, router_id: str) -> TokenStream:
        """All that is asked for hangs on it, so that a dead router's calls, read late, hold nothing."""
        stream = self.streams.get(router_id)
        if stream is None:
            raise PodUnavailable(
                f"router_id = {router_id!r}: has no open token stream, connect to this pod's token port first",
                field="router_id",  # by which the router knows that its stream is not what it thinks
                pod_id=self._pod_id,
            )
        return stream

    def flush(self) -> None:
        """A step has ended: a message to each router that it concerns."""
        for stream in list(self.streams.values()):
            stream.flush()

    async def close(self) -> None:
        """Every stream gets what is left of its news and ends."""
        if self.listener is None:
            return
        self.listener.close()
        for stream in list(self.connections):
            stream.end()
        if self.connections:
            await asyncio.wait([stream.connection.closed for stream in self.connections])
        await self.listener.wait_closed()

    def _accept(self) -> FrameConnection[pods_pb2.StreamTokensRequest]:
        stream = TokenStream(self._epoch, self._greet, self._ended)
        self.connections.add(stream)
        stream.connection.closed.add_done_callback(lambda _: self.connections.discard(stream))
        return stream.connection

    def _greet(self, stream: TokenStream, hello: pods_pb2.StreamTokensRequest) -> None:
        if (error := self._refusal(hello)) is not None:
            stream.end(error)
            return
        if (replaced := self.streams.get(hello.router_id)) is not None:
            replaced.end(PodUnavailable(f"router_id = {hello.router_id!r}: opened a newer stream"))
        self.streams[hello.router_id] = stream
        stream.open(hello.router_id)

    def _refusal(self, hello: pods_pb2.StreamTokensRequest) -> PdserveError | None:
        if not 0 < len(hello.router_id) <= MAX_ID_CHARS:
            given = f"{len(hello.router_id)} characters"
            return InvalidRequest(f"router_id = {given}: must be 1 to {MAX_ID_CHARS} characters", field="router_id")
        if hello.epoch != self._epoch:
            return PodUnavailable(f"epoch = {hello.epoch!r}: this is {self._epoch!r}", pod_id=self._pod_id)
        return None

    def _ended(self, stream: TokenStream) -> None:
        if self.streams.get(stream.router_id) is stream:
            del self.streams[stream.router_id]
            self._on_end(stream)
