from __future__ import annotations

import numpy as np
import torch

from kernels import rope
from tests.kernels.cases import assert_close, float64
from tests.kernels.triton_interpreted.precisions import every_dtype


@every_dtype
def test_rope(dtype: torch.dtype) -> None:
    qkv, positions = torch.randn(6, 15, 72).to(dtype), torch.tensor([0, 49, 3, 3, 7, 11])
    angles = torch.rand(50, 36) * 6
    cos, sin, before = angles.cos(), angles.sin(), float64(qkv)
    rope.rope(qkv[:, :9], qkv[:, 9:12], positions, cos, sin, backend="triton")
    first, second = before[..., :36], before[..., 36:]
    c, s = float64(cos[positions])[:, None], float64(sin[positions])[:, None]
    expected = np.concatenate((first * c - second * s, second * c + first * s), axis=-1)
    assert_close(qkv[:, :12], expected[:, :12])
    assert np.array_equal(float64(qkv[:, 12:]), before[:, 12:])
