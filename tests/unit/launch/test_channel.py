"""The line between supervisor and gateway: whole messages, in order, and never blocking."""

from __future__ import annotations

import socket

import pytest

from penstock.errors import ProtocolError
from penstock.launch.channel import MAX_MESSAGE_BYTES, MAX_WAITING, Channel
from penstock.types import WorkerId
from penstock.wire.codec import encode_message
from penstock.wire.gateway_messages import Hello
from penstock.wire.supervisor_messages import ServiceDraining, SuspectWorker


def suspect(number: int) -> SuspectWorker:
    return SuspectWorker(worker=WorkerId("decode-0"), incarnation=number, reason="x" * 200)


def test_messages_come_whole_and_in_order() -> None:
    ours, theirs = Channel.pair()
    assert ours.receive() is None
    for number in range(10):
        theirs.send(suspect(number))
    theirs.send(ServiceDraining())
    assert [ours.receive() for _ in range(12)] == [*(suspect(n) for n in range(10)), ServiceDraining(), None]
    ours.close()
    theirs.close()


def test_what_is_not_read_waits_without_blocking() -> None:
    ours, theirs = Channel.pair()
    for number in range(2000):
        theirs.send(suspect(number))
    assert theirs.wants_write
    got = []
    while len(got) < 2000:
        message = ours.receive()
        if message is None:
            theirs.flush()
        else:
            got.append(message.incarnation)
    assert got == list(range(2000))
    assert not theirs.wants_write
    for _ in range(3 * MAX_WAITING):  # bounded, whoever does not read
        theirs.send(ServiceDraining())
    ours.close()
    theirs.close()


def test_a_closed_end_is_an_end_and_no_error_for_the_sender() -> None:
    ours, theirs = Channel.pair()
    theirs.send(suspect(1))
    theirs.close()
    assert ours.receive() == suspect(1)
    with pytest.raises(EOFError):
        ours.receive()
    ours.send(ServiceDraining())
    assert not ours.wants_write
    ours.close()
    ours.close()


@pytest.mark.parametrize("frame", [b"garbage", b"\x01\x80", encode_message(Hello(gateway="g", incarnation=1))])
def test_other_frames_are_refused(frame: bytes) -> None:
    raw, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(other)
    raw.send(frame)
    with pytest.raises(ProtocolError):
        channel.receive()
    raw.close()
    channel.close()


def test_a_message_that_is_too_large_is_left_out_alone() -> None:
    """Here or at the other end: it must end neither process, and take no other message with it."""
    ours, theirs = Channel.pair()
    theirs.send(suspect(1))
    theirs.send(SuspectWorker(worker=WorkerId("decode-0"), incarnation=2, reason="x" * MAX_MESSAGE_BYTES))
    theirs.send(SuspectWorker(worker=WorkerId("decode-0"), incarnation=1 << 70, reason="x"))
    theirs.send(suspect(3))
    assert [ours.receive() for _ in range(3)] == [suspect(1), suspect(3), None]
    ours.close()
    theirs.close()
