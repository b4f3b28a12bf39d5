"""What the engine says, in protobuf."""

from __future__ import annotations

from engine.batch import EngineLoad
from engine.sequence import FinishReason, SampledToken
from proto import common_pb2, registry_pb2
from proto.errors import InternalError

FINISH_REASONS: dict[FinishReason | None, common_pb2.FinishReason.ValueType] = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}


def not_finite(pod_id: str) -> InternalError:
    """What a sequence that ended as FAILED is told; all others go on."""
    return InternalError(
        "the model gave logits that are not finite: its weights are damaged, or this input overflows them",
        pod_id=pod_id,
    )


def describe_token(message: common_pb2.TokenOutput, token: SampledToken) -> None:
    """Fills an empty message in, which takes less than making one and copying it to where it belongs."""
    message.token_id = token.token_id
    if token.logprob is not None:
        message.logprob = token.logprob
    for top in token.top:
        message.top_logprobs.add(token_id=top.token_id, logprob=top.logprob)


def pod_load(load: EngineLoad, *, num_leases: int, num_credits: int, num_transfers: int) -> registry_pb2.PodLoad:
    return registry_pb2.PodLoad(
        num_waiting=load.num_waiting,
        num_running=load.num_running,
        num_waiting_tokens=load.num_waiting_tokens,
        num_free_blocks=load.num_free_blocks,
        num_blocks=load.num_blocks,
        num_leases=num_leases,
        num_credits=num_credits,
        num_transfers=num_transfers,
        step_s=load.step_s,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        num_drafts=load.num_drafts,
        num_accepted=load.num_accepted,
    )
