"""What a router says to pods, one call at a time: for tests of pods alone."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc.aio

from engine.fake import EOS_ID, FAKE_MODEL, FakeAnswer, fake_generate
from pod.spec import parse_params
from proto import common_pb2, kv_pb2, pods_pb2, pods_pb2_grpc
from proto.errors import PdserveError, from_info, from_rpc
from proto.frames import FrameConnection, connect
from proto.registry_pb2 import PodRecord
from proto.service import MAX_MESSAGE_BYTES, channel
from tests.support.polling import until

WAIT_S = 30.0
BEAT_S = 0.5
LEASE_MS = 30_000
_numbers = itertools.count(1)
Response = TypeVar("Response")


def sampling(**fields: Any) -> common_pb2.SamplingParams:
    """Greedy, 16 tokens, ends at the fake model's end-of-text; `fields` override."""
    defaults: dict[str, Any] = {"temperature": 0.0, "seed": 0, "max_tokens": 16, "stop_token_ids": [EOS_ID]}
    return common_pb2.SamplingParams(**(defaults | fields))


def spec(prompt: Sequence[int], output: Sequence[int] = (), **fields: Any) -> pods_pb2.SequenceSpec:
    """A sequence with a new id. `fields` are sampling parameters."""
    return pods_pb2.SequenceSpec(
        sequence_id=f"sequence-{next(_numbers)}.0",
        prompt_token_ids=prompt,
        output_token_ids=output,
        sampling=sampling(**fields),
    )


def right_answer(sequence: pods_pb2.SequenceSpec) -> FakeAnswer:
    """By the fake model's own generator, which uses no cache."""
    params = parse_params(sequence.sampling, FAKE_MODEL)
    return fake_generate(tuple(sequence.prompt_token_ids), params, tuple(sequence.output_token_ids))


class Received:
    """All that a decode pod streamed for one sequence."""

    def __init__(self) -> None:
        self.messages: list[pods_pb2.SequenceTokens] = []
        self.arrived = asyncio.Event()

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for message in self.messages for token in message.tokens]

    @property
    def last(self) -> pods_pb2.SequenceTokens:
        return self.messages[-1]

    def error(self) -> PdserveError | None:
        return from_info(self.last.error) if self.messages and self.last.HasField("error") else None

    @property
    def ended(self) -> bool:
        return bool(self.messages) and (bool(self.last.finish_reason) or self.last.HasField("error"))

    async def until_ended(self) -> None:
        await self._until(lambda: self.ended)

    async def until_tokens(self, num_tokens: int) -> None:
        await self._until(lambda: len(self.token_ids) >= num_tokens)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self.arrived.clear()
                await self.arrived.wait()


