"""Requests for the chaos suite: drawn from a seed, each with the one right answer to it, and the judge of what came.

The right answer is computed from the fake model's arithmetic (engine/fake.py) and Python's own UTF-8 decoder; nothing
of the router, the pods or their caches takes part.
"""

from __future__ import annotations

import asyncio
import codecs
import enum
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random

from engine.fake import EOS_ID, MAX_MODEL_LEN, VOCAB_SIZE, fake_generate
from engine.sequence import FinishReason, SamplingParams
from proto import common_pb2, inference_pb2
from proto.errors import Cancelled, DeadlineExceeded, InvalidRequest, Overloaded, PdserveError, PodUnavailable
from router.client import RouterClient

LEDGER_TOLERANCE_S = 1e-3
HUNG_S = 90.0  # far past every bound of the system: what takes longer has been forgotten
ODD_IDS = ("", "same", "same", "pdserve:*:pod:?", "naïve 请求 🦜", "a/b.c 1", "%s{}[]")
NUM_SHARED_PREFIXES = 3

FINISH_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}


class Leave(enum.Enum):
    """How a client ends its request before the answer is complete."""

    NEVER = "never"
    DISCONNECT = "disconnect"  # after `leave_at` tokens
    CANCEL = "cancel"  # after `leave_at` seconds, wherever the request is then
    ABORT = "abort"  # by id, after `leave_at` tokens
    DEADLINE = "deadline"  # of `leave_at` seconds


@dataclass(frozen=True, slots=True)
class Expected:
    token_ids: tuple[int, ...]
    text: str
    finish_reason: common_pb2.FinishReason.ValueType
    stop_match: str


@dataclass(frozen=True, slots=True)
class Case:
    """One request, its right answer (None: it must be refused), and how its client behaves."""

    name: str
    request: inference_pb2.GenerateRequest
    expected: Expected | None
    leave: Leave
    leave_at: float


@dataclass(slots=True)
class Outcome:
    """All that a client saw. `error` is None after a normal end, and when the client left."""

    responses: list[inference_pb2.GenerateResponse] = field(default_factory=list)
    error: PdserveError | None = None
    left: bool = False

    @property
    def tokens(self) -> list[common_pb2.TokenOutput]:
        return [token for response in self.responses for token in response.tokens]

    @property
    def text(self) -> str:
        return "".join(response.text for response in self.responses)


# --- Drawing --------------------------------------------------------------------------------------------------------


def draw_case(seed: str, number: int, capacity: int) -> Case:
    """`capacity`: tokens that a sequence may have in all."""
    rng = Random(f"{seed}/request {number}")
    if rng.random() < 0.03:
        return Case(f"request {number}", _bad_request(rng), None, Leave.NEVER, 0)
    request = inference_pb2.GenerateRequest(request_id=rng.choice(ODD_IDS), priority=rng.choice((0, 0, 0, 1, -1)))
    request.cache_salt = rng.choice(("", "", "", "salt"))
    prompt = _draw_prompt(seed, rng, capacity)
    request.tokens.token_ids.extend(prompt)
    _draw_sampling(request.sampling, rng, min(200, capacity - len(prompt)))
    expected = right_answer(request)
    if rng.random() < 0.3 and expected.text and not request.sampling.min_tokens:
        request.sampling.stop.extend(_draw_stops(rng, expected.text))
        expected = right_answer(request)
    leave = rng.choices(list(Leave), (14, 2, 3, 1, 1))[0]
    tokens = rng.randrange(1, 40)
    leave_at = rng.uniform(0, 0.8) if leave in (Leave.CANCEL, Leave.DEADLINE) else float(tokens)
    return Case(f"request {number}", request, expected, leave, leave_at)


