"""Whether a draft model speaks the target's language: the same id must mean the same piece of text in both."""

from __future__ import annotations

from pathlib import Path

from engine.config_fields import CheckpointError, read_json
from engine.model_config import read_config

TOKENIZER_NAME = "tokenizer.json"


def check_same_vocabulary(model_dir: Path, draft_dir: Path) -> None:
    """Raises CheckpointError that says what differs. A directory without tokenizer.json is judged by its size alone."""
    size, draft_size = read_config(model_dir).vocab_size, read_config(draft_dir).vocab_size
    if size != draft_size:
        raise CheckpointError(
            f"draft model {draft_dir}: has a vocabulary of {draft_size} tokens, must have the {size} of {model_dir}"
        )
    files = [folder / TOKENIZER_NAME for folder in (model_dir, draft_dir)]
    if all(file.is_file() for file in files) and files[0].read_bytes() != files[1].read_bytes():
        _check_same_tokens(*files)


def _check_same_tokens(file: Path, draft_file: Path) -> None:
    ids, draft_ids = _ids(file), _ids(draft_file)
    differing = sorted(token for token in ids.keys() | draft_ids.keys() if ids.get(token) != draft_ids.get(token))
    if differing:
        token = differing[0]
        raise CheckpointError(
            f"draft model {draft_file.parent}: {len(differing)} tokens have other ids than in {file.parent}, "
            f"such as {token!r}: {_difference(draft_ids.get(token), ids.get(token))}"
        )


def _difference(draft_id: int | None, target_id: int | None) -> str:
    if target_id is None:
        return f"{draft_id}, is not in the model's vocabulary"
    return f"{'missing' if draft_id is None else draft_id}, must be {target_id}"


def _ids(file: Path) -> dict[str, int]:
    """Token to id, added tokens included."""
    tokenizer = read_json(file)
    vocab = tokenizer["model"]["vocab"]
    if isinstance(vocab, list):  # a unigram model's: pairs of token and score, in the order of ids
        vocab = {token: index for index, (token, _) in enumerate(vocab)}
    return {**vocab, **{added["content"]: added["id"] for added in tokenizer.get("added_tokens", [])}}
