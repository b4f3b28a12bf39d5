"""Which of the tokens that were drawn after drafts are real. Pure.

Before the first draft and after each one, the runner draws the token that it would have drawn had the drafts so far
been the answer: from the same logits and penalties, with the same uniform number of (seed, position). So the first
token drawn is real, and a later one is real when every draft before it equals the token drawn in its place. What comes
out is the answer without drafts, token for token, greedy or sampled, whoever guessed.
docs/decisions/0008-drafts-are-compared.md says why not rejection sampling (https://arxiv.org/abs/2211.17192).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.sequence import SampledToken


def verified(draft_ids: Seq[int], drawn: Seq[SampledToken]) -> tuple[SampledToken, ...]:
    """`drawn`, which has one token more than `draft_ids`, up to and with the first that is not its draft."""
    for index, draft_id in enumerate(draft_ids):
        if drawn[index].token_id != draft_id:
            return tuple(drawn[: index + 1])
    return tuple(drawn)
