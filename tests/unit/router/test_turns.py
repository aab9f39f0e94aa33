"""What a turn looks at, or handles, is bounded, whatever the number of streams and workers."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from penstock.router.links import MessageBudget
from penstock.router.stream import RequestStream
from penstock.router.turns import MIN_STALE, StreamChecks, sleep_to_multiple


def a_stream(name: str) -> RequestStream:
    return cast(RequestStream, name)  # it is only passed on


def test_a_look_takes_so_many_of_those_that_are_due_in_order_of_time():
    rounds = StreamChecks(per_turn=256)
    for number in range(10_000):
        rounds.add(a_stream(f"s{number}"), at=1.0 + number / 10_000)
    rounds.add(a_stream("later"), at=9.0)
    seen: list[Any] = []
    while rounds.has_due(3.0):
        taken = rounds.pop_due(3.0)
        assert 0 < len(taken) <= 256
        seen += taken
    assert seen == [f"s{number}" for number in range(10_000)]
    assert len(rounds) == 1


def test_nothing_is_looked_at_before_its_time():
    rounds = StreamChecks(per_turn=4)
    rounds.add(a_stream("s"), at=1.0)
    assert (rounds.pop_due(0.9), rounds.has_due(0.9)) == ([], False)
    assert rounds.pop_due(1.0) == ["s"]


def test_nothing_is_kept_of_streams_that_are_over_before_their_time():
    rounds, streams = StreamChecks(per_turn=256), [a_stream(f"s{number}") for number in range(10_000)]
    for stream in streams:
        rounds.add(stream, at=3600.0)
    for stream in streams[:-1]:
        rounds.discard(stream)
    assert len(rounds) == 1
    assert len(rounds._heap) <= MIN_STALE + 2
    assert list(rounds._streams.values()) == streams[-1:]
    assert rounds.pop_due(3600.0) == streams[-1:]
    rounds.discard(streams[-1])
    assert (len(rounds), rounds.pop_due(3600.0)) == (0, [])


async def test_all_links_together_have_so_much_room_in_a_turn():
    room, handled = MessageBudget(100), 0
    for _ in range(5):
        in_this_turn = 0
        while room.has_room:
            room.spend(30)
            in_this_turn += 1
        assert in_this_turn == 4  # the last of them exceeds what was left
        handled += in_this_turn
        await asyncio.sleep(0)
    assert handled == 20


async def test_what_is_periodic_wakes_at_multiples_of_its_period():
    loop = asyncio.get_running_loop()
    for period in (0.01, 0.02, 0.05):
        before = loop.time()
        await sleep_to_multiple(period)
        multiple = (round(before / period) + 1) * period
        assert 0.5 * period <= multiple - before <= 1.5 * period + 1e-6
        assert loop.time() >= multiple - 0.002, "not before it, but for the clock's resolution"
