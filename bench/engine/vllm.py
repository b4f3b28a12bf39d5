"""vLLM's arms: its CPU build behind its own OpenAI server; colocated with a chunk size, and as a P/D pair over NIXL."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from bench.engine.paths import Peers
from bench.engine.servers import MODEL_NAME, NotRun, Program, ServerSpec, flags, free_port, python
from engine.checkpoint import resolve_dtype

KV_GIB = 1
MAX_MODEL_LEN = 8192
CHUNKED_SEQS = 32  # of one step; vLLM wants no more of them than tokens
START_TIMEOUT_S = 600.0
TCMALLOC = "libtcmalloc_minimal.so.4"  # of Debian's libtcmalloc-minimal4; vLLM's documents ask for it
LIBRARY_DIRECTORIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib")


def colocated(name: str, peers: Peers, model: Path, cores: frozenset[int], chunk: int | None = None) -> ServerSpec:
    """`chunk`: tokens of one step; None: vLLM's own choice. Raises NotRun."""
    options = {"max-num-batched-tokens": chunk, "max-num-seqs": CHUNKED_SEQS} if chunk else {}
    program = engine(name, peers, model, cores, options, {})
    return ServerSpec(
        name=name, programs=(program,), start_timeout_s=START_TIMEOUT_S, kv_pool_bytes=lambda _logs: KV_GIB << 30
    )


def disaggregated(name: str, peers: Peers, model: Path, cores: frozenset[int]) -> ServerSpec:
    """A prefill and a decode engine on one core each, and our proxy before them. Raises NotRun."""
    if not any(peers.vllm.glob("lib/python*/site-packages/nixl_*")):
        raise NotRun("vLLM's environment has no NIXL")
    if len(cores) < 2:
        raise NotRun("needs two cores")
    prefill, decode = (
        engine(f"{name}_{role}", peers, model, frozenset({core}), {"kv-transfer-config": transfer_config()}, nixl())
        for role, core in zip(("prefill", "decode"), sorted(cores), strict=False)
    )
    port = free_port()
    proxy = python("bench.engine.vllm_proxy", *flags({"port": port, "prefill": prefill.port, "decode": decode.port}))
    return ServerSpec(
        name=name,
        programs=(prefill, decode, Program(name=f"{name}_proxy", command=proxy, port=port)),
        start_timeout_s=2 * START_TIMEOUT_S,
        kv_pool_bytes=lambda _logs: 2 * KV_GIB << 30,
    )


def transfer_config() -> str:
    return json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"})


def nixl() -> dict[str, str]:
    return {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}


def engine(
    name: str, peers: Peers, model: Path, cores: frozenset[int], options: Mapping[str, object], env: Mapping[str, str]
) -> Program:
    program = peers.vllm / "bin" / "vllm"
    if not program.exists():
        raise NotRun("vLLM is not installed (make bench-peers)")
    port = free_port()
    common: dict[str, object] = {
        "served-model-name": MODEL_NAME,
        "dtype": resolve_dtype("auto"),  # on AVX2 vLLM is several times faster in float32 than in bfloat16
        "max-model-len": MAX_MODEL_LEN,
        "host": "127.0.0.1",
        "port": port,
    }
    return Program(
        name=name,
        command=(str(program), "serve", str(model), *flags({**common, **options}), "--no-enable-prefix-caching"),
        port=port,
        env={**environment(peers, cores), **env},
        cores=cores,
    )


def environment(peers: Peers, cores: frozenset[int]) -> dict[str, str]:
    preloads = [str(path) for path in (tcmalloc(), peers.vllm / "lib" / "libiomp5.so") if path and path.exists()]
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(cores))),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "LD_PRELOAD": ":".join(preloads),
    }


def tcmalloc() -> Path | None:
    return next((path for each in LIBRARY_DIRECTORIES if (path := Path(each) / TCMALLOC).exists()), None)
