"""One request from its arrival to its one terminal status: validate, tokenise, place, reserve, prefill, decode.

This is the shell around `lifecycle`: every event goes through `_move`, which frees what the table says. When a pod or
a transfer fails, prompt and tokens already sent are replayed on other pods; the client sees one stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random

from proto import common_pb2, inference_pb2, pods_pb2
from proto.errors import Cancelled, DeadlineExceeded, InternalError, PdserveError
from router.answer import Answer, Chunk
from router.attempt import Attempt
from router.cluster import Cluster, Placement
from router.ledger import Ledger
from router.lifecycle import TOLD, Event, State, advance
from router.metrics import RouterMetrics
from router.model import ServedModel
from router.policy import RoutingRequest
from router.prefix_index import chunk_hashes
from router.retries import Retries
from router.retry_log import RetryLog
from router.tokenizer import Tokenizer
from router.validation import ResolvedRequest, check, check_text, resolve

log = logging.getLogger(__name__)

LARGE_PROMPT_BYTES = 8192  # checked and tokenised on another thread
HUGE_PROMPT_BYTES = 64 * 1024  # one at a time: a megabyte takes some 300 in a tokenizer

Emit = Callable[[inference_pb2.GenerateResponse], None]  # never waits: a slow client holds up no pod

# Where the time goes that passes in a state which is then left by a failure.
_STAGE: dict[State, str] = {
    State.QUEUED: "queue",
    State.RESERVING: "credit",
    State.PREFILLING: "prefill",
    State.HANDING_OFF: "transfer",
    State.TRANSFERRING: "transfer",
    State.STARTING: "decode_queue",
    State.DECODING: "decode",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What all requests of a router share."""

    model: ServedModel
    tokenizer: Tokenizer
    cluster: Cluster
    metrics: RouterMetrics
    rng: Random
    queue_wait_s: float
    resume_wait_s: float
    huge_prompts: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "huge-prompts"))
    retry_log: RetryLog = field(default_factory=RetryLog)
    clock: Callable[[], float] = time.monotonic


