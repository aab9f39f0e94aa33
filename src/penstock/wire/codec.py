"""Bytes to messages and back: one version byte, then one msgpack map with a tag.

Whatever bytes come in, ``decode_message`` returns a message or raises ``ProtocolError``, and allocates no more than a
small multiple of the frame.  Knows nothing about sockets, and nothing about what a message means.
"""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import msgspec

from penstock.errors import ProtocolError, ProtocolVersionError
from penstock.wire.gateway_messages import (
    AdapterChanged,
    AdapterNames,
    AssignRole,
    Cancel,
    ChangeAdapter,
    ClaimIdempotencyKey,
    ConfirmRequests,
    FindTokens,
    FoundTokens,
    Hello,
    IdempotencyKeyState,
    KvEvents,
    MigrateRequests,
    OpenRequestAnswer,
    OpenRequestCounts,
    PoisonRequests,
    RateDemands,
    RateTotals,
    RequestReturned,
    SaveTokens,
    Submit,
    Tokens,
    WorkerReport,
)
from penstock.wire.supervisor_messages import SupervisorMessage
from penstock.wire.transfer_messages import (
    EncodeImage,
    FetchTicket,
    HandOverAlive,
    HandOverFailed,
    ImageAlive,
    ImageEncoded,
    PageReady,
    PagesReady,
    PagesReceived,
    PrefillDone,
    PullPages,
)

PROTOCOL_VERSION = 4
"""First byte of every frame.  A peer of another version is refused."""

PREVIOUS_VERSION = 3
"""Workers of this version do not answer frames of others; `version_probe` makes them say who they are."""

VERSION_NOTICE = bytes((PROTOCOL_VERSION,))
"""What a listener answers to a frame of another version: it is of no message, and its only byte is the version."""

_PROBE_NAME = "version-probe"

MAX_FRAME_BYTES = 32 << 20
"""Largest encoded message: a prompt of a million tokens fits.  What may be larger is sent in parts."""

MAX_LIST_FRAME_BYTES = 4 << 20
"""The same of all kinds but ``LARGE_KINDS``: a list takes up to 30 times its bytes, and 60 ns for each of them."""

MAX_PAYLOAD_BYTES = 64 << 20
"""Largest payload of a message: one KV page."""

PeerMessage: TypeAlias = (
    Hello
    | Submit
    | Cancel
    | Tokens
    | RequestReturned
    | WorkerReport
    | KvEvents
    | PoisonRequests
    | PullPages
    | PageReady
    | PrefillDone
    | HandOverAlive
    | HandOverFailed
    | PagesReceived
    | AssignRole
    | MigrateRequests
    | ConfirmRequests
    | RateDemands
    | RateTotals
    | ClaimIdempotencyKey
    | IdempotencyKeyState
    | SaveTokens
    | FindTokens
    | FoundTokens
    | OpenRequestCounts
    | OpenRequestAnswer
    | ChangeAdapter
    | AdapterChanged
    | AdapterNames
    | FetchTicket
    | PagesReady
    | EncodeImage
    | ImageAlive
    | ImageEncoded
)
"""What a frame from a socket may hold."""

LARGE_KINDS = frozenset(
    kind.__struct_config__.tag for kind in (Submit, SaveTokens, FoundTokens, WorkerReport, EncodeImage)
)
"""Tags of messages that may be large: their bytes are, and each of their lists has a limit."""

_T = TypeVar("_T")
_VERSION = bytes((PROTOCOL_VERSION,))
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[PeerMessage | SupervisorMessage] = msgspec.msgpack.Decoder(
    PeerMessage | SupervisorMessage
)
_peer_decoder: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)


def encode_message(message: PeerMessage | SupervisorMessage) -> bytes:
    """One frame.  Raises ProtocolError when it is too large or a number does not fit 64 bits."""
    try:
        frame = _VERSION + _encoder.encode(message)
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a message that cannot be encoded: {error}") from error
    _check_size(frame)
    return frame


def fits_in_frame(message: PeerMessage | SupervisorMessage) -> bool:
    """Whether this can be encoded: the reason when a message could not be sent."""
    try:
        encode_message(message)
    except ProtocolError:
        return False
    return True


def decode_message(frame: bytes | bytearray | memoryview) -> PeerMessage | SupervisorMessage:
    """Any message of ours.  Raises ProtocolError, and nothing else, for every other sequence of bytes."""
    return _decode(frame, _decoder)


def decode_peer(frame: bytes | bytearray | memoryview) -> PeerMessage:
    """A message that may come over a socket; the supervisor's own are refused like any unknown tag."""
    return _decode(frame, _peer_decoder)


def message_kind(frame: bytes | bytearray | memoryview) -> str:
    """The tag of a frame that has it first, as all that is encoded here; empty for any other."""
    head = bytes(frame[1:36])
    tag = 3 if head[:1] == b"\xde" else 1  # after the map's number of fields
    if head[tag : tag + 2] != b"\xa1t" or len(head) < tag + 3 or head[tag + 2] & 0xE0 != 0xA0:
        return ""
    return head[tag + 3 :][: head[tag + 2] & 0x1F].decode(errors="replace")


def version_probe() -> bytes:
    """A frame that a worker of ``PREVIOUS_VERSION`` answers with a report, whose first byte is its version.

    It is a Hello for discovery in the fields of that version: no gateway is remembered for it.
    """
    hello = {"t": "hello", "gateway": _PROBE_NAME, "incarnation": 1, "discovery": True}
    return bytes((PREVIOUS_VERSION,)) + msgspec.msgpack.encode(hello)


def version_reason(version: int) -> str:
    """Why a peer of another version is not spoken to, in one line."""
    return (
        f"the other end speaks protocol version {version}, this one {PROTOCOL_VERSION}: "
        "install the same version of Penstock on all hosts"
    )


def is_version_probe(frame: bytes | bytearray | memoryview) -> bool:
    """Whether a frame of another version is a `version_probe`."""
    return bytes(frame) == version_probe()


def check_payload(payload: memoryview) -> None:
    """Raises ProtocolError for a payload that is larger than any page."""
    if payload.nbytes > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"a payload of {payload.nbytes} bytes; at most {MAX_PAYLOAD_BYTES} are allowed")


def _decode(frame: bytes | bytearray | memoryview, decoder: msgspec.msgpack.Decoder[_T]) -> _T:
    view = memoryview(frame)
    _check_size(view)
    if view.nbytes == 0:
        raise ProtocolError("an empty frame")
    if view[0] != PROTOCOL_VERSION:
        raise ProtocolVersionError(view[0], PROTOCOL_VERSION)
    try:
        return decoder.decode(view[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"a frame that is not one of ours: {error}") from error


def _check_size(frame: bytes | memoryview) -> None:
    """Raises ProtocolError before anything is decoded."""
    most = MAX_FRAME_BYTES
    if len(frame) > MAX_LIST_FRAME_BYTES and message_kind(frame) not in LARGE_KINDS:
        most = min(most, MAX_LIST_FRAME_BYTES)
    if len(frame) > most:
        raise ProtocolError(f"a frame of {len(frame)} bytes; at most {most} are allowed")
