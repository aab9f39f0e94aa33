"""``/v1/chat/completions`` on the wire: answers, chunks and logprobs as OpenAI writes them; what completions share.

Chunks of a choice: its role; reasoning, text and tool calls as they come; an empty delta with the reason of its end.
Reasoning goes out under both names that clients read it by, ``reasoning`` and ``reasoning_content``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from penstock.api.errors import ErrorResponse
from penstock.api.response_format import (
    SAMPLE_DELTA,
    CompletedChoice,
    ResponseFormat,
    ResponseHead,
    SeedExtension,
    StreamEvent,
    TextEventParts,
    TokenUsage,
    TranslatedRequest,
    encode,
    unset_unless,
)
from penstock.api.sse import DONE
from penstock.interfaces import JsonObject, OutputDelta, RequestContext, TokenText, ToolCallDelta
from penstock.types import FinishReason


class _Top(msgspec.Struct, frozen=True):
    token: str
    logprob: float | None
    bytes: list[int]


class _Token(msgspec.Struct, frozen=True):
    token: str
    logprob: float | None
    bytes: list[int]
    top_logprobs: list[_Top]


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[_Token]
    refusal: None = None


class _Function(msgspec.Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class _CallDelta(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: _Function


class _Call(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: _Function


class _Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[_CallDelta] | UnsetType = UNSET


class _ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: _Delta
    logprobs: _Logprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class _Chunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[_ChunkChoice, ...]
    usage: TokenUsage | UnsetType | None = UNSET
    penstock: SeedExtension | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[_Call] | UnsetType = UNSET


class _WholeChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: _Message
    logprobs: _Logprobs | None = None
    finish_reason: FinishReason
    token_ids: Sequence[int] | UnsetType = UNSET


class _Whole(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[_WholeChoice]
    usage: TokenUsage
    penstock: SeedExtension
    prompt_token_ids: list[int] | UnsetType = UNSET


_EMPTY = _Delta()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIGenerationApi:
    """``GenerationApi`` of chats or completions, whose bodies are served as they come."""

    id_prefix: str
    operation: str
    format: ResponseFormat
    clamps_length: bool = False

    async def translate(self, body: JsonObject, context: RequestContext) -> TranslatedRequest:
        """The body itself."""
        return TranslatedRequest(body, self.format)


class OpenAIStreamEncoder(ABC):
    """The common part of their ``StreamEncoder``."""

    def __init__(self, head: ResponseHead, usage: Callable[[], TokenUsage]) -> None:
        self.head = head
        self.usage = usage
        self._seed_sent = head.resumed

    @abstractmethod
    def delta(self, choice: int, piece: OutputDelta) -> Sequence[StreamEvent]:
        """As ``StreamEncoder``'s: one event."""

    def error(self, error: ErrorResponse) -> StreamEvent:
        """The envelope of other errors."""
        return StreamEvent(error.body)

    def text_parts(self, choice: int) -> TextEventParts | None:
        """Once the seed is out, an event is text alone unless more is wanted."""
        head = self.head
        if not self._seed_sent or head.logprobs or head.token_ids or head.continuous_usage:
            return None
        return TextEventParts.of(self.delta(choice, SAMPLE_DELTA)[0])

    def usage_so_far(self) -> TokenUsage | UnsetType | None:
        """For an event that is not the last; null where only the last has it."""
        if not self.head.include_usage:
            return UNSET
        return self.usage() if self.head.continuous_usage else None

    def seed_once(self) -> SeedExtension | UnsetType:
        """For the first event of a stream."""
        if self._seed_sent:
            return UNSET
        self._seed_sent = True
        return SeedExtension(self.head.seed)


