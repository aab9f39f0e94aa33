"""``/v1/responses`` on the wire: responses and their events as OpenAI writes them.

A body becomes that of a chat (``RequestProcessor.responses``); here is how its response is written and stored.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.api import json_strict
from penstock.api.errors import ErrorResponse
from penstock.api.http import INLINE_BODY_BYTES
from penstock.api.openai.response_events import CustomInputDecoder, ResponseEvents, response_of_item
from penstock.api.response_format import (
    CompletedChoice,
    ResponseHead,
    StreamEvent,
    TextEventParts,
    TokenUsage,
    TranslatedRequest,
    encode,
)
from penstock.api.response_store import PendingResponses, ResponseStore, StoredConversation
from penstock.config.limits import RequestLimits
from penstock.errors import QueueFull, RequestError
from penstock.interfaces import (
    JsonObject,
    OutputDelta,
    RequestContext,
    RequestProcessor,
    ResponsesRequest,
    TokenText,
    ToolCallDelta,
    ToolTarget,
)
from penstock.types import FinishReason

EVENTS_PER_TOKEN = 8
"""At least as many as one token can cause: it may open an item, grow and close it, and close the one before."""

_decode = msgspec.json.decode


class ResponsesApi:
    """``GenerationApi`` of responses."""

    id_prefix = "resp_"
    operation = "chat"
    clamps_length = False

    def __init__(self, processor: RequestProcessor, store: ResponseStore | None, limits: RequestLimits) -> None:
        """``store`` None: nothing is stored."""
        self._processor = processor
        self._store = store
        self._limits = limits
        self._pending = PendingResponses(limits.max_pending_response_bytes)

    async def translate(self, body: JsonObject, context: RequestContext) -> TranslatedRequest:
        """The chat, and its format.  Raises RequestError, QueueFull."""
        history = StoredHistory(self._store, context.caller.tenant, self._limits, self._pending)
        request = await self._processor.responses(body, history)
        saving = None
        if self._store is not None and request.store:
            await history.extend(request.items)
            saving = _Saving(self._store, context.caller.tenant, history)
        echo = {**request.echo, "store": saving is not None}
        return TranslatedRequest(request.chat, ResponsesFormat(request, echo, saving, history))


class _StoredOutput(msgspec.Struct):
    """The output of a stored response, not decoded."""

    output: msgspec.Raw


class StoredHistory:
    """``ResponseHistory`` of one request, and the conversation up to it.  Its bytes are reserved while it lives."""

    def __init__(
        self, store: ResponseStore | None, tenant: str, limits: RequestLimits, pending: PendingResponses
    ) -> None:
        self._store = store
        self._tenant = tenant
        self._limits = limits
        self._pending = pending
        self._json = b"[]"

    @property
    def json(self) -> bytes:
        """All items, as a JSON array."""
        return self._json

    async def conversation(self, response: str) -> Sequence[Any]:
        found = None if self._store is None else await self._store.load(self._tenant, response)
        if found is None:
            kept = (
                "stores no responses"
                if self._store is None
                else f"keeps them for {self._limits.stored_responses_s:g} s"
            )
            raise RequestError(
                f"Previous response with id '{response[:64]}' not found. This server {kept}; send the whole input.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        self._hold(len(found.items) + len(found.response))
        self._json = _joined(found.items, bytes(_decode(found.response, type=_StoredOutput).output))
        items: list[Any] = await self._parsed(self._json)
        return items

    async def items(self, names: Sequence[str]) -> Mapping[str, Any]:
        owners = {name: owner for name in names if (owner := response_of_item(name)) is not None}
        responses = list(dict.fromkeys(owners.values()))
        most = self._limits.max_referenced_responses
        if len(responses) > most:
            raise RequestError(
                f"The input refers to items of {len(responses)} responses; at most {most} are allowed "
                "(max_referenced_responses). Send the items themselves.",
                param="input",
                code="array_above_max_length",
            )
        loaded = await self._store.load_responses(self._tenant, responses) if self._store and responses else {}
        self._hold(sum(map(len, loaded.values())))
        found: dict[str, Any] = {}
        for response in loaded.values():
            output = await self._parsed(bytes(_decode(response, type=_StoredOutput).output))
            found |= {item["id"]: item for item in output if item["id"] in owners}
        return found

    async def extend(self, items: Sequence[Any]) -> None:
        """The request's own items, where the conversation is to be stored.  Raises RequestError for too many."""
        added = encode(items)
        self._hold(len(added))
        self._json = _joined(self._json, added)
        most = self._limits.max_stored_response_bytes
        if len(self._json) > most:
            raise RequestError(
                f"The conversation has {len(self._json)} bytes of JSON, and at most {most} can be stored "
                "(max_stored_response_bytes). Send 'store': false.",
                param="store",
                code="response_too_large",
            )
        if len(self._json) > INLINE_BODY_BYTES:  # what is stored can be parsed later
            await asyncio.to_thread(self._weighed, self._json)

    async def _parsed(self, raw: bytes) -> Any:
        """As bodies are parsed: memory is reserved first, and others get turns."""
        if len(raw) <= INLINE_BODY_BYTES:
            return _decode(raw)
        self._hold(await asyncio.to_thread(self._weighed, raw))
        return await asyncio.to_thread(json_strict.parse_json, raw, max_depth=self._limits.max_json_depth + 2)

    def _weighed(self, raw: bytes) -> int:
        """Bytes that its values will take.  Raises RequestError for too many values."""
        limits = self._limits
        return json_strict.estimated_bytes(
            raw, max_values=limits.max_json_values, max_containers=limits.max_json_containers
        )

    def _hold(self, nbytes: int) -> None:
        if not self._pending.reserve(nbytes):
            raise QueueFull(
                "The open requests with stored conversations take as much memory as they may "
                "(max_pending_response_bytes). Try again, or send 'store': false."
            )
        weakref.finalize(self, self._pending.release, nbytes).atexit = False


