"""This project's own arms: `python -m pdserve up` in the configurations that the bars name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bench.engine.servers import MODEL_NAME, NotRun, Program, ServerSpec, flags, free_port, python
from pod.settings import PodSettings

KV_BYTES = 1 << 30
# Long prompts that wait for a prefill pod of one core have their blocks on the decode pod already.
OTHER_KV_BYTES = {"ours_pd": 2 << 30, "ours_pd_unpinned": 1 << 29}
START_TIMEOUT_S = 300.0
DECODE_POD = "decode_service"  # in the command line of the pod whose memory counts

# arm -> fields of PodSettings beyond the defaults. KV is in bfloat16 wherever it is not quantised, as the weights are.
POD_SETTINGS: dict[str, dict[str, str]] = {
    "ours": {"kv_dtype": "bf16"},
    "ours_int8": {"quantization": "int8", "kv_dtype": "int8"},
    "ours_int4": {"quantization": "int4", "kv_dtype": "bf16"},
    "ours_pd": {"kv_dtype": "bf16"},
    "ours_pd_unpinned": {"kv_dtype": "bf16"},
}
SHAPES: dict[str, tuple[str, ...]] = {
    "ours_pd": ("--prefill", "1", "--decode", "1"),
    "ours_pd_unpinned": ("--prefill", "1", "--decode", "1", "--no-pin"),
}


def spec(arm: str, model: Path, run_dir: Path, cores: frozenset[int]) -> ServerSpec:
    """Raises NotRun when the pods of this tree lack a setting that the arm needs."""
    settings = POD_SETTINGS[arm]
    if missing := [name for name in settings if name not in PodSettings.model_fields]:
        raise NotRun(f"pods have no setting {' or '.join(missing)}")
    port, kv_bytes = free_port(), OTHER_KV_BYTES.get(arm, KV_BYTES)
    options: dict[str, object] = {
        "model": model,
        "served-model-name": MODEL_NAME,
        "port": port,
        "router-port": 0,
        "kv-memory": kv_bytes,
        "run-dir": run_dir / arm,
        "log-level": "warning",
    }
    shape = SHAPES.get(arm, ("--colocated",))
    return ServerSpec(
        name=arm,
        programs=(
            Program(
                name="up",
                command=python("pdserve", "up", *flags(options), *shape),
                port=port,
                env=environment(settings),
                cores=cores,
            ),
        ),
        start_timeout_s=START_TIMEOUT_S,
        kv_pool_bytes=lambda _logs: kv_bytes,
        freezable=False,  # a frozen pod is given up by its router; idle, they take no time
    )


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Pods read what `up` does not pass on from here. Prefix caches are off in every server of the bench."""
    return {f"PDSERVE_{name.upper()}": value for name, value in {**settings, "prefix_cache": "false"}.items()}
