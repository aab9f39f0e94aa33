"""Ranks on several machines, over links that a test holds the other end of."""

from __future__ import annotations

import queue
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from penstock.errors import GroupError, ProtocolError
from penstock.parallel.collectives.nodes import (
    MESSAGE_BYTES,
    PIECE_BYTES,
    READ_AHEAD_RECORDS,
    NodeCollectives,
    RemoteRank,
)
from penstock.parallel.collectives.shm import ShmMemory
from penstock.wire.rank_link import RECORD_BYTES


class HeldLink:
    """One end of a link; ``come`` is what it receives: a record, or an error."""

    def __init__(self) -> None:
        self.come: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()
        self.sent: list[bytes] = []
        self.taken = 0

    def send(self, *parts: bytes | memoryview) -> None:
        record = b"".join(parts)
        assert len(record) <= RECORD_BYTES
        self.sent.append(record)

    def recv(self) -> bytes:
        record = self.come.get()
        self.taken += 1
        if isinstance(record, Exception):
            raise record
        return record

    def close(self) -> None:
        self.come.put(ConnectionError("closed here"))


Ends = tuple[RemoteRank, HeldLink, list[str], list[bytes]]


@pytest.fixture
def remote() -> Iterator[Ends]:
    link, lost, reports = HeldLink(), list[str](), list[bytes]()
    rank = RemoteRank(link, "rank 1", on_lost=lost.append, on_report=reports.append)
    rank.start()
    yield rank, link, lost, reports
    rank.close()


def nothing() -> None:
    """The check of who need not be called while it waits."""


def pass_on(link: HeldLink) -> None:
    """What was sent comes back."""
    for record in link.sent:
        link.come.put(record)
    link.sent.clear()


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (3, 5), (2, PIECE_BYTES // 4)])
def test_arrays_come_as_they_were_sent_piece_by_piece(remote: Ends, shape: tuple[int, int]) -> None:
    rank, link, _, _ = remote
    array = np.random.default_rng(1).standard_normal(shape, np.float32)
    rank.send_array(array)
    rank.send_array(array + 1)
    pass_on(link)
    assert np.array_equal(rank.recv_array(shape, nothing), array)
    assert np.array_equal(rank.recv_array(shape, nothing), array + 1)


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, 2 * PIECE_BYTES + 7])
def test_messages_arrays_and_reports_do_not_get_in_each_others_way(remote: Ends, size: int) -> None:
    rank, link, _, reports = remote
    array = np.ones((2, 2), np.float32)
    rank.send_array(array)
    rank.send_message(bytes(size))
    rank.send_report(b"so far")
    rank.send_message(b"next")
    pass_on(link)
    assert rank.recv_message(nothing) == bytes(size)
    assert rank.recv_message(nothing) == b"next"
    assert reports == [b"so far"]
    assert np.array_equal(rank.recv_array((2, 2), nothing), array)


def test_who_waits_is_heard_of(remote: Ends) -> None:
    rank, link, _, _ = remote
    rank.send_message(b"late")
    asked: list[int] = []

    def check() -> None:
        asked.append(1)
        if len(asked) == 2:
            pass_on(link)

    assert rank.recv_message(check) == b"late"
    assert len(asked) >= 2


def of_another_shape(link: HeldLink) -> bytes:
    sender = RemoteRank(link, "", on_lost=lambda why: None)
    sender.send_array(np.ones((2, 3), np.float32))
    return link.sent.pop()


def record(kind: int, rows: int, total: int, data: bytes = b"") -> bytes:
    return struct.pack("<BxxxIQ", kind, rows, total) + data


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        (of_another_shape(HeldLink()), lambda rank: rank.recv_array((3, 2), nothing)),
        (record(0, 3, 24, bytes(20)), lambda rank: rank.recv_array((3, 2), nothing)),
        (record(1, 0, MESSAGE_BYTES + 1, b"x"), lambda rank: rank.recv_message(nothing)),
        (record(1, 0, 1, b"xy"), lambda rank: rank.recv_message(nothing)),
        (record(1, 0, 5), lambda rank: rank.recv_message(nothing)),
    ],
    ids=["shape", "too short", "too long a message", "more than announced", "nothing of what was announced"],
)
def test_what_does_not_fit_is_an_error(remote: Ends, said: bytes, asked: Callable[[RemoteRank], Any]) -> None:
    rank, link, _, _ = remote
    link.come.put(said)
    with pytest.raises(GroupError, match="rank 1 sent"):
        asked(rank)


@pytest.mark.parametrize("end", [ConnectionError("gone"), ProtocolError("changed"), record(9, 0, 0), b"short"], ids=str)
def test_the_end_of_a_link_is_told_once_and_ends_all_that_waits(remote: Ends, end: bytes | Exception) -> None:
    rank, link, lost, _ = remote
    told = threading.Event()
    link.come.put(end)
    for wait in (lambda: rank.recv_message(told.set), lambda: rank.recv_array((1, 1), nothing)) * 2:
        with pytest.raises(GroupError, match="the link to rank 1 has ended"):
            wait()
    rank.close()
    assert len(lost) == 1


def test_a_link_that_is_closed_here_is_not_lost() -> None:
    lost: list[str] = []
    rank = RemoteRank(HeldLink(), "rank 1", on_lost=lost.append)
    rank.start()
    rank.close()
    assert lost == []


def test_what_is_read_ahead_is_bounded(remote: Ends) -> None:
    rank, link, _, _ = remote
    count = 3 * READ_AHEAD_RECORDS
    for number in range(count):
        link.come.put(record(1, 0, 1, bytes([number])))
    assert rank.recv_message(nothing) == b"\0"
    assert link.taken <= READ_AHEAD_RECORDS + 2
    assert [rank.recv_message(nothing)[0] for _ in range(1, count)] == list(range(1, count))


def test_a_group_reaches_each_rank_where_it_is(remote: Ends) -> None:
    rank, link, _, _ = remote
    memory = ShmMemory(3)
    own, near = memory.group(0), memory.group(2)
    group = NodeCollectives(own, {1: rank})
    assert (group.rank, group.size) == (0, 3)
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    group.send(array, 2)
    assert np.array_equal(near.recv(0, (2, 3)), array)
    group.send_message(b"here", 2)
    assert near.recv_message(0) == b"here"
    near.send_message(b"back", 0)
    assert group.recv_message(2) == b"back"
    near.send(array, 0)
    assert np.array_equal(group.recv(2, (2, 3)), array)
    group.send(array, 1)
    group.send_message(b"there", 1)
    pass_on(link)
    assert np.array_equal(group.recv(1, (2, 3)), array)
    assert group.recv_message(1) == b"there"
