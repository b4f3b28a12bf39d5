"""Weights in panels: made once, mapped by all, and the same answers as from the checkpoint's own order."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import packed_file
from engine.checkpoint import cache_dir
from engine.config_fields import CheckpointError
from engine.model import Model
from engine.model_config import read_config
from engine.shard import WHOLE, Shard
from engine.weights import ExpertWeights, ModelWeights, load_weights
from kernels.decoder import MlpWeights
from kernels.linear import LinearWeights
from kernels.panels import PANEL, PanelMatrix
from tests.engine.quantized_checkpoints import values_of
from tests.engine.test_weights import convert, num_mappings
from tests.engine.tiny_families import make_family
from tests.engine.tiny_llama import edit_config, make_checkpoint

pytestmark = pytest.mark.usefixtures("empty_cache")


def load(folder: Path, shard: Shard = WHOLE, *, dtype: str = "float32") -> ModelWeights:
    return load_weights(folder, read_config(folder), dtype, shard, in_panels=True)


def packed_folder() -> Path:
    return cache_dir().parent / "packed"


def linears(weights: ModelWeights) -> list[LinearWeights]:
    found = [weights.head]
    for layer in weights.layers:
        found += [layer.qkv, layer.output]
        blocks = layer.mlp.experts if isinstance(layer.mlp, ExpertWeights) else (layer.mlp,)
        found += [each for block in blocks for each in (block.gate_up, block.down)]
    return found


@pytest.fixture
def bfloat16_model(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "m", attention_bias=True)
    convert(tmp_path / "m", "bfloat16")
    return tmp_path / "m"


@pytest.mark.parametrize("tied", [True, False])
def test_the_file_is_made_once_and_mapped_by_all(tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "m", tie_word_embeddings=tied)
    convert(tmp_path / "m", "bfloat16")
    first = load(tmp_path / "m")
    monkeypatch.setattr(packed_file, "_make", lambda *_: pytest.fail("made again"))
    second = load(tmp_path / "m")
    plain = load_weights(tmp_path / "m", read_config(tmp_path / "m"), "float32")
    for one, other, original in zip(*map(linears, (first, second, plain)), strict=True):
        assert all(isinstance(part, PanelMatrix) and part.dtype == torch.bfloat16 for part in one.parts)
        assert torch.equal(values_of(one), values_of(original))
        assert torch.equal(values_of(other), values_of(original))
    assert num_mappings(packed_folder())
    del first, second, one, other
    assert not num_mappings(packed_folder())


def test_experts_and_their_router_too(tmp_path: Path) -> None:
    make_family(tmp_path / "m", "mixtral")
    convert(tmp_path / "m", "bfloat16")
    weights = load(tmp_path / "m")
    assert isinstance(weights.layers[0].mlp, ExpertWeights)
    for linear in (*linears(weights), weights.layers[0].mlp.router):
        assert all(isinstance(part, PanelMatrix) for part in linear.parts)


def test_what_the_checkpoint_has_in_float32_is_packed_in_memory(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m")
    weights = load(tmp_path / "m")
    assert all(isinstance(part, PanelMatrix) for linear in linears(weights) for part in linear.parts)
    assert weights.head.dtype == torch.float32
    assert not packed_folder().exists()


def test_single_projections_in_another_dtype(bfloat16_model: Path) -> None:
    """Parts of one layer become alike: in the dtype of the computation."""
    convert(bfloat16_model, "float32", only="k_proj")
    weights = load(bfloat16_model)
    assert weights.layers[0].qkv.dtype == torch.float32
    assert weights.layers[0].output.dtype == torch.bfloat16
    tensors = load_file(bfloat16_model / "model.safetensors")
    parts = [tensors[f"model.layers.0.self_attn.{name}_proj.weight"].float() for name in "qkv"]
    assert torch.equal(values_of(weights.layers[0].qkv), torch.cat(parts))


@pytest.mark.parametrize("count", [2, 4])
def test_shares_of_ranks(count: int, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m", num_attention_heads=4, num_key_value_heads=4)
    convert(tmp_path / "m", "bfloat16")
    whole = load(tmp_path / "m").layers[0]
    shares = [load(tmp_path / "m", Shard(rank, count)).layers[0] for rank in range(count)]
    assert torch.equal(torch.cat([values_of(share.output) for share in shares], dim=1), values_of(whole.output))
    assert isinstance(whole.mlp, MlpWeights)
    downs = [share.mlp.down for share in shares if isinstance(share.mlp, MlpWeights)]
    assert torch.equal(torch.cat(list(map(values_of, downs)), dim=1), values_of(whole.mlp.down))
    (part,) = downs[0].parts
    assert isinstance(part, PanelMatrix)
    assert part.packed.stride(0) == whole.mlp.down.columns * PANEL  # a view


def test_without_a_disk_each_pod_packs_for_itself(
    bfloat16_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(file: Path, *_: object) -> None:
        file.write_bytes(b"half")
        raise OSError("disk full")

    expected = [values_of(linear) for linear in linears(load(bfloat16_model))]
    for file in packed_folder().glob("*.safetensors"):
        file.unlink()
    monkeypatch.setattr(packed_file, "write_tensors", fail)
    with caplog.at_level(logging.WARNING):
        found = linears(load(bfloat16_model))
    assert "disk full; XDG_CACHE_HOME may name a directory that can be written. Each pod keeps its own" in caplog.text
    assert all(isinstance(part, PanelMatrix) for linear in found for part in linear.parts)
    assert all(torch.equal(values_of(one), other) for one, other in zip(found, expected, strict=True))
    assert [f.suffix for f in packed_folder().iterdir()] == [".lock"]


def test_a_model_on_a_cpu_loads_them(bfloat16_model: Path) -> None:
    Model.load(bfloat16_model, "float32")
    (file,) = packed_folder().glob("*.safetensors")
    assert file.name.endswith("-panels-3.safetensors")


def test_another_shape_than_the_config_says_is_named(bfloat16_model: Path) -> None:
    load(bfloat16_model)
    (file,) = packed_folder().glob("*.safetensors")
    config = json.loads((bfloat16_model / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    name = "model.layers.0.mlp.down_proj"
    assert packed_file.PackedFile(file).matrix(name, (hidden, inner)).shape == (hidden, inner)
    for shape in ((hidden, inner + 1), (hidden + PANEL, inner)):
        with pytest.raises(CheckpointError, match=r"packed has shape .*; config\.json calls for"):
            packed_file.PackedFile(file).matrix(name, shape)
    edit_config(bfloat16_model, intermediate_size=inner + 1)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: model\S+gate_proj\.weight has shape .*config\.json calls for"
    ):
        load(bfloat16_model)


def test_a_checkpoint_that_cannot_be_loaded_leaves_no_file(bfloat16_model: Path) -> None:
    tensors = load_file(bfloat16_model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, bfloat16_model / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm"):
        load(bfloat16_model)
    assert not list(packed_folder().glob("*.safetensors"))


def test_a_copy_with_other_weights_has_a_file_of_its_own(bfloat16_model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "m"
    shutil.copytree(bfloat16_model, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] += 1
    save_file(tensors, other / "model.safetensors")
    first, second = load(bfloat16_model).layers[0].mlp, load(other).layers[0].mlp
    assert isinstance(first, MlpWeights)
    assert isinstance(second, MlpWeights)
    assert not torch.equal(values_of(first.down), values_of(second.down))
    assert len(list(packed_folder().glob("*.safetensors"))) == 2
