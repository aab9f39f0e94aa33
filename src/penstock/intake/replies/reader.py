"""A text that arrives in pieces, read by generators that say when they need more of it.

A step of such a generator yields an event, or None where the text is not enough to go on.  Knows no format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

import msgspec

T = TypeVar("T")

MAX_HELD = 1 << 16
"""Characters that may be held back to see whether they are a call.  What is undecided then is none."""

_SPACE = " \t\r\n"
_STRING_STOP = re.compile(r'["\\]')
_JSON_STOP = re.compile(r'[\[\]{}"]')
_SCALAR_STOP = re.compile(r"[,\]}\s]")


class Said(msgspec.Struct, frozen=True):
    """Content."""

    text: str


class Thought(msgspec.Struct, frozen=True):
    """Reasoning."""

    text: str


class CallBegun(msgspec.Struct, frozen=True):
    """A tool call.  ``id`` is the model's own, if its format has one that must be kept."""

    name: str
    id: str | None = None


class CallMore(msgspec.Struct, frozen=True):
    """A part of the arguments of the call that began last, as JSON text."""

    text: str


Event = Said | Thought | CallBegun | CallMore
Steps = Generator[Event | None, None, T]


class NotACallError(Exception):
    """What looked like a call is none, or not a whole one.  Raised before any of it was given out."""


class Marks:
    """Words to look for.  None may lie within another: then what is found does not depend on where pieces end."""

    def __init__(self, words: Iterable[str]) -> None:
        self.words = tuple(dict.fromkeys(words))
        if any(a != b and a in b for a in self.words for b in self.words) or not all(self.words):
            raise ValueError(f"marks within marks: {self.words}")
        self.pattern = re.compile("|".join(map(re.escape, self.words)) or "(?!)")
        self._beginnings = frozenset(word[:i] for word in self.words for i in range(1, len(word)))
        self._longest = max(map(len, self.words), default=1) - 1

    def begun_at_end(self, text: str) -> int:
        """How many of the last characters may be the beginning of a mark."""
        return next((i for i in range(min(self._longest, len(text)), 0, -1) if text[-i:] in self._beginnings), 0)


class Reader:
    """See above.  All methods that return ``Steps`` are used with ``yield from``."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._kept: int | None = None
        self._ended = False

    def feed(self, text: str) -> None:
        """More text."""
        done = self._at if self._kept is None else self._kept
        self._text = self._text[done:] + text
        self._at -= done
        self._kept = None if self._kept is None else 0

    def end(self) -> None:
        """There will be no more."""
        self._ended = True

    def keep(self) -> None:
        """From here on the text can be gone back to."""
        self._kept = self._at

    def forget(self) -> None:
        """It need not."""
        self._kept = None

    def go_back(self) -> None:
        """To where ``keep`` was."""
        assert self._kept is not None
        self._at, self._kept = self._kept, None

    @property
    def holds_too_much(self) -> bool:
        """Is more than ``MAX_HELD`` read since ``keep``?"""
        return self._kept is not None and self._at - self._kept > MAX_HELD

    def _wait(self) -> Steps[None]:
        # All there is was looked at, so what began would end beyond the limit.
        if self._kept is not None and len(self._text) - self._kept > MAX_HELD:
            raise NotACallError
        yield None

    # --- looking ------------------------------------------------------------------------------------------------------

    def peek(self, count: int = 1) -> Steps[str]:
        """The next characters; fewer only at the end."""
        while len(self._text) - self._at < count and not self._ended:
            yield from self._wait()
        return self._text[self._at : self._at + count]

    def take(self, word: str) -> Steps[bool]:
        """Passes over ``word``, if that is what comes next."""
        for i in range(1, len(word) + 1):
            if (yield from self.peek(i)) != word[:i]:
                return False
        self._at += len(word)
        return True

    def expect(self, word: str) -> Steps[None]:
        """As ``take``, but for what must come next."""
        if not (yield from self.take(word)):
            raise NotACallError

    def skip_space(self) -> Steps[str]:
        """Passes over white space; returns the next character, or nothing at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            yield from self._wait()

    # --- taking -------------------------------------------------------------------------------------------------------

    def copy_until(self, marks: Marks, give: Callable[[str], Iterable[Event]]) -> Steps[str | None]:
        """Gives the text before the next mark out as it comes; returns the mark, None at the end."""
        while True:
            match = marks.pattern.search(self._text, self._at)
            end = match.start() if match else len(self._text)
            if match is None and not self._ended:
                end -= marks.begun_at_end(self._text[self._at :])
            text = self._text[self._at : end]
            self._at = match.end() if match else end
            if text:
                yield from give(text)
            if match:
                return match[0]
            if self._ended:
                return None
            yield from self._wait()

    def until(self, marks: Marks) -> Steps[tuple[str, str | None]]:
        """The text before the next mark, and the mark, None at the end."""
        pieces: list[str] = []

        def collect(text: str) -> Iterable[Event]:
            pieces.append(text)
            return ()

        mark = yield from self.copy_until(marks, collect)
        return "".join(pieces), mark

    def json_string(self) -> Steps[str]:
        """The value of the JSON string that comes next.  Raises NotACallError when it is none."""
        pieces = yield from self._collected(self._copy_string)
        try:
            return str(json.loads(pieces, strict=False))
        except ValueError as error:
            raise NotACallError from error

    def json_raw(self) -> Steps[str]:
        """The text of the JSON value that comes next."""
        text = yield from self._collected(self.copy_json)
        return text

    def copy_json(self, give: Callable[[str], Iterable[Event]]) -> Steps[bool]:
        """Gives the JSON value that comes next out as it comes; False when the text ends within it."""
        first = yield from self.peek()
        if first == '"':
            return (yield from self._copy_string(give))
        if first not in ("{", "["):
            return (yield from self._copy_to(_SCALAR_STOP, give, at_end=True))
        depth = 0
        while True:
            if not (yield from self._copy_to(_JSON_STOP, give)):
                return False
            char = self._text[self._at]
            if char == '"':
                if not (yield from self._copy_string(give)):
                    return False
                continue
            depth += 1 if char in "[{" else -1
            self._at += 1
            yield from give(char)
            if depth == 0:
                return True

    def _copy_string(self, give: Callable[[str], Iterable[Event]]) -> Steps[bool]:
        if (yield from self.peek()) != '"':
            raise NotACallError
        self._at += 1
        yield from give('"')
        while True:
            if not (yield from self._copy_to(_STRING_STOP, give)):
                return False
            taken = (yield from self.peek(2)) if self._text[self._at] == "\\" else '"'
            self._at += len(taken)
            yield from give(taken)
            if taken == '"':
                return True

    def _copy_to(
        self, stop: re.Pattern[str], give: Callable[[str], Iterable[Event]], *, at_end: bool = False
    ) -> Steps[bool]:
        """Gives out what comes before the next character that ``stop`` matches; ``at_end`` when there is none."""
        while True:
            match = stop.search(self._text, self._at)
            end = match.start() if match else len(self._text)
            text, self._at = self._text[self._at : end], end
            if text:
                yield from give(text)
            if match:
                return True
            if self._ended:
                return at_end
            yield from self._wait()

    def _collected(self, copy: Callable[[Callable[[str], Iterable[Event]]], Steps[bool]]) -> Steps[str]:
        pieces: list[str] = []

        def collect(text: str) -> Iterable[Event]:
            pieces.append(text)
            return ()

        if not (yield from copy(collect)):
            raise NotACallError
        return "".join(pieces)
