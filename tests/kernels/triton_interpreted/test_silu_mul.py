from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels import silu_mul
from tests.kernels.cases import assert_close, float64
from tests.kernels.triton_interpreted.precisions import every_dtype


@every_dtype
@pytest.mark.parametrize("columns", [96, 1100])
def test_silu_mul(dtype: torch.dtype, columns: int) -> None:
    gate_up = (torch.randn(3, 2 * columns + 5) * 4).to(dtype)[:, : 2 * columns]
    gate, up = np.split(float64(gate_up), 2, axis=1)
    assert_close(silu_mul.silu_mul(gate_up, backend="triton"), gate / (1 + np.exp(-gate)) * up)
