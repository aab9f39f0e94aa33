"""What a worker and its process for NIXL say to each other, over a socket that keeps messages apart."""

from __future__ import annotations

import msgspec

MESSAGE_BYTES = 128 << 10


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """What a process begins with."""

    name: str  # of the agent; no other has it
    transports: str  # UCX_TLS
    devices: str  # UCX_NET_DEVICES
    gives: bool  # others read its memory; otherwise it reads theirs into it
    writable: bool  # how its memory is mapped
    nbytes: int  # of its memory
    descriptors: tuple[int, int]  # socket, memory


class Meet(msgspec.Struct, frozen=True, tag="meet"):
    """Somebody to read from."""

    peer: int
    agent: bytes


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Read pieces of ``nbytes`` from a peer's addresses, to offsets of the memory here."""

    number: int
    peer: int
    nbytes: int
    addresses: list[int]
    offsets: list[int]


Order = Meet | Read


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The agent is there.  ``base``: where its memory lies in the process."""

    agent: bytes
    base: int


class Absent(msgspec.Struct, frozen=True, tag="absent"):
    """There is no agent, and will be none."""

    reason: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Of a ``Read``."""

    number: int
    failure: str | None = None


News = Ready | Absent | Done
