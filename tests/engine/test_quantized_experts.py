"""Mixtures of experts whose experts are quantised already, beside plain checkpoints of the same values."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.weights import ExpertWeights
from kernels.quantized import QuantizedMatrix
from tests.engine.quantized_checkpoints import Recipe, load, random_linear
from tests.engine.tiny_families import make_family
from tests.engine.tiny_llama import OurModel, random_ids, scheduled

SIZES = {"hidden_size": 128, "intermediate_size": 256}
FAMILIES = {"mixtral": SIZES, "qwen3-moe": SIZES | {"moe_intermediate_size": 128}}
QUANTISED = re.compile(r"_proj\.weight$|\.experts\.\d+\.w[123]\.weight$")  # the router's precision is kept


def make_pair(folder: Path, family: str, recipe: Recipe) -> tuple[Path, Path]:
    """Directories of a quantised checkpoint, and of one that has its values."""
    make_family(folder / "made", family, **FAMILIES[family])
    plain = {n: t for shard in (folder / "made").glob("*.safetensors") for n, t in load_file(shard).items()}
    quantised = dict(plain)
    generator = np.random.default_rng(0)
    for name in sorted(filter(QUANTISED.search, plain)):
        rows, columns = quantised.pop(name).shape
        linear = random_linear(rows, columns, recipe, generator)
        plain[name] = linear.values
        quantised |= {f"{name.removesuffix('.weight')}.{kind}": t for kind, t in linear.stored(recipe).items()}
    config = json.loads((folder / "made" / "config.json").read_text())
    return (
        _write(folder / "quantised", quantised, config | {"quantization_config": recipe.config}),
        _write(folder / "plain", plain, config),
    )


def _write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.usefixtures("empty_cache", "float_activations")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recipe", [Recipe("awq"), Recipe("gptq"), Recipe("gptq", act_order=True)], ids=str)
def test_quantised_experts_give_the_logits_of_their_values(family: str, recipe: Recipe, tmp_path: Path) -> None:
    quantised, plain = make_pair(tmp_path, family, recipe)
    experts = load(quantised).layers[0].mlp
    assert isinstance(experts, ExpertWeights)
    kind = torch.Tensor if recipe.act_order else QuantizedMatrix
    assert all(isinstance(expert.down.parts[0], kind) for expert in experts.experts)
    chunk = scheduled(random_ids(40, vocab_size=300), 0, range(10))
    actual, expected = (OurModel(folder).logits(chunk) for folder in (quantised, plain))
    torch.testing.assert_close(actual, expected, atol=2e-3 * float(expected.abs().max()), rtol=0)
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))
