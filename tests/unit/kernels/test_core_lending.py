"""Lent cores: whoever computes, the bits are the same, and whoever owns a core gets it back."""

from __future__ import annotations

import mmap
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kernel_cases import NATIVE, assert_same_bits, make, normal

from penstock.config.schema import CoreLoan
from penstock.kernels import _native
from penstock.kernels.core_lending import LINE_BYTES, CoreSeats, SharedCores
from penstock.kernels.operands import segment_ends
from penstock.launch.heartbeat import CoreLendingTable
from penstock.types import WorkerId

P, D = WorkerId("prefill-0"), WorkerId("decode-0")
RECALL_S = 0.001


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    yield
    _native.set_threads(1)


class Rig:
    """One worker with guests at the cores of another, whose line a test writes itself."""

    def __init__(self, seats: int) -> None:
        self.memory = mmap.mmap(-1, 16 * LINE_BYTES)
        self.words = memoryview(self.memory).cast("I")
        self.cores = SharedCores(self.memory, 1, CoreSeats(0, 1, 1), [CoreSeats(2, 3, seats)])

    def busy(self, busy: bool) -> None:
        self.words[2 * 16] = busy

    @property
    def sitting(self) -> list[int]:
        return [self.words[line * 16] for line in range(3, 7)]


def big_linear(family: str, compute: str) -> tuple[Any, Any, Any]:
    ops = make(family, compute)
    packed = ops.pack_linear(normal(1, 1600, 1024), segments=segment_ends(1024, 32))
    return ops, packed, ops.compute(normal(2, 70, 1024))


def until(holds: Any) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        os.sched_yield()


@pytest.mark.parametrize(("family", "compute"), NATIVE)
def test_bits_are_the_same_while_cores_come_and_go(family: str, compute: str) -> None:
    ops, packed, x = big_linear(family, compute)
    alone = ops.to_numpy(ops.linear(x, packed)).copy()
    rig = Rig(seats=2)
    over = threading.Event()

    def flip() -> None:
        dice = random.Random(7)
        while not over.is_set():
            rig.busy(dice.random() < 0.5)
            for _ in range(dice.randrange(300)):
                os.sched_yield()

    flipper = threading.Thread(target=flip)
    flipper.start()
    try:
        for turn in range(60):
            _native.set_threads(1 + turn // 10 % 3)
            assert_same_bits(ops.to_numpy(ops.linear(x, packed)), alone, f"turn {turn}")
    finally:
        over.set()
        flipper.join()
        rig.cores.close()


def test_guests_help_while_the_owner_is_idle_and_leave_when_it_is_back() -> None:
    ops, packed, x = big_linear(*NATIVE[0])
    rig = Rig(seats=1)
    before = rig.cores.borrowed_s()

    def helped() -> bool:
        ops.linear(x, packed)
        return rig.cores.borrowed_s() > before

    until(helped)
    rig.busy(True)
    until(lambda: not any(rig.sitting))
    spent = rig.cores.borrowed_s()
    for _ in range(20):
        ops.linear(x, packed)
    assert rig.cores.borrowed_s() == spent
    assert not any(rig.sitting)
    rig.cores.close()


def test_two_borrowers_never_sit_at_one_core() -> None:
    ops, packed, x = big_linear(*NATIVE[0])
    rig = Rig(seats=1)
    rig.words[3 * 16] = 0x102  # somebody else is there
    before = rig.cores.borrowed_s()
    for _ in range(20):
        ops.linear(x, packed)
    assert (rig.cores.borrowed_s(), rig.sitting[0]) == (before, 0x102)
    rig.cores.close()


def test_an_owner_waits_once_for_a_borrower_that_was_stopped() -> None:
    board = CoreLendingTable({P: 1, D: 1})
    owner = board.cores_of(D, [])
    owner.lend_cores()
    line = 3 * 16  # D's seat, behind P's two lines and D's own
    board._words[line] = 0x501
    begun = time.monotonic()
    owner.reclaim_cores()
    assert time.monotonic() - begun >= RECALL_S
    quickest = []
    for _ in range(20):
        begun = time.monotonic()
        owner.reclaim_cores()
        quickest.append(time.monotonic() - begun)
    assert min(quickest) < RECALL_S / 2
    board.reset(P)
    assert board._words[line] == 0
    owner.close()


def test_a_worker_that_begins_anew_lends_nothing_yet() -> None:
    board = CoreLendingTable({P: 1, D: 1})
    owner = board.cores_of(D, [])
    owner.lend_cores()
    assert board._words[2 * 16] == 0
    board.reset(D)
    assert board._words[2 * 16] == 1
    owner.close()


def test_cores_are_lent_between_processes() -> None:
    """The owner's process says idle, then busy; its word is waited for, and a killed owner leaves what it said last."""
    board = CoreLendingTable({P: 1, D: 1})
    ours, theirs = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        owner = board.cores_of(D, [])
        for act in (owner.lend_cores, owner.reclaim_cores):
            os.read(ours[0], 1)
            act()
            os.write(theirs[1], b".")
        signal.pause()
        os._exit(0)
    ops, packed, x = big_linear(*NATIVE[0])
    borrower = board.cores_of(P, [CoreLoan(lender=D, cores=1)])
    before = borrower.borrowed_s()
    for _ in range(10):
        ops.linear(x, packed)
    assert borrower.borrowed_s() == before
    os.write(ours[1], b".")
    os.read(theirs[0], 1)

    def helped() -> bool:
        ops.linear(x, packed)
        return borrower.borrowed_s() > before

    until(helped)
    os.write(ours[1], b".")
    os.read(theirs[0], 1)
    assert board._words[3 * 16] == 0
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    spent = borrower.borrowed_s()
    ops.linear(x, packed)
    assert borrower.borrowed_s() == spent
    borrower.close()
    for descriptor in (*ours, *theirs):
        os.close(descriptor)


def test_lines_that_are_not_there_are_refused() -> None:
    memory = mmap.mmap(-1, 4 * LINE_BYTES)
    with pytest.raises(ValueError, match="no such seats"):
        SharedCores(memory, 1, CoreSeats(0, 1, 1), [CoreSeats(2, 3, 2)])
    with pytest.raises(ValueError, match="from 1 to 255"):
        SharedCores(memory, 256, CoreSeats(0, 1, 1), [])
    with pytest.raises(ValueError, match="no such line"):
        SharedCores(memory, 1, CoreSeats(4, 1, 1), [])
    assert np.frombuffer(memory, np.uint32).sum() == 0
