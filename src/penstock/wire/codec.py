"""Bytes to messages and back: one version byte, then one msgpack map with a tag.

Whatever bytes come in, ``decode`` gives a message or raises ``ProtocolError``, and allocates no more than a small
multiple of the frame.  Knows nothing about sockets, and nothing about what a message means.
"""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import msgspec

from penstock.errors import ProtocolError
from penstock.wire.gateway_messages import (
    Assign,
    Cancel,
    Hello,
    KvEvents,
    Relieve,
    Report,
    Returned,
    StillWanted,
    Submit,
    Tokens,
)
from penstock.wire.supervisor_messages import SupervisorMessage
from penstock.wire.transfer_messages import (
    EncodeImage,
    HandOverAlive,
    HandOverFailed,
    ImageAlive,
    ImageEncoded,
    PageReady,
    PagesAt,
    PagesReady,
    PagesReceived,
    PrefillDone,
    PullPages,
)

PROTOCOL_VERSION = 3
"""First byte of every frame.  A peer of another version is refused."""

MAX_FRAME_BYTES = 32 << 20
"""Largest encoded message: a prompt of a million tokens fits.  What may be larger is sent in parts."""

MAX_PAYLOAD_BYTES = 64 << 20
"""Largest payload beside a message: one KV page."""

PeerMessage: TypeAlias = (
    Hello
    | Submit
    | Cancel
    | Tokens
    | Returned
    | Report
    | KvEvents
    | PullPages
    | PageReady
    | PrefillDone
    | HandOverAlive
    | HandOverFailed
    | PagesReceived
    | Assign
    | Relieve
    | StillWanted
    | PagesAt
    | PagesReady
    | EncodeImage
    | ImageAlive
    | ImageEncoded
)
"""What a frame from a socket may hold."""

_T = TypeVar("_T")
_VERSION = bytes((PROTOCOL_VERSION,))
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[PeerMessage | SupervisorMessage] = msgspec.msgpack.Decoder(
    PeerMessage | SupervisorMessage
)
_peer_decoder: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)


def encode(message: PeerMessage | SupervisorMessage) -> bytes:
    """One frame.  Raises ProtocolError when it is over ``MAX_FRAME_BYTES`` or a number does not fit 64 bits."""
    try:
        frame = _VERSION + _encoder.encode(message)
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a message that cannot be encoded: {error}") from error
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes; at most {MAX_FRAME_BYTES} are allowed")
    return frame


def fits(message: PeerMessage | SupervisorMessage) -> bool:
    """Can this be encoded?  To be asked when it could not be sent, to tell why."""
    try:
        encode(message)
    except ProtocolError:
        return False
    return True


def decode(frame: bytes | bytearray | memoryview) -> PeerMessage | SupervisorMessage:
    """Any message of ours.  Raises ProtocolError, and nothing else, for every other sequence of bytes."""
    return _decode(frame, _decoder)


def decode_peer(frame: bytes | bytearray | memoryview) -> PeerMessage:
    """A message that may come over a socket; the supervisor's own are refused like any unknown tag."""
    return _decode(frame, _peer_decoder)


def check_payload(payload: memoryview) -> None:
    """Raises ProtocolError for a payload that is larger than any page."""
    if payload.nbytes > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"a payload of {payload.nbytes} bytes; at most {MAX_PAYLOAD_BYTES} are allowed")


def _decode(frame: bytes | bytearray | memoryview, decoder: msgspec.msgpack.Decoder[_T]) -> _T:
    view = memoryview(frame)
    if view.nbytes > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {view.nbytes} bytes; at most {MAX_FRAME_BYTES} are allowed")
    if view.nbytes == 0:
        raise ProtocolError("an empty frame")
    if view[0] != PROTOCOL_VERSION:
        raise ProtocolError(f"protocol version {view[0]}, expected {PROTOCOL_VERSION}")
    try:
        return decoder.decode(view[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"a frame that is not one of ours: {error}") from error
