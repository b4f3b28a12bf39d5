"""Who guesses tokens on this pod: resolved from the settings before anything is loaded, and built with the engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.batch import ModelInfo
from engine.block_manager import Generations
from engine.checkpoint import (
    CheckpointError,
    estimate_memory_bytes,
    model_info,
    resolve_model,
)
from engine.fake import FakeProposer
from engine.kv_format import kv_block_bytes
from engine.speculation.ngram import NgramProposer
from engine.speculation.proposer import Proposer
from engine.speculation.vocabulary import check_same_vocabulary
from pod.errors import StartupError
from pod.settings import PodSettings

FAKE_DRAFT = "fake"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationPlan:
    """`kind` is "off" where a role does not decode."""

    kind: str
    draft_dir: Path | None = None  # None: no draft model, or the fake one
    draft: ModelInfo | None = None
    block_bytes: int = 0  # of the draft model's own KV
    model_bytes: int = 0  # of its weights

    def describe(self) -> str:
        return f"{self.kind}:{self.draft.model_id}" if self.draft is not None else self.kind


def resolve_speculation(settings: PodSettings, role: str, model_dir: Path | None, model: ModelInfo) -> SpeculationPlan:
    """Reads the draft checkpoint's header. Raises StartupError."""
    if role == "prefill" or settings.speculation != "draft":
        return SpeculationPlan(kind="off" if role == "prefill" else settings.speculation)
    if (model_dir is None) != (settings.draft_model == FAKE_DRAFT):
        raise StartupError(f"draft model {settings.draft_model!r}: cannot draft for the model {model.model_id!r}")
    if model_dir is None:
        return SpeculationPlan(kind="draft")
    try:
        draft_dir = resolve_model(settings.draft_model)
        check_same_vocabulary(model_dir, draft_dir)
        draft = model_info(draft_dir, model.dtype)
        return SpeculationPlan(
            kind="draft",
            draft_dir=draft_dir,
            draft=draft,
            block_bytes=kv_block_bytes(draft, settings.block_size),
            model_bytes=estimate_memory_bytes(draft_dir, model.dtype),
        )
    except CheckpointError as error:
        raise StartupError(str(error)) from None


def make_proposer(
    plan: SpeculationPlan, settings: PodSettings, *, num_blocks: int, generations: Generations, num_threads: int
) -> Proposer | None:
    """Loads the draft model, if there is one. Raises CheckpointError, ValueError."""
    if plan.kind == "ngram":
        return NgramProposer(settings.ngram_min, settings.ngram_max)
    if plan.kind == "draft" and (plan.draft_dir is None or plan.draft is None):
        return FakeProposer()
    if plan.draft_dir is None or plan.draft is None:
        return None
    from engine.speculation.draft_model import DraftModel  # noqa: PLC0415 - loads torch

    return DraftModel(
        plan.draft_dir,
        num_blocks=num_blocks,
        block_size=settings.block_size,
        generations=generations,
        dtype=plan.draft.dtype,
        num_threads=num_threads,
    )
