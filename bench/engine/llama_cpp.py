"""llama.cpp's arms: `llama-server` on the default model, as F16 or quantised to 4 bits."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from bench.engine.paths import Peers
from bench.engine.servers import MODEL_NAME, NotRun, Program, ServerSpec, flags, free_port

START_TIMEOUT_S = 180.0
SLOT_TOKENS = 5120
KV_LINE = re.compile(r"KV buffer size = +([0-9.]+) MiB")


def spec(name: str, peers: Peers, gguf: Path, cores: frozenset[int], slots: int) -> ServerSpec:
    """`slots`: how many streams it can hold; each has its cache from the start. Raises NotRun."""
    program = peers.llama_program("llama-server")
    if program is None:
        raise NotRun("llama.cpp is not installed (make bench-peers)")
    port = free_port()
    options: dict[str, object] = {
        "model": gguf,
        "alias": MODEL_NAME,
        "host": "127.0.0.1",
        "port": port,
        "threads": len(cores),
        "threads-batch": len(cores),
        "parallel": slots,
        "ctx-size": slots * SLOT_TOKENS,
        "batch-size": 2048,
        "ubatch-size": 512,
        "flash-attn": "on",
    }
    return ServerSpec(
        name=name,
        programs=(
            Program(
                name=name,
                command=(str(program), *flags(options), "--no-kv-unified", "--no-cache-prompt"),
                port=port,
                cores=cores,
            ),
        ),
        start_timeout_s=START_TIMEOUT_S,
        kv_pool_bytes=lambda logs: kv_bytes((logs / f"{name}.log").read_text(errors="replace")),
    )


def kv_bytes(log: str) -> int:
    """What the server says its KV buffers take."""
    return int(sum(float(size) for size in KV_LINE.findall(log)) * 2**20)


def quantised(peers: Peers, source: Path, kind: str) -> Path:
    """The GGUF file `source` as `kind` (F16, Q4_0, ...), made once. Raises NotRun."""
    target = peers.gguf / f"{source.stem}-{kind}.gguf"
    if target.exists():
        return target
    program = peers.llama_program("llama-quantize")
    if program is None:
        raise NotRun("llama.cpp is not installed (make bench-peers)")
    peers.gguf.mkdir(exist_ok=True)
    partial = target.with_suffix(".partial")
    command = [str(program), "--allow-requantize", str(source), str(partial), kind]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise NotRun(f"llama-quantize {kind}: {result.stderr.strip().splitlines()[-1:]}")
    partial.rename(target)
    return target
