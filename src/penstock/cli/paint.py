"""What commands print: tables, colours where the output is a terminal that wants them, bars on long work.

Knows nothing about what is printed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
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
"""Names of the ANSI styles (ECMA-48, SGR) that ``Paint`` knows."""

tqdm.monitor_interval = 0  # no thread beside the command's own


class Paint:
    """Colours for one stream, decided once: a terminal, and no NO_COLOR (no-color.org) in the environment."""

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = sys.stdout if stream is None else stream
        self.colored = stream.isatty() and not os.environ.get("NO_COLOR")

    def __call__(self, text: str, style: str) -> str:
        """``text`` in this style, or as it is."""
        return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if self.colored and text else text


def table(rows: Sequence[Sequence[str]], *, headers: Sequence[str] = (), right: Sequence[int] = ()) -> str:
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
        """So many more are done."""
        self._done += count
        now = self._now()
        if now - self._told >= self.EVERY_S:
            self._told = now
            share = self._done / self._total if self._total else 1.0
            done = f"{self._done:,} of {self._total:,} {self._unit} ({share:.0%})"
            print(f"{self._what}: {done}, {now - self._begun:.0f} s", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _bar(what: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    scaled = unit == "B"
    bar: tqdm[NoReturn] = tqdm(desc=what, total=total, unit=unit, unit_scale=scaled, disable=None, dynamic_ncols=True)

    def add(count: int) -> None:
        bar.update(count)

    with bar:
        yield add
