"""The few places that know that a device may be a GPU: weights and batches move to it, decode steps are captured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track

from engine.decode_graphs import Capture
from kernels.flat_batch import FlatBatch

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

D = TypeVar("D", bound="DataclassInstance")

CPU = torch.device("cpu")


def moved(value: Any, device: torch.device) -> Any:
    """`value`, dataclasses and tuples of tensors, with all of these on `device`. What was shared stays shared."""
    done: dict[int, torch.Tensor] = {}

    def move(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return done.setdefault(id(item), item.to(device))
        if isinstance(item, tuple):
            return tuple(move(each) for each in item)
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            return _changed(item, move)
        return item

    return value if device.type == "cpu" else move(value)


def uploaded(batch: FlatBatch, device: torch.device) -> FlatBatch:
    """A batch of host tensors on `device`, copied from pinned memory so that the host does not wait for the copies."""
    if device.type != "cuda":
        return batch
    return _changed(batch, lambda tensor: tensor.pin_memory().to(device, non_blocking=True))


def _changed(instance: D, change: Callable[[Any], Any]) -> D:
    """A dataclass's copy with every field changed."""
    names = [field.name for field in dataclasses.fields(instance) if field.init]
    return dataclasses.replace(instance, **{name: change(getattr(instance, name)) for name in names})


class CudaGraph:
    """Work captured on the current CUDA device. It runs once before, so that kernels compile and workspaces exist.

    Graphs of one `pool` share memory: a replay may overwrite what another one computed.
    """

    def __init__(self, work: Callable[[], torch.Tensor], pool: Any) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch does not annotate it
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self.output = work()

    def replay(self) -> None:
        self._graph.replay()


def device_capture(device: torch.device) -> Capture | None:
    """How steps on `device` are captured; None: they are computed as they come."""
    return partial(CudaGraph, pool=torch.cuda.graph_pool_handle()) if device.type == "cuda" else None


def capture_progress(buckets: list[int]) -> Iterable[int]:
    """Shows a bar on a terminal: a capture takes a second, and there are several."""
    console = Console(stderr=True)
    return track(buckets, description="CUDA graphs", console=console, disable=not console.is_terminal)
