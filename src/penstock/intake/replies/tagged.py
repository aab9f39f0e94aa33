"""Tool calls whose arguments stand in tags, one by one: GLM-4.5, and Qwen3-Coder and Seed-OSS.

The tags hold plain text; the parameter's schema says whether it is a string or JSON.  An argument is given out when it
is complete.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from penstock.intake.replies.formats import checked_name
from penstock.intake.replies.reader import CallBegun, CallMore, Marks, NotACallError, Reader, Steps
from penstock.intake.replies.reply import Tools


class GlmCalls(msgspec.Struct, frozen=True, kw_only=True):
    """A name, then ``<arg_key>`` and ``<arg_value>`` in turn."""

    begins: tuple[str, ...] = ("<tool_call>",)
    drops: tuple[str, ...] = ()
    alone: bool = False

    def inner(self) -> tuple[str, ...]:
        """See ``CallFormat``."""
        return ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def read(self, reader: Reader, mark: str, tools: Tools) -> Steps[None]:
        """See ``CallFormat``."""
        head, divided = yield from reader.until(Marks(("<arg_key>", "</tool_call>")))
        if divided is None:
            raise NotACallError
        name = checked_name(head)
        yield CallBegun(name)
        written = _Arguments(name, tools)
        while divided == "<arg_key>":
            key, closed = yield from reader.until(Marks(("</arg_key>", "</tool_call>")))
            if closed == "</arg_key>":
                _, closed = yield from reader.until(Marks(("<arg_value>", "</tool_call>")))
            if closed != "<arg_value>":
                break
            value, closed = yield from reader.until(Marks(("</arg_value>",)))
            if closed is None:
                return
            yield CallMore(written.one(key.strip(), value))
            _, divided = yield from reader.until(Marks(("<arg_key>", "</tool_call>")))
        yield CallMore(written.end())


class XmlCalls(msgspec.Struct, frozen=True, kw_only=True):
    """``<function=NAME>`` with ``<parameter=KEY>VALUE</parameter>`` in it, within a mark of the family's own."""

    begin: str
    end: str
    drops: tuple[str, ...] = ()
    alone: bool = False

    @property
    def begins(self) -> tuple[str, ...]:
        """See ``CallFormat``."""
        return (self.begin,)

    def inner(self) -> tuple[str, ...]:
        """See ``CallFormat``."""
        return (self.end,)

    def read(self, reader: Reader, mark: str, tools: Tools) -> Steps[None]:
        """See ``CallFormat``."""
        yield from reader.skip_space()
        yield from reader.expect("<function=")
        head, closed = yield from reader.until(Marks((">",)))
        if closed is None:
            raise NotACallError
        name = checked_name(head)
        yield CallBegun(name)
        written = _Arguments(name, tools)
        marks = Marks(("<parameter=", "</function>", self.end))
        _, found = yield from reader.until(marks)
        while found == "<parameter=":
            key, _ = yield from reader.until(Marks((">",)))
            value, closed = yield from reader.until(Marks(("</parameter>", "</function>")))
            if closed is None:
                return
            yield CallMore(written.one(key.strip(), value.removeprefix("\n").removesuffix("\n")))
            found = closed
            if closed == "</parameter>":
                _, found = yield from reader.until(marks)
        if found is not None:
            yield CallMore(written.end())
        if found == "</function>":
            yield from reader.skip_space()
            yield from reader.take(self.end)


class _Arguments:
    """A JSON object that grows by one argument at a time."""

    def __init__(self, tool: str, tools: Tools) -> None:
        self._tool, self._tools = tool, tools
        self._before = "{"

    def one(self, key: str, text: str) -> str:
        """The next argument."""
        value = _typed(text, self._tools.kind_of(self._tool, key))
        written = f"{self._before}{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
        self._before = ", "
        return written

    def end(self) -> str:
        """What closes it."""
        return "{}" if self._before == "{" else "}"


def _typed(text: str, kind: str | None) -> Any:
    """Text for a string; for anything else JSON, or Python's words for it, and text where it is neither."""
    if kind == "string":
        return text
    word = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
    try:
        return json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text


def _refuse(word: str) -> None:
    raise ValueError(word)
