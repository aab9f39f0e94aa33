"""Events that tell nothing but text, put together from bytes: of each only the id and the text differ.

What such an event looks like is found by having the API's shape write one with a mark for its text.  Knows nothing
about that shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from penstock.wire.ports import AnswerPiece, AnswerText

_MARK = "\uf8ff text \uf8ff"
_MARK_BYTES = msgspec.json.encode(_MARK)[1:-1]

MARKED = AnswerPiece(text=_MARK, tokens=1)
"""To be written by a shape for ``PlainEvents.of``."""


@dataclass(frozen=True, slots=True)
class PlainText:
    """The text of one choice, and where its tokens are counted."""

    index: int
    text: AnswerText
    tokens: list[int]  # of all choices


class PlainEvents:
    """Of one choice."""

    __slots__ = ("_before", "_behind", "_escaped", "_index", "_tokens", "_write")

    def __init__(self, text: PlainText, before: bytes, behind: bytes, write: Callable[[bytes], bool]) -> None:
        self._escaped = text.text.escaped
        self._index = text.index
        self._tokens = text.tokens
        self._before = before
        self._behind = behind
        self._write = write

    @classmethod
    def made(cls, text: PlainText, marked: bytes, write: Callable[[bytes], bool]) -> PlainEvents | None:
        """``marked``: the JSON of an event with ``MARKED``.  None where its text does not stand there, once.

        ``write``: as ``BodyWriter``'s.
        """
        parts = marked.split(_MARK_BYTES)
        return cls(text, parts[0], parts[1], write) if len(parts) == 2 else None

    def write(self, tokens: tuple[int, ...]) -> bool | None:
        """Write the event of these tokens, which do not end the answer; nothing if they show nothing yet.

        Returns what writing it did.  None: they are not taken, as they are more than text.
        """
        text = self._escaped(tokens)
        if text is None:
            return None
        told = self._tokens[self._index] = self._tokens[self._index] + len(tokens)
        if not text:
            return False
        return self._write(b"id: %d:%d\ndata: %b%b%b\n\n" % (self._index, told, self._before, text, self._behind))