class Request:
    """Runs once, in one task. `timeout_s` is what is left of the client's deadline, if it has one."""

    def __init__(
        self, services: Services, request_id: str, message: inference_pb2.GenerateRequest, timeout_s: float | None
    ) -> None:
        self._arrived_at = now = services.clock()
        self.id = request_id
        self.state = State.QUEUED
        self._services = services
        self._message = message
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else now + timeout_s
        self._retries = Retries(services.queue_wait_s, services.resume_wait_s, self._deadline)
        self._ledger = Ledger(now)
        self._outcome = ""
        self._num_placed = 0
        self._attempt: Attempt | None = None
        self._sent_at: float | None = None  # when the last tokens were given to the client

    @property
    def sequence_id(self) -> str:
        """Of the present attempt; unique over all requests and attempts."""
        return f"{self.id}.{self._num_placed}"

    def ledger(self) -> inference_pb2.Ledger:
        return self._ledger.to_proto(self.id, self._message.request_id, self._outcome)

    # The one terminal status.

    async def run(self, emit: Emit) -> None:
        """Emits responses, the last with a finish reason. Raises PdserveError when it does not come to that."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._run(emit)
        except TimeoutError:
            late = DeadlineExceeded(f"the deadline of {self._timeout_s} s passed while {self.state.value}")
            raise self._give_up(late) from None
        except PdserveError as error:
            raise self._give_up(error) from None
        except asyncio.CancelledError:
            self._end(Event.CANCELLED, outcome_of(Cancelled("")))
            raise
        except Exception as error:
            log.exception("request %s failed while %s", self.id, self.state.value)
            raise self._give_up(InternalError(f"request {self.id}: {type(error).__name__}: {error}")) from error

    def _give_up(self, error: PdserveError) -> PdserveError:
        self._end(Event.GAVE_UP, outcome_of(error))
        return error

    def _end(self, event: Event, outcome: str) -> None:
        """Leads to a terminal state, unless the answer was complete and only its last message did not get out."""
        if not self.state.terminal:
            self._ledger.account(_STAGE[self.state], self._services.clock())
            if self.state is not State.QUEUED:  # then the last attempt has failed already, for a reason of its own
                self._ledger.fail_attempt(outcome)
            self._move(event)
        self._close(outcome)

    def _close(self, outcome: str) -> None:
        if not self._outcome:
            self._outcome = outcome
            self._services.metrics.ended(outcome, self._ledger)

    def _move(self, event: Event) -> None:
        """The only place where the state changes and anything is freed."""
        transition = advance(self.state, event)
        self.state = transition.state
        if not (transition.released or transition.settled):
            return
        for resource in TOLD:
            if self._attempt is None:
                assert not transition.released, f"{event.value}: {transition.released} without an attempt"
            elif resource in transition.released:
                self._attempt.release(resource)
            elif resource in transition.settled:
                self._attempt.settle(resource)

    # Admission.

    async def _run(self, emit: Emit) -> None:
        request = await self._admit()
        answer = Answer(request, self._services.tokenizer)
        hashes = chunk_hashes(request.prompt_ids, request.cache_salt)
        while not self.state.terminal:
            try:
                await self._serve(request, answer, hashes, emit)
            except PdserveError as error:
                self._retry_or_raise(error)

    async def _admit(self) -> ResolvedRequest:
        services, num_bytes = self._services, self._message.ByteSize()
        max_model_len = services.cluster.max_model_len(services.model)
        if num_bytes > HUGE_PROMPT_BYTES:
            loop = asyncio.get_running_loop()
            prompt_ids = await loop.run_in_executor(services.huge_prompts, self._tokenise, max_model_len)
        elif num_bytes > LARGE_PROMPT_BYTES:
            prompt_ids = await asyncio.to_thread(self._tokenise, max_model_len)
        else:
            prompt_ids = self._tokenise(max_model_len)
        return resolve(self._message, prompt_ids, services.model, max_model_len, services.rng)

    def _tokenise(self, max_model_len: int) -> Sequence[int]:
        """Raises InvalidRequest for what can be refused without its tokens."""
        message, tokenizer = self._message, self._services.tokenizer
        check(message, self._services.model)
        kind = message.WhichOneof("prompt")
        if kind == "tokens":
            return message.tokens.token_ids
        is_chat = kind == "chat"
        text = tokenizer.render_chat(message.chat.messages) if is_chat else message.text
        if len(text) > HUGE_PROMPT_BYTES:  # of others the number of tokens is cheap, and tells more
            check_text("chat" if is_chat else "text", text, tokenizer.token_length, max_model_len)
        return tokenizer.encode(text, rendered=is_chat)

    # One attempt.

    async def _serve(self, request: ResolvedRequest, answer: Answer, hashes: tuple[bytes, ...], emit: Emit) -> None:
        placement = await self._place(request, answer, hashes)
        attempt = self._begin(placement, request, answer)
        if placement.prefill is not None:
            await self._prefill(attempt, answer, emit)
        if not self.state.terminal:
            await attempt.start()
            self._move(Event.STARTED)
            await self._decode(attempt, answer, emit)

    async def _place(self, request: ResolvedRequest, answer: Answer, hashes: tuple[bytes, ...]) -> Placement:
        clock, previous = self._services.clock, self._attempt
        self._num_placed += 1

        def routing() -> RoutingRequest:
            return RoutingRequest(
                model_id=self._services.model.model_id,
                num_tokens=len(request.prompt_ids) + len(answer.output_ids),
                max_tokens=len(request.prompt_ids) + request.sampling.max_tokens,
                prefix_hashes=hashes,
                deadline=self._deadline,
                excluded=self._retries.avoid,
                busy=self._retries.busy(clock()),
                computes=None if previous is None else previous.placement.decision.decode_pod.computes,
            )

        wait_s = self._retries.wait_s(clock())
        try:
            return await self._services.cluster.place(
                self.sequence_id,
                routing,
                priority=request.priority,
                arrived_at=self._arrived_at,
                waiting_since=self._retries.waiting_since,
                wait_s=wait_s,
            )
        except PdserveError as refusal:
            raise self._retries.explain(refusal) from None

    def _begin(self, placement: Placement, request: ResolvedRequest, answer: Answer) -> Attempt:
        self._attempt = attempt = Attempt(self._services.cluster, placement, request, answer.output_ids)
        self._move(Event.ALONE if placement.prefill is None else Event.PAIRED)
        self._ledger.account("queue", self._services.clock())
        prefill_id = "" if placement.prefill is None else placement.prefill.pod.pod_id
        self._ledger.begin_attempt(prefill_id, placement.decode.pod.pod_id, placement.decision.reason)
        return attempt

    async def _prefill(self, attempt: Attempt, answer: Answer, emit: Emit) -> None:
        """Credit first, then the prompt. Streams the first token at once."""
        await attempt.reserve()
        self._ledger.account("credit", self._services.clock())
        self._move(Event.RESERVED)
        response = await attempt.prefill()
        parts = {"prefill_queue": response.queue_s, "prefill": response.compute_s}
        self._ledger.account_parts(parts, self._services.clock())
        self._retries.progressed()
        answer.computed(response.num_cached_tokens)
        chunk = answer.accept([response.first_token], response.finish_reason)
        if response.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED:
            self._move(Event.ANSWERED)
        else:
            self._move(Event.PREFILLED)
            if chunk.stopped:
                self._move(Event.STOPPED)
        self._send(chunk, answer, emit)

    async def _decode(self, attempt: Attempt, answer: Answer, emit: Emit) -> None:
        is_first = True
        while not self.state.terminal:
            tokens = await attempt.next()
            self._account_decode(tokens, is_first)
            is_first = False
            self._retries.progressed()
            answer.computed(tokens.num_cached_tokens)
            chunk = answer.accept(tokens.tokens, tokens.finish_reason)
            if chunk.stopped:
                self._move(Event.STOPPED)
            elif chunk.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED:
                self._move(Event.ANSWERED)
            else:
                self._move(Event.TOKENS)
            self._send(chunk, answer, emit)

    def _account_decode(self, tokens: pods_pb2.SequenceTokens, is_first: bool) -> None:
        if tokens.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED:
            self._ledger.num_preemptions += tokens.num_preemptions
            self._ledger.num_drafts += tokens.num_drafts
            self._ledger.num_accepted += tokens.num_accepted
        if not is_first:
            self._ledger.account("decode", self._services.clock())
            return
        times = tokens.timings
        self._ledger.transfer_bytes += times.transfer_bytes
        parts = {
            "transfer": times.transfer_s,
            "decode_queue": times.queue_s,
            "prefill": times.prefill_s,
            "first_decode": times.first_step_s,
        }
        self._ledger.account_parts(parts, self._services.clock())

    def _retry_or_raise(self, error: PdserveError) -> None:
        """Back to the queue with what the client has so far, or the end."""
        if self._attempt is None or self.state in (State.QUEUED, State.FINISHED):
            raise error
        now = self._services.clock()
        decision = self._attempt.placement.decision
        if not self._retries.should_retry(self.state, error, decision, now):
            raise error
        self._services.cluster.pump_in(self._retries.pause_s)
        self._services.retry_log.note(self.id, self.state, error)
        self._ledger.account(_STAGE[self.state], now)
        self._ledger.fail_attempt(f"{outcome_of(error)}: {error.message}")
        self._move(Event.ATTEMPT_FAILED)

    # What the client gets.

    def _send(self, chunk: Chunk, answer: Answer, emit: Emit) -> None:
        is_last = chunk.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED
        if not (chunk.tokens or chunk.text or is_last):
            return
        response = inference_pb2.GenerateResponse(
            request_id=self.id,
            model=self._services.model.name,
            text=chunk.text,
            tokens=chunk.tokens,
        )
        if self._sent_at is None or is_last:
            response.usage.CopyFrom(answer.usage())
        if self._sent_at is None and self._message.echo_prompt:
            response.prompt_text = answer.prompt_text()
        self._stamp(len(chunk.tokens))
        if is_last:
            response.finish_reason, response.stop_match = chunk.finish_reason, chunk.stop_match
            self._ledger.account("other", self._services.clock())
            self._close(FINISHED_AS[chunk.finish_reason])
            response.ledger.CopyFrom(self.ledger())
        emit(response)

    def _stamp(self, num_tokens: int) -> None:
        now = self._services.clock()
        if self._sent_at is None:
            self._ledger.first_token(now)
        else:
            self._services.metrics.itl_s.observe(now - self._sent_at)
        self._services.metrics.tokens.value += num_tokens
        self._sent_at = now


FINISHED_AS = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}


def outcome_of(error: PdserveError) -> str:
    """`pod_unavailable` and so on."""
    return common_pb2.ErrorKind.Name(error.kind).removeprefix("ERROR_KIND_").lower()
