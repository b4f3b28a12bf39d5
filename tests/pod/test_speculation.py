"""Which pods speculate, how, and what is refused before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.fake import FakeProposer
from engine.speculation.draft_model import DraftModel
from engine.speculation.ngram import NgramProposer
from pod.errors import StartupError
from pod.plan import PodPlan, resolve
from pod.settings import PodSettings
from pod.speculation import make_proposer
from proto.settings import ConfigError
from tests.engine.tiny_llama import make_checkpoint
from tests.support.cluster import Cluster
from tests.support.pod_client import right_answer, spec


def resolved(role: str = "decode", **values: object) -> PodPlan:
    return resolve(PodSettings.model_validate({"num_blocks": 4} | values), role)


def proposer_of(plan: PodPlan) -> object:
    return make_proposer(
        plan.speculation,
        plan.settings,
        num_blocks=plan.num_blocks,
        generations=np.zeros(plan.num_blocks, np.uint64),
        num_threads=1,
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "tiny"
    make_checkpoint(folder)
    return folder


def test_off_by_default_and_on_prefill_pods() -> None:
    for plan in (resolved(model="fake"), resolved("prefill", model="fake", speculation="ngram")):
        assert plan.speculation.kind == "off"
        assert proposer_of(plan) is None
        assert "speculation=off " in plan.describe()


def test_prompt_lookup() -> None:
    plan = resolved(model="fake", speculation="ngram", ngram_min=3, ngram_max=3)
    assert isinstance(proposer_of(plan), NgramProposer)
    assert "speculation=ngram " in plan.describe()


def test_a_draft_model(tiny: Path) -> None:
    plan = resolved(model=str(tiny), speculation="draft", draft_model=str(tiny), dtype="float32")
    assert isinstance(proposer_of(plan), DraftModel)
    assert "speculation=draft:tiny " in plan.describe()
    fake = resolved(model="fake", speculation="draft", draft_model="fake")
    assert isinstance(proposer_of(fake), FakeProposer)


def test_the_drafts_kv_counts_when_memory_is_short(tiny: Path) -> None:
    """What fits without a draft of the same size does not fit with it."""
    plain = resolved(model=str(tiny), num_blocks=1, dtype="float32")
    drafting = resolved(model=str(tiny), num_blocks=1, dtype="float32", speculation="draft", draft_model=str(tiny))
    assert plain.speculation.block_bytes == 0
    assert drafting.speculation.block_bytes == plain.layout.block_bytes
    assert drafting.speculation.model_bytes > 0
    with pytest.raises(StartupError, match="too little memory"):
        resolved(model=str(tiny), num_blocks=10**9, speculation="draft", draft_model=str(tiny))


def test_a_draft_model_that_cannot_be_is_refused(tiny: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "large", vocab_size=97)
    with pytest.raises(StartupError, match="has a vocabulary of 97 tokens, must have the 96 of"):
        resolved(model=str(tiny), speculation="draft", draft_model=str(tmp_path / "large"))
    with pytest.raises(StartupError, match="no such directory or file"):
        resolved(model=str(tiny), speculation="draft", draft_model="nowhere")
    for model, draft in (("fake", str(tiny)), (str(tiny), "fake")):
        with pytest.raises(StartupError, match="cannot draft for the model"):
            resolved(model=model, speculation="draft", draft_model=draft)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--speculation", "draft"], "speculation = draft: needs draft_model"),
        (["--draft-model", "x"], "draft_model = x: has no effect unless speculation is draft"),
        (["--speculation", "ngram", "--draft-model", "x"], "has no effect"),
        (["--ngram-min", "5"], "ngram_min = 5: must be at most ngram_max = 4"),
        (["--num-draft-tokens", "0"], "num_draft_tokens"),
        (["--speculation", "wild"], "speculation"),
    ],
)
def test_bad_settings_are_named(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PodSettings.load(argv)


async def test_a_pod_that_drafts_answers_rightly_and_says_how_often_it_guessed(cluster: Cluster) -> None:
    pod = await cluster.start("decode", speculation="draft", draft_model="fake")
    client = await cluster.decode_client(pod)
    await client.start_decode(sequence := spec(range(20), max_tokens=40, min_tokens=40))
    received = client.received[sequence.sequence_id]
    await received.until_ended()
    assert tuple(received.token_ids) == right_answer(sequence).output_ids
    assert 0 < received.last.num_accepted < received.last.num_drafts
    load = pod.load()
    assert (load.num_drafts, load.num_accepted) == (received.last.num_drafts, received.last.num_accepted)
    registry = pod.metrics.registry
    assert registry.get_sample_value("pdserve_drafts_total") == load.num_drafts
    assert registry.get_sample_value("pdserve_accepted_drafts_total") == load.num_accepted
