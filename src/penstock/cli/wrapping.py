"""Text that is shown while it comes, wrapped between words at the terminal's width."""

from __future__ import annotations

import shutil
import unicodedata
from typing import TextIO

_ERASE_TO_END = "\x1b[K"


def columns_of(text: str) -> int:
    """Cells of a terminal that the text takes: two for wide characters, none for combining ones."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


class WrappedOutput:
    """Writes pieces of a text at once; a word that crosses the right margin is taken back and begins the next line.

    Where the output is no terminal, text is written as it is.
    """

    def __init__(self, out: TextIO, width: int | None = None) -> None:
        """``width`` in columns; None: the terminal's, or no wrapping where there is none."""
        self._out = out
        if width is None and out.isatty():
            width = shutil.get_terminal_size().columns
        self._width = width
        self._column = 0
        self._word = ""  # the last word so far, as it stands on the line

    def write(self, text: str) -> None:
        """Show the text; the caller has removed control characters but line ends and tabs."""
        if self._width is None:
            self._out.write(text)
        else:
            self._out.write("".join(self._placed(c, self._width) for c in text))
        self._out.flush()

    def _placed(self, c: str, width: int) -> str:
        """What is written for one character."""
        if c == "\n":
            self._column, self._word = 0, ""
            return c
        cells = columns_of(c) if c != "\t" else 8 - self._column % 8
        if c.isspace():
            self._word = ""
            if self._column + cells >= width:  # the space itself becomes the line's end
                self._column = 0
                return "\n"
            self._column += cells
            return c
        back = ""
        if self._column + cells > width:
            back = self._word_to_next_line(width)
        self._word += c
        self._column += cells
        return back + c

    def _word_to_next_line(self, width: int) -> str:
        """Take back the word that has begun, unless it fills the whole line."""
        cells = columns_of(self._word)
        if cells >= width:
            self._column, self._word = 0, ""
            return "\n"
        self._column = cells
        back = f"\x1b[{cells}D{_ERASE_TO_END}" if cells else ""
        return f"{back}\n{self._word}"
