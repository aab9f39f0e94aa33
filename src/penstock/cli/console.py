"""What commands print: tables, colors where the output is a terminal that wants them, progress bars, wrapped text.

Knows nothing about what is printed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NoReturn, TextIO

from tabulate import tabulate
from tqdm import tqdm

STYLES: Final = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "blue": "34",
    "magenta": "35",
    "cyan": "36",
}
"""Names of the ANSI styles (ECMA-48, SGR) that ``TextStyle`` knows."""

tqdm.monitor_interval = 0  # no thread of its own


class TextStyle:
    """Colors for one stream, decided once: a terminal, and no NO_COLOR (no-color.org) in the environment."""

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = sys.stdout if stream is None else stream
        self.colored = stream.isatty() and not os.environ.get("NO_COLOR")

    def __call__(self, text: str, style: str) -> str:
        """``text`` in this style, or as it is."""
        return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if self.colored and text else text


def text_table(rows: Sequence[Sequence[str]], *, headers: Sequence[str] = (), right: Sequence[int] = ()) -> str:
    """Columns two spaces apart; those in ``right`` end together, the others begin together.  Text stays as it is."""
    width = max((len(row) for row in (headers, *rows)), default=0)
    sides = ["right" if column in right else "left" for column in range(width)]
    return tabulate(rows, headers=headers, tablefmt="plain", colalign=sides if rows else None, disable_numparse=True)


@contextlib.contextmanager
def byte_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar; call what it gives with the number of bytes that are newly done.  Silent unless standard error is a
    terminal."""
    with _bar(what, total, "B") as add:
        yield add


@contextlib.contextmanager
def count_bar(what: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """The same of things that are counted one by one; where standard error is no terminal, a line every ten seconds."""
    if sys.stderr.isatty():
        with _bar(what, total, unit) as add:
            yield add
    else:
        yield _ProgressLines(what, total, unit).add


class _ProgressLines:
    """How far a long run is, for logs: silent for its first ten seconds."""

    EVERY_S = 10.0

    def __init__(self, what: str, total: int, unit: str, now: Callable[[], float] = time.monotonic) -> None:
        self._what, self._total, self._unit, self._now = what, total, unit, now
        self._begun = self._told = now()
        self._done = 0

    def add(self, count: int) -> None:
        """Add ``count`` finished items."""
        self._done += count
        now = self._now()
        if now - self._told >= self.EVERY_S:
            self._told = now
            share = self._done / self._total if self._total else 1.0
            done = f"{self._done:,} of {self._total:,} {self._unit} ({share:.0%})"
            print(f"{self._what}: {done}, {now - self._begun:.0f} s", file=sys.stderr, flush=True)


class StatusLine:
    """What is being waited for: on a terminal one line of standard error, elsewhere a line every ten seconds."""

    EVERY_S = 10.0
    TERMINAL_EVERY_S = 0.2

    def __init__(self, what: str, now: Callable[[], float] = time.monotonic) -> None:
        self._what, self._now = what, now
        self._terminal = sys.stderr.isatty()
        self._begun = now()
        self._last = self._begun - self.TERMINAL_EVERY_S

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *error: object) -> None:
        if self._terminal:
            print(f"\r{_ERASE_TO_END}", end="", file=sys.stderr, flush=True)

    def show(self, detail: str) -> None:
        """The latest news, without line ends."""
        now = self._now()
        if now - self._last < (self.TERMINAL_EVERY_S if self._terminal else self.EVERY_S):
            return
        self._last = now
        line = f"{self._what}, {now - self._begun:.0f} s" + (f": {detail}" if detail else "")
        if self._terminal:
            width = shutil.get_terminal_size().columns
            print(f"\r{line[: width - 1]}{_ERASE_TO_END}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _bar(what: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    scaled = unit == "B"
    bar: tqdm[NoReturn] = tqdm(desc=what, total=total, unit=unit, unit_scale=scaled, disable=None, dynamic_ncols=True)

    def add(count: int) -> None:
        bar.update(count)

    with bar:
        yield add


_ERASE_TO_END = "\x1b[K"


def display_width(text: str) -> int:
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
        cells = display_width(c) if c != "\t" else 8 - self._column % 8
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
        cells = display_width(self._word)
        if cells >= width:
            self._column, self._word = 0, ""
            return "\n"
        self._column = cells
        back = f"\x1b[{cells}D{_ERASE_TO_END}" if cells else ""
        return f"{back}\n{self._word}"
