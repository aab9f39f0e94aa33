"""``/v1/messages`` on the wire: messages and their events as Anthropic writes them.

::

    message_start, ping
      content_block_start     thinking, text or tool_use
        content_block_delta   thinking_delta, text_delta or input_json_delta; thinking ends with a signature_delta
      content_block_stop
    message_delta             why it ended, and the usage
    message_stop

One block is open at a time.  White space alone makes no block of text.  Knows nothing about requests or tokens.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from penstock.api.errors import ErrorResponse, anthropic_error
from penstock.api.response_format import (
    SAMPLE_DELTA,
    CompletedChoice,
    ResponseHead,
    StreamEvent,
    TextEventParts,
    TokenUsage,
    TranslatedRequest,
    encode,
)
from penstock.api.sse import sse_event_without_id
from penstock.interfaces import (
    HIDDEN_THINKING,
    JsonObject,
    OutputDelta,
    RequestContext,
    RequestProcessor,
    ToolCallDelta,
)
from penstock.types import FinishReason

SIGNATURE = "penstock"
"""Of thinking: clients return it, and nothing here is proved by it."""

_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}


class MessagesApi:
    """``GenerationApi`` of messages."""

    id_prefix = "msg_"
    operation = "chat"
    clamps_length = True  # clients must name a length, and agents name one beyond what small contexts have

    def __init__(self, processor: RequestProcessor) -> None:
        self._processor = processor
        self._shown, self._hidden = MessagesFormat(), MessagesFormat(hides_thinking=True)

    async def translate(self, body: JsonObject, context: RequestContext) -> TranslatedRequest:
        """The chat.  Raises RequestError."""
        chat = await self._processor.messages(body)
        hides = (body.get("thinking") or {}).get("display") == "omitted"
        return TranslatedRequest(chat, self._hidden if hides else self._shown)


class MessagesFormat:
    """``ResponseFormat`` of messages."""

    terminator = b""

    def __init__(self, *, hides_thinking: bool = False) -> None:
        """``hides_thinking``: a response shows that there was some, and has its text in the signature."""
        self._hides_thinking = hides_thinking

    def stream(self, head: ResponseHead, usage: Callable[[], TokenUsage]) -> MessagesEncoder:
        return MessagesEncoder(head, usage, hides_thinking=self._hides_thinking)

    def complete(self, head: ResponseHead, choices: Sequence[CompletedChoice], usage: TokenUsage) -> bytes:
        """The one choice: its blocks in the order of the events that a stream would have."""
        (choice,) = choices
        content: list[dict[str, Any]] = []
        for part in choice.ordered_parts():
            if part.reasoning:
                hides = self._hides_thinking
                signature = _hidden_signature(part.reasoning) if hides else SIGNATURE
                shown = "" if hides else part.reasoning
                content.append({"type": "thinking", "thinking": shown, "signature": signature})
            elif part.text.strip():
                content.append({"type": "text", "text": part.text})
            content += [
                {"type": "tool_use", "id": call.id or "", "name": call.name or "", "input": call_input(call.arguments)}
                for call in part.calls
            ]
        ending = {
            "stop_reason": _stop_reason(head, choice.finish, choice.stop_text),
            "stop_sequence": choice.stop_text,
        }
        return encode(_message(head, content, usage) | ending | {"penstock": {"seed": head.seed}})

    async def persist(self) -> None:
        pass


class MessagesEncoder:
    """``StreamEncoder`` of messages."""

    def __init__(self, head: ResponseHead, usage: Callable[[], TokenUsage], *, hides_thinking: bool = False) -> None:
        self._head = head
        self._usage = usage
        self._hides_thinking = hides_thinking
        self._hidden: list[str] = []  # thinking of the open block
        self._open = ""  # the type of the open block
        self._index = -1  # of the latest block
        self._space = ""  # that text begins with, until there is more

    def begin(self, choice: int) -> Sequence[StreamEvent]:
        """The message without content, and a ping as Anthropic sends one."""
        message = _message(self._head, [], self._usage()) | {"penstock": {"seed": self._head.seed}}
        return _event("message_start", message=message), _event("ping")

    def delta(self, choice: int, piece: OutputDelta) -> Sequence[StreamEvent]:
        """What the piece adds, block by block."""
        events: list[StreamEvent] = []
        for part in piece.parts or (piece,):
            if part.reasoning:
                self._continue("thinking", {"thinking": "", "signature": ""}, events)
                if self._hides_thinking:
                    self._hidden.append(part.reasoning)
                else:
                    events.append(self._delta("thinking_delta", thinking=part.reasoning))
            if part.text:
                self._add_text(part.text, events)
            for call in part.calls:
                self._add_call(call, events)
        return events

    def finish(self, choice: int, last: OutputDelta) -> Sequence[StreamEvent]:
        """The end of the open block, and why the message ended."""
        assert last.finish is not None
        events: list[StreamEvent] = []
        self._close(events)
        ending = {"stop_reason": _stop_reason(self._head, last.finish, last.stop_text), "stop_sequence": last.stop_text}
        events.append(_event("message_delta", delta=ending, usage=message_usage(self._usage())))
        return events

    def end(self) -> Sequence[StreamEvent]:
        return (_event("message_stop"),)

    def error(self, error: ErrorResponse) -> StreamEvent:
        """The envelope of other errors."""
        return StreamEvent(anthropic_error(error), b"error")

    def text_parts(self, choice: int) -> TextEventParts | None:
        """While a block of text is open."""
        if self._open != "text":
            return None
        return TextEventParts.of(self._delta("text_delta", text=SAMPLE_DELTA.text))

    def _add_text(self, text: str, events: list[StreamEvent]) -> None:
        if self._open != "text":
            text = self._space + text
            if not text.strip():
                self._space = text
                return
            self._continue("text", {"text": ""}, events)
        events.append(self._delta("text_delta", text=text))

    def _add_call(self, call: ToolCallDelta, events: list[StreamEvent]) -> None:
        if call.id is not None:
            self._close(events)
            self._start("tool_use", {"id": call.id, "name": call.name or "", "input": {}}, events)
        if call.arguments:
            events.append(self._delta("input_json_delta", partial_json=call.arguments))

    def _continue(self, kind: str, block: dict[str, Any], events: list[StreamEvent]) -> None:
        """Opens a block of this type unless one is open."""
        if self._open != kind:
            self._close(events)
            self._start(kind, block, events)

    def _start(self, kind: str, block: dict[str, Any], events: list[StreamEvent]) -> None:
        self._open, self._space = kind, ""
        self._index += 1
        events.append(_event("content_block_start", index=self._index, content_block={"type": kind, **block}))

    def _close(self, events: list[StreamEvent]) -> None:
        if not self._open:
            return
        if self._open == "thinking":
            signature = _hidden_signature("".join(self._hidden)) if self._hides_thinking else SIGNATURE
            self._hidden.clear()
            events.append(self._delta("signature_delta", signature=signature))
        self._open = ""
        events.append(_event("content_block_stop", index=self._index))

    def _delta(self, kind: str, **fields: str) -> StreamEvent:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **fields})


def _hidden_signature(thinking: str) -> str:
    return HIDDEN_THINKING + b64encode(thinking.encode()).decode()


def messages_error_event(error: ErrorResponse) -> bytes:
    """The last event of a stream that breaks off."""
    return sse_event_without_id(anthropic_error(error), b"error")


def _event(kind: str, **fields: Any) -> StreamEvent:
    return StreamEvent(encode({"type": kind, **fields}), kind.encode())


def _message(head: ResponseHead, content: list[dict[str, Any]], usage: TokenUsage) -> dict[str, Any]:
    return {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": message_usage(usage),
    }


def message_usage(usage: TokenUsage) -> dict[str, Any]:
    """``input_tokens`` are those that no cache had."""
    cached = usage.prompt_tokens_details.cached_tokens
    shown: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.completion_tokens_details.reasoning_tokens},
    }
    return shown if usage.penstock is msgspec.UNSET else shown | {"penstock": usage.penstock}


def _stop_reason(head: ResponseHead, finish: FinishReason, stop_text: str | None) -> str:
    if stop_text is not None and finish is FinishReason.STOP:
        return "stop_sequence"
    if finish is FinishReason.LENGTH and head.length_clamped:
        return "model_context_window_exceeded"
    return _STOP_REASONS[finish]


def call_input(arguments: str) -> Any:
    """The arguments of a call as an object; what is none is kept as a text, as Anthropic advises clients to."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}
