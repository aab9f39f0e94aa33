"""Incremental parsing of model output: a reader for generators, and the message loop of all formats but harmony.

A step of a generator yields an event, or None where it needs more text.  A message is content with reasoning and tool
calls between marks.  White space is kept so that a template that renders the message again writes what the model
wrote: new lines at both ends of reasoning and before the content after it, and white space around calls, belong to the
format.  Knows no family.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import msgspec

T = TypeVar("T")

MAX_HELD = 1 << 16
"""Characters that may be held back to see whether they are a call.  What is undecided then is none."""

_SPACE = " \t\r\n"
_STRING_STOP = re.compile(r'["\\]')
_JSON_STOP = re.compile(r'[\[\]{}"]')
_SCALAR_STOP = re.compile(r"[,\]}\s]")


class ContentDelta(msgspec.Struct, frozen=True):
    """Content."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True):
    """Reasoning."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """A tool call.  ``id`` is the model's own, if its format has one that must be kept."""

    name: str
    id: str | None = None


class ToolCallArguments(msgspec.Struct, frozen=True):
    """A part of the arguments of the call that began last, as JSON text."""

    text: str


ParserEvent = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments
ParserSteps = Generator[ParserEvent | None, None, T]


class NotACallError(Exception):
    """What looked like a call is none, or not a whole one.  Raised before any of it was given out."""


class MarkSet:
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


class IncrementalReader:
    """See above.  All methods that return ``ParserSteps`` are used with ``yield from``."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._kept: int | None = None
        self._ended = False
        self.in_reasoning = False  # what is being read is reasoning

    def feed(self, text: str) -> None:
        """More text."""
        done = self._at if self._kept is None else self._kept
        self._text = self._text[done:] + text
        self._at -= done
        self._kept = None if self._kept is None else 0

    def finish(self) -> None:
        """There will be no more."""
        self._ended = True

    def set_mark(self) -> None:
        """Mark this place for ``rewind``."""
        self._kept = self._at

    def clear_mark(self) -> None:
        """Remove the mark."""
        self._kept = None

    def rewind(self) -> None:
        """Go back to the mark, and clear it."""
        assert self._kept is not None
        self._at, self._kept = self._kept, None

    @property
    def holds_too_much(self) -> bool:
        """Whether more than ``MAX_HELD`` was read since ``set_mark``."""
        return self._kept is not None and self._at - self._kept > MAX_HELD

    def _wait(self) -> ParserSteps[None]:
        # All there is was looked at, so what began would end beyond the limit.
        if self._kept is not None and len(self._text) - self._kept > MAX_HELD:
            raise NotACallError
        yield None

    # --- looking ------------------------------------------------------------------------------------------------------

    def peek(self, count: int = 1) -> ParserSteps[str]:
        """The next characters; fewer only at the end."""
        while len(self._text) - self._at < count and not self._ended:
            yield from self._wait()
        return self._text[self._at : self._at + count]

    def accept(self, word: str) -> ParserSteps[bool]:
        """Passes over ``word``, if that is what comes next."""
        for i in range(1, len(word) + 1):
            if (yield from self.peek(i)) != word[:i]:
                return False
        self._at += len(word)
        return True

    def expect(self, word: str) -> ParserSteps[None]:
        """As ``accept``, but raises NotACallError for other text."""
        if not (yield from self.accept(word)):
            raise NotACallError

    def skip_space(self) -> ParserSteps[str]:
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

    def copy_until(self, marks: MarkSet, give: Callable[[str], Iterable[ParserEvent]]) -> ParserSteps[str | None]:
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

    def read_until(self, marks: MarkSet) -> ParserSteps[tuple[str, str | None]]:
        """The text before the next mark, and the mark, None at the end."""
        pieces: list[str] = []

        def collect(text: str) -> Iterable[ParserEvent]:
            pieces.append(text)
            return ()

        mark = yield from self.copy_until(marks, collect)
        return "".join(pieces), mark

    def json_string(self) -> ParserSteps[str]:
        """The value of the JSON string that comes next.  Raises NotACallError when it is none."""
        pieces = yield from self._collected(self._copy_string)
        try:
            return str(json.loads(pieces, strict=False))
        except ValueError as error:
            raise NotACallError from error

    def json_raw(self) -> ParserSteps[str]:
        """The text of the JSON value that comes next."""
        text = yield from self._collected(self.copy_json)
        return text

    def copy_json(self, give: Callable[[str], Iterable[ParserEvent]]) -> ParserSteps[bool]:
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

    def _copy_string(self, give: Callable[[str], Iterable[ParserEvent]]) -> ParserSteps[bool]:
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
        self, stop: re.Pattern[str], give: Callable[[str], Iterable[ParserEvent]], *, at_end: bool = False
    ) -> ParserSteps[bool]:
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

    def _collected(
        self, copy: Callable[[Callable[[str], Iterable[ParserEvent]]], ParserSteps[bool]]
    ) -> ParserSteps[str]:
        pieces: list[str] = []

        def collect(text: str) -> Iterable[ParserEvent]:
            pieces.append(text)
            return ()

        if not (yield from copy(collect)):
            raise NotACallError
        return "".join(pieces)


MAX_FAILED = 64
"""Marks of a message that may turn out to begin no call; further ones are content unseen."""

_LINES, _EDGE_SPACE = "\r\n", " \t\r\n"


class ToolSchemas(msgspec.Struct, frozen=True):
    """The tools of a request: schemas of the parameters by name."""

    parameters: Mapping[str, Mapping[str, Any]]

    def kind_of(self, tool: str, parameter: str) -> str | None:
        """The type that a parameter's schema names."""
        properties = self.parameters.get(tool, {}).get("properties")
        schema = properties.get(parameter) if isinstance(properties, dict) else None
        kind = schema.get("type") if isinstance(schema, dict) else None
        return kind if isinstance(kind, str) else None


