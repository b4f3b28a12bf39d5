from __future__ import annotations

import numpy as np
import torch

from kernels import rms_norm
from tests.kernels.cases import assert_close, float64
from tests.kernels.triton_interpreted.precisions import every_dtype


@every_dtype
def test_rms_norm(dtype: torch.dtype) -> None:
    x, residual, weight = (
        torch.randn(5, 603).to(dtype)[:, :600],
        torch.randn(5, 600).to(dtype),
        torch.randn(600).to(dtype),
    )
    total = (x.double() + residual.double()).to(dtype)
    normed, new_residual = rms_norm.fused_add_rms_norm(x, residual, weight, 1e-5, backend="triton")
    assert torch.equal(new_residual, total)
    for actual, source in ((normed, total), (rms_norm.rms_norm(x, weight, 1e-5, backend="triton"), x)):
        wide = float64(source)
        assert_close(actual, wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * float64(weight))
