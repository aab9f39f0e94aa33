"""Every message survives the codec; nothing else gets through it."""

from __future__ import annotations

import random
import tracemalloc
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.message_samples import MESSAGES

from penstock.errors import ProtocolError, ProtocolVersionError
from penstock.wire import codec
from penstock.wire.codec import (
    PREVIOUS_VERSION,
    PROTOCOL_VERSION,
    PeerMessage,
    check_payload,
    decode_message,
    decode_peer,
    encode_message,
    message_kind,
    version_probe,
)
from penstock.wire.gateway_messages import (
    MAX_NAMED_REQUESTS,
    Cancel,
    ConfirmRequests,
    Submit,
    WireMessage,
    in_parts,
)
from penstock.wire.supervisor_messages import ServiceDraining, SupervisorMessage

PEER = get_args(PeerMessage)
SUPERVISOR = get_args(SupervisorMessage)


def test_the_samples_cover_every_message() -> None:
    assert {type(message) for message in MESSAGES} == set(PEER) | set(SUPERVISOR)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: WireMessage) -> None:
    frame = encode_message(message)
    assert frame[0] == PROTOCOL_VERSION
    assert decode_message(frame) == message
    assert decode_message(memoryview(bytearray(frame))) == message
    if isinstance(message, PEER):
        assert decode_peer(frame) == message
    else:
        with pytest.raises(ProtocolError):
            decode_peer(frame)


def refused(frame: bytes) -> bool:
    """Not one of ours; anything but ProtocolError fails the test."""
    try:
        decode_message(frame)
        decode_peer(frame)
    except ProtocolError:
        return True
    return False


@settings(max_examples=800, deadline=None)
@given(st.binary(max_size=300))
def test_random_frames_give_a_protocol_error(frame: bytes) -> None:
    assert refused(frame)
    refused(bytes((PROTOCOL_VERSION,)) + frame)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    frame = bytearray(encode_message(draw(st.sampled_from(MESSAGES))))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(frame)))
        match draw(st.sampled_from(["flip", "cut", "insert", "replace", "splice"])):
            case "flip" if at < len(frame):
                frame[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del frame[at : at + draw(st.integers(1, 20))]
            case "insert":
                frame[at:at] = draw(st.binary(min_size=1, max_size=8))
            case "replace" if at < len(frame):
                frame[at] = draw(st.sampled_from([0xC1, 0xC6, 0xDB, 0xDD, 0xDF, 0xC0, 0xCB, 0xD3, 0xCF, 0xC9, 0xFF]))
            case _:
                other = encode_message(draw(st.sampled_from(MESSAGES)))
                frame[at:] = other[draw(st.integers(0, len(other))) :]
        if not frame:
            break
    return bytes(frame)


@settings(max_examples=600, deadline=None)
@given(mutated())
def test_a_mutated_frame_is_a_message_or_a_protocol_error(frame: bytes) -> None:
    if not refused(frame):
        message = decode_message(frame)
        assert decode_message(encode_message(message)) == message


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_million_spoilt_frames() -> None:
    dice = random.Random(1)
    frames = [encode_message(message) for message in MESSAGES]
    survived = 0
    for _ in range(1_000_000):
        frame = bytearray(dice.choice(frames))
        for _ in range(dice.randrange(1, 4)):
            frame[dice.randrange(len(frame))] = dice.randrange(256)
        survived += not refused(bytes(frame[: dice.randrange(len(frame) + 8)]))
    assert 0 < survived < 900_000


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, 255])
def test_another_version_is_refused_by_name(version: int) -> None:
    frame = encode_message(ServiceDraining())
    with pytest.raises(ProtocolError, match=f"version {version}"):
        decode_message(bytes((version,)) + frame[1:])


@pytest.mark.parametrize(
    "change",
    [
        {"t": "unheard-of"},
        {"epoch": "1"},
        {"epoch": 1.5},
        {"epoch": True},
        {"epoch": None},
        {"more": 1},
        {"request": b"r"},
        {"request": 7},
    ],
)
def test_wrong_tags_types_and_fields_are_refused(change: dict[str, object]) -> None:
    fields = {"t": "cancel", "request": "r", "epoch": 1}
    good = encode_message(Cancel(request="r", epoch=1))
    version = good[:1]
    assert decode_message(version + msgspec.msgpack.encode(fields)) == Cancel(request="r", epoch=1)
    with pytest.raises(ProtocolError):
        decode_message(version + msgspec.msgpack.encode(fields | change))
    del fields["epoch"]
    with pytest.raises(ProtocolError):
        decode_message(version + msgspec.msgpack.encode(fields))


