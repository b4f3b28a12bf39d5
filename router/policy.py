"""Which pods serve a request: a pure function of (request, snapshot, prefix index, rng, now).

A prefill pod costs the predicted time until it has computed this prompt: tokens waiting there plus this prompt's
uncached tokens, over its speed. A decode pod costs its step time once for each sequence that shares it, and more as
its blocks fill up. Costs within 10 % are ties, which the random generator breaks, so that several routers that see
the same records do not all pick the same pod. A pod without measurements is taken for the median of the others.

Only pods of equal KV layout are paired. Without a usable prefill pod the decode pod computes the prompt too, which is
also how a colocated deployment works.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from proto import common_pb2, registry_pb2
from router.snapshot import DECODE, PREFILL, PodKey, PodView, Snapshot, layout_difference

TIE = 1.1  # costs up to this factor of the lowest are equal
COLD_TOKENS_PER_S = 1000.0  # prefill speed and decode step that are assumed while no pod has measured any
COLD_STEP_S = 0.03
MAX_SLOWNESS = 4.0  # a pod's step counts for at most this many medians: its average may be old
CACHED_DECODE_DISCOUNT = 0.2  # of a decode pod's cost, when it holds the whole prompt: nothing is transferred
MIN_RETRY_MS, MAX_RETRY_MS = 250, 30_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRequest:
    model_id: str
    num_tokens: int  # to prefill: prompt and replayed output
    max_tokens: int  # prompt and longest possible output together, more than num_tokens
    prefix_hashes: tuple[bytes, ...] = ()
    deadline: float | None = None  # of the first token, on the clock of `now`
    excluded: frozenset[PodKey] = frozenset()  # pods that failed an earlier attempt of this request
    busy: frozenset[PodKey] = frozenset()  # pods that have just refused it for lack of room
    computes: tuple[str, str, str, str] | None = None  # a replay stays on pods of these model, weights, dtypes

    @property
    def num_kv_tokens(self) -> int:
        """That a decode pod must have room for at first: one more than are there, and none for the very last."""
        return min(self.num_tokens + 1, self.max_tokens - 1)


class PrefixView(Protocol):
    def cached_tokens(self, pod_id: str, epoch: str, hashes: Sequence[bytes]) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingDecision:
    prefill_pod: PodView | None  # None: decode-only
    decode_pod: PodView
    reason: str
    predicted_prefill_s: float  # until the prompt is computed
    predicted_cached_tokens: int  # on the pod that computes the prompt


@dataclass(frozen=True, slots=True)
class Refusal:
    """No pods now. `can_wait`: that may change in a moment; otherwise the request is refused at once."""

    kind: common_pb2.ErrorKind.ValueType
    message: str
    can_wait: bool
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class _Priced:
    pod: PodView
    cost: float  # seconds
    prefill_s: float
    cached_tokens: int


def decide(
    request: RoutingRequest, snapshot: Snapshot, prefixes: PrefixView, rng: Random, now: float
) -> RoutingDecision | Refusal:
    """`now` and the request's deadline are seconds on one monotonic clock."""
    found = _candidates(request, snapshot, rng)
    if isinstance(found, Refusal):
        return found
    prefills, decodes = found
    if prefills:
        return _paired(request, prefills, decodes, prefixes, rng, now)
    return _decode_only(request, snapshot, decodes, prefixes, rng, now)


def why_not_serving(model_id: str, snapshot: Snapshot) -> str | None:
    """Why no pods could serve a request for this model even if they were idle; None when some could."""
    shortest = RoutingRequest(model_id=model_id, num_tokens=1, max_tokens=1)
    found = _candidates(shortest, snapshot, Random(0))  # which draws retry delays alone
    return found.message if isinstance(found, Refusal) else None


def _candidates(
    request: RoutingRequest, snapshot: Snapshot, rng: Random
) -> tuple[Sequence[PodView], Sequence[PodView]] | Refusal:
    """Prefill and decode pods of which some pair up, whatever their load; without prefill pods: decode-only."""
    usable = [pod for pod in snapshot if _unusable(request, pod) is None]
    fitting = [pod for pod in usable if _can_ever_hold(request, pod)]
    decodes = _prefer_untried(request, [pod for pod in fitting if pod.role == DECODE])
    if not decodes:
        return _no_decode_pod(request, snapshot, [pod for pod in usable if pod.role == DECODE], rng)
    prefills = [pod for pod in fitting if pod.role == PREFILL and pod.key not in request.excluded]
    if _pairable(prefills, decodes):
        return prefills, decodes
    if prefills and not _pairable(snapshot.of_role(PREFILL), snapshot.of_role(DECODE)):
        return _unpairable(prefills[0], decodes[0])
    return (), decodes


def _prefer_untried(request: RoutingRequest, pods: Sequence[PodView]) -> Sequence[PodView]:
    """Without another decode pod one that failed this request is tried again: it is reachable, so that may be over."""
    return [pod for pod in pods if pod.key not in request.excluded] or pods


