from __future__ import annotations

import torch

from kernels import kv_write
from kernels.kv_cache import PagedKV
from tests.kernels.triton_interpreted.precisions import every_dtype


@every_dtype
def test_kv_write(dtype: torch.dtype) -> None:
    cache = torch.full((4, 2, 2, 3, 16, 20), torch.nan, dtype=dtype)
    wide = torch.randn(4, 7, 20).to(dtype)
    slots = torch.tensor([63, -1, 0, 17])
    expected = cache.clone()
    for token, slot in ((0, 63), (2, 0), (3, 17)):
        expected[slot // 16, 1, 0, :, slot % 16] = wide[token, :3]
        expected[slot // 16, 1, 1, :, slot % 16] = wide[token, 3:6]
    kv_write.kv_write(wide[:, :3], wide[:, 3:6], PagedKV(cache[:, 1, 0], cache[:, 1, 1]), slots, backend="triton")
    assert torch.equal(cache.nan_to_num(-1.0), expected.nan_to_num(-1.0))
