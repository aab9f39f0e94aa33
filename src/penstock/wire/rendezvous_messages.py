"""What the machines of one worker say to one another before its ranks exchange anything (``launch.rendezvous``)."""

from __future__ import annotations

from typing import Annotated, TypeAlias, TypeVar

import msgspec

from penstock.errors import ProtocolError
from penstock.types import Count, Name
from penstock.wire.gateway_messages import RankReport, ReasonText

TOKEN_BYTES = 32
MAX_RANKS = 1024

Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
Token = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


class RendezvousMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", forbid_unknown_fields=True):
    """The base of all of them."""


class NodeHello(RendezvousMessage, frozen=True, kw_only=True, tag="hello"):
    """To machine 0: what the ranks of another one compute with, which must be what its own do."""

    node: Count
    nodes: Count
    plan: Name
    fingerprint: Name  # of the model
    numerics: Name  # class
    kv: Name  # layout of the whole model's KV pages
    pages: Count  # of KV that it has room for
    ports: Annotated[dict[Rank, Port], msgspec.Meta(max_length=MAX_RANKS)]  # where its ranks listen
    predecessor_fault: ReasonText = ""  # how one of its ranks crashed before; empty: none did


class NodeWelcome(RendezvousMessage, frozen=True, kw_only=True, tag="welcome"):
    """To every other machine: all are there."""

    token: Token  # of this incarnation of the worker
    pages: Count  # of KV, of all ranks
    addresses: Annotated[dict[Rank, tuple[Name, Port]], msgspec.Meta(max_length=MAX_RANKS)]  # where ranks listen


class NodeRefused(RendezvousMessage, frozen=True, kw_only=True, tag="refused"):
    """To a machine that does not belong to the worker."""

    reason: ReasonText


class LinkHello(RendezvousMessage, frozen=True, kw_only=True, tag="link"):
    """The first record of a rank on a link to another one."""

    token: Token
    rank: Rank  # who says it
    to: Rank
    report: RankReport


_AnyMessage: TypeAlias = NodeHello | NodeWelcome | NodeRefused | LinkHello
_T = TypeVar("_T", bound=_AnyMessage)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[_AnyMessage] = msgspec.msgpack.Decoder(_AnyMessage)
_reports = msgspec.msgpack.Decoder(RankReport)


def encode(message: _AnyMessage | RankReport) -> bytes:
    """The bytes of one message."""
    return _encoder.encode(message)


def decode(record: bytes) -> _AnyMessage:
    """Any message.  Raises ProtocolError for everything else."""
    try:
        return _decoder.decode(record)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"no message of a machine of this worker: {error}") from error


def decode_as(record: bytes, kind: type[_T]) -> _T:
    """A message of this kind.  Raises ProtocolError for everything else."""
    message = decode(record)
    if not isinstance(message, kind):
        raise ProtocolError(f"a {type(message).__name__} where a {kind.__name__} is expected")
    return message


def decode_report(record: bytes) -> RankReport:
    """What a rank says of itself.  Raises ProtocolError."""
    try:
        return _reports.decode(record)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"no report of a rank: {error}") from error