def _unusable(request: RoutingRequest, pod: PodView) -> str | None:
    """Why nothing of this request may go to the pod, whatever its load; None when it may."""
    if pod.model_id != request.model_id:
        return f"of model {pod.model_id!r}"
    if pod.draining:
        return "draining"
    if not pod.reachable:
        return "unreachable"
    if request.computes is not None and pod.computes != request.computes:
        return "other weights"
    return None


def _can_ever_hold(request: RoutingRequest, pod: PodView) -> bool:
    """A prefill pod samples one token; the rest of the answer is a decode pod's."""
    needed = request.max_tokens if pod.role == DECODE else request.num_tokens + 1
    return needed <= pod.max_model_len


def _has_room(request: RoutingRequest, priced: _Priced) -> bool:
    pod = priced.pod
    if pod.key in request.busy or pod.num_sequences >= pod.max_num_seqs:
        return False
    if pod.role == PREFILL:
        return True
    return pod.blocks_for(request.num_kv_tokens) - priced.cached_tokens // pod.block_size <= pod.num_free_blocks


# --- Prices ---------------------------------------------------------------------------------------------------------


def _price_prefill(request: RoutingRequest, pods: Sequence[PodView], prefixes: PrefixView) -> list[_Priced]:
    cold = _median([pod.prefill_tokens_per_s for pod in pods], COLD_TOKENS_PER_S)
    priced = []
    for pod in pods:
        cached = min(prefixes.cached_tokens(*pod.key, request.prefix_hashes), request.num_tokens)
        cached -= cached % pod.block_size
        tokens = pod.num_waiting_tokens + request.num_tokens - cached
        seconds = max(tokens, 1) / (pod.prefill_tokens_per_s or cold)
        priced.append(_Priced(pod, seconds, seconds, cached))
    return priced


def _price_decode(request: RoutingRequest, pods: Sequence[PodView], prefixes: PrefixView) -> list[_Priced]:
    median = _median([pod.step_s for pod in pods], COLD_STEP_S)
    priced = []
    for pod in pods:
        cached = min(prefixes.cached_tokens(*pod.key, request.prefix_hashes), request.num_tokens)
        step_s = min(max(pod.step_s or median, median / MAX_SLOWNESS), median * MAX_SLOWNESS)
        fullness = 1 - pod.num_free_blocks / pod.num_blocks
        discount = 1 - CACHED_DECODE_DISCOUNT * cached / request.num_tokens
        priced.append(_Priced(pod, step_s * (pod.num_sequences + 1) * (1 + fullness) * discount, 0.0, cached))
    return priced


def _price_both(request: RoutingRequest, pods: Sequence[PodView], prefixes: PrefixView) -> list[_Priced]:
    """Decode pods that are to compute the prompt as well."""
    prefills = _price_prefill(request, pods, prefixes)
    decodes = _price_decode(request, pods, prefixes)
    return [
        _Priced(p.pod, p.cost + d.cost, p.prefill_s, p.cached_tokens) for p, d in zip(prefills, decodes, strict=True)
    ]


def _median(values: Iterable[float], default: float) -> float:
    measured = [value for value in values if value > 0]
    return statistics.median(measured) if measured else default


def _pick(priced: Sequence[_Priced], rng: Random) -> _Priced:
    """One of the cheapest, ties broken at random."""
    lowest = min(p.cost for p in priced)
    return rng.choice([p for p in priced if p.cost <= lowest * TIE])


# --- Decisions ------------------------------------------------------------------------------------------------------


def _decode_only(
    request: RoutingRequest, snapshot: Snapshot, pods: Sequence[PodView], prefixes: PrefixView, rng: Random, now: float
) -> RoutingDecision | Refusal:
    priced = _price_both(request, pods, prefixes)
    free = [p for p in priced if _has_room(request, p)]
    if not free:
        return _busy("decode", request, priced, rng)
    best = _pick(free, rng)
    why = f"decode-only: {_census(request, snapshot, PREFILL)}; {_describe_decode(best)}"
    return _in_time(
        request,
        RoutingDecision(
            prefill_pod=None,
            decode_pod=best.pod,
            reason=why,
            predicted_prefill_s=best.prefill_s,
            predicted_cached_tokens=best.cached_tokens,
        ),
        best.pod,
        now,
    )


def _paired(
    request: RoutingRequest,
    prefills: Sequence[PodView],
    decodes: Sequence[PodView],
    prefixes: PrefixView,
    rng: Random,
    now: float,
) -> RoutingDecision | Refusal:
    priced_prefills = _price_prefill(request, prefills, prefixes)
    priced_decodes = _price_decode(request, decodes, prefixes)
    free_prefills = [p for p in priced_prefills if _has_room(request, p)]
    free_decodes = [d for d in priced_decodes if _has_room(request, d)]
    if not free_decodes:
        return _busy("decode", request, priced_decodes, rng)
    groups = _pairable([p.pod for p in free_prefills], [d.pod for d in free_decodes])
    if not groups:
        return _busy("prefill", request, priced_prefills, rng)
    prefill, decode = _best_pair(groups, free_prefills, free_decodes, rng)
    return _in_time(
        request,
        RoutingDecision(
            prefill_pod=prefill.pod,
            decode_pod=decode.pod,
            reason=f"{_describe_prefill(request, prefill)}; {_describe_decode(decode)}",
            predicted_prefill_s=prefill.prefill_s,
            predicted_cached_tokens=prefill.cached_tokens,
        ),
        prefill.pod,
        now,
    )