class ChatResponseFormat:
    """``ResponseFormat`` of chats."""

    terminator = DONE

    def stream(self, head: ResponseHead, usage: Callable[[], TokenUsage]) -> _ChatStreamEncoder:
        return _ChatStreamEncoder(head, usage)

    def complete(self, head: ResponseHead, choices: Sequence[CompletedChoice], usage: TokenUsage) -> bytes:
        """All choices at once."""
        return encode(
            _Whole(
                id=head.id,
                created=head.created,
                model=head.model,
                system_fingerprint=head.system_fingerprint,
                choices=[
                    _WholeChoice(
                        index=index,
                        message=_message(choice),
                        logprobs=_logprobs(choice.logprobs) if head.logprobs else None,
                        finish_reason=choice.finish,
                        token_ids=unset_unless(choice.token_ids, head.token_ids),
                    )
                    for index, choice in enumerate(choices)
                ],
                usage=usage,
                penstock=SeedExtension(head.seed),
                prompt_token_ids=head.prompt_ids(0),
            )
        )

    async def persist(self) -> None:
        pass


class _ChatStreamEncoder(OpenAIStreamEncoder):
    """``StreamEncoder`` of chats."""

    def begin(self, choice: int) -> Sequence[StreamEvent]:
        """The role, before any text."""
        started = _ChunkChoice(index=choice, delta=_Delta(role="assistant", content=""))
        return (self._chunk(started, prompt_ids=self.head.prompt_ids(choice)),)

    def delta(self, choice: int, piece: OutputDelta) -> Sequence[StreamEvent]:
        """Text, reasoning and calls, and the logprobs of the tokens they came from."""
        more = _ChunkChoice(
            index=choice,
            delta=_delta(piece),
            logprobs=_logprobs(piece.logprobs) if self.head.logprobs else None,
            token_ids=unset_unless(piece.token_ids, self.head.token_ids),
        )
        return (self._chunk(more),)

    def finish(self, choice: int, last: OutputDelta) -> Sequence[StreamEvent]:
        """An empty delta with the reason."""
        return (self._chunk(_ChunkChoice(index=choice, delta=_EMPTY, finish_reason=last.finish)),)

    def end(self) -> Sequence[StreamEvent]:
        """The usage, if it is wanted: no choices, only figures."""
        head = self.head
        if not head.include_usage:
            return ()
        last = _Chunk(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=(),
            usage=self.usage(),
        )
        return (StreamEvent(encode(last)),)

    def _chunk(self, choice: _ChunkChoice, *, prompt_ids: list[int] | UnsetType = UNSET) -> StreamEvent:
        head = self.head
        chunk = _Chunk(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=(choice,),
            usage=self.usage_so_far(),
            penstock=self.seed_once(),
            prompt_token_ids=prompt_ids,
        )
        return StreamEvent(encode(chunk))


CHAT_API = OpenAIGenerationApi(id_prefix="chatcmpl-", operation="chat", format=ChatResponseFormat())


def _delta(piece: OutputDelta) -> _Delta:
    reasoning = piece.reasoning or UNSET
    shows_nothing_else = not piece.reasoning and not piece.calls
    return _Delta(
        content=piece.text if piece.text or shows_nothing_else else UNSET,
        reasoning_content=reasoning,
        reasoning=reasoning,
        tool_calls=[_call_delta(call) for call in piece.calls] or UNSET,
    )


def _call_delta(call: ToolCallDelta) -> _CallDelta:
    begins = call.id is not None
    return _CallDelta(
        index=call.index,
        id=UNSET if call.id is None else call.id,
        type="function" if begins else UNSET,
        function=_Function(name=UNSET if call.name is None else call.name, arguments=call.arguments),
    )


def _message(choice: CompletedChoice) -> _Message:
    reasoning = choice.reasoning or UNSET
    return _Message(
        content=choice.text if choice.text or not choice.calls else None,
        reasoning_content=reasoning,
        reasoning=reasoning,
        tool_calls=[
            _Call(id=call.id or "", function=_Function(name=call.name or "", arguments=call.arguments))
            for call in choice.calls
        ]
        or UNSET,
    )


def _logprobs(tokens: Iterable[TokenText]) -> _Logprobs:
    return _Logprobs(
        [
            _Token(
                token.shown,
                token.logprob,
                list(token.raw),
                [_Top(top.shown, top.logprob, list(top.raw)) for top in token.top],
            )
            for token in tokens
        ]
    )
