"""What `up` refuses before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.checks import LaunchError
from pdserve.console import Reporter
from pdserve.prepare import check_kv_memory, prepare_draft
from pdserve.settings import UpSettings
from tests.engine.tiny_llama import make_checkpoint


def test_a_draft_model_without_drafting_is_refused_in_the_flag_s_own_words() -> None:
    with pytest.raises(LaunchError, match=r"^--speculation off and --draft-model 'tiny': a draft model is needed for"):
        prepare_draft(UpSettings.load(["--draft-model", "tiny"]), Reporter())


def test_kv_memory_that_holds_no_block_is_refused(tmp_path: Path) -> None:
    """As pods refuse it, but before any process is started. A block: 2 layers, K and V, 2 heads, 16 slots of 16."""
    make_checkpoint(tmp_path, num_hidden_layers=2, num_key_value_heads=2, head_dim=16)
    one_block = 2 * 2 * 2 * 16 * 16 * 2  # bytes, in bfloat16

    def check(kv_memory: int) -> None:
        flags = ["--kv-memory", str(kv_memory), "--kv-dtype", "bf16"]
        check_kv_memory(UpSettings.load(flags), tmp_path)

    check(one_block)
    with pytest.raises(
        LaunchError, match=rf"^--kv-memory {one_block - 1} bytes: must be at least {one_block} bytes, one KV block$"
    ):
        check(one_block - 1)
