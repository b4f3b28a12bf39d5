"""Weights: joined in the right order, mapped where they can be, and refused when they do not fit config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config_fields import CheckpointError
from engine.model_config import read_config
from engine.weights import TORCH_DTYPES, ModelWeights, load_weights
from kernels.decoder import MlpWeights
from tests.engine.quantized_checkpoints import values_of
from tests.engine.tiny_llama import edit_config, make_checkpoint


def load(folder: Path, dtype: str = "float32") -> ModelWeights:
    return load_weights(folder, read_config(folder), dtype)


def convert(folder: Path, dtype: str, only: str = "") -> None:
    """Rewrites the tensors whose names contain `only`."""
    for file in folder.glob("*.safetensors"):
        save_file({n: t.to(TORCH_DTYPES[dtype]) if only in n else t for n, t in load_file(file).items()}, file)


def num_mappings(folder: Path) -> int:
    """How many times this process has files of `folder` mapped."""
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_parts_come_in_order(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, attention_bias=True, mlp_bias=True)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = load(tmp_path).layers[1]
    assert isinstance(layer.mlp, MlpWeights)
    for fused, kind, names in (
        (layer.qkv, "self_attn", ("q", "k", "v")),
        (layer.output, "self_attn", ("o",)),
        (layer.mlp.gate_up, "mlp", ("gate", "up")),
        (layer.mlp.down, "mlp", ("down",)),
    ):
        assert fused.bias is not None
        parts = [f"model.layers.1.{kind}.{name}_proj" for name in names]
        assert all(torch.equal(got, tensors[f"{part}.weight"]) for got, part in zip(fused.tensors, parts, strict=True))
        assert torch.equal(fused.bias, torch.cat([tensors[f"{part}.bias"] for part in parts]))


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, tie_word_embeddings=True)
    weights = load(tmp_path)
    assert weights.head.tensors[0].data_ptr() == weights.embedding.data_ptr()


@pytest.mark.parametrize(("file_dtype", "dtype"), [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16",) * 2])
def test_the_file_is_mapped_once_and_the_mapping_ends_with_the_weights(
    file_dtype: str, dtype: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, attention_bias=True)
    convert(tmp_path, file_dtype)
    weights = load(tmp_path, dtype)
    assert num_mappings(tmp_path) == 1
    layer = weights.layers[0]
    assert isinstance(layer.mlp, MlpWeights)
    assert {part.dtype for part in (weights.embedding, *layer.qkv.tensors, *layer.mlp.down.tensors)} == {
        TORCH_DTYPES[file_dtype]
    }
    assert layer.qkv.bias is not None
    assert layer.input_norm.dtype == layer.qkv.bias.dtype == weights.final_norm.dtype == TORCH_DTYPES[dtype]
    del weights, layer
    assert num_mappings(tmp_path) == 0


def test_parts_of_unlike_dtypes_become_alike(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    convert(tmp_path, "bfloat16", only="q_proj")
    qkv = load(tmp_path).layers[0].qkv
    assert [part.dtype for part in qkv.tensors] == [torch.float32] * 3


def test_another_dtype_is_a_copy_and_nothing_stays_mapped(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    weights = load(tmp_path, "bfloat16")
    assert num_mappings(tmp_path) == 0
    assert weights.embedding.dtype == weights.layers[0].qkv.dtype == torch.bfloat16


@pytest.mark.parametrize("in_panels", [False, True])
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.usefixtures("empty_cache")
def test_a_tied_heads_own_tensor_counts(quantization: str, in_panels: bool, tmp_path: Path) -> None:
    """As in transformers: the file has what was trained, its config.json may be an older one's."""
    make_checkpoint(tmp_path / "m")
    convert(tmp_path / "m", "bfloat16")
    edit_config(tmp_path / "m", tie_word_embeddings=True)
    own = load_file(tmp_path / "m" / "model.safetensors")["lm_head.weight"].float()
    config = read_config(tmp_path / "m")
    head = load_weights(tmp_path / "m", config, "float32", quantization=quantization, in_panels=in_panels).head
    torch.testing.assert_close(values_of(head), own, atol=0.01 if quantization == "int8" else 0.0, rtol=0)


def test_float16_files_load(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: tensor.half() for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    assert torch.equal(load(tmp_path).embedding, tensors["model.embed_tokens.weight"].float())


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    edit_config(tmp_path, num_hidden_layers=4)
    with pytest.raises(CheckpointError, match=r"weight model\.layers\.3\.\S+ is missing, though config\.json calls"):
        load(tmp_path)


def test_a_weight_of_another_shape_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    edit_config(tmp_path, intermediate_size=100)
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight has shape \(112, 64\), config\.json calls for \(100"):
        load(tmp_path)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: tensor.to(torch.int8) for name, tensor in load_file(file).items()}, file)
    with pytest.raises(CheckpointError, match="is I8: weights must be F32, F16, BF16"):
        load(tmp_path)


def test_a_shard_index_is_followed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, max_shard_size="60KB")
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    shard = load_file(tmp_path / weight_map["model.norm.weight"])
    assert torch.equal(load(tmp_path).final_norm, shard["model.norm.weight"])
