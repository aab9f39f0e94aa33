"""``/v1/completions`` on the wire: answers, chunks and logprobs as OpenAI writes them.

Chunks of a choice: its text, then an empty text with the reason of its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from penstock.api.openai.chat import OpenAIGenerationApi, OpenAIStreamEncoder
from penstock.api.response_format import (
    CompletedChoice,
    ResponseHead,
    SeedExtension,
    StreamEvent,
    TokenUsage,
    encode,
    unset_unless,
)
from penstock.api.sse import DONE
from penstock.interfaces import OutputDelta, TokenText
from penstock.types import FinishReason


class _Logprobs(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class _Choice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: _Logprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class _Completion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[_Choice]
    usage: TokenUsage | UnsetType | None = UNSET
    penstock: SeedExtension | UnsetType = UNSET


class CompletionResponseFormat:
    """``ResponseFormat`` of completions."""

    terminator = DONE

    def stream(self, head: ResponseHead, usage: Callable[[], TokenUsage]) -> _CompletionStreamEncoder:
        return _CompletionStreamEncoder(head, usage)

    def complete(self, head: ResponseHead, choices: Sequence[CompletedChoice], usage: TokenUsage) -> bytes:
        """All choices at once."""
        shown = [
            _Choice(
                index=index,
                text=choice.text,
                logprobs=_logprobs(choice.logprobs) if head.logprobs else None,
                finish_reason=choice.finish,
                token_ids=unset_unless(choice.token_ids, head.token_ids),
                prompt_token_ids=head.prompt_ids(index),
            )
            for index, choice in enumerate(choices)
        ]
        return _completion(head, shown, usage=usage, seed=SeedExtension(head.seed))

    async def persist(self) -> None:
        pass


class _CompletionStreamEncoder(OpenAIStreamEncoder):
    """``StreamEncoder`` of completions."""

    def begin(self, choice: int) -> Sequence[StreamEvent]:
        """Nothing, unless the prompt's token ids are wanted."""
        if not self.head.token_ids:
            return ()
        return (self._chunk(_Choice(index=choice, text="", prompt_token_ids=self.head.prompt_ids(choice))),)

    def delta(self, choice: int, piece: OutputDelta) -> Sequence[StreamEvent]:
        """Text, and the logprobs of the tokens it came from."""
        more = _Choice(
            index=choice,
            text=piece.text,
            logprobs=_logprobs(piece.logprobs) if self.head.logprobs else None,
            token_ids=unset_unless(piece.token_ids, self.head.token_ids),
        )
        return (self._chunk(more),)

    def finish(self, choice: int, last: OutputDelta) -> Sequence[StreamEvent]:
        """An empty text with the reason."""
        return (self._chunk(_Choice(index=choice, text="", finish_reason=last.finish)),)

    def end(self) -> Sequence[StreamEvent]:
        """The usage, if it is wanted: no choices, only figures."""
        return (StreamEvent(_completion(self.head, (), usage=self.usage())),) if self.head.include_usage else ()

    def _chunk(self, choice: _Choice) -> StreamEvent:
        return StreamEvent(_completion(self.head, (choice,), usage=self.usage_so_far(), seed=self.seed_once()))


COMPLETION_API = OpenAIGenerationApi(id_prefix="cmpl-", operation="text_completion", format=CompletionResponseFormat())


def _completion(
    head: ResponseHead,
    choices: Sequence[_Choice],
    *,
    usage: TokenUsage | UnsetType | None,
    seed: SeedExtension | UnsetType = UNSET,
) -> bytes:
    return encode(
        _Completion(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=choices,
            usage=usage,
            penstock=seed,
        )
    )


def _logprobs(tokens: Sequence[TokenText]) -> _Logprobs:
    return _Logprobs(
        tokens=[_name(token) for token in tokens],
        token_logprobs=[token.logprob for token in tokens],
        top_logprobs=[_top(token) for token in tokens],
        text_offset=[token.offset for token in tokens],
    )


def _top(token: TokenText) -> dict[str, float] | None:
    """The alternatives and the token itself; of two that are written alike the likelier counts."""
    if token.logprob is None:
        return None
    named: dict[str, float] = {}
    for one in (*token.top, token):
        if one.logprob is not None:
            named.setdefault(_name(one), one.logprob)
    return named


def _name(token: TokenText) -> str:
    """The token's text; ``bytes:\\\\xe4`` for a part of a character, as OpenAI's older API has it."""
    return f"bytes:{token.shown}" if token.partial else token.shown
