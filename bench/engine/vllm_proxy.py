"""What stands before a vLLM P/D pair: `python -m bench.engine.vllm_proxy --port P --prefill P1 --decode P2`.

vLLM has engines that can hand KV over, and leaves it to a proxy to ask the first for one token and the second for the
answer, with the parameters of the hand-off that the first returned. The answer's bytes go through untouched, so that
the proxy costs the pair as little as possible.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping
from typing import Any

from bench.arguments import positive

COPY_BYTES = 1 << 16
HAND_OFF = "kv_transfer_params"
ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def prefill_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """What the prefill engine is asked: the same prompt, one token, in one piece."""
    kept = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    return {**kept, "max_tokens": 1, "stream": False, HAND_OFF: ASK}


def decode_body(body: Mapping[str, Any], prefilled: Mapping[str, Any]) -> dict[str, Any]:
    """What the decode engine is asked. Raises ValueError when the prefill engine offered no KV."""
    if not prefilled.get(HAND_OFF):
        raise ValueError(f"the prefill engine's answer has no {HAND_OFF}: {str(prefilled)[:300]}")
    return {**body, HAND_OFF: prefilled[HAND_OFF]}


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """Path and body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
    return head[0].split()[1], await reader.readexactly(int(fields.get("content-length", 0)))


async def send(port: int, method: str, path: str, body: Mapping[str, Any] | None = None) -> Streams:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    payload = json.dumps(body).encode() if body is not None else b""
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode() + payload)
    return reader, writer


async def whole(port: int, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of an answer that is not streamed. Raises ValueError for any status but 200."""
    reader, writer = await send(port, "POST", path, body)
    try:
        head, _, content = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    if b" 200 " not in head.split(b"\r\n")[0]:
        raise ValueError(content[:500].decode(errors="replace"))
    answer: dict[str, Any] = json.loads(content)
    return answer


async def copy(source: Streams, target: asyncio.StreamWriter) -> None:
    reader, writer = source
    try:
        while chunk := await reader.read(COPY_BYTES):
            target.write(chunk)
            await target.drain()
    finally:
        writer.close()


class Proxy:
    def __init__(self, prefill_port: int, decode_port: int) -> None:
        self._prefill = prefill_port
        self._decode = decode_port

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: one request."""
        try:
            path, body = await read_request(reader)
            answer = await self._answer(path, json.loads(body) if body else None)
            await copy(answer, writer)
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            text = json.dumps({"error": {"message": str(error)}}).encode()
            head = f"HTTP/1.1 502 Bad Gateway\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode() + text)
        finally:
            writer.close()

    async def _answer(self, path: str, body: dict[str, Any] | None) -> Streams:
        if body is None:
            return await send(self._decode, "GET", path)
        prefilled = await whole(self._prefill, path, prefill_body(body))
        return await send(self._decode, "POST", path, decode_body(body, prefilled))


async def run(port: int, prefill_port: int, decode_port: int) -> None:
    server = await asyncio.start_server(Proxy(prefill_port, decode_port).serve, "127.0.0.1", port)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("port", "prefill", "decode"):
        parser.add_argument(f"--{name}", type=positive, required=True)
    arguments = parser.parse_args()
    asyncio.run(run(arguments.port, arguments.prefill, arguments.decode))


if __name__ == "__main__":
    main()
