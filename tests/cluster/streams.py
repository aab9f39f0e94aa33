"""A client of every generation API that takes an answer apart: each text with its logprobs, when it came, how it ended.

A body tells which API it is for (``api_of``), and what comes back has one form whichever that was.  It never retries:
what a test sees is what one connection saw.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Choice:
    """One choice as it was streamed."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    top: list[Any] = field(default_factory=list)
    finish: str | None = None


@dataclass
class Answer:
    """A whole streamed answer.  ``identical`` is what law 1 is about; times and cache hits are not in it."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    done: bool = False
    times: list[float] = field(default_factory=list)
    id: str = ""
    route: str = ""  # which workers serve it, as a header tells
    resumed: int = 0  # how often it was asked for again
    sequence: int = -1  # the last event's number, where events have numbers

    @property
    def identical(self) -> dict[str, Any]:
        """Everything that must not depend on how the answer was served."""
        return {
            "choices": {index: vars(choice) for index, choice in sorted(self.choices.items())},
            "completion_tokens": self.usage.get("completion_tokens"),
            "prompt_tokens": self.usage.get("prompt_tokens"),
        }

    def begins(self, whole: Answer) -> bool:
        """Is what there is of it the beginning of this one?  For a client that has hung up."""
        for index, choice in self.choices.items():
            other = whole.choices.get(index)
            if other is None or not other.text.startswith(choice.text):
                return False
            if choice.logprobs != other.logprobs[: len(choice.logprobs)]:
                return False
        return True

    @property
    def cached_tokens(self) -> int:
        details: dict[str, int] = self.usage.get("prompt_tokens_details") or {}
        return details.get("cached_tokens", 0)


AGAIN_S = 0.05
"""Before a stream that broke off is asked for again."""


class BrokenAnswerError(AssertionError):
    """The server said or did something that a client must never see."""


@dataclass(frozen=True)
class Api:
    """One generation API: where it is, what asks it for a stream, and how its events are read."""

    name: str
    path: str
    asks: Mapping[str, Any]
    take: Callable[[Answer, dict[str, Any]], None]


def api_of(body: Mapping[str, Any]) -> Api:
    """The API that a body is for, by the field that only this one has; Messages always with its ``system``."""
    return next(
        (api for field, api in (("prompt", COMPLETIONS), ("input", RESPONSES), ("system", MESSAGES)) if field in body),
        CHATS,
    )


def max_tokens_of(body: Mapping[str, Any]) -> int:
    """Of the answer, whatever the API calls it."""
    return int(body["max_output_tokens"] if "max_output_tokens" in body else body["max_tokens"])


def _begin(answer: Answer, identity: str) -> None:
    if answer.id and answer.id != identity:
        raise BrokenAnswerError(f"the answer was {answer.id} and is {identity} now")
    answer.id = identity


def _take_chunk(answer: Answer, chunk: dict[str, Any]) -> None:
    """Of completions and chats."""
    _begin(answer, chunk["id"])
    if "penstock" in chunk:
        answer.seed = chunk["penstock"]["seed"]
    if chunk.get("usage"):
        answer.usage = chunk["usage"]
    for part in chunk["choices"]:
        choice = answer.choices.setdefault(part["index"], Choice())
        if choice.finish is not None:
            raise BrokenAnswerError(f"choice {part['index']} went on after its end: {part}")
        text = part["text"] if "text" in part else part["delta"].get("content", "")
        choice.finish = part["finish_reason"]
        if part.get("logprobs"):
            choice.tokens += part["logprobs"]["tokens"]
            choice.logprobs += part["logprobs"]["token_logprobs"]
            choice.top += part["logprobs"].get("top_logprobs") or []
        _add(answer, choice, text)


def _add(answer: Answer, choice: Choice, text: str) -> None:
    choice.text += text
    if text:
        answer.times.append(time.monotonic())


_STOP_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}


def _take_message_event(answer: Answer, event: dict[str, Any]) -> None:
    """Of Anthropic's Messages."""
    choice = answer.choices.setdefault(0, Choice())
    match event["type"]:
        case "message_start":
            _begin(answer, event["message"]["id"])
            _count_message(answer, event["message"]["usage"])
        case "content_block_delta":
            if choice.finish is not None:
                raise BrokenAnswerError(f"it went on after its end: {event}")
            _add(answer, choice, event["delta"].get("text", ""))
        case "message_delta":
            choice.finish = _STOP_REASONS[event["delta"]["stop_reason"]]
            _count_message(answer, event["usage"])
        case "message_stop":
            answer.done = True