def _draw_prompt(seed: str, rng: Random, capacity: int) -> list[int]:
    """Short, around block borders, long enough for several chunks, or with a prefix that others have too."""
    longest = capacity * 2 // 3
    kind = rng.random()
    if kind < 0.35:
        length = rng.randrange(1, min(60, longest))
    elif kind < 0.5:
        length = min(longest, 16 * rng.randrange(1, 8) + rng.choice((-1, 0, 1)))
    else:
        length = rng.randrange(1, longest)
    prefix: list[int] = []
    if kind > 0.6:
        shared = Random(f"{seed}/prefix {rng.randrange(NUM_SHARED_PREFIXES)}")
        prefix = [shared.randrange(256) for _ in range(min(longest // 2, 200))]
    return (prefix + [rng.randrange(256) for _ in range(length)])[:longest]


def _draw_sampling(sampling: common_pb2.SamplingParams, rng: Random, room: int) -> None:
    sampling.temperature = rng.choice((0.0, 0.0, 0.8))
    sampling.seed = rng.choice((0, 7, 2**64 - 1, rng.getrandbits(64)))
    sampling.max_tokens = 1 if rng.random() < 0.15 else rng.randrange(1, room + 1)
    if rng.random() < 0.4:
        sampling.ignore_eos = True
    if rng.random() < 0.3:
        sampling.min_tokens = rng.randrange(1, sampling.max_tokens + 1)
    if rng.random() < 0.2:
        sampling.stop_token_ids.extend(rng.sample(range(VOCAB_SIZE), 20))
    if rng.random() < 0.2:
        sampling.logprobs = rng.choice((0, 2, 20))
    if rng.random() < 0.15:
        sampling.presence_penalty = 1.0
    if rng.random() < 0.15:
        sampling.logit_bias.update({rng.randrange(VOCAB_SIZE): -100.0 for _ in range(5)})


def _draw_stops(rng: Random, text: str) -> list[str]:
    """One that comes, from somewhere in the answer, and one that may."""
    start = rng.randrange(len(text))
    return [text[start : start + rng.randrange(1, 6)], rng.choice(("<3", "zzzz", ">"))]


def _bad_request(rng: Random) -> inference_pb2.GenerateRequest:
    sampling = common_pb2.SamplingParams(max_tokens=4)
    length = 4
    match rng.randrange(4):
        case 0:
            sampling.max_tokens = 0
        case 1:
            sampling.temperature = float("nan")
        case 2:
            length = MAX_MODEL_LEN
        case _:
            length = 0
    return inference_pb2.GenerateRequest(tokens=inference_pb2.TokenPrompt(token_ids=[1] * length), sampling=sampling)


# --- The right answer -----------------------------------------------------------------------------------------------


def right_answer(request: inference_pb2.GenerateRequest) -> Expected:
    sampling = request.sampling
    stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else {EOS_ID})
    params = SamplingParams(
        temperature=sampling.temperature,
        presence_penalty=sampling.presence_penalty,
        logit_bias=dict(sampling.logit_bias),
        seed=sampling.seed,
        stop_token_ids=stop_ids,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
    )
    token_ids, reason = fake_generate(tuple(request.tokens.token_ids), params)
    ended_by = token_ids[-1] if reason is FinishReason.STOP else None
    readable = token_ids if ended_by is None else token_ids[:-1]
    for count in range(1, len(readable) + 1):
        if (found := _first_stop(text_of(readable[:count], final=False), sampling.stop)) is not None:
            return Expected(token_ids[:count], *found)
    if (found := _first_stop(text_of(readable, final=True), sampling.stop)) is not None:
        return Expected(token_ids, *found)  # completed by the end itself: a character that stays incomplete
    match = "" if ended_by is None or ended_by not in sampling.stop_token_ids else _label(ended_by)
    return Expected(token_ids, text_of(readable, final=True), FINISH_REASONS[reason], match)


def text_of(token_ids: Sequence[int], *, final: bool) -> str:
    """Unless `final`, an incomplete last character is not part of it yet."""
    raw = b"".join(bytes([t]) if t < 256 else b"" if t == EOS_ID else f"<{t}>".encode() for t in token_ids)
    return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(raw, final)


def _label(token_id: int) -> str:
    return "<end>" if token_id == EOS_ID else text_of([token_id], final=True)


def _first_stop(text: str, stops: Sequence[str]) -> tuple[str, common_pb2.FinishReason.ValueType, str] | None:
    """How the answer ends at the stop that is complete first; of several, the longest."""
    found = [(text.index(stop) + len(stop), text.index(stop), stop) for stop in stops if stop in text]
    if not found:
        return None
    _, start, stop = min(found)
    return text[:start], common_pb2.FINISH_REASON_STOP, stop


# --- A client -------------------------------------------------------------------------------------------------------


async def run_case(client: RouterClient, case: Case, on_response: Callable[[], None]) -> Outcome:
    """Raises TimeoutError for a request that never ends."""
    outcome = Outcome()
    call = asyncio.create_task(_converse(client, case, outcome, on_response))
    at_most_s = case.leave_at if case.leave is Leave.CANCEL else HUNG_S
    done, _ = await asyncio.wait([call], timeout=at_most_s)
    if not done:
        call.cancel()
        await asyncio.wait([call])
        outcome.left = True
        if case.leave is not Leave.CANCEL:
            raise TimeoutError(f"{case.name} has not ended after {HUNG_S} s")
    else:
        await call
    return outcome


async def _converse(client: RouterClient, case: Case, outcome: Outcome, on_response: Callable[[], None]) -> None:
    timeout_s = case.leave_at if case.leave is Leave.DEADLINE else None
    try:
        async with aclosing(client.generate(case.request, timeout_s)) as answer:
            async for response in answer:
                outcome.responses.append(response)
                on_response()
                if response.finish_reason or len(outcome.tokens) < case.leave_at:
                    continue
                if case.leave is Leave.DISCONNECT:
                    outcome.left = True
                    return
                if case.leave is Leave.ABORT:
                    await client.abort(response.request_id)
    except PdserveError as error:
        outcome.error = error


# --- The judge ------------------------------------------------------------------------------------------------------


def judge(case: Case, outcome: Outcome, *, router_died: bool) -> list[str]:
    """What is wrong with an outcome; `router_died`: it was killed, stopped or away while the request lasted."""
    if case.expected is None:
        refused = isinstance(outcome.error, InvalidRequest) or (router_died and outcome.error is not None)
        return [] if refused and not outcome.responses else [f"a bad request got {outcome}"]
    ends = [response for response in outcome.responses if response.finish_reason]
    problems = _stream_problems(case.expected, outcome)
    if ends:
        problems += _end_problems(case, case.expected, outcome)
    elif outcome.error is not None:
        problems += _error_problems(case, outcome.error, router_died=router_died)
    elif not outcome.left:
        problems.append("it ended without finish reason and without error")
    return [f"{problem}\n    request: {case.request}\n    leave: {case.leave} {case.leave_at}" for problem in problems]


def _stream_problems(expected: Expected, outcome: Outcome) -> list[str]:
    """However it ended: what was sent is a beginning of the right answer, and nothing follows the end."""
    problems = []
    token_ids = tuple(token.token_id for token in outcome.tokens)
    if expected.token_ids[: len(token_ids)] != token_ids:
        problems.append(f"wrong tokens {token_ids}, right are {expected.token_ids}")
    if not expected.text.startswith(outcome.text):
        problems.append(f"wrong text {outcome.text!r}, right is {expected.text!r}")
    if any(response.finish_reason for response in outcome.responses[:-1]):
        problems.append("responses follow the one with the finish reason")
    if outcome.error is not None and outcome.responses and outcome.responses[-1].finish_reason:
        problems.append(f"a normal finish and an error: {outcome.error!r}")
    if len({response.request_id for response in outcome.responses}) > 1:
        problems.append("the request's id changed")
    return problems


def _end_problems(case: Case, expected: Expected, outcome: Outcome) -> list[str]:
    last, usage = outcome.responses[-1], outcome.responses[-1].usage
    prompt, completion = len(case.request.tokens.token_ids), len(expected.token_ids)
    found = (tuple(t.token_id for t in outcome.tokens), outcome.text, last.finish_reason, last.stop_match)
    right = (expected.token_ids, expected.text, expected.finish_reason, expected.stop_match)
    problems = [] if found == right else [f"wrong end {found}, right is {right}"]
    if (usage.prompt_tokens, usage.completion_tokens) != (prompt, completion) or usage.cached_tokens > prompt:
        problems.append(f"wrong usage {usage}")
    if case.request.sampling.HasField("logprobs"):
        problems += _logprob_problems(outcome.tokens, case.request.sampling.logprobs)
    return problems + _ledger_problems(last.ledger)


def _logprob_problems(tokens: Sequence[common_pb2.TokenOutput], count: int) -> list[str]:
    for token in tokens:
        logprob = -(token.token_id % 8 + 1) / 8
        top = [((token.token_id + rank) % VOCAB_SIZE, logprob - rank) for rank in range(count)]
        if token.logprob != logprob or [(t.token_id, t.logprob) for t in token.top_logprobs] != top:
            return [f"wrong logprobs {token}"]
    return []


def _ledger_problems(ledger: inference_pb2.Ledger) -> list[str]:
    seconds = [entry.seconds for entry in ledger.entries]
    adds_up = abs(sum(seconds) - ledger.wall_s) <= LEDGER_TOLERANCE_S and min(seconds) >= 0
    only_last_succeeded = [bool(a.failure) for a in ledger.attempts] == [True] * (len(ledger.attempts) - 1) + [False]
    return [] if adds_up and only_last_succeeded else [f"wrong ledger {ledger}"]


def _error_problems(case: Case, error: PdserveError, *, router_died: bool) -> list[str]:
    allowed: tuple[type[PdserveError], ...] = ()
    if router_died:
        allowed += (PodUnavailable, Cancelled)
    if case.leave is Leave.ABORT:
        allowed += (Cancelled,)
    if case.leave is Leave.DEADLINE:
        allowed += (DeadlineExceeded, Overloaded, PodUnavailable)  # refused early, or lost with no time to go on
    return [] if type(error) in allowed else [f"{error!r} after {case.leave}"]
