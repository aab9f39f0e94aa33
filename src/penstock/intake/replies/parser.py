"""One answer's text, as it comes, to what a client gets: pieces of content, of reasoning and of tool calls.

Knows nothing about tokens or JSON on the wire.
"""

from __future__ import annotations

from enum import Enum
from hashlib import blake2b

import msgspec

from penstock.intake.replies.harmony import HARMONY_MARKS, read_harmony
from penstock.intake.replies.reader import CallBegun, CallMore, Reader, Said, Steps
from penstock.intake.replies.reply import CallFormat, Pair, ReplySteps, Tools
from penstock.wire.ports import CallPiece


class Ids(Enum):
    """How the ids of calls are made."""

    LONG = "long"  # "call_" and 24 digits, as OpenAI's
    SHORT = "short"  # nine letters and digits, as Mistral's templates want them


class ReplyFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How one model writes its answers."""

    name: str
    reasoning: Pair | None = None
    calls: CallFormat | None = None
    harmony: bool = False
    ids: Ids = Ids.LONG

    def marks(self, *, calls: bool) -> tuple[str, ...]:
        """What must be seen of an answer though it may be control tokens."""
        if self.harmony:
            return HARMONY_MARKS
        marks = [self.reasoning.begin, self.reasoning.end] if self.reasoning else []
        if calls and self.calls is not None:
            marks += [*self.calls.begins, *self.calls.drops, *self.calls.inner()]
        return tuple(dict.fromkeys(marks))


class ReplyPiece(msgspec.Struct, frozen=True):
    """What some text added to a message."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()


class ReplyParser:
    """One message."""

    def __init__(
        self, form: ReplyFormat, *, tools: Tools | None, thinking: bool, identity: str, parallel: bool = True
    ) -> None:
        """``tools`` is None when calls are not looked for; ``identity`` is what ids of calls are made of."""
        self._reader = Reader()
        self._steps = _steps(form, self._reader, tools, thinking=thinking)
        self._ids = form.ids
        self._identity = identity
        self._parallel = parallel
        self.calls = 0
        self.done = False  # a second call began where only one is wanted: nothing more counts

    def push(self, text: str, *, last: bool = False) -> ReplyPiece:
        """The next text, and with ``last`` the end."""
        self._reader.feed(text)
        if last:
            self._reader.end()
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[CallPiece] = []
        while not self.done and (event := next(self._steps, None)) is not None:
            match event:
                case Said():
                    content.append(event.text)
                case CallBegun() if self.calls and not self._parallel:
                    self.done = True
                case CallBegun():
                    calls.append(self._begin(event))
                case CallMore():
                    _append(calls, self.calls - 1, event.text)
                case _:
                    reasoning.append(event.text)
        return ReplyPiece("".join(content), "".join(reasoning), tuple(calls))

    def _begin(self, event: CallBegun) -> CallPiece:
        index, self.calls = self.calls, self.calls + 1
        digest = blake2b(f"{self._identity}/{index}".encode(), digest_size=12).hexdigest()
        made = digest[:9] if self._ids is Ids.SHORT else f"call_{digest}"
        return CallPiece(index=index, id=event.id or made, name=event.name)


def _append(calls: list[CallPiece], index: int, text: str) -> None:
    if calls and calls[-1].index == index:
        calls[-1] = msgspec.structs.replace(calls[-1], arguments=calls[-1].arguments + text)
    else:
        calls.append(CallPiece(index=index, arguments=text))


def _steps(form: ReplyFormat, reader: Reader, tools: Tools | None, *, thinking: bool) -> Steps[None]:
    if form.harmony:
        return read_harmony(reader)
    calls = form.calls if tools is not None else None
    reply = ReplySteps(reader, reasoning=form.reasoning, calls=calls, tools=tools or Tools({}))
    return reply.run(thinking=thinking and form.reasoning is not None)
