from __future__ import annotations

import numpy as np
import torch

from kernels import gelu_mul
from tests.kernels.cases import assert_close, float64
from tests.kernels.triton_interpreted.precisions import every_dtype


@every_dtype
def test_gelu_mul(dtype: torch.dtype) -> None:
    gate_up = (torch.randn(3, 1105) * 4).to(dtype)[:, :1100]
    gate, up = np.split(float64(gate_up), 2, axis=1)
    twice = np.sqrt(8 / np.pi) * (gate + 0.044715 * gate**3)
    assert_close(gelu_mul.gelu_mul(gate_up, backend="triton"), gate / (1 + np.exp(np.minimum(-twice, 700.0))) * up)
