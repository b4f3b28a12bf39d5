"""What a request remembers of its failed attempts: pods to avoid, whether to try again, how long it may wait. Pure."""

from __future__ import annotations

from proto.errors import InternalError, PdserveError, PodUnavailable
from router.failures import Leg, judge
from router.lifecycle import State
from router.policy import RoutingDecision
from router.snapshot import PodKey

MAX_FAILURES = 5  # attempts that the request itself may have broken
MAX_REFUSALS = 5  # attempts on pods that were gone or said no; more only while the request may still wait for room
MAX_DOUBLINGS = 4  # of the pause after a failure: a wait must be worth more than one try
MAX_BUGS = 2  # of them internal errors: a request that breaks engines must not visit them all
BUSY_S = 0.2  # for so long a pod that had no room is not asked again; one that failed, twice as long each time
DEADLINE_MARGIN_S = 0.05  # before the client's own timer, so that it hears why


class Retries:
    """Owned by one request. Times are seconds of one monotonic clock."""

    def __init__(self, queue_wait_s: float, resume_wait_s: float, deadline: float | None) -> None:
        self.avoid: frozenset[PodKey] = frozenset()
        self.pause_s = 0.0  # for which the pod of the last failure is left alone; 0: nobody was to blame
        self._max_wait_s = queue_wait_s
        self._resume_wait_s = resume_wait_s
        self._deadline = deadline
        self._num_failures = 0
        self._num_refusals = 0
        self._num_bugs = 0
        self._busy: dict[PodKey, float] = {}
        self._wait_until: float | None = None
        self.waiting_since = 0.0  # set by the first wait_s of a wait
        self._last_failure: PdserveError | None = None

    def busy(self, now: float) -> frozenset[PodKey]:
        return frozenset(key for key, until in self._busy.items() if until > now)

    def wait_s(self, now: float) -> float:
        """How long the request may now wait for room: until its deadline or, without one, queue_wait_s since it came
        or resume_wait_s, if that is longer, since a pod last had it.
        """
        if self._wait_until is None:
            until = now + self._max_wait_s if self._deadline is None else self._deadline - DEADLINE_MARGIN_S
            self._wait_until, self.waiting_since = until, now
        return max(0.0, self._wait_until - now)

    def progressed(self) -> None:
        """A pod computed something for it, or may have: the next wait is a new one."""
        self._wait_until = None
        self._max_wait_s = max(self._max_wait_s, self._resume_wait_s)

    def should_retry(self, state: State, error: PdserveError, decision: RoutingDecision, now: float) -> bool:
        """Records that an attempt with `decision` ended in `state` with `error`."""
        verdict = judge(state, error)
        self.pause_s = 0.0
        if (busy := _key(verdict.busy, decision)) is not None:
            self._leave_alone(busy, BUSY_S, now)
            return True
        if (avoid := _key(verdict.avoid, decision)) is not None:
            self.avoid |= {avoid}
            doublings = min(self._num_failures + self._num_refusals, MAX_DOUBLINGS)
            self._leave_alone(avoid, BUSY_S * 2**doublings, now)
        self._last_failure = error
        if not verdict.suspect:
            self._num_refusals += 1
            return self._num_refusals < MAX_REFUSALS or self.wait_s(now) > 0
        self.progressed()
        self._num_failures += 1
        self._num_bugs += isinstance(error, InternalError)
        return verdict.retry and self._num_failures < MAX_FAILURES and self._num_bugs < MAX_BUGS

    def _leave_alone(self, key: PodKey, pause_s: float, now: float) -> None:
        """A pod that fails at once must not use up all attempts before anything can have changed."""
        self.pause_s = pause_s
        self._busy[key] = now + pause_s

    def explain(self, refusal: PdserveError) -> PdserveError:
        """What the client is told when no pod was found: a replay fails for what happened before, not for the queue."""
        if self._last_failure is None:
            return refusal
        cause = self._last_failure
        return PodUnavailable(f"{cause.message}; to go on elsewhere: {refusal.message}", pod_id=cause.pod_id)


def _key(leg: Leg | None, decision: RoutingDecision) -> PodKey | None:
    if leg is None:
        return None
    pod = decision.decode_pod if leg is Leg.DECODE else decision.prefill_pod
    return None if pod is None else pod.key