class ToolCallFormat(Protocol):
    """How a family writes tool calls."""

    @property
    def begins(self) -> tuple[str, ...]:
        """Marks that a call, or a list of calls, begins with."""
        ...

    @property
    def drops(self) -> tuple[str, ...]:
        """Marks that belong to the format and say nothing."""
        ...

    @property
    def alone(self) -> bool:
        """Whether a message may begin with a call that has no marker."""
        ...

    def inner_marks(self) -> tuple[str, ...]:
        """Marks within a call."""
        ...

    def parse(self, reader: IncrementalReader, mark: str, tools: ToolSchemas) -> ParserSteps[None]:
        """What follows ``mark``, which is empty where a call without one may begin.

        Raises NotACallError; what was read is content then, unless a call was given out.
        """
        ...


class ReasoningMarks(msgspec.Struct, frozen=True):
    """The marks around reasoning."""

    begin: str
    end: str


class _Edges:
    """A text without white space at its edges: in front, and behind until more text shows that it lies within."""

    def __init__(self, *, front: str, behind: str) -> None:
        self._front, self._behind = front, behind
        self._held = ""

    def push(self, text: str) -> str:
        """What can be given out."""
        text = self._held + text.lstrip(self._front) if not self._held else self._held + text
        if text:
            self._front = ""
        kept = text.rstrip(self._behind)
        self._held = text[len(kept) :]
        return kept

    def rest(self) -> str:
        """What was held back, when it turns out to belong to the text."""
        text, self._held = self._held, ""
        return text


class MessageParser:
    """One message being read."""

    def __init__(
        self,
        reader: IncrementalReader,
        *,
        reasoning: ReasoningMarks | None,
        calls: ToolCallFormat | None,
        tools: ToolSchemas,
    ) -> None:
        self._reader = reader
        self._reasoning = reasoning
        self._calls = calls
        self._tools = tools
        begins = calls.begins if calls else ()
        drops = calls.drops if calls else ()
        thoughts = (reasoning.begin,) if reasoning else ()
        self._failed = 0
        self._begins, self._drops = frozenset(begins), frozenset(drops)
        self._marks = MarkSet((*thoughts, *begins, *drops))
        self._content = _Edges(front="", behind=_EDGE_SPACE if begins else "")

    def run(self, *, thinking: bool) -> ParserSteps[None]:
        """The whole message; ``thinking`` when the prompt ended within reasoning."""
        if thinking:
            yield from self._think()
        if self._calls is not None and self._calls.alone:
            yield from self._call("")
        while True:
            mark = yield from self._reader.copy_until(self._marks, self._say)
            if mark is None:
                yield from _content(self._content.rest())
                return
            if mark in self._begins:
                yield from self._call(mark)
            elif mark not in self._drops:
                yield from self._think()

    def _say(self, text: str) -> Iterable[ParserEvent]:
        return _content(self._content.push(text)) if text else ()

    def _think(self) -> ParserSteps[None]:
        assert self._reasoning is not None
        edges = _Edges(front=_LINES, behind=_LINES)

        def think(text: str) -> Iterable[ParserEvent]:
            kept = edges.push(text)
            return (ReasoningDelta(kept),) if kept else ()

        self._reader.in_reasoning = True
        mark = yield from self._reader.copy_until(MarkSet((self._reasoning.end,)), think)
        self._reader.in_reasoning = False
        if mark is None and (rest := edges.rest()):
            yield ReasoningDelta(rest)
        self._between()

    def _between(self) -> None:
        """Content that follows: without the lines, or the space, that set it off."""
        self._content = _Edges(front=_LINES, behind=_EDGE_SPACE if self._begins else "")

    def _call(self, mark: str) -> ParserSteps[None]:
        """What follows ``mark``, or begins the message; content, when it is no call after all."""
        assert self._calls is not None
        if self._failed == MAX_FAILED:
            yield from self._say(mark)
            return
        begun, understood = False, True
        steps = self._calls.parse(self._reader, mark, self._tools)
        self._reader.set_mark()
        try:
            for event in steps:
                if isinstance(event, ToolCallStart) and not begun:
                    if self._reader.holds_too_much:
                        raise NotACallError
                    begun = True
                    self._reader.clear_mark()
                yield event
        except NotACallError:
            if not begun:
                self._reader.rewind()
                self._failed += 1
                understood = False
        self._reader.clear_mark()
        if begun:
            self._content = _Edges(front=_EDGE_SPACE, behind=_EDGE_SPACE)
        elif not understood:
            yield from self._say(mark)


def _content(text: str) -> Iterable[ParserEvent]:
    return (ContentDelta(text),) if text else ()