def _pairable(prefills: Iterable[PodView], decodes: Iterable[PodView]) -> list[str]:
    """Fingerprints of which there is a pod of either role, in a fixed order."""
    return sorted({pod.fingerprint for pod in prefills} & {pod.fingerprint for pod in decodes})


def _best_pair(
    groups: Sequence[str], prefills: Sequence[_Priced], decodes: Sequence[_Priced], rng: Random
) -> tuple[_Priced, _Priced]:
    pairs = [
        (
            _pick([p for p in prefills if p.pod.fingerprint == group], rng),
            _pick([d for d in decodes if d.pod.fingerprint == group], rng),
        )
        for group in groups
    ]
    return min(pairs, key=lambda pair: pair[0].cost + pair[1].cost)


def _in_time(
    request: RoutingRequest, decision: RoutingDecision, computing: PodView, now: float
) -> RoutingDecision | Refusal:
    """Refuses early what even the best pod is measured to be too slow for."""
    if request.deadline is None or computing.prefill_tokens_per_s <= 0:
        return decision
    late_s = now + decision.predicted_prefill_s - request.deadline
    if late_s <= 0:
        return decision
    backlog = f"pod {computing.pod_id} has {computing.num_waiting_tokens} tokens waiting"
    message = f"the first token would be {late_s:.1f} s past the deadline: {backlog}"
    return Refusal(common_pb2.ERROR_KIND_OVERLOADED, message, False, _clamp_retry(late_s * 1000))


# --- Refusals -------------------------------------------------------------------------------------------------------


def _busy(role: str, request: RoutingRequest, priced: Sequence[_Priced], rng: Random) -> Refusal:
    backlog_s = min(p.cost for p in priced)
    most_free = max(p.pod.num_free_blocks for p in priced)
    room = f"{request.num_tokens} tokens to place, at most {most_free} blocks free"
    refused = sum(p.pod.key in request.busy for p in priced)  # whatever their last reports say
    asked = f", {refused} asked just now had no room in time" if refused else ""
    message = f"all {len(priced)} {role} pods are busy: {room}{asked}"
    return Refusal(common_pb2.ERROR_KIND_OVERLOADED, message, True, _retry_ms(backlog_s, rng))


def _no_decode_pod(request: RoutingRequest, snapshot: Snapshot, too_small: Sequence[PodView], rng: Random) -> Refusal:
    if too_small:
        limit = max(pod.max_model_len for pod in too_small)
        message = f"prompt and max_tokens are {request.max_tokens} tokens: decode pods hold at most {limit}"
        return Refusal(common_pb2.ERROR_KIND_INVALID_REQUEST, message, False)
    message = _census(request, snapshot, DECODE)
    return Refusal(common_pb2.ERROR_KIND_OVERLOADED, message, True, _retry_ms(1.0, rng))


def _unpairable(prefill: PodView, decode: PodView) -> Refusal:
    difference = layout_difference(prefill.layout, decode.layout) or "fingerprints differ"
    where = f"prefill pod {prefill.pod_id}, decode pod {decode.pod_id}"
    message = f"no decode pod has the KV layout of a prefill pod: {difference} ({where})"
    return Refusal(common_pb2.ERROR_KIND_POD_UNAVAILABLE, message, False)


def _census(request: RoutingRequest, snapshot: Snapshot, role: registry_pb2.Role.ValueType) -> str:
    """`no usable prefill pod (2 draining, 1 unreachable)`."""
    reasons = Counter(_why_not(request, pod) for pod in snapshot.of_role(role))
    listed = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items())) or "none registered"
    return f"no usable {'prefill' if role == PREFILL else 'decode'} pod ({listed})"


def _why_not(request: RoutingRequest, pod: PodView) -> str:
    if (reason := _unusable(request, pod)) is not None:
        return reason
    if pod.key in request.excluded:
        return "failed earlier"
    return "of another layout" if _can_ever_hold(request, pod) else "too small"


def _retry_ms(seconds: float, rng: Random) -> int:
    """Spread over [1, 2) times the estimate, so that refused clients do not come back together."""
    return _clamp_retry(seconds * 1000 * rng.uniform(1, 2))


def _clamp_retry(milliseconds: float) -> int:
    return int(min(max(milliseconds, MIN_RETRY_MS), MAX_RETRY_MS))


def _describe_prefill(request: RoutingRequest, priced: _Priced) -> str:
    pod = priced.pod
    uncached = request.num_tokens - priced.cached_tokens
    return (
        f"prefill {pod.pod_id}: {uncached} uncached + {pod.num_waiting_tokens} waiting tokens, {priced.prefill_s:.3f} s"
    )


def _describe_decode(priced: _Priced) -> str:
    pod = priced.pod
    return f"decode {pod.pod_id}: {pod.num_sequences} sequences, {pod.num_free_blocks} of {pod.num_blocks} blocks free"
