"""What a gateway and its checker say to each other: frames of four bytes of length and one msgpack struct."""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgspec

from penstock.types import Grammar

MAX_BYTES = 256 << 20
"""Of one frame: a vocabulary of a million tokens fits."""

OUT_OF_MEMORY = 17
"""Exit status of a checker whose interpreter got no more memory."""

_HEAD = struct.Struct("<I")


class CheckLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one check may cost."""

    cpu_s: float
    memory_bytes: int  # beyond what the process needs for the vocabulary


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Of one grammar."""

    refused: str | None = None  # why
    grammar: Grammar | None = None  # when not refused: the grammar as workers are to have it


def framed(content: bytes) -> bytes:
    """A whole frame."""
    return _HEAD.pack(len(content)) + content


def read_frame(read: Callable[[int], bytes]) -> bytes | None:
    """The next frame's content; None at the end.  ``read`` gives as many bytes as asked for, fewer only at the end."""
    head = read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    (size,) = _HEAD.unpack(head)
    if size > MAX_BYTES:
        return None
    content = read(size)
    return content if len(content) == size else None
