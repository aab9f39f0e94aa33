"""Signals, and turns of what clients send: who waits goes on, whoever else has left."""

from __future__ import annotations

import asyncio

import pytest

from penstock.launch.http_connection import ParseTurns, SlimEvent


async def test_all_who_wait_go_on_when_it_is_set_and_one_who_left_is_nobody():
    signal = SlimEvent()
    waiting = [asyncio.create_task(signal.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    await asyncio.sleep(0)
    signal.set()
    assert await asyncio.gather(waiting[0], waiting[2]) == [True, True]
    with pytest.raises(asyncio.CancelledError):
        await waiting[1]
    assert signal.is_set()
    assert await signal.wait()
    signal.clear()
    assert not signal.is_set()


async def test_who_waits_for_a_turn_goes_on_in_order_though_one_of_them_fails():
    turns, done = ParseTurns(2), list[int]()

    def fails() -> None:
        raise RuntimeError("unlucky")

    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    assert (turns.try_parse(), turns.try_parse(), turns.try_parse()) == (True, True, False)
    for number in range(3):
        turns.enqueue(lambda number=number: done.append(number))
    turns.enqueue(fails)
    turns.enqueue(lambda: done.append(9))
    assert not turns.try_parse()  # nobody goes before who waits
    for turn in ([0, 1], [0, 1, 2], [0, 1, 2, 9]):
        await asyncio.sleep(0)
        assert done == turn
    await asyncio.sleep(0)
    assert turns.try_parse()
