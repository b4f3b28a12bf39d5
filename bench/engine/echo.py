"""One bare grpc.aio stream between two processes: the floor of any hop that carries a message an engine step.

    python -m bench.engine.echo [--messages 150] [--every-ms 20]    prints its port, serves one stream
    python -m bench.engine.echo --read PORT

Both print, as their last line, the processor milliseconds that a message cost them, without the first WARM_UP ones.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

import grpc
import grpc.aio
import uvloop

from bench.arguments import positive

SERVICE, METHOD = "bench.Echo", "Stream"
PAYLOAD = bytes(512)  # 16 tokens with their sequences' ids
WARM_UP = 10


class Meter:
    """The process' time from message WARM_UP to the latest."""

    def __init__(self) -> None:
        self._num_messages = 0
        self._started_s = self._latest_s = 0.0

    def count(self) -> None:
        self._num_messages += 1
        self._latest_s = time.process_time()
        if self._num_messages == WARM_UP:
            self._started_s = self._latest_s

    @property
    def ms_per_message(self) -> float:
        return (self._latest_s - self._started_s) * 1e3 / (self._num_messages - WARM_UP)


async def serve(messages: int, every_s: float) -> None:
    """Prints its port, serves one stream and ends."""
    meter, served = Meter(), asyncio.Event()

    async def stream(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        for _ in range(messages):
            await asyncio.sleep(every_s)
            await context.write(PAYLOAD)
            meter.count()
        served.set()

    server = grpc.aio.server()
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await served.wait()
    await server.stop(1.0)
    print(meter.ms_per_message, flush=True)


async def read(port: int) -> None:
    meter = Meter()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stream: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"/{SERVICE}/{METHOD}")
        async for _ in stream(b""):
            meter.count()
    print(meter.ms_per_message, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=positive, default=150)
    parser.add_argument("--every-ms", type=positive, default=20)
    parser.add_argument("--read", type=positive, metavar="PORT", help="read from this port instead of serving")
    arguments = parser.parse_args()
    if arguments.read is None:
        uvloop.run(serve(arguments.messages, arguments.every_ms / 1000))
    else:
        uvloop.run(read(arguments.read))


if __name__ == "__main__":
    main()
