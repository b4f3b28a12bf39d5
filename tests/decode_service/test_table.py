"""The decode pod's table: who is owed what, and a check that notices every disagreement."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from decode_service.stream import TokenStream
from decode_service.table import DecodeTable, Entry, State
from engine.batch import EngineLoad, Reservation
from proto.errors import InvalidRequest

IDLE = EngineLoad(
    num_waiting=0,
    num_running=0,
    num_waiting_tokens=0,
    num_free_blocks=8,
    num_blocks=8,
    num_held=0,
    num_reserved=0,
    step_s=0,
    prefill_tokens_per_s=0,
)
BLOCKS = Reservation("a", (0, 1), 0)


def new_stream() -> TokenStream:
    return TokenStream("epoch", lambda stream, hello: None, lambda stream: None)


def reserved(table: DecodeTable, name: str = "a", ttl_s: float = 10) -> Entry:
    entry = table.add(Entry(name, new_stream(), State.WAITING))
    table.grant(entry, BLOCKS, now=0, duration_s=ttl_s)
    return entry


async def test_a_credit_s_life() -> None:
    table = DecodeTable()
    entry = reserved(table)
    table.check_invariants(replace(IDLE, num_reserved=1))
    assert not table.idle.is_set()
    assert table.num_credits == 1
    assert table.claim("a") is entry
    assert table.claim("a") is None
    assert (entry.state, table.num_credits) == (State.TRANSFERRING, 0)
    table.remove(entry)
    assert table.idle.is_set()
    table.check_invariants(IDLE)


async def test_unused_credits_expire_once() -> None:
    table = DecodeTable()
    short, long = reserved(table, "a", ttl_s=1), reserved(table, "b", ttl_s=5)
    assert table.take_expired(now=0.5) == []
    assert table.take_expired(now=1) == [short]
    assert table.take_expired(now=1) == []
    assert table.entries() == [long]
    assert table.claim("a") is None


async def test_a_second_sequence_of_the_same_id_is_refused() -> None:
    table = DecodeTable()
    reserved(table)
    with pytest.raises(InvalidRequest, match=r"sequence\.sequence_id = 'a'"):
        table.add(Entry("a", new_stream(), State.WAITING))


async def test_states_only_advance() -> None:
    entry = Entry("a", new_stream(), State.DECODING)
    with pytest.raises(AssertionError, match="decoding -> reserved"):
        entry.advance(State.RESERVED)


async def test_entries_are_found_by_their_stream_in_every_state() -> None:
    table = DecodeTable()
    credit, stream = reserved(table), new_stream()
    decoding = table.add(Entry("d", stream, State.DECODING))
    assert table.of_stream(stream) == [decoding]
    assert table.of_stream(credit.stream) == [credit]


def _lost_reservation(table: DecodeTable) -> None:
    reserved(table)


def _lost_sequence(table: DecodeTable) -> None:
    table.add(Entry("a", new_stream(), State.DECODING))


def _transfer_without_task(table: DecodeTable) -> None:
    reserved(table)
    table.claim("a")


def _ended_stream(table: DecodeTable) -> None:
    entry = table.add(Entry("a", new_stream(), State.DECODING))
    entry.stream.end()


@pytest.mark.parametrize(
    ("spoil", "load", "message"),
    [
        (_lost_reservation, IDLE, "reservations"),
        (_lost_sequence, IDLE, "computes 0"),
        (_transfer_without_task, replace(IDLE, num_reserved=1), "no transfer"),
        (_ended_stream, replace(IDLE, num_running=1), "stream that has ended"),
    ],
)
async def test_the_check_names_what_disagrees(
    spoil: Callable[[DecodeTable], None], load: EngineLoad, message: str
) -> None:
    table = DecodeTable()
    spoil(table)
    with pytest.raises(AssertionError, match=message):
        table.check_invariants(load)


async def test_a_settled_transfer_is_not_one_in_flight() -> None:
    table = DecodeTable()
    entry = reserved(table)
    table.claim("a")
    entry.task = asyncio.create_task(asyncio.sleep(0))
    table.check_invariants(replace(IDLE, num_reserved=1))
    await entry.task
    with pytest.raises(AssertionError, match="no transfer any more"):
        table.check_invariants(replace(IDLE, num_reserved=1))
