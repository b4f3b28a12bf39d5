"""`python -m pdserve model`, which is also a part of every start.

A model is found, converted once with a progress bar, and its need of memory is known before anything starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from engine.checkpoint import (
    CheckpointError,
    estimate_memory_bytes,
    model_info,
    resolve_dtype,
    resolve_model,
    weights_revision,
)
from engine.gguf_convert import ProgressCallback
from engine.model_config import read_config
from engine.shard import check_tensor_parallel
from pdserve.checks import LaunchError
from pdserve.console import Reporter
from pdserve.settings import ModelSettings

FAKE = "fake"


@dataclass(frozen=True, slots=True)
class Model:
    path: str  # what `--model` of pods and router takes
    memory_bytes: int  # of one pod, without its KV cache


def prepare_model(
    name: str, dtype: str | None, reporter: Reporter, tensor_parallel: int = 1, quantization: str = "none"
) -> Model:
    """Raises LaunchError when there is no such model or it cannot be served so."""
    if name == FAKE:
        return Model(FAKE, 0)
    try:
        path = resolve_with_progress(name, reporter, quantization)
        check_tensor_parallel(read_config(path), tensor_parallel)
        with reporter.working("reading the weights (once)"):
            weights_revision(path)  # of a large model many seconds, which each pod would take for itself
        known_dtype = resolve_dtype(dtype or "auto")
        return Model(str(path), estimate_memory_bytes(path, known_dtype, tensor_parallel, quantization))
    except (CheckpointError, ValueError) as error:
        raise LaunchError(str(error)) from None


def resolve_with_progress(name: str, reporter: Reporter, quantization: str = "none") -> Path:
    """`resolve_model` with a bar on a terminal and one line a stage elsewhere; silent when nothing is to be done."""
    if not reporter.console.is_terminal:
        return resolve_model(name, _line_a_stage(name, reporter), quantization)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=reporter.console, transient=True) as bars:
        return resolve_model(name, _bar_a_stage(bars), quantization)


def main(settings: ModelSettings) -> int:
    """The command: standard output is the directory alone, for scripts."""
    reporter = Reporter()
    if settings.model == FAKE:
        print(FAKE)
        return 0
    try:
        path = resolve_with_progress(settings.model, reporter)
        reporter.say(describe(path, resolve_dtype("auto")))
    except CheckpointError as error:
        raise LaunchError(str(error)) from None
    print(path)
    return 0


def describe(path: Path, dtype: str) -> str:
    info = model_info(path, dtype)
    size = f"{info.num_layers} layers, vocabulary {info.vocab_size}, context {info.max_model_len} tokens"
    return f"{info.model_id}: {size}, {dtype}, weights {info.weights_revision}"


def _line_a_stage(name: str, reporter: Reporter) -> ProgressCallback:
    said: set[str] = set()

    def progress(stage: str, _fraction: float) -> None:
        if stage not in said:
            said.add(stage)
            reporter.say(f"  {name}: {stage}")

    return progress


def _bar_a_stage(bars: Progress) -> ProgressCallback:
    tasks: dict[str, TaskID] = {}

    def progress(stage: str, fraction: float) -> None:
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=1.0)
        bars.update(tasks[stage], completed=fraction)

    return progress
