"""gpt-oss's harmony format: messages on channels, each with a header.

``analysis`` is reasoning, ``final`` is content, and so is ``commentary`` to nobody; what goes to ``functions.NAME`` is
a call (openai/harmony, "OpenAI harmony response format").  The prompt ends before the first header.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from penstock.intake.replies.json_calls import more
from penstock.intake.replies.reader import CallBegun, Event, Marks, Reader, Said, Steps, Thought

_HEADER_END = "<|message|>"
_BODY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", _HEADER_END, "<|end|>", "<|call|>", "<|return|>")

_TO = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def read_harmony(reader: Reader) -> Steps[None]:
    """The whole answer."""
    thoughts, contents = _Channel(Thought), _Channel(Said)
    header_marks, body_marks = Marks((_HEADER_END,)), Marks(_BODY_ENDS)
    while True:
        header, mark = yield from reader.until(header_marks)
        if mark is None:
            if "<|" not in header and header.strip() not in ("", "assistant"):
                yield Said(header)  # the model forgot its format
            return
        to, channel = _TO.search(header), _CHANNEL.search(header)
        if to is not None:
            yield CallBegun(to[1])
            yield from reader.copy_until(body_marks, more)
        else:
            chosen = thoughts if channel is not None and channel[1] == "analysis" else contents
            chosen.next_message()
            yield from reader.copy_until(body_marks, chosen.give)


class _Channel:
    """Gives out the messages of one kind, divided by a blank line."""

    def __init__(self, event: type[Thought] | type[Said]) -> None:
        self._event = event
        self._used = self._divide = False

    def next_message(self) -> None:
        """What comes belongs to another message."""
        self._divide = self._used

    def give(self, text: str) -> Iterable[Event]:
        """A part of the message."""
        before = "\n\n" if self._divide else ""
        self._used, self._divide = True, False
        return (self._event(before + text),)
