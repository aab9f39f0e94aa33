"""What chats and completions have in common: usage, the fields that every object repeats, and ``ResponseFormat``.

A response format knows the JSON of one API; ``api.streaming`` asks it for bytes and never looks inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from penstock.interfaces import OutputDelta, TokenText, ToolCallDelta
from penstock.types import FinishReason, TokenIds

encode = msgspec.json.Encoder().encode


class CachedTokens(msgspec.Struct, frozen=True):
    """Prompt tokens that were found in a prefix cache."""

    cached_tokens: int


class UsageCharge(msgspec.Struct, frozen=True):
    """Usages with one ``charge_id`` are of one request with an idempotency key, and count once."""

    charge_id: str
    repeated: bool  # as far as this gateway knows, it was sent before, at least in part


class UsageExtension(msgspec.Struct, frozen=True, kw_only=True):
    """Penstock's own field in ``usage``."""

    charge_id: str | UnsetType = UNSET  # see ``UsageCharge``
    repeated: bool | UnsetType = UNSET
    stored_tokens: int | UnsetType = UNSET  # of the completion, those that come from a stored response

    @classmethod
    def of(cls, charge: UsageCharge | None, stored: int) -> UsageExtension | UnsetType:
        """UNSET without content."""
        if charge is None and not stored:
            return UNSET
        tokens = stored or UNSET
        if charge is None:
            return cls(stored_tokens=tokens)
        return cls(charge_id=charge.charge_id, repeated=charge.repeated, stored_tokens=tokens)


class TokenUsage(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's ``usage``."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    penstock: UsageExtension | UnsetType = UNSET

    @property
    def stored_tokens(self) -> int:
        """Of the completion, those that come from a stored response."""
        return 0 if self.penstock is UNSET or self.penstock.stored_tokens is UNSET else self.penstock.stored_tokens

    @classmethod
    def of(
        cls, *, prompt: int, completion: int, cached: int, stored: int = 0, charge: UsageCharge | None = None
    ) -> TokenUsage:
        """Of all choices together, each prompt once."""
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=CachedTokens(min(cached, prompt)),
            penstock=UsageExtension.of(charge, stored),
        )


class SeedExtension(msgspec.Struct, frozen=True):
    """Penstock's own field: with this seed the same request gives the same response."""

    seed: int


class ResponseHead(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that every object of one response repeats."""

    id: str
    created: int  # Unix seconds
    model: str
    system_fingerprint: str
    seed: int
    logprobs: bool = False
    token_ids: bool = False
    n: int = 1
    prompts: tuple[TokenIds, ...] = ()  # token ids, sent when ``token_ids``
    include_usage: bool = False
    used: TokenUsage | None = None  # so far, for events that include it

    def prompt_ids(self, choice: int) -> list[int] | UnsetType:
        """The prompt of a choice, if wanted."""
        return self.prompts[choice // self.n].tolist() if self.token_ids else UNSET


class CompletedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One completed choice."""

    text: str
    reasoning: str = ""
    calls: Sequence[ToolCallDelta] = ()  # whole
    logprobs: Sequence[TokenText]
    token_ids: Sequence[int]
    finish: FinishReason


class ResponseFormat(Protocol):
    """How one API writes its responses.  ``first`` marks the first object of a stream, which has the seed."""

    id_prefix: str
    """Of ids, as ``chatcmpl-``."""

    operation: str
    """As OpenTelemetry calls it (``gen_ai.operation.name``)."""

    def first_chunk(self, head: ResponseHead, choice: int, *, first: bool) -> bytes | None:
        """The object before a choice's first text, if this API has one."""
        ...

    def delta_chunk(self, head: ResponseHead, choice: int, piece: OutputDelta, *, first: bool) -> bytes:
        """More of a choice."""
        ...

    def finish_chunk(self, head: ResponseHead, choice: int, finish: FinishReason, *, first: bool) -> bytes:
        """The finish of a choice, without text."""
        ...

    def usage_chunk(self, head: ResponseHead, usage: TokenUsage) -> bytes:
        """The last object of a stream."""
        ...

    def complete(self, head: ResponseHead, choices: Sequence[CompletedChoice], usage: TokenUsage) -> bytes:
        """A response that is not streamed."""
        ...


def unset_unless(value: Any, wanted: bool) -> Any:
    """``value`` if ``wanted``, else UNSET."""
    return value if wanted else UNSET
