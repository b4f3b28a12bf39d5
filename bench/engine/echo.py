"""One bare connection of frames between two processes: the floor of any hop that carries a message an engine step.

    python -m bench.engine.echo [--messages 150] [--every-ms 20]    prints its port, serves one stream
    python -m bench.engine.echo --read PORT

Both print, as their last line, the processor milliseconds that a message cost them; WARM_UP uncounted ones come first.
"""

from __future__ import annotations

import argparse
import asyncio
import time

import uvloop

from bench.arguments import positive
from proto import pods_pb2
from proto.frames import FrameConnection, connect

MESSAGE = pods_pb2.StepTokens(epoch="x" * 512)  # as large as 16 tokens with their sequences' ids
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
    """Prints its port, serves one connection and ends."""
    meter, connected = Meter(), asyncio.Event()
    connection = FrameConnection(pods_pb2.StepTokens, lambda _: connected.set(), max_bytes=1024)
    server = await asyncio.get_running_loop().create_server(lambda: connection, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await connected.wait()
    for _ in range(WARM_UP + messages):
        await asyncio.sleep(every_s)
        connection.send(MESSAGE)
        meter.count()
    connection.close("done")
    await connection.closed
    server.close()
    print(meter.ms_per_message, flush=True)


async def read(port: int) -> None:
    meter = Meter()
    connection = FrameConnection(pods_pb2.StepTokens, lambda _: meter.count(), max_bytes=1024)
    await connect(connection, f"127.0.0.1:{port}")
    connection.send(pods_pb2.StepTokens())
    await connection.closed
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
