"""The router on real fake pods: answers equal the fake model's own on every path, and every ledger adds up."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.fake import EOS_ID
from proto import common_pb2, inference_pb2
from proto.errors import InvalidRequest, NotFound
from router.client import RouterClient
from router.tokenizer import FakeTokenizer
from tests.router.support import (
    Outcome,
    long_running,
    prompt_of,
    right_answer,
    running_router,
    running_stack,
    tokens_request,
)


def assert_right(outcome: Outcome, request: inference_pb2.GenerateRequest) -> None:
    expected = right_answer(request)
    assert outcome.token_ids == list(expected.output_ids)
    assert (
        outcome.last.finish_reason
        == {
            "stop": common_pb2.FINISH_REASON_STOP,
            "length": common_pb2.FINISH_REASON_LENGTH,
        }[expected.finish_reason.value]
    )
    assert [bool(r.finish_reason) for r in outcome.responses] == [False] * (len(outcome.responses) - 1) + [True]
    usage = outcome.last.usage
    assert usage.prompt_tokens == len(request.tokens.token_ids)
    assert usage.completion_tokens == len(expected.output_ids)
    assert 0 <= usage.cached_tokens <= usage.prompt_tokens


def assert_adds_up(ledger: inference_pb2.Ledger) -> None:
    assert sum(entry.seconds for entry in ledger.entries) == pytest.approx(ledger.wall_s, abs=1e-3)
    assert all(entry.seconds >= 0 for entry in ledger.entries)
    assert 0 < ledger.ttft_s <= ledger.wall_s


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 500])
async def test_through_a_hand_off(registry_url: str, tmp_path: Path, length: int) -> None:
    async with running_stack(registry_url, tmp_path) as stack:
        request = tokens_request(prompt_of(length), max_tokens=20)
        outcome = await stack.generate(request)
        assert_right(outcome, request)
        assert_adds_up(outcome.ledger)
        stages = {entry.stage for entry in outcome.ledger.entries}
        assert {"credit", "prefill"} <= stages
        assert [bool(a.prefill_pod) for a in outcome.ledger.attempts] == [True]
        if len(outcome.token_ids) > 1:
            assert outcome.ledger.transfer_bytes > 0


@pytest.mark.parametrize("prefill", [0, 1])
@pytest.mark.parametrize("num_output", [1, 2, 17])
async def test_what_fills_kv_memory_to_the_last_slot(
    num_output: int, prefill: int, registry_url: str, tmp_path: Path
) -> None:
    """The answer's last token takes none."""
    num_slots = 8 * 16
    async with running_stack(registry_url, tmp_path, prefill=prefill, pod={"num_blocks": 8}) as stack:
        request = tokens_request(prompt_of(num_slots + 1 - num_output), max_tokens=num_output)
        assert_right(await stack.generate(request), request)
        request.sampling.max_tokens += 1
        with pytest.raises(InvalidRequest, match="all that a decode pod serves of the model's 4096"):
            await stack.generate(request)


async def test_decode_only(registry_url: str, tmp_path: Path) -> None:
    async with running_stack(registry_url, tmp_path, prefill=0) as stack:
        request = tokens_request(prompt_of(100), max_tokens=20)
        outcome = await stack.generate(request)
        assert_right(outcome, request)
        assert_adds_up(outcome.ledger)
        (attempt,) = outcome.ledger.attempts
        assert attempt.prefill_pod == ""
        assert attempt.reason.startswith("decode-only: no usable prefill pod (none registered)")


async def test_prefix_hits_change_nothing_but_cached_tokens(registry_url: str, tmp_path: Path) -> None:
    async with running_stack(registry_url, tmp_path, prefill=2, decode=2) as stack:
        request = tokens_request(prompt_of(100), max_tokens=5, ignore_eos=True)
        cached = []
        for _ in range(3):
            outcome = await stack.generate(request)
            assert_right(outcome, request)
            cached.append(outcome.last.usage.cached_tokens)
        assert cached == [0, 96, 96], "the same prefill pod is chosen again"


