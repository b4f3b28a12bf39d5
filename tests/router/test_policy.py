"""Routing decisions by hand: who is chosen, why, and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proto import common_pb2, kv_pb2, registry_pb2
from router.policy import MAX_RETRY_MS, MIN_RETRY_MS, Refusal, RoutingDecision, RoutingRequest, decide, why_not_serving
from router.prefix_index import PrefixIndex, chunk_hashes
from router.snapshot import DECODE, PREFILL, Correction, PodView, Snapshot, pod_view

RNG_SEED = 7


def layout(**fields: Any) -> kv_pb2.KVLayout:
    values: dict[str, Any] = {
        "model_id": "fake",
        "weights_revision": "1",
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_dim": 1,
        "block_size": 16,
        "dtype": "int64",
        "kv_dtype": "int64",
        "tp_size": 1,
        "memory_order": "block_major",
        "layout_version": 1,
    } | fields
    return kv_pb2.KVLayout(**values, fingerprint=repr(sorted(values.items())))


def record(pod_id: str, role: registry_pb2.Role.ValueType, **layout_fields: Any) -> registry_pb2.PodRecord:
    return registry_pb2.PodRecord(
        pod_id=pod_id,
        epoch="e1",
        role=role,
        state=registry_pb2.POD_STATE_READY,
        address="127.0.0.1:1",
        token_address="127.0.0.1:2" if role == DECODE else "",
        model_id="fake",
        max_model_len=4096,
        layout=layout(**layout_fields),
        max_num_seqs=8,
        load=registry_pb2.PodLoad(num_free_blocks=100, num_blocks=100),
    )


def prefill(pod_id: str, waiting_tokens: int = 0, **changes: Any) -> PodView:
    return replace(pod_view(record(pod_id, PREFILL)), num_waiting_tokens=waiting_tokens, **changes)


def decode(pod_id: str, num_sequences: int = 0, **changes: Any) -> PodView:
    return replace(pod_view(record(pod_id, DECODE)), num_sequences=num_sequences, **changes)


def request(num_tokens: int = 100, **fields: Any) -> RoutingRequest:
    values: dict[str, Any] = {"model_id": "fake", "num_tokens": num_tokens, "max_tokens": num_tokens + 10} | fields
    return RoutingRequest(**values)


def route(
    pods: Sequence[PodView],
    asked: RoutingRequest | None = None,
    prefixes: PrefixIndex | None = None,
    seed: int = RNG_SEED,
    now: float = 0.0,
) -> RoutingDecision | Refusal:
    return decide(asked or request(), Snapshot(tuple(pods)), prefixes or PrefixIndex(), Random(seed), now)


def chosen(outcome: RoutingDecision | Refusal) -> tuple[str, str]:
    assert isinstance(outcome, RoutingDecision), outcome
    return outcome.prefill_pod.pod_id if outcome.prefill_pod else "", outcome.decode_pod.pod_id


def refused(outcome: RoutingDecision | Refusal) -> Refusal:
    assert isinstance(outcome, Refusal), outcome
    return outcome


def test_the_least_loaded_pair() -> None:
    pods = [prefill("p1", 5000), prefill("p2", 100), decode("d1", 6), decode("d2", 1)]
    outcome = route(pods)
    assert chosen(outcome) == ("p2", "d2")
    assert isinstance(outcome, RoutingDecision)
    assert "prefill p2: 100 uncached + 100 waiting tokens" in outcome.reason
    assert "decode d2: 1 sequences, 100 of 100 blocks free" in outcome.reason
    assert outcome.predicted_prefill_s == pytest.approx(0.2), "at the cold speed of 1,000 tokens/s"


def test_a_full_cache_counts_against_a_decode_pod() -> None:
    assert chosen(route([prefill("p"), decode("d1", 2, num_free_blocks=20), decode("d2", 2)]))[1] == "d2"


def test_a_slow_decode_pod_gets_less() -> None:
    pods = [prefill("p"), decode("slow", 1, step_s=0.09), decode("fast", 3, step_s=0.03)]
    assert chosen(route(pods))[1] == "fast"


def test_an_old_average_does_not_banish_a_pod() -> None:
    """An idle pod that once measured a step of 100 s is taken for at most four times the median."""
    pods = [prefill("p"), decode("old", 0, step_s=100.0), *(decode(f"d{n}", 7, step_s=0.03) for n in range(3))]
    assert chosen(route(pods))[1] == "old"


def test_a_faster_prefill_pod_takes_a_longer_queue() -> None:
    pods = [prefill("slow", 500, prefill_tokens_per_s=100), prefill("fast", 1000, prefill_tokens_per_s=1000)]
    assert chosen(route([*pods, decode("d")]))[0] == "fast"


def test_a_cold_pod_is_taken_for_the_median() -> None:
    pods = [prefill("cold", 0), prefill("warm", 900, prefill_tokens_per_s=100)]
    assert chosen(route([*pods, decode("d")]))[0] == "cold"


def test_the_prefix_wins_over_a_small_queue_but_not_a_long_one() -> None:
    hashes = chunk_hashes(range(100), "")
    index = PrefixIndex()
    index.record("p1", "e1", hashes)
    asked = request(100, prefix_hashes=hashes)
    outcome = route([prefill("p1", 50), prefill("p2", 0), decode("d")], asked, index)
    assert chosen(outcome)[0] == "p1"
    assert isinstance(outcome, RoutingDecision)
    assert outcome.predicted_cached_tokens == 96
    assert chosen(route([prefill("p1", 500), prefill("p2", 0), decode("d")], asked, index))[0] == "p2"


def test_ties_are_broken_at_random_and_by_the_seed_alone() -> None:
    pods = [*(prefill(f"p{n}") for n in range(3)), *(decode(f"d{n}") for n in range(3))]
    seen = Counter(chosen(route(pods, seed=seed)) for seed in range(200))
    assert len(seen) == 9
    assert chosen(route(pods, seed=3)) == chosen(route(pods, seed=3))


def test_pods_within_ten_percent_share_the_work() -> None:
    """So that several routers that see the same records do not all pick the same pod."""
    pods = [prefill("p1", 1000), prefill("p2", 1050), decode("d")]
    assert {chosen(route(pods, seed=seed))[0] for seed in range(20)} == {"p1", "p2"}


def test_a_burst_spreads_when_it_is_counted() -> None:
    pods = {name: prefill(name) for name in ("p1", "p2", "p3")}
    counts: Counter[str] = Counter()
    for seed in range(6):
        name, _ = chosen(route([*pods.values(), decode("d")], seed=seed))
        counts[name] += 1
        pods[name] = pods[name].corrected(Correction(1, 100, 0), reachable=True)
    assert set(counts.values()) == {2}


# --- Decode-only ----------------------------------------------------------------------------------------------------


def test_decode_only_without_prefill_pods() -> None:
    outcome = route([decode("d1", 3), decode("d2", 1)])
    assert chosen(outcome) == ("", "d2")
    assert isinstance(outcome, RoutingDecision)
    assert outcome.reason.startswith("decode-only: no usable prefill pod (none registered)")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"draining": True}, "1 draining"),
        ({"reachable": False}, "1 unreachable"),
        ({"model_id": "other"}, "1 of model 'other'"),
        ({"max_model_len": 100}, "1 too small"),
    ],
)
def test_decode_only_says_why(change: dict[str, Any], why: str) -> None:
    outcome = route([prefill("p", **change), decode("d")])
    assert chosen(outcome) == ("", "d")
    assert isinstance(outcome, RoutingDecision)
    assert why in outcome.reason


def test_decode_only_after_the_prefill_pod_failed_this_request() -> None:
    outcome = route([prefill("p"), decode("d")], request(excluded=frozenset({("p", "e1")})))
    assert chosen(outcome) == ("", "d")
    assert isinstance(outcome, RoutingDecision)
    assert "1 failed earlier" in outcome.reason


# --- Not that pod ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", [{"draining": True}, {"reachable": False}, {"model_id": "other"}, {"max_model_len": 109}]
)
def test_unusable_pods_get_nothing(change: dict[str, Any]) -> None:
    pods = [prefill("p1", **change), prefill("p2", 10_000), decode("d1", **change), decode("d2", 7)]
    expected = "p1" if "max_model_len" in change else "p2"  # a prefill pod need not hold the answer
    assert chosen(route(pods)) == (expected, "d2")


def test_a_failed_pod_is_avoided_but_not_its_next_incarnation() -> None:
    pods = [prefill("p"), decode("d1"), decode("d2", 7)]
    assert chosen(route(pods, request(excluded=frozenset({("d1", "e1")}))))[1] == "d2"
    assert chosen(route(pods, request(excluded=frozenset({("d1", "e0")}))))[1] == "d1"


def test_a_failed_decode_pod_is_the_last_resort() -> None:
    assert chosen(route([prefill("p"), decode("d")], request(excluded=frozenset({("d", "e1")}))))[1] == "d"


def test_a_replay_stays_with_its_weights() -> None:
    other = replace(pod_view(record("d1", DECODE, weights_revision="2")), num_sequences=0)
    mine = decode("d2", 7)
    assert chosen(route([other, mine], request(computes=mine.computes))) == ("", "d2")


def test_pods_without_room_are_passed_over() -> None:
    full = [decode("seqs", 8), decode("blocks", 0, num_free_blocks=6), decode("busy")]
    asked = request(busy=frozenset({("busy", "e1")}))
    assert chosen(route([prefill("p"), *full, decode("room", 7)], asked))[1] == "room"


def test_cached_blocks_need_no_room() -> None:
    hashes = chunk_hashes(range(100), "")
    index = PrefixIndex()
    index.record("d", "e1", hashes)
    pods = [prefill("p"), decode("d", 0, num_free_blocks=1)]
    assert chosen(route(pods, request(100, prefix_hashes=hashes), index)) == ("p", "d")


# --- Refusals -------------------------------------------------------------------------------------------------------


def test_an_answers_last_token_needs_no_room() -> None:
    """Nothing is computed from it, so a prompt of just as many tokens as there are slots can be served."""
    pods = [prefill("p"), decode("d", 0, num_free_blocks=6)]
    assert chosen(route(pods, request(6 * 16, max_tokens=6 * 16 + 1))) == ("p", "d")
    refused(route(pods, request(6 * 16, max_tokens=6 * 16 + 2)))


def test_no_pods_can_wait() -> None:
    refusal = refused(route([prefill("p"), decode("d", draining=True)]))
    assert refusal.kind == common_pb2.ERROR_KIND_OVERLOADED
    assert refusal.can_wait
    assert refusal.message == "no usable decode pod (1 draining)"
    assert MIN_RETRY_MS <= refusal.retry_after_ms <= MAX_RETRY_MS


@pytest.mark.parametrize(
    ("pods", "message"),
    [
        ([prefill("p"), decode("d", 8)], "all 1 decode pods are busy"),
        ([prefill("p", num_sequences=8), decode("d")], "all 1 prefill pods are busy"),
        ([decode("d", 8)], "all 1 decode pods are busy"),
    ],
)
def test_busy_pods_can_wait(pods: list[PodView], message: str) -> None:
    refusal = refused(route(pods))
    assert refusal.can_wait
    assert refusal.message.startswith(message)


def test_a_pod_that_just_refused_is_counted_whatever_it_reported() -> None:
    refusal = refused(route([prefill("p"), decode("d")], request(busy=frozenset({("d", "e1")}))))
    assert refusal.message.endswith("blocks free, 1 asked just now had no room in time")


def test_too_long_for_every_pod() -> None:
    refusal = refused(route([prefill("p"), decode("d", max_model_len=109)]))
    assert refusal.kind == common_pb2.ERROR_KIND_INVALID_REQUEST
    assert not refusal.can_wait
    assert refusal.message == "prompt and max_tokens are 110 tokens: decode pods hold at most 109"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("block_size", 32, "block_size 32 != 16"),
        ("dtype", "float32", "dtype float32 != int64"),
        ("kv_dtype", "int8", "kv_dtype int8 != int64"),
        ("num_kv_heads", 2, "num_kv_heads 2 != 1"),
        ("weights_revision", "2", "weights_revision 2 != 1"),
    ],
)
def test_an_unpairable_cluster_names_the_field(field: str, value: Any, message: str) -> None:
    other = pod_view(record("p", PREFILL, **{field: value}))
    refusal = refused(route([other, decode("d")]))
    assert refusal.kind == common_pb2.ERROR_KIND_POD_UNAVAILABLE
    assert not refusal.can_wait
    assert message in refusal.message
    assert "prefill pod p, decode pod d" in refusal.message


@pytest.mark.parametrize(
    ("pods", "reason"),
    [
        ([], "no usable decode pod (none registered)"),
        ([prefill("p")], "no usable decode pod (none registered)"),
        ([prefill("p"), decode("d")], None),
        ([decode("d")], None),
        ([prefill("p", reachable=False), decode("d")], None),
        (
            [decode("d", draining=True), decode("e", reachable=False)],
            "no usable decode pod (1 draining, 1 un",
        ),
        ([prefill("p"), decode("d", num_sequences=10**6, num_free_blocks=0)], None),
        ([replace(decode("d"), model_id="other")], "no usable decode pod (1 of model 'other')"),
        (
            [pod_view(record("p", PREFILL, block_size=32)), decode("d")],
            "no decode pod has the KV layout of a prefill pod",
        ),
    ],
)
def test_pods_serve_when_an_idle_one_of_them_could(pods: Sequence[PodView], reason: str | None) -> None:
    found = why_not_serving("fake", Snapshot(tuple(pods)))
    assert (found or "").startswith(reason or "")
    assert (found is None) == (reason is None)


def test_only_equal_layouts_are_paired() -> None:
    odd_prefill, odd_decode = (
        pod_view(record(f"odd-{n}", role, block_size=32)) for n, role in ((1, PREFILL), (2, DECODE))
    )
    pods = [odd_prefill, prefill("p", 3000), replace(odd_decode, num_sequences=7), decode("d", 7)]
    assert chosen(route(pods)) == ("odd-1", "odd-2")
    assert chosen(route([odd_prefill, prefill("p", 3000), decode("d", 7)])) == ("p", "d")


def test_a_mixed_cluster_is_not_refused_for_what_is_left_of_it() -> None:
    """The only decode pod of one layout is unreachable: the other one computes alone."""
    odd = pod_view(record("odd", DECODE, block_size=32))
    assert chosen(route([prefill("p"), decode("d", reachable=False), odd])) == ("", "odd")


def test_a_deadline_that_cannot_be_met_is_refused_early() -> None:
    pods = [prefill("p", 900, prefill_tokens_per_s=100), decode("d")]
    refusal = refused(route(pods, request(100, deadline=105.0), now=100.0))
    assert (refusal.kind, refusal.can_wait) == (common_pb2.ERROR_KIND_OVERLOADED, False)
    assert (refusal.message, refusal.retry_after_ms) == (
        "the first token would be 5.0 s past the deadline: pod p has 900 tokens waiting",
        5000,
    )
    assert chosen(route(pods, request(100, deadline=111.0), now=100.0)) == ("p", "d")
    assert chosen(route([prefill("p", 9000), decode("d")], request(deadline=1.0))) == ("p", "d"), "nothing measured yet"


# --- Always ---------------------------------------------------------------------------------------------------------

pods_strategy = st.lists(
    st.builds(
        lambda n, role, **changes: replace(pod_view(record(f"pod-{n}", role)), **changes),
        st.integers(0, 99),
        st.sampled_from([PREFILL, DECODE]),
        draining=st.booleans(),
        reachable=st.booleans(),
        num_sequences=st.integers(0, 9),
        num_waiting_tokens=st.integers(0, 10_000),
        num_free_blocks=st.integers(0, 100),
        step_s=st.floats(0, 1),
        prefill_tokens_per_s=st.floats(0, 1e5),
        max_model_len=st.integers(1, 4096),
    ),
    max_size=6,
    unique_by=lambda pod: pod.pod_id,
)


@given(pods=pods_strategy, num_tokens=st.integers(1, 2000), seed=st.integers(0, 9))
def test_a_decision_always_keeps_the_rules(pods: list[PodView], num_tokens: int, seed: int) -> None:
    outcome = route(pods, request(num_tokens), seed=seed)
    if isinstance(outcome, Refusal):
        assert outcome.message
        assert outcome.can_wait == (outcome.retry_after_ms > 0)
        return
    for pod in filter(None, (outcome.prefill_pod, outcome.decode_pod)):
        assert not pod.draining
        assert pod.reachable
        assert pod.num_sequences < pod.max_num_seqs
    assert outcome.decode_pod.num_free_blocks * 16 >= num_tokens + 1
    assert outcome.decode_pod.max_model_len >= num_tokens + 10
    assert outcome.reason