def _joined(first: bytes, second: bytes) -> bytes:
    """Two JSON arrays as one."""
    if len(first) <= 2 or len(second) <= 2:
        return first if len(second) <= 2 else second
    return first[:-1] + b"," + second[1:]


class _Saving:
    """Where the response to one request is stored."""

    def __init__(self, store: ResponseStore, tenant: str, history: StoredHistory) -> None:
        self._store = store
        self._tenant = tenant
        self._history = history

    async def save(self, name: str, response: bytes, deltas: list[list[int]]) -> None:
        """Keeps it; what cannot be kept is logged by the store."""
        kept = StoredConversation(id=name, response=response, items=self._history.json, deltas=encode(deltas))
        await self._store.save(self._tenant, kept)


class _Completed(msgspec.Struct, frozen=True):
    """A complete response, to be stored."""

    id: str
    response: bytes
    deltas: list[list[int]]


class ResponsesFormat:
    """``ResponseFormat`` of one request."""

    terminator = b""

    def __init__(
        self, request: ResponsesRequest, echo: JsonObject, saving: _Saving | None, history: StoredHistory
    ) -> None:
        """``history`` is held for its reservation."""
        self._tools = request.tools
        self._summary = request.summary
        self._seal = request.seal
        self._echo = encode(echo)[1:]
        self._saving = saving
        self._history = history if saving is not None else None
        self._completed: _Completed | None = None

    def stream(self, head: ResponseHead, usage: Callable[[], TokenUsage]) -> _ResponsesStreamEncoder:
        return _ResponsesStreamEncoder(self, head, self._writer(head), usage)

    def complete(self, head: ResponseHead, choices: Sequence[CompletedChoice], usage: TokenUsage) -> bytes:
        (choice,) = choices
        writer = self._writer(head)
        for part in choice.ordered_parts():
            writer.add(part)
        writer.finish(choice.finish)
        return self.completed(writer, head, choice.finish, usage)

    async def persist(self) -> None:
        completed, saving = self._completed, self._saving
        if completed is not None and saving is not None:
            await saving.save(completed.id, completed.response, completed.deltas)
        self._completed = self._saving = self._history = None

    def completed(self, writer: _OutputWriter, head: ResponseHead, finish: FinishReason, usage: TokenUsage) -> bytes:
        """The last event is written; the response that it has, which ``persist`` stores."""
        cut = finish is FinishReason.LENGTH
        status = "incomplete" if cut else "completed"
        fields: dict[str, Any] = {"usage": _usage(usage)}
        fields |= {"incomplete_details": {"reason": "max_output_tokens"}} if cut else {"completed_at": int(time.time())}
        response = writer.events.lifecycle(f"response.{status}", status, **fields)
        self._completed = _Completed(head.id, response, writer.events.deltas)
        return response

    def _writer(self, head: ResponseHead) -> _OutputWriter:
        def snapshot(status: str, output: Sequence[Any], **fields: Any) -> bytes:
            return response_json(head, self._echo, status, output, **fields)

        options = _OutputOptions(tools=self._tools, summary=self._summary, seal=self._seal, logprobs=head.logprobs)
        return _OutputWriter(ResponseEvents(head.id, snapshot), options)


def response_json(head: ResponseHead, echo: bytes, status: str, output: Sequence[Any], **fields: Any) -> bytes:
    """The response object.  ``echo``: the JSON of the fields that it repeats, without its first brace."""
    own = {
        "id": head.id,
        "object": "response",
        "created_at": head.created,
        "completed_at": None,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": head.model,
        "output": output,
        "usage": None,
        "system_fingerprint": head.system_fingerprint,
        "penstock": {"seed": head.seed},
        **fields,
    }
    return encode(own)[:-1] + b"," + echo


def _usage(used: TokenUsage) -> dict[str, Any]:
    cached = used.prompt_tokens_details.cached_tokens
    shown: dict[str, Any] = {
        "input_tokens": used.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": used.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": used.completion_tokens_details.reasoning_tokens},
        "total_tokens": used.total_tokens,
    }
    return shown if used.penstock is msgspec.UNSET else shown | {"penstock": used.penstock}


