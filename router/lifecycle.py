"""The life of a request as one table: every (state, event), the state it leads to, what it frees, who must be told.

A request is in exactly one state. Each state says what the request holds; each row of the table says what becomes of
what is no longer held: *settled* (its owner has freed it by itself, the router only forgets it) or *released* (the
router must tell the owner named in `TOLD`). Nothing else in the router frees anything, so nothing can be forgotten or
freed twice. Pure; docs/router.md shows the table.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class State(enum.Enum):
    QUEUED = "queued"  # waits for a decision: new, or to be replayed
    RESERVING = "reserving"  # Reserve is under way
    PREFILLING = "prefilling"  # Prefill is under way, the credit is held
    HANDING_OFF = "handing_off"  # the first token is out; StartDecode with the hand-off is under way
    TRANSFERRING = (
        "transferring"  # the decode pod has accepted; no token of its own yet, so the lease may still be held
    )
    STARTING = "starting"  # decode-only: StartDecode is under way
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    __hash__ = object.__hash__  # members are single; Enum's own hashes the name, in Python, three times a token

    @property
    def terminal(self) -> bool:
        return self in TERMINAL


class Event(enum.Enum):
    PAIRED = "paired"  # the policy chose a prefill and a decode pod
    ALONE = "alone"  # the policy chose a decode pod that computes the prompt too
    RESERVED = "reserved"
    PREFILLED = "prefilled"  # first token and hand-off are here
    STARTED = "started"  # StartDecode returned
    TOKENS = "tokens"  # the decode pod sent tokens
    ANSWERED = "answered"  # a pod sent the answer's last token
    STOPPED = "stopped"  # the router found a stop string; the pods do not know yet
    ATTEMPT_FAILED = "attempt_failed"  # pod or transfer failed, or the pod was too busy: try again
    GAVE_UP = "gave_up"  # an error that no other pod can mend, no attempts left, no room, or the deadline
    CANCELLED = "cancelled"  # the client went away or said so

    __hash__ = object.__hash__  # as State's


class Resource(enum.Enum):
    PREFILL_SLOT = "prefill_slot"  # the router's own count of work on the prefill pod
    DECODE_SLOT = "decode_slot"  # likewise on the decode pod
    CREDIT = "credit"  # reserved decode blocks, from the moment that Reserve is sent
    PREFILL = "prefill"  # the prefill call, and all that the pod holds for it
    LEASE = "lease"  # pinned blocks on the prefill pod
    STREAM = "stream"  # the entry by which the decode pod's tokens find this request
    SEQUENCE = "sequence"  # what the decode pod runs for us, from the moment that StartDecode is sent


# How each resource is released; also the order in which it is done.
TOLD: dict[Resource, str] = {
    Resource.STREAM: "router: drop the entry; late tokens are discarded",
    Resource.SEQUENCE: "decode pod: AbortSequence",
    Resource.CREDIT: "decode pod: ReleaseCredit",
    Resource.PREFILL: "prefill pod: cancel the call",
    Resource.LEASE: "prefill pod: ReleaseLease",
    Resource.PREFILL_SLOT: "router: uncount",
    Resource.DECODE_SLOT: "router: uncount",
}

_SLOTS = frozenset({Resource.PREFILL_SLOT, Resource.DECODE_SLOT})
_RUNNING = frozenset({Resource.STREAM, Resource.SEQUENCE, Resource.DECODE_SLOT})

HELD: dict[State, frozenset[Resource]] = {
    State.QUEUED: frozenset(),
    State.RESERVING: _SLOTS | {Resource.CREDIT},
    State.PREFILLING: _SLOTS | {Resource.CREDIT, Resource.PREFILL},
    State.HANDING_OFF: _RUNNING | {Resource.CREDIT, Resource.LEASE},
    State.TRANSFERRING: _RUNNING | {Resource.LEASE},
    State.STARTING: _RUNNING,
    State.DECODING: _RUNNING,
    State.FINISHED: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
}

TERMINAL = frozenset({State.FINISHED, State.FAILED, State.CANCELLED})


class InvalidTransition(Exception):
    """A bug of the router: this event cannot happen in this state."""


@dataclass(frozen=True, slots=True)
class Transition:
    """`acquires` is held from now on; `settled` and `released` no longer are. The client is told of terminal states."""

    state: State
    acquires: frozenset[Resource]
    settled: frozenset[Resource]
    released: frozenset[Resource]


def _moves() -> dict[tuple[State, Event], tuple[State, frozenset[Resource]]]:
    """(state, event) -> (new state, what is settled). The rest of what is no longer held is released."""
    s, e, r = State, Event, Resource
    prefill_done, nothing = frozenset({r.PREFILL, r.PREFILL_SLOT}), frozenset[Resource]()
    moves = {
        (s.QUEUED, e.PAIRED): (s.RESERVING, nothing),
        (s.QUEUED, e.ALONE): (s.STARTING, nothing),
        (s.RESERVING, e.RESERVED): (s.PREFILLING, nothing),
        (s.PREFILLING, e.PREFILLED): (s.HANDING_OFF, prefill_done),
        (s.PREFILLING, e.ANSWERED): (s.FINISHED, prefill_done),  # by its first token: there is no hand-off
        (s.HANDING_OFF, e.STARTED): (s.TRANSFERRING, frozenset({r.CREDIT})),  # it became the sequence's blocks
        (s.HANDING_OFF, e.STOPPED): (s.FINISHED, nothing),  # by the first token, before StartDecode
        (s.TRANSFERRING, e.TOKENS): (s.DECODING, frozenset({r.LEASE})),  # released by the decode pod
        (s.TRANSFERRING, e.ANSWERED): (s.FINISHED, _RUNNING | {r.LEASE}),
        (s.TRANSFERRING, e.STOPPED): (s.FINISHED, frozenset({r.LEASE})),
        (s.STARTING, e.STARTED): (s.DECODING, nothing),
        (s.DECODING, e.TOKENS): (s.DECODING, nothing),
        (s.DECODING, e.ANSWERED): (s.FINISHED, _RUNNING),
        (s.DECODING, e.STOPPED): (s.FINISHED, nothing),
    }
    for state in State:
        if not state.terminal:
            moves[state, e.GAVE_UP] = (s.FAILED, nothing)
            moves[state, e.CANCELLED] = (s.CANCELLED, nothing)
            if state is not s.QUEUED:
                moves[state, e.ATTEMPT_FAILED] = (s.QUEUED, nothing)
    return moves


def _transition(state: State, new: State, settled: frozenset[Resource]) -> Transition:
    freed = HELD[state] - HELD[new]
    return Transition(new, HELD[new] - HELD[state], settled & freed, freed - settled)


TABLE: dict[tuple[State, Event], Transition] = {
    (state, event): _transition(state, new, settled) for (state, event), (new, settled) in _moves().items()
}


def advance(state: State, event: Event) -> Transition:
    """Raises InvalidTransition when the table has no such row."""
    try:
        return TABLE[state, event]
    except KeyError:
        raise InvalidTransition(f"{event.value} cannot happen to a request that is {state.value}") from None
