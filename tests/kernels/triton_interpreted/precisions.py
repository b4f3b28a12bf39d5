"""The dtypes that Triton kernels take, and what attention adds to their rounding."""

from __future__ import annotations

import pytest
import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Attention rounds its weights to the values' dtype before the second product, as tensor cores want them.
WEIGHT_ROUNDING = {torch.float32: 0.0, torch.float16: 1e-3, torch.bfloat16: 8e-3}

every_dtype = pytest.mark.parametrize("dtype", DTYPES)
