"""The dtypes that Triton kernels take, and what attention adds to their rounding."""

from __future__ import annotations

import pytest
import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

every_dtype = pytest.mark.parametrize("dtype", DTYPES)