class PodClient:
    """One connection to one pod. For decode pods, `open_stream` first; then `received[sequence_id]` fills up."""

    def __init__(self, address: str, router_id: str = "router-1") -> None:
        self.address = address
        self.router_id = router_id
        self.received: defaultdict[str, Received] = defaultdict(Received)
        self.steps: list[pods_pb2.StepTokens] = []
        self.stream_error: PdserveError | None = None
        self._channel = channel(address)
        self.prefill_stub: pods_pb2_grpc.PrefillPodAsyncStub = pods_pb2_grpc.PrefillPodStub(self._channel)
        self.decode_stub: pods_pb2_grpc.DecodePodAsyncStub = pods_pb2_grpc.DecodePodStub(self._channel)
        self._tokens: FrameConnection[pods_pb2.StepTokens] | None = None
        self._beats: asyncio.Task[None] | None = None

    async def close(self) -> None:
        await self.close_stream()
        await self._channel.close()

    async def open_stream(self, record: PodRecord, **hello: str) -> None:
        """Returns once the pod has said that the stream is open. `hello` are StreamTokensRequest's fields."""
        self.stream_error = None
        self._tokens = tokens = FrameConnection(pods_pb2.StepTokens, self._on_step, max_bytes=MAX_MESSAGE_BYTES)
        await connect(tokens, record.token_address)
        fields = {"router_id": self.router_id, "epoch": record.epoch} | hello
        tokens.send(pods_pb2.StreamTokensRequest(**fields))
        self._beats = asyncio.create_task(self._beat(tokens), name=f"beats of {self.router_id}")
        await until(lambda: tokens.heard or tokens.closed.done())
        if self.stream_error is not None:
            raise self.stream_error
        assert not tokens.closed.done(), f"the stream ended at once: {tokens.closed.result()}"

    async def _beat(self, tokens: FrameConnection[pods_pb2.StepTokens]) -> None:
        while tokens.is_open:
            tokens.send(pods_pb2.StreamTokensRequest())
            await asyncio.wait([tokens.closed], timeout=BEAT_S)

    async def close_stream(self) -> None:
        if self._tokens is not None:
            self._tokens.abort("the test has ended it")
            await self.until_stream_ended()

    async def until_stream_ended(self) -> str:
        """Why."""
        assert self._tokens is not None, "open_stream() first"
        assert self._beats is not None, "likewise"
        await asyncio.wait_for(asyncio.shield(self._beats), WAIT_S)
        return self._tokens.closed.result()

    def _on_step(self, step: pods_pb2.StepTokens) -> None:
        if step.HasField("error"):
            self.stream_error = from_info(step.error)
            return
        self.steps.append(step)
        for message in step.sequences:
            received = self.received[message.sequence_id]
            received.messages.append(message)
            received.arrived.set()

    async def prefill(self, sequence: pods_pb2.SequenceSpec, lease_ms: int = LEASE_MS) -> pods_pb2.PrefillResponse:
        request = pods_pb2.PrefillRequest(sequence=sequence, lease_ms=lease_ms)
        return await _raising(self.prefill_stub.Prefill(request))

    async def release_lease(self, lease_id: str, epoch: str = "") -> bool:
        request = pods_pb2.ReleaseLeaseRequest(lease_id=lease_id, epoch=epoch)
        return (await _raising(self.prefill_stub.ReleaseLease(request))).released

    def reserve_request(
        self, sequence: pods_pb2.SequenceSpec, fingerprint: str, *, wait_ms: int = 0, ttl_ms: int = LEASE_MS
    ) -> pods_pb2.ReserveRequest:
        return pods_pb2.ReserveRequest(
            router_id=self.router_id,
            sequence=sequence,
            layout_fingerprint=fingerprint,
            wait_ms=wait_ms,
            ttl_ms=ttl_ms,
        )

    async def reserve(self, sequence: pods_pb2.SequenceSpec, fingerprint: str, **durations: int) -> pods_pb2.Credit:
        return await _raising(self.decode_stub.Reserve(self.reserve_request(sequence, fingerprint, **durations)))

    async def release_credit(self, credit_id: str, epoch: str = "") -> bool:
        request = pods_pb2.ReleaseCreditRequest(credit_id=credit_id, epoch=epoch)
        return (await _raising(self.decode_stub.ReleaseCredit(request))).released

    async def start_decode(
        self, sequence: pods_pb2.SequenceSpec, handoff: kv_pb2.KVHandoff | None = None, credit_id: str = ""
    ) -> pods_pb2.StartDecodeResponse:
        request = pods_pb2.StartDecodeRequest(
            router_id=self.router_id, sequence=sequence, handoff=handoff, credit_id=credit_id
        )
        return await _raising(self.decode_stub.StartDecode(request))

    async def abort(self, sequence_id: str) -> bool:
        request = pods_pb2.AbortSequenceRequest(sequence_id=sequence_id)
        return (await _raising(self.decode_stub.AbortSequence(request))).found


async def hand_over(
    sequence: pods_pb2.SequenceSpec, prefill: PodClient, decode: PodClient, fingerprint: str
) -> pods_pb2.PrefillResponse:
    """Credit, prefill, start of the transfer, as a router does it."""
    credit = await decode.reserve(sequence, fingerprint, wait_ms=5000)
    response = await prefill.prefill(sequence)
    if response.HasField("handoff"):
        await decode.start_decode(continued(sequence, response), response.handoff, credit.credit_id)
    else:
        await decode.release_credit(credit.credit_id)
    return response


def continued(sequence: pods_pb2.SequenceSpec, response: pods_pb2.PrefillResponse) -> pods_pb2.SequenceSpec:
    """`sequence` with the hand-off's first token."""
    extended = pods_pb2.SequenceSpec.FromString(sequence.SerializeToString())
    extended.output_token_ids.append(response.first_token.token_id)
    return extended


async def generate(
    sequence: pods_pb2.SequenceSpec, prefill: PodClient, decode: PodClient, fingerprint: str
) -> list[int]:
    """The whole answer through a hand-off; what the router would have sent to the client. Raises PdserveError."""
    response = await hand_over(sequence, prefill, decode, fingerprint)
    first = response.first_token.token_id
    if response.finish_reason:
        return [*sequence.output_token_ids, first]
    received = decode.received[sequence.sequence_id]
    await received.until_ended()
    if (error := received.error()) is not None:
        raise error
    return [*sequence.output_token_ids, first, *received.token_ids]


async def _raising(call: Awaitable[Response]) -> Response:
    try:
        return await asyncio.wait_for(call, WAIT_S)
    except grpc.aio.AioRpcError as error:
        raise from_rpc(error) from error
