"""The message loop that all formats but harmony share: content, in which reasoning and calls stand between marks.

White space is kept so that a template that writes the message down again writes what the model wrote: new lines at
both ends of reasoning and before content that follows it, and white space around calls, belong to the format.

Knows no family.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec

from penstock.intake.replies.reader import CallBegun, Event, Marks, NotACallError, Reader, Said, Steps, Thought

MAX_FAILED = 64
"""Marks of a message that may turn out to begin no call; further ones are content unseen."""

_LINES, _SPACE = "\r\n", " \t\r\n"


class Tools(msgspec.Struct, frozen=True):
    """The tools of a request: schemas of the parameters by name."""

    parameters: Mapping[str, Mapping[str, Any]]

    def kind_of(self, tool: str, parameter: str) -> str | None:
        """The type that a parameter's schema names."""
        properties = self.parameters.get(tool, {}).get("properties")
        schema = properties.get(parameter) if isinstance(properties, dict) else None
        kind = schema.get("type") if isinstance(schema, dict) else None
        return kind if isinstance(kind, str) else None


class CallFormat(Protocol):
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
        """May a message begin with a call that has no mark?"""
        ...

    def inner(self) -> tuple[str, ...]:
        """Marks within a call."""
        ...

    def read(self, reader: Reader, mark: str, tools: Tools) -> Steps[None]:
        """What follows ``mark``, which is empty where a call without one may begin.

        Raises NotACallError; what was read is content then, unless a call was given out.
        """
        ...


class Pair(msgspec.Struct, frozen=True):
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


class ReplySteps:
    """One message being read."""

    def __init__(self, reader: Reader, *, reasoning: Pair | None, calls: CallFormat | None, tools: Tools) -> None:
        self._reader = reader
        self._reasoning = reasoning
        self._calls = calls
        self._tools = tools
        begins = calls.begins if calls else ()
        drops = calls.drops if calls else ()
        thoughts = (reasoning.begin,) if reasoning else ()
        self._failed = 0
        self._begins, self._drops = frozenset(begins), frozenset(drops)
        self._marks = Marks((*thoughts, *begins, *drops))
        self._content = _Edges(front="", behind=_SPACE if begins else "")

    def run(self, *, thinking: bool) -> Steps[None]:
        """The whole message; ``thinking`` when the prompt ended within reasoning."""
        if thinking:
            yield from self._think()
        if self._calls is not None and self._calls.alone:
            yield from self._call("")
        while True:
            mark = yield from self._reader.copy_until(self._marks, self._say)
            if mark is None:
                yield from _said(self._content.rest())
                return
            if mark in self._begins:
                yield from self._call(mark)
            elif mark not in self._drops:
                yield from self._think()

    def _say(self, text: str) -> Iterable[Event]:
        return _said(self._content.push(text)) if text else ()

    def _think(self) -> Steps[None]:
        assert self._reasoning is not None
        edges = _Edges(front=_LINES, behind=_LINES)

        def think(text: str) -> Iterable[Event]:
            kept = edges.push(text)
            return (Thought(kept),) if kept else ()

        mark = yield from self._reader.copy_until(Marks((self._reasoning.end,)), think)
        if mark is None and (rest := edges.rest()):
            yield Thought(rest)
        self._between()

    def _between(self) -> None:
        """Content that follows: without the lines, or the space, that set it off."""
        self._content = _Edges(front=_LINES, behind=_SPACE if self._begins else "")

    def _call(self, mark: str) -> Steps[None]:
        """What follows ``mark``, or begins the message; content, when it is no call after all."""
        assert self._calls is not None
        if self._failed == MAX_FAILED:
            yield from self._say(mark)
            return
        begun, understood = False, True
        steps = self._calls.read(self._reader, mark, self._tools)
        self._reader.keep()
        try:
            for event in steps:
                if isinstance(event, CallBegun) and not begun:
                    if self._reader.holds_too_much:
                        raise NotACallError
                    begun = True
                    self._reader.forget()
                yield event
        except NotACallError:
            if not begun:
                self._reader.go_back()
                self._failed += 1
                understood = False
        self._reader.forget()
        if begun:
            self._content = _Edges(front=_SPACE, behind=_SPACE)
        elif not understood:
            yield from self._say(mark)


def _said(text: str) -> Iterable[Event]:
    return (Said(text),) if text else ()