class _OutputOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the output of one request is written."""

    tools: Mapping[str, ToolTarget]
    summary: bool
    seal: Callable[[str], str] | None
    logprobs: bool


class _OutputWriter:
    """From deltas of a chat to output items, one open at a time."""

    def __init__(self, events: ResponseEvents, options: _OutputOptions) -> None:
        self.events = events
        self._options = options
        self._call = -1  # index of the open call
        self._input: CustomInputDecoder | None = None  # of an open custom call
        self._logprobs: list[Any] = []  # of tokens that have shown no text yet

    def add(self, piece: OutputDelta) -> None:
        """What one delta adds."""
        events, options = self.events, self._options
        if options.logprobs:
            self._logprobs += _logprobs(piece.logprobs)
        for part in piece.parts or (piece,):
            if part.reasoning:
                self._open("reasoning", summary=options.summary, seal=options.seal)
                events.grow(part.reasoning)
            if part.text:
                self._open("message")
                logprobs, self._logprobs = self._logprobs, []
                events.grow(part.text, logprobs)
            for call in part.calls:
                self._add_call(call)

    def finish(self, finish: FinishReason) -> None:
        """Closes what is open; a response without any output has an empty message."""
        if self.events.item is None and not self.events.output:
            self._open("message")
        self._close("incomplete" if finish is FinishReason.LENGTH else "completed")

    def _open(self, kind: str, **fields: Any) -> None:
        item = self.events.item
        if item is None or item.kind != kind:
            self._close()
            self.events.open(kind, **fields)

    def _close(self, status: str = "completed") -> None:
        decoder, self._input, self._call = self._input, None, -1
        if decoder is not None and (rest := decoder.finish()):
            self.events.grow(rest)
        if self.events.item is not None:
            self.events.close(status)

    def _continue_call(self, part: ToolCallDelta) -> bool:
        """Whether this is more of the open call."""
        if part.index != self._call:
            return False
        text = part.arguments if self._input is None else self._input.push(part.arguments)
        if text:
            self.events.grow(text)
        return True

    def _add_call(self, part: ToolCallDelta) -> None:
        """More of the open call, or the beginning of the next."""
        if not self._continue_call(part):
            self._close()
            target = self._options.tools.get(part.name or "") or ToolTarget(name=part.name or "")
            custom = target.text_argument is not None
            if target.text_argument is not None:
                self._input = CustomInputDecoder(target.text_argument)
            self.events.open("custom_tool_call" if custom else "function_call", target=target, call_id=part.id or "")
            self._call = part.index
            self._continue_call(part)


class _ResponsesStreamEncoder:
    """``StreamEncoder`` of responses."""

    def __init__(
        self, form: ResponsesFormat, head: ResponseHead, writer: _OutputWriter, usage: Callable[[], TokenUsage]
    ) -> None:
        self._form = form
        self._head = head
        self._writer = writer
        self._events = writer.events
        self._usage = usage
        self._finish = FinishReason.STOP

    def begin(self, choice: int) -> Sequence[StreamEvent]:
        self._events.lifecycle("response.created", "in_progress")
        self._events.lifecycle("response.in_progress", "in_progress")
        return self._events.pop_events()

    def delta(self, choice: int, piece: OutputDelta) -> Sequence[StreamEvent]:
        self._number_after(piece.tokens)
        self._writer.add(piece)
        return self._events.pop_events()

    def finish(self, choice: int, last: OutputDelta) -> Sequence[StreamEvent]:
        self._number_after(last.tokens + 1)
        self._finish = last.finish or FinishReason.STOP
        self._writer.finish(self._finish)
        return self._events.pop_events()

    def end(self) -> Sequence[StreamEvent]:
        self._form.completed(self._writer, self._head, self._finish, self._usage())
        return self._events.pop_events()

    def error(self, error: ErrorResponse) -> StreamEvent:
        """``response.failed``, with what there is of the output."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        shown = {"code": code, "message": error.message, "type": error.type, "param": error.param}
        self._events.pop_events()
        self._events.lifecycle("response.failed", "failed", error=shown, usage=_usage(self._usage()))
        return self._events.pop_events()[-1]

    def text_parts(self, choice: int) -> TextEventParts | None:
        """Every event has a number of its own."""
        return None

    def _number_after(self, tokens: int) -> None:
        """Another run may have batched tokens otherwise, and so numbered them: in a resumed stream, numbers go on above
        all that its client can have."""
        if self._head.resumed:
            self._events.skip_to(EVENTS_PER_TOKEN * (tokens + 1))


def _logprobs(tokens: Iterable[TokenText]) -> list[dict[str, Any]]:
    return [
        {
            "token": token.shown,
            "logprob": token.logprob,
            "bytes": list(token.raw),
            "top_logprobs": [{"token": top.shown, "logprob": top.logprob, "bytes": list(top.raw)} for top in token.top],
        }
        for token in tokens
    ]
