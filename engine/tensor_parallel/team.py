"""The other ranks of a tensor-parallel pod, as its first rank sees them: real processes that end when it does.

    Team(...)    starts the processes, which load their shares
    exchange     for the first rank's own share of the model, which it loads now
    connect()    when the others have theirs, all of them meet
    close()      ends them

Each rank maps the pod's one KV memory and writes its own heads of every block there, so blocks hold what a pod of one
process would have in them, and move between pods as ever.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import torch

from engine.shard import Shard
from engine.tensor_parallel.errors import RankLost
from engine.tensor_parallel.exchange import GroupExchange
from engine.tensor_parallel.wire import pack, receive_message, send_message
from engine.tensor_parallel.worker import EXCHANGE_TIMEOUT_S, LOST_ANOTHER, READY, RankSpec
from kernels.flat_batch import FlatBatch

START_TIMEOUT_S = 180.0  # of a process: it imports torch, then reads its weights
REAP_TIMEOUT_S = 1.0  # from a rank's connections closing to its process having ended
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class _Member:
    rank: int
    process: subprocess.Popen[bytes]
    connection: socket.socket

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process.pid})"

    def own_end(self) -> str:
        """How it ended by itself; empty while it runs, and when it only followed another one."""
        code = self.process.poll()
        if code is None or code == LOST_ANOTHER:
            return ""
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


class Team:
    """Close it, or use it as a context manager. `exchange` belongs to the one thread that computes.

    Raises OSError when it cannot start processes; then none is left running.
    """

    def __init__(
        self,
        size: int,
        *,
        model_dir: Path,
        dtype: str,
        kv_dtype: str = "auto",
        quantization: str = "none",
        block_size: int,
        num_threads: int,
        kv_fd: int,
        kv_bytes: int,
    ) -> None:
        """`size`: ranks, the caller's own included; `num_threads`: of each. `kv_fd`: a file of `kv_bytes`, the KV
        memory; it stays the caller's."""
        self._members: list[_Member] = []
        self._directory = tempfile.TemporaryDirectory(prefix="pdserve-ranks-")
        self._store_file = Path(self._directory.name) / "store"
        self.exchange = GroupExchange(Shard(0, size), self._announce, self.lost)
        try:
            for rank in range(1, size):
                connection, theirs = socket.socketpair()
                with theirs:
                    spec = RankSpec(
                        rank=rank,
                        size=size,
                        model_dir=str(model_dir),
                        dtype=dtype,
                        kv_dtype=kv_dtype,
                        quantization=quantization,
                        block_size=block_size,
                        num_threads=num_threads,
                        store_file=str(self._store_file),
                        connection_fd=theirs.fileno(),
                        kv_fd=kv_fd,
                        kv_bytes=kv_bytes,
                    )
                    self._members.append(_Member(rank, _spawn(spec), connection))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(member.process.pid for member in self._members)

    def connect(self) -> None:
        """Waits until the other ranks have loaded their shares, and connects with them. Raises RankLost."""
        for member in self._members:
            member.connection.settimeout(START_TIMEOUT_S)
            self._expect_ready(member)
            member.connection.settimeout(EXCHANGE_TIMEOUT_S)
        self.exchange.connect(self._store_file, torch.device("cpu"), EXCHANGE_TIMEOUT_S)
        self._directory.cleanup()

    def lost(self) -> RankLost:
        """What to raise when the others cannot be reached. Waits a moment for the one that ended to be known."""
        return self._lost(self._members, EXCHANGE_TIMEOUT_S)

    def close(self) -> None:
        """Ends all ranks but the caller's, whatever they do. A second call does nothing."""
        for member in self._members:
            member.connection.close()
            member.process.kill()
        for member in self._members:
            member.process.wait()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _announce(self, batch: FlatBatch) -> None:
        message = pack(batch)
        for member in self._members:
            try:
                send_message(member.connection, message)
            except OSError:
                raise self._lost([member], EXCHANGE_TIMEOUT_S) from None

    def _expect_ready(self, member: _Member) -> None:
        try:
            message = receive_message(member.connection)
        except OSError:
            message = None
        if message is None:
            raise self._lost([member], START_TIMEOUT_S)
        if message != READY:
            raise RankLost(f"{member} says {message!r} instead of {READY!r}")

    def _lost(self, suspects: list[_Member], timeout_s: float) -> RankLost:
        """Blames whoever ended by itself; if nobody did, those of `suspects` that run and were silent for `timeout_s`.

        A rank that was waiting for another gives up and ends too, so one that still runs is not waiting.
        """
        deadline = time.monotonic() + REAP_TIMEOUT_S
        while True:
            for member in self._members:
                if end := member.own_end():
                    return RankLost(f"{member} {end}")
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        silent = [str(member) for member in suspects if member.process.poll() is None]
        return RankLost(f"{' or '.join(silent) or 'rank 0 (this process)'} did not answer within {timeout_s:.0f} s")


def _spawn(spec: RankSpec) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        (sys.executable, "-m", "engine.tensor_parallel.worker", json.dumps(asdict(spec))),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # the pod's own carries its READY line
        pass_fds=(spec.connection_fd, spec.kv_fd),
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(spec.num_threads)},
    )
