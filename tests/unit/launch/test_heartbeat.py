"""The heartbeat board: what a child writes is what its parent reads, and no word is ever torn."""

from __future__ import annotations

import os
import signal
import time

from hypothesis import given
from hypothesis import strategies as st

from penstock.launch.heartbeat import SLOT_BYTES, HeartbeatTable
from penstock.types import Role, WorkerState


def test_slots_do_not_touch_each_other() -> None:
    board = HeartbeatTable(3)
    for i, slot in enumerate(board.slots):
        slot.reset(i + 1, 10**9 * i)
    board.slots[1].beat(7_000_000_000, 8_500_000_000, 42)
    board.slots[1].set_state(WorkerState.READY)
    board.slots[1].set_exit_reason("x" * 2 * SLOT_BYTES)
    assert [s.read().incarnation for s in board.slots] == [1, 2, 3]
    beat = board.slots[1].read()
    assert (beat.beat_s, beat.predicted_end_s, beat.steps, beat.state) == (7.0, 8.5, 42, WorkerState.READY)
    for other in (board.slots[0], board.slots[2]):
        assert other.read().steps == 0
        assert other.read().state is WorkerState.STARTING
        assert other.exit_reason() == ""


def test_a_role_that_was_given_outlives_the_process() -> None:
    one, other = HeartbeatTable(2).slots
    assert one.assigned_role is None
    for role in Role:
        one.assign_role(role)
        one.reset(2, 0)
        assert one.assigned_role is role
    assert other.assigned_role is None


@given(st.text())
def test_last_words_are_kept_and_cut_at_the_slot(text: str) -> None:
    (slot,) = HeartbeatTable(1).slots
    slot.set_exit_reason(text)
    kept = slot.exit_reason()
    assert text.startswith(kept.rstrip("\N{REPLACEMENT CHARACTER}"))
    assert len(kept.encode()) <= SLOT_BYTES
    slot.reset(2, 0)
    assert slot.exit_reason() == ""


def test_a_state_that_is_none_of_ours_is_read_as_dead() -> None:
    (slot,) = HeartbeatTable(1).slots
    slot._words[3] = 2**64 - 1
    assert slot.read().state is WorkerState.DEAD


def test_a_parent_never_sees_half_a_word() -> None:
    """The writer alternates between two values that share no byte; any mixture would be a torn word."""
    low, high = 0x0101010101010101, 0x7E7E7E7E7E7E7E7E
    (slot,) = HeartbeatTable(1).slots
    slot.reset(1, low)
    pid = os.fork()
    if pid == 0:
        while True:
            slot.beat(high, high, 0)
            slot.beat(low, low, 0)
    try:
        seen: set[int] = set()
        deadline = time.monotonic() + 20.0
        while not {low, high} <= seen and time.monotonic() < deadline:
            seen |= {slot._words[0] for _ in range(100_000)}
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert seen == {low, high}
