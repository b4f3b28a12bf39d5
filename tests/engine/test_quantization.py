"""Weights that we quantise: rounded with little error, kept in one file, mapped by all pods."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import packed_file
from engine.checkpoint import CheckpointError, cache_dir, estimate_memory_bytes, model_info, resolve_model
from engine.quantization import QUANTIZER_VERSION
from engine.quantize import half_scales, quantize_int4, quantize_int8
from engine.shard import Shard
from kernels.decoder import MlpWeights
from kernels.linear import LinearWeights
from kernels.quantized import QuantizedMatrix, dequantized
from tests.engine.quantized_checkpoints import Recipe, load, make_quantized, values_of
from tests.engine.tiny_families import make_family
from tests.engine.tiny_llama import (
    OurModel,
    make_checkpoint,
    random_ids,
    reference_logits,
    scheduled,
)

pytestmark = pytest.mark.usefixtures("empty_cache")


# --- rounding


def test_int8_errs_by_half_a_step_of_each_row() -> None:
    weight = torch.randn(37, 100) * torch.logspace(-3, 3, 37)[:, None]
    weight[5] = 0
    error = (dequantized(quantize_int8(weight)) - weight).abs().amax(1)
    assert (error <= weight.abs().amax(1) / 127 * 0.5001).all()


def test_int4_beats_the_range_of_the_weights() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 320)
    matrix = quantize_int4(weight)
    assert matrix.format == (4, 32, torch.float16)
    groups = weight.view(64, -1, 32)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    step = (high - low) / 15
    plain = (((groups - low) / step).round() * step + low - groups).square().mean()
    assert (dequantized(matrix) - weight).square().mean() < 0.93 * plain


def test_int4_keeps_what_lies_on_a_grid() -> None:
    levels = torch.randint(0, 16, (20, 128), generator=torch.Generator().manual_seed(0)).float()
    levels[:, ::32], levels[:, 1::32] = 0, 15  # both ends of the range are in use
    scales, offsets = torch.tensor([0.5, -0.25, 2**-14, 1.0])[:, None], torch.tensor([-3.0, 2.0, 0.0, -8.0])[:, None]
    weight = (levels.view(20, 4, 32) * scales + offsets).view(20, 128)
    torch.testing.assert_close(dequantized(quantize_int4(weight)), weight, rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize("quantize", [quantize_int8, quantize_int4])
def test_zeros_ragged_groups_and_bfloat16(quantize: Any) -> None:
    assert torch.equal(dequantized(quantize(torch.zeros(3, 70))), torch.zeros(3, 70))
    weight = torch.randn(5, 71).bfloat16()
    torch.testing.assert_close(dequantized(quantize(weight)), weight.float(), atol=0.4, rtol=0)


def test_half_scales_lose_nothing_to_the_range_of_float16() -> None:
    scales = torch.tensor([[1e-30, 3e-30], [1e20, 5e19], [0.0, 0.0], [1e-3, -2e-3]])
    halves, rows = half_scales(scales)
    torch.testing.assert_close(halves.float() * rows[:, None], scales, rtol=2**-11, atol=0)


# --- when a model is loaded


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_is_quantised_as_asked(quantization: str, tied: bool, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "m", tie_word_embeddings=tied, attention_bias=True)
    weights = load(tmp_path / "m", quantization)
    layer = weights.layers[0]
    assert isinstance(layer.mlp, MlpWeights)
    bits = {"int8": 8, "int4": 4}[quantization]
    for linear in (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down):
        assert all(isinstance(part, QuantizedMatrix) and part.bits == bits for part in linear.parts)
    assert weights.embedding.dtype == layer.input_norm.dtype == torch.float32
    assert isinstance(weights.head.parts[0], QuantizedMatrix)
    assert weights.head.parts[0].bits == 8
    with torch.no_grad():
        for name, values in ((f"{n}_proj", part) for n, part in zip("qkv", layer.qkv.parts, strict=True)):
            original = model.state_dict()[f"model.layers.0.self_attn.{name}.weight"]
            assert isinstance(values, QuantizedMatrix)
            error = (dequantized(values) - original).norm() / original.norm()
            assert error < {"int8": 0.01, "int4": 0.09}[quantization]


@pytest.mark.usefixtures("float_activations")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_model_computes_what_its_rounded_weights_say(quantization: str, tmp_path: Path) -> None:
    """Token for token in float32 against transformers with the very weights that were rounded to."""
    model = make_checkpoint(tmp_path / "m")
    weights, state = load(tmp_path / "m", quantization), model.state_dict()
    for i, layer in enumerate(weights.layers):
        assert isinstance(layer.mlp, MlpWeights)
        for linear, names in (
            (layer.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            (layer.output, ("self_attn.o_proj",)),
            (layer.mlp.gate_up, ("mlp.gate_proj", "mlp.up_proj")),
            (layer.mlp.down, ("mlp.down_proj",)),
        ):
            for part, name in zip(linear.parts, names, strict=True):
                assert isinstance(part, QuantizedMatrix)
                state[f"model.layers.{i}.{name}.weight"].copy_(dequantized(part))
    state["lm_head.weight"].copy_(values_of(weights.head))
    prompt = random_ids(60)
    actual = OurModel(tmp_path / "m", quantization=quantization).logits(scheduled(prompt, 0, range(15)))
    expected = reference_logits(model, prompt)
    torch.testing.assert_close(actual, expected, atol=2e-3 * float(expected.abs().max()), rtol=0)
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "phi-3"])
def test_experts_are_quantised_and_their_router_is_not(family: str, tmp_path: Path) -> None:
    make_family(tmp_path / "m", family)
    weights = load(tmp_path / "m", "int8")
    mlp = weights.layers[-1].mlp
    if not isinstance(mlp, MlpWeights):
        assert mlp.router.dtype == torch.float32
        mlp = mlp.experts[1]
    assert mlp.down.dtype == mlp.gate_up.dtype == torch.int8


def test_ranks_get_the_rows_and_columns_of_the_whole(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m", hidden_size=128, intermediate_size=512)
    whole, shares = load(tmp_path / "m", "int4"), [load(tmp_path / "m", "int4", Shard(rank, 2)) for rank in range(2)]
    for i, layer in enumerate(whole.layers):
        parts = [share.layers[i] for share in shares]
        assert isinstance(layer.mlp, MlpWeights)
        downs = [values_of(part.mlp.down) for part in parts if isinstance(part.mlp, MlpWeights)]
        assert torch.equal(torch.cat(downs, dim=1), values_of(layer.mlp.down))
        outputs = [values_of(part.output) for part in parts]
        assert torch.equal(torch.cat(outputs, dim=1), values_of(layer.output))
        keys = [part.qkv.parts[1] for part in parts]
        assert all(isinstance(key, QuantizedMatrix) for key in keys)
        assert torch.equal(values_of(LinearWeights(tuple(keys))), values_of(LinearWeights((layer.qkv.parts[1],))))
    assert torch.equal(torch.cat([values_of(share.head) for share in shares]), values_of(whole.head))


def test_ranks_that_would_cut_a_group_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m")  # 112 inner columns
    with pytest.raises(
        CheckpointError, match=r"down_proj cannot be shared among ranks: columns 0 to 56 cut a group of 32"
    ):
        load(tmp_path / "m", "int4", Shard(0, 2))


# --- the file


def test_the_file_is_made_once_and_mapped_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "m")
    first = load(tmp_path / "m", "int4")
    files = list((cache_dir().parent / "packed").glob("*.safetensors"))
    assert [f.name.rpartition("-")[0].rpartition("-")[2] for f in files] == ["int4"]
    monkeypatch.setattr(packed_file, "_make", lambda *_: pytest.fail("made again"))
    second = load(tmp_path / "m", "int4")
    assert torch.equal(values_of(first.head), values_of(second.head))
    maps = Path("/proc/self/maps").read_text()
    assert str(files[0]) in maps
    del first, second
    assert str(files[0]) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("num_bytes", [0, 4, 1000, -1000])
def test_a_file_that_was_cut_short_is_made_anew(num_bytes: int, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m")
    whole = values_of(load(tmp_path / "m", "int4").head).clone()
    (file,) = (cache_dir().parent / "packed").glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:num_bytes])
    assert torch.equal(values_of(load(tmp_path / "m", "int4").head), whole)
    assert file.read_bytes() == content


@pytest.mark.parametrize("place", [100, -1000, -1], ids=["header", "weights", "checksum"])
def test_a_file_with_a_changed_byte_is_made_anew(place: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_checkpoint(tmp_path / "m")
    whole = values_of(load(tmp_path / "m", "int4").head).clone()
    (file,) = (cache_dir().parent / "packed").glob("*.safetensors")
    content = file.read_bytes()
    changed = bytearray(content)
    changed[place] ^= 1
    file.write_bytes(changed)
    assert torch.equal(values_of(load(tmp_path / "m", "int4").head), whole)
    assert caplog.messages == [f"{file} is damaged, or of a release without checksums: it is made anew"]
    assert file.read_bytes() == content


def test_a_new_version_takes_the_place_of_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "m")
    load(tmp_path / "m", "int4")
    (earlier,) = (cache_dir().parent / "packed").glob("*.safetensors")
    monkeypatch.setattr(packed_file, "QUANTIZER_VERSION", QUANTIZER_VERSION + 1)
    load(tmp_path / "m", "int4")
    (file,) = (cache_dir().parent / "packed").glob("*.safetensors")
    assert file.name > earlier.name


def test_two_processes_make_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stand for processes: the lock belongs to the open file."""
    make_checkpoint(tmp_path / "m")
    made: list[Path] = []
    make = packed_file._make

    def counted(model_dir: Path, target: Path, write: Callable[[packed_file._Checkpoint, Path], None]) -> None:
        made.append(target)
        make(model_dir, target, write)

    monkeypatch.setattr(packed_file, "_make", counted)
    threads = [threading.Thread(target=load, args=(tmp_path / "m", "int8")) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(made) == 1


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "m")

    def fail(file: Path, *_: object) -> None:
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(packed_file, "write_tensors", fail)
    with pytest.raises(CheckpointError, match=r"cannot write the packed weights of .*: disk full"):
        load(tmp_path / "m", "int8")
    assert [f.suffix for f in (cache_dir().parent / "packed").iterdir()] == [".lock"]


