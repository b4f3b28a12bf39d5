"""How the first rank hands batches to the others: length-prefixed messages over a socket between two processes.

A batch is its tensors one after the other. Nothing is pickled: what comes in can only become int32 and int64 tensors.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import fields

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.flat_batch import FlatBatch

_LENGTH = struct.Struct("<q")
_DTYPES = (np.dtype(np.int64), np.dtype(np.int32))
_MAX_DIMS = 2
_HEADER = 2 + _MAX_DIMS  # of a tensor, all int64: dtype, number of dimensions, sizes


def send_message(connection: socket.socket, message: bytes) -> None:
    """Raises OSError when the other end is gone or does not read."""
    connection.sendall(_LENGTH.pack(len(message)) + message)


def receive_message(connection: socket.socket) -> bytes | None:
    """None: the other end is gone, or went in the middle of a message."""
    prefix = _receive(connection, _LENGTH.size)
    return None if prefix is None else _receive(connection, _LENGTH.unpack(prefix)[0])


def _receive(connection: socket.socket, num_bytes: int) -> bytes | None:
    received = bytearray(num_bytes)
    view = memoryview(received)
    while view:
        count = connection.recv_into(view)
        if count == 0:
            return None
        view = view[count:]
    return bytes(received)


def pack(batch: FlatBatch) -> bytes:
    parts: list[bytes] = []
    for field in fields(batch):
        array: NDArray[np.int64] = getattr(batch, field.name).numpy()
        sizes = (*array.shape, *[0] * (_MAX_DIMS - array.ndim))
        parts += [np.array([_DTYPES.index(array.dtype), array.ndim, *sizes], np.int64).tobytes(), array.tobytes()]
    return b"".join(parts)


def unpack(message: bytes) -> FlatBatch:
    tensors = {}
    offset = 0
    for field in fields(FlatBatch):
        code, num_dims, *sizes = np.frombuffer(message, np.int64, _HEADER, offset).tolist()
        offset += _HEADER * 8
        shape, dtype = sizes[:num_dims], _DTYPES[code]
        array = np.frombuffer(message, dtype, int(np.prod(shape)), offset).reshape(shape)
        offset += array.nbytes
        tensors[field.name] = torch.from_numpy(array.copy())
    return FlatBatch(**tensors)
