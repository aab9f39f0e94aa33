"""``/v1/chat/completions`` on the wire: answers, chunks and logprobs as OpenAI writes them.

Chunks of a choice: its role; reasoning, text and tool calls as they come; an empty delta with the reason of its end.
Reasoning goes out under both names that clients read it by, ``reasoning`` and ``reasoning_content``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from penstock.api.openai.schema import CompletedChoice, ResponseHead, SeedExtension, TokenUsage, encode, unset_unless
from penstock.interfaces import OutputDelta, TokenText, ToolCallDelta
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


class ChatResponseFormat:
    """``ResponseFormat`` of chats."""

    id_prefix = "chatcmpl-"
    operation = "chat"

    def first_chunk(self, head: ResponseHead, choice: int, *, first: bool) -> bytes:
        """The role, before any text."""
        started = _ChunkChoice(index=choice, delta=_Delta(role="assistant", content=""))
        return _chunk(head, started, first=first, prompt_ids=head.prompt_ids(choice))

    def delta_chunk(self, head: ResponseHead, choice: int, piece: OutputDelta, *, first: bool) -> bytes:
        """Text, reasoning and calls, and the logprobs of the tokens they came from."""
        more = _ChunkChoice(
            index=choice,
            delta=_delta(piece),
            logprobs=_logprobs(piece.logprobs) if head.logprobs else None,
            token_ids=unset_unless(piece.token_ids, head.token_ids),
        )
        return _chunk(head, more, first=first)

    def finish_chunk(self, head: ResponseHead, choice: int, finish: FinishReason, *, first: bool) -> bytes:
        """An empty delta with the reason."""
        return _chunk(head, _ChunkChoice(index=choice, delta=_EMPTY, finish_reason=finish), first=first)

    def usage_chunk(self, head: ResponseHead, usage: TokenUsage) -> bytes:
        """No choices, only figures."""
        return encode(
            _Chunk(
                id=head.id,
                created=head.created,
                model=head.model,
                system_fingerprint=head.system_fingerprint,
                choices=(),
                usage=usage,
            )
        )

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


def _chunk(
    head: ResponseHead, choice: _ChunkChoice, *, first: bool, prompt_ids: list[int] | UnsetType = UNSET
) -> bytes:
    return encode(
        _Chunk(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=(choice,),
            usage=head.used if head.include_usage else UNSET,
            penstock=SeedExtension(head.seed) if first else UNSET,
            prompt_token_ids=prompt_ids,
        )
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
