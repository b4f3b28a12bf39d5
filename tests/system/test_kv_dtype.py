"""The whole system with a KV cache narrower than the model: blocks cross between pods whole, scales and all."""

from __future__ import annotations

import asyncio

import pytest

from engine.checkpoint import DEFAULT_MODEL, model_info, resolve_model
from engine.kv_format import kv_block_bytes
from router.client import RouterClient
from tests.reference_outputs import ReferenceCase, reference_case
from tests.support.stack import LaunchedStack, launched_stack
from tests.system.test_real_model import Answer, generate

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

SETTINGS = ("--dtype", "float32", "--kv-memory", "64MiB")
CASES = ("english question", "code", "33 tokens")


async def answers(stack: LaunchedStack, cases: list[ReferenceCase]) -> list[Answer]:
    async with RouterClient(stack.router_address) as router:
        given = await asyncio.gather(*(generate(router, case) for case in cases))
    await stack.idle()
    return given


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
async def test_disaggregated_answers_equal_colocated_ones(kv_dtype: str) -> None:
    settings = (*SETTINGS, "--kv-dtype", kv_dtype)
    cases = [reference_case(name) for name in CASES]
    with launched_stack(*settings, "--colocated", "--decode", "1") as stack:
        colocated = await answers(stack, cases)
    with launched_stack(*settings, "--prefill", "1", "--decode", "1") as stack:
        disaggregated = await answers(stack, cases)
    assert [a.token_ids for a in disaggregated] == [a.token_ids for a in colocated]
    block_bytes = kv_block_bytes(model_info(resolve_model(DEFAULT_MODEL), "float32", kv_dtype=kv_dtype), 16)
    num_blocks = [-(-len(case.prompt_ids) // 16) for case in cases]
    assert [a.ledger.transfer_bytes for a in disaggregated] == [n * block_bytes for n in num_blocks]