def _count_message(answer: Answer, usage: dict[str, Any]) -> None:
    known = answer.usage
    cached = usage.get("cache_read_input_tokens", known.get("prompt_tokens_details", {}).get("cached_tokens", 0))
    if "input_tokens" in usage:
        known["prompt_tokens"] = usage["input_tokens"] + cached
    known["prompt_tokens_details"] = {"cached_tokens": cached}
    known["completion_tokens"] = usage["output_tokens"]


def _take_response_event(answer: Answer, event: dict[str, Any]) -> None:
    """Of OpenAI's Responses.  The last event must have all that was told before it."""
    choice = answer.choices.setdefault(0, Choice())
    if event["sequence_number"] <= answer.sequence:
        raise BrokenAnswerError(f"event {event['sequence_number']} behind {answer.sequence}: {event}")
    answer.sequence = event["sequence_number"]
    match event["type"]:
        case "response.created":
            _begin(answer, event["response"]["id"])
        case "response.output_text.delta":
            _add(answer, choice, event["delta"])
        case "response.completed" | "response.incomplete":
            whole = event["response"]
            text = "".join(
                part["text"] for item in whole["output"] if item["type"] == "message" for part in item["content"]
            )
            if text != choice.text:
                raise BrokenAnswerError(f"the whole response has {text!r}, its deltas {choice.text!r}")
            choice.finish = "stop" if whole["status"] == "completed" else "length"
            usage = whole["usage"]
            answer.usage = {
                "prompt_tokens": usage["input_tokens"],
                "prompt_tokens_details": usage["input_tokens_details"],
                "completion_tokens": usage["output_tokens"],
            }
            answer.done = True


_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
COMPLETIONS = Api("completions", "/v1/completions", _USAGE, _take_chunk)
CHATS = Api("chats", "/v1/chat/completions", _USAGE, _take_chunk)
MESSAGES = Api("messages", "/v1/messages", {"stream": True}, _take_message_event)
RESPONSES = Api("responses", "/v1/responses", {"stream": True}, _take_response_event)


def _error_of(event: dict[str, Any]) -> dict[str, Any] | None:
    """What an event says of an error; None: it is none."""
    if event.get("type") == "response.failed":
        event = event["response"]
    error: dict[str, Any] | None = event.get("error")
    return error


def _gateway_ends(error: dict[str, Any]) -> bool:
    """Whether another gateway has the rest.  Messages have types instead of codes, Responses one code for it."""
    retryable = ("service_unavailable", "server_error")
    return error.get("code") in retryable or error.get("type") in ("api_error", "overloaded_error")


def _take(answer: Answer, data: str, api: Api) -> None:
    """One event."""
    if data == "[DONE]":
        answer.done = True
        return
    event = json.loads(data)
    error = _error_of(event)
    if error is not None:
        raise BrokenAnswerError(f"error in the stream: {error}")
    api.take(answer, event)


async def stream_completion(
    client: httpx.AsyncClient,
    url: str,
    body: dict[str, Any],
    *,
    on_chunk: Callable[[Answer], None] | None = None,
    hang_up_after: int | None = None,
) -> Answer:
    """Stream the answer to a body of any API to its end.

    ``on_chunk`` is called after each event.  With ``hang_up_after`` the connection is closed after so many events, and
    the answer's ``done`` stays False.  Raises BrokenAnswerError for any status but 200, an error event, or a stream
    that ends too early.
    """
    answer, api = Answer(), api_of(body)
    events = 0
    async with client.stream("POST", f"{url}{api.path}", json={**body, **api.asks}) as response:
        if response.status_code != 200:
            await response.aread()
            raise BrokenAnswerError(f"status {response.status_code}: {response.text}")
        async for _, parts in _events(response):
            for data in parts:
                _take(answer, data, api)
                if answer.done:
                    break
                events += 1
                if on_chunk:
                    on_chunk(answer)
            if not answer.done and hang_up_after is not None and events >= hang_up_after:
                return answer
    return _whole(answer, events)


