"""Who waits goes in order; nobody overtakes, nobody is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from router.wait_queue import QueueFull, WaitQueue


class Room:
    """So many may be placed; remembers the order and what was undone."""

    def __init__(self, num_free: int = 0, max_waiting: int = 10) -> None:
        self.num_free = num_free
        self.placed: list[str] = []
        self.undone: list[str] = []
        self.queue: WaitQueue[str] = WaitQueue(max_waiting, self.undone.append)

    def attempt(self, name: str) -> Callable[[], str | None]:
        def attempt() -> str | None:
            if self.num_free == 0:
                return None
            self.num_free -= 1
            self.placed.append(name)
            return name

        return attempt

    def wait(self, name: str, priority: int = 0, arrived_at: float = 0.0, wait_s: float = 10.0) -> asyncio.Task[str]:
        place = self.queue.place(
            self.attempt(name), priority=priority, arrived_at=arrived_at, is_picky=False, wait_s=wait_s
        )
        return asyncio.create_task(place, name=name)

    async def give(self, num_free: int) -> None:
        self.num_free += num_free
        self.queue.pump()
        await asyncio.sleep(0)


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_room_is_taken_at_once() -> None:
    room = Room(1)
    assert await room.wait("a") == "a"


async def test_by_priority_then_arrival() -> None:
    room = Room()
    tasks = [room.wait("late", 5), room.wait("first"), room.wait("second"), room.wait("urgent", -1)]
    await settle()
    await room.give(2)
    await room.give(2)
    await asyncio.gather(*tasks)
    assert room.placed == ["urgent", "first", "second", "late"]


async def test_a_replay_keeps_its_place() -> None:
    room = Room()
    tasks = [room.wait("newer", arrived_at=2.0), room.wait("older", arrived_at=1.0)]
    await settle()
    await room.give(2)
    await asyncio.gather(*tasks)
    assert room.placed == ["older", "newer"]


async def test_a_newcomer_does_not_overtake() -> None:
    room = Room()
    first = room.wait("first")
    await settle()
    room.num_free = 1
    second = room.wait("second")
    await settle()
    assert room.placed == ["first"]
    await room.give(1)
    assert (await first, await second) == ("first", "second")


async def test_a_picky_waiter_holds_up_nobody() -> None:
    room = Room()
    picky = asyncio.create_task(room.queue.place(lambda: None, priority=-5, arrived_at=0.0, is_picky=True, wait_s=10.0))
    other = room.wait("other")
    await settle()
    await room.give(1)
    assert await other == "other"
    picky.cancel()
    await asyncio.wait([picky])
    assert len(room.queue) == 0


async def test_waiting_ends() -> None:
    room = Room()
    with pytest.raises(TimeoutError):
        await room.wait("a", wait_s=0.0)
    assert len(room.queue) == 0


async def test_no_time_to_wait_is_still_one_try() -> None:
    assert await Room(1).wait("a", wait_s=0.0) == "a"


async def test_the_last_in_order_goes_when_too_many_wait() -> None:
    room = Room(max_waiting=2)
    tasks = [room.wait("a"), room.wait("b")]
    await settle()
    with pytest.raises(QueueFull):
        await room.wait("c")
    urgent = room.wait("urgent", -1)
    with pytest.raises(QueueFull):
        await tasks[1]
    await room.give(2)
    assert (await tasks[0], await urgent) == ("a", "urgent")


async def test_a_refusal_for_good_reaches_its_waiter_only() -> None:
    room = Room()

    def refuse() -> str | None:
        raise ValueError("never")

    bystander = room.wait("bystander")
    with pytest.raises(ValueError, match="never"):
        await room.queue.place(refuse, priority=-1, arrived_at=0.0, is_picky=False, wait_s=10.0)
    await room.give(1)
    assert await bystander == "bystander"


async def test_who_leaves_in_the_moment_of_being_placed_is_undone() -> None:
    room = Room()
    task = room.wait("a")
    await settle()
    room.num_free = 1
    room.queue.pump()
    task.cancel()
    await asyncio.wait([task])
    assert (task.cancelled(), room.placed, room.undone) == (True, ["a"], ["a"])


async def test_who_leaves_while_waiting_is_gone() -> None:
    room = Room()
    task = room.wait("a")
    await settle()
    task.cancel()
    await asyncio.wait([task])
    await room.give(1)
    assert (room.placed, room.undone, len(room.queue)) == ([], [], 0)
