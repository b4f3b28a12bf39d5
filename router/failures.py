"""What an error in a given state means: try again or not, and which leg, if any, is to be avoided. Pure.

The wrong leg is never blamed: a decode pod's failure says nothing about the prefill pod, a lease that expired or an
expired credit says nothing about either, and a client's bad request blames nobody.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from proto.errors import (
    InternalError,
    InvalidRequest,
    LayoutMismatch,
    NotFound,
    Overloaded,
    PdserveError,
    PeerLost,
    PodUnavailable,
)
from router.lifecycle import State


class Leg(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class PodLost(PodUnavailable):
    """The pod had the request, or may have had it, when it fell silent: the request may be why.

    A plain PodUnavailable is a pod that never had it, or that itself said no.
    """


class CutOff(PodUnavailable):
    """This router stood still or read too slowly, and lost its link to the pod by that: the pod is not to blame."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`avoid` is excluded from this request's next attempts; `busy` only until something changes.

    `suspect`: the request may have broken something, so that it gets few attempts.
    """

    retry: bool
    avoid: Leg | None = None
    busy: Leg | None = None
    suspect: bool = True


# Which pod was being spoken to.
_SPEAKING: dict[State, Leg] = {
    State.RESERVING: Leg.DECODE,
    State.PREFILLING: Leg.PREFILL,
    State.HANDING_OFF: Leg.DECODE,
    State.TRANSFERRING: Leg.DECODE,
    State.STARTING: Leg.DECODE,
    State.DECODING: Leg.DECODE,
}


def judge(state: State, error: PdserveError) -> Verdict:
    """`error` ended an attempt that was in `state`."""
    leg = _SPEAKING.get(state)
    if leg is None:
        return Verdict(retry=False)
    match error:
        case Overloaded():
            return Verdict(retry=True, busy=leg, suspect=False)
        case PodUnavailable() | InternalError() if not isinstance(error, CutOff):
            return Verdict(retry=True, avoid=leg, suspect=isinstance(error, PodLost | InternalError))
        case PeerLost() | LayoutMismatch():
            return Verdict(retry=True, avoid=Leg.PREFILL)  # the decode pod says that it cannot read from there
        case InvalidRequest():
            return Verdict(retry=isinstance(error, NotFound))  # the pod forgot something of ours: nobody's fault
        case _:
            return Verdict(retry=True)  # a lease or credit that expired, a pod's own cancellation, a standstill of ours