async def keyed_completion(
    client: httpx.AsyncClient,
    url: str | Sequence[str],
    body: dict[str, Any],
    *,
    key: str,
    on_chunk: Callable[[Answer], None] | None = None,
    hang_up_after: int | None = None,
) -> Answer:
    """As ``stream_completion``, with an idempotency key: a broken stream is asked for again from where it broke off.

    Waits and asks again while nobody answers, or with 503, be it in the stream.  Of several URLs, which are of gateways
    of one service, each attempt goes to the next.  Raises BrokenAnswerError for any other refusal.
    """
    answer, api, last, events = Answer(), api_of(body), "", 0
    for base in itertools.cycle([url] if isinstance(url, str) else url):
        if answer.done:
            break
        headers = {"Idempotency-Key": key, "x-penstock-explain": "1"} | ({"Last-Event-ID": last} if last else {})
        asked = client.stream("POST", f"{base}{api.path}", json={**body, **api.asks}, headers=headers)
        try:
            async with asked as response:
                if response.status_code != 200:
                    await response.aread()
                    if response.status_code not in (503, 529):
                        raise BrokenAnswerError(f"status {response.status_code}: {response.text}")
                    await asyncio.sleep(AGAIN_S)
                    continue
                answer.route = response.headers.get("x-penstock-route", answer.route)
                async for name, parts in _events(response):
                    if name is None:
                        broken = [
                            error for data in parts if data != "[DONE]" and (error := _error_of(json.loads(data)))
                        ]
                        if broken and _gateway_ends(broken[0]):
                            break
                        if broken:
                            raise BrokenAnswerError(f"error in the stream: {broken[0]}")
                        continue  # what broke off before its id comes again
                    last = name
                    for data in parts:
                        _take(answer, data, api)
                    if answer.done:
                        break
                    events += len(parts)
                    if on_chunk:
                        on_chunk(answer)
                    if hang_up_after is not None and events >= hang_up_after:
                        return answer
        except httpx.TransportError:
            pass
        if not answer.done:
            answer.resumed += 1
            await asyncio.sleep(AGAIN_S)
    return _whole(answer, events)


def _check_broken_off(parts: Sequence[str]) -> None:
    """What a stream ends with behind its last id comes again, unless it is an error that is final."""
    for error in filter(None, map(_error_of, map(json.loads, parts))):
        if not _gateway_ends(error):
            raise BrokenAnswerError(f"error in the stream: {error}")


def _whole(answer: Answer, events: int) -> Answer:
    if not answer.done:
        raise BrokenAnswerError(f"the stream ended too early, after {events} events")
    if any(choice.finish is None for choice in answer.choices.values()):
        raise BrokenAnswerError("a choice has no finish_reason")
    return answer


async def _events(response: httpx.Response) -> AsyncIterator[tuple[str | None, list[str]]]:
    """An event's id, and its data behind that of all events without an id before it: only where there is an id a stream
    can be resumed.  At the end, what came whole behind the last id, with None."""
    name: str | None = None
    parts: list[str] = []
    data = ""
    async for line in response.aiter_lines():
        if line.startswith("id: "):
            name = line[4:]
        elif line.startswith("data: "):
            data = line[6:]
        elif not line and data:
            parts.append(data)
            data = ""
            if name is not None:
                yield name, parts
                name, parts = None, []
    if parts:
        yield None, parts


def make_client(headers: Mapping[str, str] | None = None) -> httpx.AsyncClient:
    """A client without retries, without proxies, with room for many streams."""
    return httpx.AsyncClient(
        headers=headers,
        timeout=httpx.Timeout(120.0),
        limits=httpx.Limits(max_connections=64),
        trust_env=False,
        http2=False,
        verify=False,
    )


async def all_answers(
    url: str, bodies: list[dict[str, Any]], *, together: bool, headers: Mapping[str, str] | None = None
) -> list[Answer]:
    """Answers to all bodies, sent at once or one after the other."""
    async with make_client(headers) as client:
        if together:
            return await asyncio.gather(*(stream_completion(client, url, body) for body in bodies))
        return [await stream_completion(client, url, body) for body in bodies]


async def whole_completion(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Answer:
    """The answer to a body for completions that is not streamed, in the form of one that is."""
    response = await client.post(f"{url}{COMPLETIONS.path}", json=body)
    if response.status_code != 200:
        raise BrokenAnswerError(f"status {response.status_code}: {response.text}")
    answer = Answer()
    COMPLETIONS.take(answer, response.json())
    answer.done = True
    return _whole(answer, 1)


async def whole_answers(url: str, bodies: list[dict[str, Any]]) -> list[Answer]:
    """Answers to all bodies for completions, not streamed, asked for at once."""
    async with make_client() as client:
        return await asyncio.gather(*(whole_completion(client, url, body) for body in bodies))
