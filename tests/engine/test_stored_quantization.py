"""Checkpoints whose weights are quantised already: their very integers are multiplied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from engine.checkpoint import CheckpointError, cache_dir, estimate_memory_bytes, model_info, resolve_model
from engine.model_config import read_config
from engine.shard import Shard
from kernels.linear import LinearWeights
from kernels.quantized import QuantizedMatrix, dequantized
from tests.engine.gguf_files import BYTE_TOKENS, write_gguf
from tests.engine.quantized_checkpoints import Recipe, load, make_quantized, values_of
from tests.engine.tiny_llama import (
    OurModel,
    edit_config,
    make_checkpoint,
    random_ids,
    reference_logits,
    scheduled,
)

pytestmark = pytest.mark.usefixtures("empty_cache")


AWQ_AND_GPTQ = [
    Recipe("awq"),
    Recipe("awq", group=128),
    Recipe("awq", group=-1),
    Recipe("gptq", symmetric=True),
    Recipe("gptq", group=128),
    Recipe("gptq", group=-1),
    Recipe("gptq", layout="gptq_v2"),
    Recipe("gptq", bits=8, symmetric=True, group=32),
    Recipe("gptq", bits=8),
    Recipe("gptq", group=-1, act_order=True),  # a single group is in any order
]
ACT_ORDER = [
    Recipe("gptq", bits=bits, symmetric=symmetric, act_order=True) for bits in (4, 8) for symmetric in (False, True)
]


@pytest.mark.usefixtures("float_activations")
@pytest.mark.parametrize("recipe", AWQ_AND_GPTQ, ids=str)
def test_a_quantised_checkpoint_gives_the_logits_of_its_values(recipe: Recipe, tmp_path: Path) -> None:
    model = make_quantized(tmp_path / "m", recipe)
    ours = OurModel(resolve_model(str(tmp_path / "m")))
    prompt = random_ids(40)
    actual, expected = ours.logits(scheduled(prompt, 0, range(10))), reference_logits(model, prompt)
    torch.testing.assert_close(actual, expected, atol=2e-3 * float(expected.abs().max()), rtol=0)
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))
    layer = load(tmp_path / "m").layers[0]
    for part, name in zip(layer.qkv.parts, ("q", "k", "v"), strict=True):
        assert isinstance(part, QuantizedMatrix)
        assert part.bits == recipe.bits
        torch.testing.assert_close(
            dequantized(part), model.state_dict()[f"model.layers.0.self_attn.{name}_proj.weight"], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("recipe", ACT_ORDER, ids=str)
def test_columns_in_the_order_of_activations_become_exactly_their_values(
    recipe: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_quantized(tmp_path / "m", recipe)
    layer, state = load(tmp_path / "m").layers[1], model.state_dict()
    for part, name in zip(layer.qkv.parts, ("q", "k", "v"), strict=True):
        assert isinstance(part, torch.Tensor)
        assert torch.equal(part, state[f"model.layers.1.self_attn.{name}_proj.weight"])
    assert [record.message for record in caplog.records if "desc_act" in record.message]
    prompt = random_ids(40)
    actual, expected = OurModel(tmp_path / "m").logits(scheduled(prompt, 0, range(10))), reference_logits(model, prompt)
    torch.testing.assert_close(actual, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)


def test_ranks_share_columns_in_the_order_of_activations(tmp_path: Path) -> None:
    state = make_quantized(tmp_path / "m", Recipe("gptq", act_order=True)).state_dict()
    layers = [load(tmp_path / "m", shard=Shard(rank, 2)).layers[2] for rank in range(2)]
    assert torch.equal(
        torch.cat([values_of(layer.output) for layer in layers], dim=1), state["model.layers.2.self_attn.o_proj.weight"]
    )
    queries = torch.cat([values_of(LinearWeights(layer.qkv.parts[:1])) for layer in layers])
    assert torch.equal(queries, state["model.layers.2.self_attn.q_proj.weight"])


def test_the_estimate_of_memory_knows_that_columns_out_of_order_take_more(tmp_path: Path) -> None:
    in_order, out_of_order = (Recipe("gptq", act_order=act_order) for act_order in (False, True))
    make_quantized(tmp_path / "in", in_order)
    state = make_quantized(tmp_path / "out", out_of_order).state_dict()
    weights = sum(t.numel() for name, t in state.items() if "_proj.weight" in name)
    less, more = (estimate_memory_bytes(tmp_path / name, "float32") for name in ("in", "out"))
    assert more - less == weights * 7 // 2  # 4 bytes, not half a byte


def name_missing_groups(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    g_idx = tensors["model.layers.1.mlp.up_proj.g_idx"]
    tensors["model.layers.1.mlp.up_proj.g_idx"] = g_idx + 1
    save_file(tensors, file)


REFUSED: dict[str, tuple[Any, str]] = {
    "groups": (
        name_missing_groups,
        r"layers\.1\.mlp\.up_proj: g_idx \(128,\) from 1 to 2: must have a group from 0 to 1 for each of 128 columns",
    ),
    "no object": (lambda d: edit_config(d, quantization_config=4), r"quantization_config = 4: must be an object"),
    "method": (
        lambda d: edit_config(d, quantization_config={"quant_method": "bitsandbytes"}),
        r"quant_method = 'bitsandbytes': only awq, gptq, gguf are supported",
    ),
    "bits": (
        lambda d: edit_config(d, quantization_config={"quant_method": "gptq", "bits": 3}),
        r"bits = 3: GPTQ weights must have 4 or 8",
    ),
    "group": (
        lambda d: edit_config(d, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 16}),
        r"group_size = 16: must be -1, 32, 64 or a multiple of 128",
    ),
    "other group": (
        lambda d: edit_config(d, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32}),
        r"\w_proj: scales \(128, 4\) and zero points \(128, 4\) do not fit weights \(128, 256\) in groups of 32",
    ),
    "awq version": (
        lambda d: edit_config(d, quantization_config={"quant_method": "awq", "version": "gemv"}),
        r"version = 'gemv': must be 'gemm'",
    ),
    "awq format": (
        lambda d: edit_config(d, quantization_config={"quant_method": "awq", "format": "marlin"}),
        r"format = 'marlin': must be 'gemm'",
    ),
    "awq without zeros": (
        lambda d: edit_config(d, quantization_config={"quant_method": "awq", "zero_point": False}),
        r"zero_point = False: only true is supported",
    ),
    "layout": (
        lambda d: edit_config(
            d, quantization_config={"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}
        ),
        r"checkpoint_format = 'marlin': must be 'gptq' or 'gptq_v2'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    spoil, message = REFUSED[name]
    make_quantized(tmp_path / "m", Recipe("gptq"))
    spoil(tmp_path / "m")
    with pytest.raises(CheckpointError, match=message) as caught:
        load(resolve_model(str(tmp_path / "m")))
    assert "\n" not in str(caught.value)
    assert not list((cache_dir().parent).glob("quantized/*.safetensors"))


@pytest.mark.parametrize(
    "spelling", [{"checkpoint_format": None, "format": "gptq"}, {"checkpoint_format": "GPTQ"}, {}], ids=str
)
def test_libraries_spell_the_layout_differently(spelling: dict[str, str | None], tmp_path: Path) -> None:
    make_quantized(tmp_path, Recipe("gptq"))
    stated = read_config(tmp_path)
    edit_config(
        tmp_path,
        quantization_config={k: v for k, v in Recipe("gptq").config.items() if k != "checkpoint_format"} | spelling,
    )
    assert read_config(tmp_path) == stated


@pytest.mark.usefixtures("float_activations")
@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [(Recipe("awq"), torch.uint8), (Recipe("gptq", act_order=True), torch.float32)],
    ids=str,
)
def test_unlike_parts_become_alike(recipe: Recipe, dtype: torch.dtype, tmp_path: Path) -> None:
    """A checkpoint may leave single projections unquantised."""
    model = make_quantized(tmp_path / "m", recipe)
    name = "model.layers.0.self_attn.k_proj"
    file = tmp_path / "m" / "model.safetensors"
    tensors = {n: t for n, t in load_file(file).items() if not n.startswith(name)}
    save_file(tensors | {f"{name}.weight": model.state_dict()[f"{name}.weight"].clone()}, file)
    layer = load(tmp_path / "m").layers[0]
    assert layer.qkv.dtype == torch.float32
    assert layer.output.dtype == dtype
    prompt = random_ids(20)
    actual = OurModel(tmp_path / "m").logits(scheduled(prompt, 0, range(5)))
    assert torch.equal(actual.argmax(-1), reference_logits(model, prompt).argmax(-1))


BLOCKS = [gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0]


@pytest.mark.usefixtures("float_activations")
@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_files_own_blocks_give_the_logits_of_their_values(
    kind: gguf.GGMLQuantizationType, tied: bool, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"vocab_size": len(BYTE_TOKENS), "tie_word_embeddings": tied, "eos_token_id": 2}
    model = make_checkpoint(tmp_path / "hf", intermediate_size=128, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.from_numpy(dequantize(quantize(parameter.numpy(), kind), kind)))
            else:
                parameter.copy_(parameter.bfloat16())  # what a conversion keeps
    write_gguf(tmp_path / "m.gguf", model, quantized=kind)
    folder = resolve_model(str(tmp_path / "m.gguf"), quantization="gguf")
    assert folder != resolve_model(str(tmp_path / "m.gguf"))
    assert (
        model_info(folder, "float32").weights_revision
        != model_info(resolve_model(str(tmp_path / "m.gguf")), "float32").weights_revision
    )
    weights, state = load(folder, "gguf"), model.state_dict()
    torch.testing.assert_close(values_of(weights.layers[2].output), state["model.layers.2.self_attn.o_proj.weight"])
    queries = LinearWeights(weights.layers[0].qkv.parts[:1])
    torch.testing.assert_close(values_of(queries), state["model.layers.0.self_attn.q_proj.weight"])
    prompt = random_ids(40, vocab_size=len(BYTE_TOKENS))
    actual = OurModel(folder, quantization="gguf").logits(scheduled(prompt, 0, range(10)))
    model.lm_head.weight = torch.nn.Parameter(
        model.lm_head.weight.clone()
    )  # what is looked up is rounded, the head not
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight.bfloat16())
    expected = reference_logits(model, prompt)
    torch.testing.assert_close(actual, expected, atol=2e-3 * float(expected.abs().max()), rtol=0)
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))
