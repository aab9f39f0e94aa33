"""From bytes to text while they arrive.

A character is shown when its last byte is there, and only then; bytes that can never become a character are shown
as U+FFFD at once, those that still could at the end.  So the pieces joined are the whole decoded at once
(Unicode 16, section 3.9, "maximal subparts").
"""

from __future__ import annotations

import codecs

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Utf8Stream:
    """UTF-8 that comes in pieces.  The work is linear in the bytes."""

    __slots__ = ("_decoder", "pending")

    def __init__(self) -> None:
        self._decoder = _Utf8Decoder(errors="replace")
        self.pending = False  # part of a character is held back

    def push(self, raw: bytes) -> str:
        """The characters that ``raw`` completes."""
        if not self.pending and raw.isascii():
            return raw.decode("ascii")
        text = self._decoder.decode(raw)
        self.pending = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """What is held back, as U+FFFD; nothing will follow."""
        self.pending = False
        return self._decoder.decode(b"", True)