async def test_many_at_once(registry_url: str, tmp_path: Path) -> None:
    async with running_stack(registry_url, tmp_path, prefill=2, decode=2) as stack:
        requests = [tokens_request(prompt_of(10 + 7 * n, n), max_tokens=1 + n) for n in range(40)]
        outcomes = await asyncio.gather(*map(stack.generate, requests))
        for outcome, request in zip(outcomes, requests, strict=True):
            assert_right(outcome, request)
        assert {a.decode_pod for o in outcomes for a in o.ledger.attempts} == {
            p.plan.pod_id for p in stack.pods.pods[2:]
        }
        assert len({o.last.request_id for o in outcomes}) == len(outcomes)


async def test_two_routers_share_the_pods(registry_url: str, tmp_path: Path) -> None:
    async with running_stack(registry_url, tmp_path, prefill=2, decode=2) as stack, running_router(stack.pods) as other:
        await other.until_pods(4)
        requests = [tokens_request(prompt_of(10 + 7 * n, n), max_tokens=1 + n) for n in range(20)]
        answers = (router.generate(request) for request in requests for router in (stack, other))
        outcomes = await asyncio.gather(*answers)
        for number, outcome in enumerate(outcomes):
            assert_right(outcome, requests[number // 2])


async def test_text_and_chat_stream_exact_text(registry_url: str, tmp_path: Path) -> None:
    async with running_stack(registry_url, tmp_path) as stack:
        sampling = common_pb2.SamplingParams(temperature=0, max_tokens=30)
        outcome = await stack.generate(inference_pb2.GenerateRequest(text="héllo", sampling=sampling))
        expected = right_answer(tokens_request("héllo".encode(), max_tokens=30))
        tokenizer = stack.router.services.tokenizer
        expected_text = b"".join(map(tokenizer.token_bytes, expected.output_ids)).decode(errors="replace")
        assert outcome.text == expected_text
        chat = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
        outcome = await stack.generate(inference_pb2.GenerateRequest(chat=chat, sampling=sampling))
        prompt = b"user: hi\nassistant: "
        assert outcome.token_ids == list(right_answer(tokens_request(prompt, max_tokens=30)).output_ids)


async def test_first_message_has_usage_and_the_echo(registry_url: str, tmp_path: Path) -> None:
    async with running_stack(registry_url, tmp_path) as stack:
        request = tokens_request(list(b"echo me"), max_tokens=4, ignore_eos=True)
        request.echo_prompt = True
        outcome = await stack.generate(request)
        first = outcome.responses[0]
        assert (first.prompt_text, first.usage.prompt_tokens, first.usage.completion_tokens) == ("echo me", 7, 1)
        assert [r.prompt_text for r in outcome.responses[1:]] == [""] * (len(outcome.responses) - 1)


@pytest.mark.parametrize("prefill", [0, 1])
async def test_one_token(registry_url: str, tmp_path: Path, prefill: int) -> None:
    async with running_stack(registry_url, tmp_path, prefill=prefill) as stack:
        request = tokens_request(prompt_of(20), max_tokens=1)
        assert_right(await stack.generate(request), request)


@pytest.mark.parametrize("prefill", [0, 1])
async def test_the_first_token_can_be_a_stop_token(registry_url: str, tmp_path: Path, prefill: int) -> None:
    async with running_stack(registry_url, tmp_path, prefill=prefill) as stack:
        prompt = prompt_of(20)
        first = right_answer(tokens_request(prompt, max_tokens=1)).output_ids[0]
        request = tokens_request(prompt, stop_token_ids=[first])
        outcome = await stack.generate(request)
        assert_right(outcome, request)
        assert (len(outcome.token_ids), outcome.text) == (1, "")
        assert outcome.last.stop_match == stack.router.services.tokenizer.token_label(first).decode(errors="replace")


def forced(text: str, **sampling: object) -> inference_pb2.GenerateRequest:
    """A request whose every token is the letter of one-letter `text`."""
    (letter,) = text.encode()
    return tokens_request(prompt_of(20), logit_bias={letter: 100.0}, **sampling)


@pytest.mark.parametrize("prefill", [0, 1])
@pytest.mark.parametrize("length", [1, 3])
async def test_stop_strings_end_the_decode(registry_url: str, tmp_path: Path, prefill: int, length: int) -> None:
    async with running_stack(registry_url, tmp_path, prefill=prefill, pod={"fake_step_s": 0.001}) as stack:
        outcome = await stack.generate(forced("a", stop=["a" * length], max_tokens=200))
        assert (outcome.text, outcome.token_ids) == ("", [97] * length)
        assert outcome.last.usage.completion_tokens == length
        assert (outcome.last.finish_reason, outcome.last.stop_match) == (common_pb2.FINISH_REASON_STOP, "a" * length)
        await stack.until_rest()
        await stack.pods.assert_idle()


async def test_stop_strings_wait_for_min_tokens(registry_url: str, tmp_path: Path) -> None:
    async with running_stack(registry_url, tmp_path) as stack:
        outcome = await stack.generate(forced("a", stop=["aa"], max_tokens=50, min_tokens=7))
        assert (outcome.text, len(outcome.token_ids)) == ("aaaaa", 7)


async def test_logprobs_are_named(registry_url: str, tmp_path: Path) -> None:
    async with running_stack(registry_url, tmp_path) as stack:
        outcome = await stack.generate(forced("a", logprobs=2, max_tokens=3))
        for response in outcome.responses:
            for token in response.tokens:
                assert (token.text, token.raw, token.logprob) == ("a", b"a", -(97 % 8 + 1) / 8)
                assert [(t.text, t.token_id) for t in token.top_logprobs] == [("a", 97), ("b", 98)]


async def test_the_seed_decides_on_every_path(registry_url: str, tmp_path: Path) -> None:
    answers = []
    for prefill in (0, 1):
        async with running_stack(registry_url, tmp_path / str(prefill), prefill=prefill) as stack:
            request = tokens_request(prompt_of(40), max_tokens=12, temperature=0.7, seed=42, ignore_eos=True)
            answers.append((await stack.generate(request)).token_ids)
    assert answers[0] == answers[1]


async def test_equal_client_ids_do_not_mix(registry_url: str, tmp_path: Path) -> None:
    async with running_stack(registry_url, tmp_path) as stack:
        requests = [long_running(20, 30, seed) for seed in (1, 2)]
        for request in requests:
            request.request_id = "same: *?/\\ ünï"
        outcomes = await asyncio.gather(*map(stack.generate, requests))
        for outcome, request in zip(outcomes, requests, strict=True):
            assert_right(outcome, request)
            assert outcome.ledger.client_request_id == request.request_id
        assert outcomes[0].last.request_id != outcomes[1].last.request_id


async def test_bad_requests_touch_no_pod(registry_url: str, tmp_path: Path) -> None:
    async with running_stack(registry_url, tmp_path) as stack:
        for request, name in (
            (tokens_request([]), "tokens"),
            (tokens_request(prompt_of(1025)), "tokens"),
            (tokens_request([1], temperature=float("nan")), "sampling.temperature"),
            (tokens_request([1], max_tokens=1025), "sampling.max_tokens"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                await stack.generate(request)
            assert caught.value.field == name
        with pytest.raises(NotFound, match="this router serves 'fake'"):
            await stack.generate(inference_pb2.GenerateRequest(model="other", text="x"))
        ledger = await stack.client.timeline()
        assert (list(ledger.attempts), ledger.outcome) == ([], "not_found")


async def test_huge_prompts_are_refused_untokenised_or_tokenised_one_at_a_time(
    registry_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most = 0, 0

    def encode(self: FakeTokenizer, text: str, *, rendered: bool = False) -> list[int]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.01)  # on a thread of its own
        running -= 1
        return list(text.encode())

    monkeypatch.setattr(FakeTokenizer, "encode", encode)
    huge = "x" * 70_000
    chat = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content=huge)])
    async with running_stack(registry_url, tmp_path) as stack:
        for request in (inference_pb2.GenerateRequest(text=huge), inference_pb2.GenerateRequest(chat=chat)):
            with pytest.raises(InvalidRequest, match=r"^(text|chat): the prompt has 70\d\d\d bytes, "):
                await stack.generate(request)
        assert most == 0
        monkeypatch.setattr(FakeTokenizer, "token_length", None)
        requests = [stack.generate(inference_pb2.GenerateRequest(text=huge)) for _ in range(4)]
        refusals = await asyncio.gather(*requests, return_exceptions=True)
        assert most == 1
        assert {str(refusal).partition(",")[0] for refusal in refusals} == {"text: the prompt has 70000 tokens"}


async def test_pods_say_how_long_a_sequence_may_be(
    registry_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotary scaling may stretch what config.json states."""
    monkeypatch.setattr("router.model.FAKE_MAX_MODEL_LEN", 50)
    async with running_stack(registry_url, tmp_path) as stack:
        request = tokens_request(prompt_of(200))
        assert_right(await stack.generate(request), request)


async def test_models_and_timelines(registry_url: str, tmp_path: Path) -> None:
    async with running_stack(registry_url, tmp_path, served_model_name="nice") as stack:
        (model,) = await stack.client.list_models()
        assert (model.id, model.max_model_len) == ("nice", 64 * 16 + 1)
        outcome = await stack.generate(tokens_request(prompt_of(5)))
        assert outcome.last.model == "nice"
        ledger = await stack.client.timeline(outcome.last.request_id)
        assert ledger == outcome.ledger == await stack.client.timeline()
        with pytest.raises(NotFound, match="request_id = 'nope'"):
            await stack.client.timeline("nope")


async def test_health_follows_the_decode_pods(registry_url: str, tmp_path: Path) -> None:
    async with running_stack(registry_url, tmp_path, prefill=1, decode=0) as stack:
        assert await stack.client.why_not_serving() == "no usable decode pod (none registered)"
        pod = await stack.pods.start("decode")
        await stack.until_pods(2)
        assert await stack.client.why_not_serving() is None
        await stack.pods.stop(pod)
        await stack.until_pods(1)
        assert await stack.client.why_not_serving() is not None
    async with RouterClient("127.0.0.1:1") as nobody:
        assert "the router cannot be reached: UNAVAILABLE" in (await nobody.why_not_serving() or "")


async def test_pods_that_do_not_pair_are_no_health(registry_url: str, tmp_path: Path) -> None:
    """Both are up, idle and reachable, and every request would be refused."""
    async with running_stack(registry_url, tmp_path, prefill=1, decode=0) as stack:
        await stack.pods.start("decode", block_size=32)
        await stack.until_pods(2)
        reason = await stack.client.why_not_serving() or ""
        assert reason.startswith("no decode pod has the KV layout of a prefill pod: block_size")
        assert await grpc_health(stack.router.address) == health_pb2.HealthCheckResponse.NOT_SERVING
        await stack.pods.start("decode")
        await stack.until_pods(3)
        assert await stack.client.why_not_serving() is None


async def grpc_health(address: str) -> health_pb2.HealthCheckResponse.ServingStatus.ValueType:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: health_pb2_grpc.HealthStub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest())).status


async def test_the_end_of_text_has_no_text(registry_url: str, tmp_path: Path) -> None:
    async with running_stack(registry_url, tmp_path) as stack:
        outcome = await stack.generate(tokens_request(prompt_of(20), logit_bias={EOS_ID: 100.0}, min_tokens=3))
        assert outcome.token_ids[-1] == EOS_ID
        assert "end" not in outcome.text
        assert outcome.last.stop_match == ""
        assert outcome.last.usage.completion_tokens == 4
