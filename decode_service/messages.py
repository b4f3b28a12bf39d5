"""One engine event as a decode pod's stream carries it."""

from __future__ import annotations

from decode_service.table import Entry
from engine.batch import TokenEvent
from pod.messages import FINISH_REASONS, describe_token
from proto import pods_pb2


def add_event(message: pods_pb2.SequenceTokens, entry: Entry, event: TokenEvent) -> None:
    """Adds `event` to its sequence's news; with timings and cached tokens when it is the sequence's first."""
    describe_token(message.tokens.add(), event.token)
    if event.finish_reason is not None:
        message.finish_reason = FINISH_REASONS[event.finish_reason]
        message.num_preemptions = event.num_preemptions
        message.num_drafts = event.num_drafts
        message.num_accepted = event.num_accepted
    if not entry.first_sent:
        entry.first_sent = True
        _describe_first(message, entry, event)


def _describe_first(message: pods_pb2.SequenceTokens, entry: Entry, event: TokenEvent) -> None:
    first_token_s = event.at - event.first_scheduled_at
    with_handoff = entry.reservation is not None
    message.timings.transfer_s = entry.transfer_s
    message.timings.transfer_bytes = entry.transfer_bytes
    message.timings.queue_s = event.first_scheduled_at - event.arrived_at
    if with_handoff:
        message.timings.first_step_s = first_token_s
    else:
        message.timings.prefill_s = first_token_s
    message.num_cached_tokens = entry.reservation.num_cached if entry.reservation is not None else event.num_cached