@pytest.mark.parametrize("head", [b"\xdd\x7f\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", b"\xc6\x7f\xff\xff\xff"])
def test_a_short_frame_that_announces_much_takes_no_memory(head: bytes) -> None:
    frame = encode_message(MESSAGES[1]).replace(b"\x93\x04\x05\x06", head)
    assert head in frame
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode_message(frame)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("prompt", [b"", b"\0\0\0", b"\0" * 9])
def test_a_prompt_is_whole_token_ids(prompt: bytes) -> None:
    good = msgspec.to_builtins(MESSAGES[1], builtin_types=(bytes,))
    frame = encode_message(MESSAGES[1])[:1] + msgspec.msgpack.encode(good | {"prompt": prompt})
    with pytest.raises(ProtocolError):
        decode_message(frame)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ProtocolError):
        decode_message(bytes((PROTOCOL_VERSION,)) + b"\x81\xa1t" + b"\x91" * 100_000)


def test_sizes_are_capped_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    message = Cancel(request="r" * 1000, epoch=1)
    frame = encode_message(message)
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", len(frame) - 1)
    for use in (lambda: encode_message(message), lambda: decode_message(frame), lambda: decode_peer(frame)):
        with pytest.raises(ProtocolError, match=str(len(frame) - 1)):
            use()
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", len(frame))
    assert decode_message(encode_message(message)) == message
    monkeypatch.setattr(codec, "MAX_PAYLOAD_BYTES", 10)
    check_payload(memoryview(bytes(10)))
    with pytest.raises(ProtocolError, match="at most 10"):
        check_payload(memoryview(bytes(11)))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_frame_begins_with_its_kind(message: WireMessage) -> None:
    assert message_kind(encode_message(message)) == type(message).__struct_config__.tag


@pytest.mark.parametrize("frame", [b"", b"\x04", b"\x04\x81\xa1t", b"\x04\x81\xa1t\x01", b"\x04\x81\xa1e\xa1t"])
def test_a_frame_that_does_not_has_none(frame: bytes) -> None:
    assert message_kind(frame) == ""


def test_long_lists_come_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a limit, and what is no list of bytes has a smaller frame, or one would take seconds and a gigabyte."""
    many = (("r", 1),) * (MAX_NAMED_REQUESTS + 1)
    with pytest.raises(ProtocolError, match="length <= 4096"):
        decode_peer(encode_message(ConfirmRequests(requests=many)))
    parts = [ConfirmRequests(requests=part) for part in in_parts(many, MAX_NAMED_REQUESTS)]
    assert [len(decode_peer(encode_message(part)).requests) for part in parts] == [MAX_NAMED_REQUESTS, 1]
    listed = encode_message(parts[0])
    large = next(message for message in MESSAGES if isinstance(message, Submit))
    monkeypatch.setattr(codec, "MAX_LIST_FRAME_BYTES", 100)
    for use in (lambda: encode_message(parts[0]), lambda: decode_peer(listed)):
        with pytest.raises(ProtocolError, match="at most 100"):
            use()
    assert decode_peer(encode_message(large)) == large


@pytest.mark.parametrize("bad", [Cancel(request="r", epoch=1 << 64), Cancel(request="\ud800", epoch=1)])
def test_what_cannot_be_encoded_is_a_protocol_error(bad: Cancel) -> None:
    with pytest.raises(ProtocolError):
        encode_message(bad)


def test_a_worker_of_the_version_before_understands_the_probe():
    """Its bytes are those of a Hello for discovery as version 3 wrote it."""
    assert version_probe().hex() == (
        "0384a174a568656c6c6fa767617465776179ad76657273696f6e2d70726f6265ab696e6361726e6174696f6e01a9646973636f76657279c3"
    )
    with pytest.raises(ProtocolVersionError, match=f"protocol version {PREVIOUS_VERSION}, expected {PROTOCOL_VERSION}"):
        decode_peer(version_probe())
