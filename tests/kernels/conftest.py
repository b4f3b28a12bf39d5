"""One thread, the same random tensors whatever ran before, and NaN in everything that torch.empty returns: an output
element that a kernel forgets shows.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
