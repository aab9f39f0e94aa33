"""One response's text, as it arrives, to deltas of content, reasoning and tool calls.

gpt-oss's harmony format has messages on channels: ``analysis`` is reasoning, ``final`` is content, and so is
``commentary`` without a recipient; what goes to ``functions.NAME`` is a call (openai/harmony, "OpenAI harmony response
format").  The prompt ends before the first header.  Knows nothing about tokens or JSON on the wire.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import Enum
from hashlib import blake2b
from itertools import groupby

import msgspec

from penstock.interfaces import ToolCallDelta
from penstock.processing.parsers.incremental import (
    ContentDelta,
    IncrementalReader,
    MarkSet,
    MessageParser,
    ParserEvent,
    ParserSteps,
    ReasoningDelta,
    ReasoningMarks,
    ToolCallArguments,
    ToolCallFormat,
    ToolCallStart,
    ToolSchemas,
)
from penstock.processing.parsers.tool_call_formats import argument_text

_HEADER_END = "<|message|>"
_BODY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", _HEADER_END, "<|end|>", "<|call|>", "<|return|>")

_TO = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def read_harmony(reader: IncrementalReader) -> ParserSteps[None]:
    """The whole answer."""
    thoughts, contents = _Channel(ReasoningDelta), _Channel(ContentDelta)
    header_marks, body_marks = MarkSet((_HEADER_END,)), MarkSet(_BODY_ENDS)
    while True:
        header, mark = yield from reader.read_until(header_marks)
        if mark is None:
            if "<|" not in header and header.strip() not in ("", "assistant"):
                yield ContentDelta(header)  # the model forgot its format
            return
        to, channel = _TO.search(header), _CHANNEL.search(header)
        if to is not None:
            yield ToolCallStart(to[1])
            yield from reader.copy_until(body_marks, argument_text)
        else:
            chosen = thoughts if channel is not None and channel[1] == "analysis" else contents
            chosen.next_message()
            reader.in_reasoning = chosen is thoughts
            yield from reader.copy_until(body_marks, chosen.give)
            reader.in_reasoning = False


class _Channel:
    """Gives out the messages of one kind, divided by a blank line."""

    def __init__(self, event: type[ReasoningDelta] | type[ContentDelta]) -> None:
        self._event = event
        self._used = self._divide = False

    def next_message(self) -> None:
        """What comes belongs to another message."""
        self._divide = self._used

    def give(self, text: str) -> Iterable[ParserEvent]:
        """A part of the message."""
        before = "\n\n" if self._divide else ""
        self._used, self._divide = True, False
        return (self._event(before + text),)


class ToolCallIds(Enum):
    """How the ids of calls are made."""

    LONG = "long"  # "call_" and 24 digits, as OpenAI's
    SHORT = "short"  # nine letters and digits, as Mistral's templates want them


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How one model writes its answers."""

    name: str
    reasoning: ReasoningMarks | None = None
    calls: ToolCallFormat | None = None
    harmony: bool = False
    ids: ToolCallIds = ToolCallIds.LONG

    def marks(self, *, calls: bool) -> tuple[str, ...]:
        """What must be seen of an answer though it may be control tokens."""
        if self.harmony:
            return HARMONY_MARKS
        marks = [self.reasoning.begin, self.reasoning.end] if self.reasoning else []
        if calls and self.calls is not None:
            marks += [*self.calls.begins, *self.calls.drops, *self.calls.inner_marks()]
        return tuple(dict.fromkeys(marks))


class ParsedDelta(msgspec.Struct, frozen=True):
    """What some text added to a message."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()
    parts: tuple[ParsedDelta, ...] = ()  # where it has more than one kind of these: each kind in its turn


class OutputParser:
    """One message."""

    def __init__(
        self, form: OutputFormat, *, tools: ToolSchemas | None, thinking: bool, identity: str, parallel: bool = True
    ) -> None:
        """``tools`` is None when calls are not looked for; ``identity`` is what ids of calls are made of."""
        self._reader = IncrementalReader()
        self._reader.in_reasoning = thinking and form.reasoning is not None
        self._steps = _steps(form, self._reader, tools, thinking=thinking)
        self._ids = form.ids
        self._identity = identity
        self._parallel = parallel
        self.calls = 0
        self.done = False  # a second call began where only one is wanted: nothing more counts

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends within reasoning."""
        return self._reader.in_reasoning

    def push(self, text: str, *, last: bool = False) -> ParsedDelta:
        """The next text, and with ``last`` the end."""
        self._reader.feed(text)
        if last:
            self._reader.finish()
        parts: list[ParsedDelta] = []
        while not self.done and (event := next(self._steps, None)) is not None:
            match event:
                case ContentDelta():
                    parts.append(ParsedDelta(content=event.text))
                case ToolCallStart() if self.calls and not self._parallel:
                    self.done = True
                case ToolCallStart():
                    parts.append(ParsedDelta(calls=(self._begin(event),)))
                case ToolCallArguments():
                    parts.append(ParsedDelta(calls=(ToolCallDelta(index=self.calls - 1, arguments=event.text),)))
                case _:
                    parts.append(ParsedDelta(reasoning=event.text))
        return joined_deltas(parts)

    def _begin(self, event: ToolCallStart) -> ToolCallDelta:
        index, self.calls = self.calls, self.calls + 1
        digest = blake2b(f"{self._identity}/{index}".encode(), digest_size=12).hexdigest()
        made = digest[:9] if self._ids is ToolCallIds.SHORT else f"call_{digest}"
        return ToolCallDelta(index=index, id=event.id or made, name=event.name)


def joined_deltas(parts: Sequence[ParsedDelta]) -> ParsedDelta:
    """What several texts added, one after the other."""
    if len(parts) == 1:
        return parts[0]
    single = [kind for part in parts for kind in part.parts or (part,)]
    runs = [_one_delta(list(run)) for kind, run in groupby(single, _kind) if kind]
    if len(runs) < 2:
        return runs[0] if runs else ParsedDelta()
    return msgspec.structs.replace(_one_delta(runs), parts=tuple(runs))


def _kind(part: ParsedDelta) -> str:
    """The kind of a part that has one; empty if there is nothing in it."""
    return "calls" if part.calls else "reasoning" if part.reasoning else "content" if part.content else ""


def _one_delta(parts: Sequence[ParsedDelta]) -> ParsedDelta:
    """All of them, without their order."""
    calls: list[ToolCallDelta] = []
    for call in (call for part in parts for call in part.calls):
        if call.id is not None:
            calls.append(call)
        else:
            _append(calls, call.index, call.arguments)
    return ParsedDelta(
        "".join([part.content for part in parts]), "".join([part.reasoning for part in parts]), tuple(calls)
    )


def _append(calls: list[ToolCallDelta], index: int, text: str) -> None:
    if calls and calls[-1].index == index:
        calls[-1] = msgspec.structs.replace(calls[-1], arguments=calls[-1].arguments + text)
    else:
        calls.append(ToolCallDelta(index=index, arguments=text))


def _steps(
    form: OutputFormat, reader: IncrementalReader, tools: ToolSchemas | None, *, thinking: bool
) -> ParserSteps[None]:
    if form.harmony:
        return read_harmony(reader)
    calls = form.calls if tools is not None else None
    reply = MessageParser(reader, reasoning=form.reasoning, calls=calls, tools=tools or ToolSchemas({}))
    return reply.run(thinking=thinking and form.reasoning is not None)
