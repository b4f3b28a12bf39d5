"""`python -m engine.tensor_parallel.worker SPEC`: one of a pod's ranks but the first. SPEC is a RankSpec in JSON.

It loads its share of the model, says so, connects with the other ranks, and computes the batches that come,
writing the KV of its heads into the pod's memory. It ends with the first rank: a thread waits for the other end of
their socket to close, which the system does however that process ends.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from engine.checkpoint import model_info
from engine.config_fields import CheckpointError
from engine.kv_cache import kv_cache
from engine.model import Model
from engine.shard import Shard
from engine.tensor_parallel.errors import RankLost
from engine.tensor_parallel.exchange import GroupExchange
from engine.tensor_parallel.wire import receive_message, send_message, unpack

READY = b"ready"
EXCHANGE_TIMEOUT_S = 60.0  # ranks lie apart by one block of a layer at most
LOST_ANOTHER = 3  # exit code of a rank that ends because another one did, which the first rank is to report instead


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """What a rank must know. The descriptors are those of the socket to the first rank and of the KV memory."""

    rank: int
    size: int
    model_dir: str
    dtype: str
    kv_dtype: str
    quantization: str
    block_size: int
    num_threads: int
    store_file: str
    connection_fd: int
    kv_fd: int
    kv_bytes: int


def main() -> int:
    spec = RankSpec(**json.loads(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM):  # they are for the first rank, which ends this one
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=spec.connection_fd)
    threading.Thread(target=_end_with, args=(connection,), name="first-rank", daemon=True).start()
    try:
        _serve(spec, connection)
    except RankLost:
        return LOST_ANOTHER
    except (CheckpointError, MemoryError) as error:
        print(f"rank {spec.rank}: {error or type(error).__name__}", file=sys.stderr, flush=True)
        return 1
    return 0


def _serve(spec: RankSpec, connection: socket.socket) -> None:
    torch.set_num_threads(spec.num_threads)
    exchange = GroupExchange(Shard(spec.rank, spec.size))
    model_dir = Path(spec.model_dir)
    model = Model.load(model_dir, spec.dtype, exchange, quantization=spec.quantization)
    memory = np.frombuffer(mmap.mmap(spec.kv_fd, spec.kv_bytes), np.uint8)
    info = model_info(model_dir, spec.dtype, kv_dtype=spec.kv_dtype, quantization=spec.quantization)
    caches = kv_cache(memory, info, spec.block_size).of_heads(model.kv_heads)
    send_message(connection, READY)
    exchange.connect(Path(spec.store_file), torch.device("cpu"), EXCHANGE_TIMEOUT_S)
    while (message := receive_message(connection)) is not None:
        model.forward(unpack(message), caches)


def _end_with(connection: socket.socket) -> None:
    poll = select.poll()
    poll.register(connection, 0)  # hang-ups are reported whatever one asks for
    poll.poll()
    os._exit(0)  # whatever this process computes, nobody waits for it


if __name__ == "__main__":
    sys.exit(main())