# --- what others must know


def test_weights_that_we_round_are_another_revision(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m")
    plain, int8, int4 = (
        model_info(tmp_path / "m", "float32", quantization=q).weights_revision for q in ("none", "int8", "int4")
    )
    assert (int8, int4) == (f"{plain}+int8.4", f"{plain}+int4.4")


def test_the_memory_estimate_shrinks(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m", vocab_size=5000)
    sizes = [estimate_memory_bytes(tmp_path / "m", "float32", quantization=q) for q in ("none", "int8", "int4")]
    assert sizes[0] > sizes[1] > sizes[2]


def test_a_checkpoint_is_quantised_once(tmp_path: Path) -> None:
    make_quantized(tmp_path / "m", Recipe("awq"))
    for q in ("int8", "int4"):
        with pytest.raises(CheckpointError, match=r"weights of .* are quantised already \(awq\): use none"):
            resolve_model(str(tmp_path / "m"), quantization=q)
    with pytest.raises(CheckpointError, match="quantization 'int3': must be none, int8, int4, gguf"):
        resolve_model(str(tmp_path / "m"), quantization="int3")
    with pytest.raises(
        CheckpointError, match=r"'gguf': .* has no blocks of a GGUF file: give the GGUF file itself, or use none$"
    ):
        resolve_model(str(tmp_path / "m"), quantization="gguf")


def test_a_checkpoint_without_quantisation_has_no_blocks_of_a_gguf_file(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m")
    with pytest.raises(CheckpointError, match=r"give the GGUF file itself, or use none, int8 or int4$"):
        resolve_model(str(tmp_path / "m"), quantization="gguf")


def test_another_shape_than_the_config_says_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m")
    load(tmp_path / "m", "int8")
    shutil.copytree(tmp_path / "m", tmp_path / "other")
    file = next((cache_dir().parent / "packed").glob("*.safetensors"))
    with pytest.raises(CheckpointError, match=r"packed has shape .*; config\.json calls for \(64, 100\)"):
        packed_file.PackedFile(file).matrix("model.layers.0.mlp.down_proj", (64, 100))
    assert np.prod(packed_file.PackedFile(file).matrix("model.layers.0.mlp.down_proj", (64, 112)).shape) == 64 * 112
