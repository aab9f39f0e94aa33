"""What the generation APIs have in common: usage, the fields that every object repeats, and how a response is written.

A ``GenerationApi`` translates its bodies into those of chats or completions, and names the ``ResponseFormat`` of each
request.  ``api.streaming`` asks that for bytes and never looks inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from penstock.api.errors import ErrorResponse
from penstock.interfaces import JsonObject, OutputDelta, RequestContext, TokenText, ToolCallDelta
from penstock.types import FinishReason, TokenIds

encode = msgspec.json.Encoder().encode


class CachedTokens(msgspec.Struct, frozen=True):
    """Prompt tokens that were found in a prefix cache."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct, frozen=True):
    """Output tokens by what they are."""

    reasoning_tokens: int


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
    completion_tokens_details: CompletionDetails
    penstock: UsageExtension | UnsetType = UNSET

    @property
    def stored_tokens(self) -> int:
        """Completion tokens that come from a stored response."""
        return 0 if self.penstock is UNSET or self.penstock.stored_tokens is UNSET else self.penstock.stored_tokens

    @classmethod
    def of(
        cls,
        *,
        prompt: int,
        completion: int,
        cached: int,
        reasoning: int = 0,
        stored: int = 0,
        charge: UsageCharge | None = None,
    ) -> TokenUsage:
        """The usage of all choices together, with each prompt counted once."""
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=CachedTokens(min(cached, prompt)),
            completion_tokens_details=CompletionDetails(reasoning),
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
    continuous_usage: bool = False  # in every event
    resumed: bool = False  # the client has a part of the stream already
    length_clamped: bool = False  # the response may be as long as the context allows, which is less than was asked for

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
    stop_text: str | None = None  # the stop string that ended it
    deltas: Sequence[OutputDelta] = ()  # that it was joined from

    def ordered_parts(self) -> list[OutputDelta]:
        """Text, reasoning and calls as they came, each a delta of one kind and as long as that kind went on.

        However the tokens were batched, these are the same: formats that have an order of blocks show them.
        """
        single = [part for delta in self.deltas for part in _single_kinds(delta)]
        return [
            OutputDelta(
                text="".join([part.text for part in run]),
                reasoning="".join([part.reasoning for part in run]),
                calls=tuple(whole_calls(call for part in run for call in part.calls)),
                tokens=run[-1].tokens,
                logprobs=tuple(token for part in run for token in part.logprobs),
            )
            for run in (list(run) for _, run in groupby(single, _output_kind))
        ]


def _single_kinds(delta: OutputDelta) -> Sequence[OutputDelta]:
    """A delta as deltas of one kind; the first has its logprobs.  Empty if it shows nothing."""
    if not delta.parts:
        return (delta,) if delta.text or delta.reasoning or delta.calls or delta.logprobs else ()
    first, *others = delta.parts
    return (msgspec.structs.replace(first, logprobs=delta.logprobs), *others)


def _output_kind(delta: OutputDelta) -> str:
    return "calls" if delta.calls else "reasoning" if delta.reasoning else "text"


def whole_calls(parts: Iterable[ToolCallDelta]) -> list[ToolCallDelta]:
    """Each call with all of its arguments; ``parts`` begin with the beginning of one."""
    calls: list[ToolCallDelta] = []
    arguments: list[list[str]] = []
    for part in parts:
        if not calls or calls[-1].index != part.index:
            calls.append(part)
            arguments.append([])
        arguments[-1].append(part.arguments)
    return [
        msgspec.structs.replace(call, arguments="".join(texts)) for call, texts in zip(calls, arguments, strict=True)
    ]


class StreamEvent(NamedTuple):
    """One server-sent event."""

    data: bytes  # JSON, without line breaks
    name: bytes = b""  # its type; empty: it has none


_MARK = "\uf8ff text \uf8ff"
_MARK_BYTES = msgspec.json.encode(_MARK)[1:-1]

SAMPLE_DELTA = OutputDelta(text=_MARK, tokens=1)
"""A delta to be encoded for ``TextEventParts.of``."""


class TextEventParts(NamedTuple):
    """The constant bytes of an event that is text alone, around that text as it stands inside a JSON string."""

    before: bytes
    behind: bytes
    name: bytes = b""

    @classmethod
    def of(cls, sample: StreamEvent) -> TextEventParts | None:
        """``sample``: the event of ``SAMPLE_DELTA``.  None where its text does not stand there, once."""
        parts = sample.data.split(_MARK_BYTES)
        return cls(parts[0], parts[1], sample.name) if len(parts) == 2 else None


class StreamEncoder(Protocol):
    """Encodes one streamed response.

    Every delta passes through it in order, those included that a resumed client has already, whose events are dropped:
    it keeps what later events depend on.
    """

    def begin(self, choice: int) -> Sequence[StreamEvent]:
        """The events before a choice's first delta."""
        ...

    def delta(self, choice: int, piece: OutputDelta) -> Sequence[StreamEvent]:
        """More of a choice.  ``piece`` shows something."""
        ...

    def finish(self, choice: int, last: OutputDelta) -> Sequence[StreamEvent]:
        """The end of a choice, whose last delta, with its ``finish``, was encoded before if it shows something."""
        ...

    def end(self) -> Sequence[StreamEvent]:
        """The events behind all choices."""
        ...

    def error(self, error: ErrorResponse) -> StreamEvent:
        """The last event of a stream that breaks off."""
        ...

    def text_parts(self, choice: int) -> TextEventParts | None:
        """What the next events of a choice are made of while they are text alone; then they do not pass through
        ``delta``.  None: they must."""
        ...


class ResponseFormat(Protocol):
    """How the response to one request is written."""

    terminator: bytes
    """What ends a stream, behind its last event; also what is left of a stream whose events were all sent."""

    def stream(self, head: ResponseHead, usage: Callable[[], TokenUsage]) -> StreamEncoder:
        """The encoder of a streamed response.  ``usage``: so far."""
        ...

    def complete(self, head: ResponseHead, choices: Sequence[CompletedChoice], usage: TokenUsage) -> bytes:
        """A response that is not streamed."""
        ...

    async def persist(self) -> None:
        """Keeps the complete response where that is wanted, before its client gets its end.

        Called behind ``complete``, or behind its encoder's ``end``.
        """
        ...


class TranslatedRequest(NamedTuple):
    """A request in the words of chats or completions, and how its response is written."""

    body: JsonObject
    format: ResponseFormat


class GenerationApi(Protocol):
    """One API that generates text."""

    @property
    def id_prefix(self) -> str:
        """Prefix of ids, such as ``chatcmpl-``."""
        ...

    @property
    def operation(self) -> str:
        """As OpenTelemetry calls it (``gen_ai.operation.name``)."""
        ...

    @property
    def clamps_length(self) -> bool:
        """Whether a length beyond what the context leaves is cut to that, instead of refused."""
        ...

    async def translate(self, body: JsonObject, context: RequestContext) -> TranslatedRequest:
        """The request that ``body`` asks for.  Raises RequestError."""
        ...


def unset_unless(value: Any, wanted: bool) -> Any:
    """``value`` if ``wanted``, else UNSET."""
    return value if wanted else UNSET
