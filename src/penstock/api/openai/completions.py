"""``/v1/completions`` on the wire: answers, chunks and logprobs as OpenAI writes them.

Chunks of a choice: its text, then an empty text with the reason of its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from penstock.api.openai.schema import CompletedChoice, ResponseHead, SeedExtension, TokenUsage, encode, unset_unless
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

    id_prefix = "cmpl-"
    operation = "text_completion"

    def first_chunk(self, head: ResponseHead, choice: int, *, first: bool) -> bytes | None:
        """Nothing, unless the prompt's token ids are wanted."""
        if not head.token_ids:
            return None
        return _chunk(head, _Choice(index=choice, text="", prompt_token_ids=head.prompt_ids(choice)), first=first)

    def delta_chunk(self, head: ResponseHead, choice: int, piece: OutputDelta, *, first: bool) -> bytes:
        """Text, and the logprobs of the tokens it came from."""
        more = _Choice(
            index=choice,
            text=piece.text,
            logprobs=_logprobs(piece.logprobs) if head.logprobs else None,
            token_ids=unset_unless(piece.token_ids, head.token_ids),
        )
        return _chunk(head, more, first=first)

    def finish_chunk(self, head: ResponseHead, choice: int, finish: FinishReason, *, first: bool) -> bytes:
        """An empty text with the reason."""
        return _chunk(head, _Choice(index=choice, text="", finish_reason=finish), first=first)

    def usage_chunk(self, head: ResponseHead, usage: TokenUsage) -> bytes:
        """No choices, only figures."""
        return _completion(head, (), usage=usage)

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


def _chunk(head: ResponseHead, choice: _Choice, *, first: bool) -> bytes:
    return _completion(
        head,
        (choice,),
        usage=head.used if head.include_usage else UNSET,
        seed=SeedExtension(head.seed) if first else UNSET,
    )


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
