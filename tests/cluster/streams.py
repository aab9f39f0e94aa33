"""A client that takes an answer apart: every streamed token with its logprob, when it came, how it ended.

It never retries: what a test sees is what one connection saw.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
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


def _take(answer: Answer, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        raise BrokenAnswerError(f"error in the stream: {chunk['error']}")
    answer.id = answer.id or chunk["id"]
    if "penstock" in chunk:
        answer.seed = chunk["penstock"]["seed"]
    if chunk.get("usage"):
        answer.usage = chunk["usage"]
    for part in chunk["choices"]:
        choice = answer.choices.setdefault(part["index"], Choice())
        if choice.finish is not None:
            raise BrokenAnswerError(f"choice {part['index']} went on after its end: {part}")
        choice.text += part["text"]
        choice.finish = part["finish_reason"]
        if part.get("logprobs"):
            choice.tokens += part["logprobs"]["tokens"]
            choice.logprobs += part["logprobs"]["token_logprobs"]
            choice.top += part["logprobs"].get("top_logprobs") or []
        if part["text"]:
            answer.times.append(time.monotonic())


async def stream_completion(
    client: httpx.AsyncClient,
    url: str,
    body: dict[str, Any],
    *,
    on_chunk: Callable[[Answer], None] | None = None,
    hang_up_after: int | None = None,
) -> Answer:
    """Stream one ``/v1/completions`` answer to its end.

    ``on_chunk`` is called after each event.  With ``hang_up_after`` the connection is closed after so many events, and
    the answer's ``done`` stays False.  Raises BrokenAnswerError for any status but 200, an error event, or a stream
    that ends without ``[DONE]``.
    """
    answer = Answer()
    payload = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", f"{url}/v1/completions", json=payload) as response:
        if response.status_code != 200:
            await response.aread()
            raise BrokenAnswerError(f"status {response.status_code}: {response.text}")
        events = 0
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                answer.done = True
                break
            _take(answer, json.loads(line[6:]))
            events += 1
            if on_chunk:
                on_chunk(answer)
            if hang_up_after is not None and events >= hang_up_after:
                return answer
    if not answer.done:
        raise BrokenAnswerError(f"the stream ended without [DONE] after {events} events")
    if any(choice.finish is None for choice in answer.choices.values()):
        raise BrokenAnswerError("a choice has no finish_reason")
    return answer


async def keyed_completion(
    client: httpx.AsyncClient,
    url: str,
    body: dict[str, Any],
    *,
    key: str,
    on_chunk: Callable[[Answer], None] | None = None,
    hang_up_after: int | None = None,
) -> Answer:
    """As ``stream_completion``, with an idempotency key: a broken stream is asked for again from where it broke off.

    Waits and asks again while nobody answers, or with 503, be it in the stream.  Raises BrokenAnswerError for any other
    refusal.
    """
    answer, last = Answer(), ""
    payload = {**body, "stream": True, "stream_options": {"include_usage": True}}
    events = 0
    while not answer.done:
        headers = {"Idempotency-Key": key, "x-penstock-explain": "1"} | ({"Last-Event-ID": last} if last else {})
        try:
            async with client.stream("POST", f"{url}/v1/completions", json=payload, headers=headers) as response:
                if response.status_code != 200:
                    await response.aread()
                    if response.status_code != 503:
                        raise BrokenAnswerError(f"status {response.status_code}: {response.text}")
                    await asyncio.sleep(AGAIN_S)
                    continue
                answer.route = response.headers.get("x-penstock-route", answer.route)
                async for name, data in _events(response):
                    if data == "[DONE]":
                        answer.done = True
                        break
                    chunk = json.loads(data)
                    if chunk.get("error", {}).get("code") == "service_unavailable":
                        break  # this gateway ends; another has the answer
                    last = name
                    _take(answer, chunk)
                    events += 1
                    if on_chunk:
                        on_chunk(answer)
                    if hang_up_after is not None and events >= hang_up_after:
                        return answer
        except httpx.TransportError:
            pass
        if not answer.done:
            answer.resumed += 1
            await asyncio.sleep(AGAIN_S)
    if any(choice.finish is None for choice in answer.choices.values()):
        raise BrokenAnswerError("a choice has no finish_reason")
    return answer


async def _events(response: httpx.Response) -> AsyncIterator[tuple[str, str]]:
    """(id, data) of each event that came whole."""
    name = data = ""
    async for line in response.aiter_lines():
        if line.startswith("id: "):
            name = line[4:]
        elif line.startswith("data: "):
            data = line[6:]
        elif not line and data:
            yield name, data
            data = ""


def make_client() -> httpx.AsyncClient:
    """A client without retries, without proxies, with room for many streams."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(120.0),
        limits=httpx.Limits(max_connections=64),
        trust_env=False,
        http2=False,
        verify=False,
    )


async def all_answers(url: str, bodies: list[dict[str, Any]], *, together: bool) -> list[Answer]:
    """Answers to all bodies, sent at once or one after the other."""
    async with make_client() as client:
        if together:
            return await asyncio.gather(*(stream_completion(client, url, body) for body in bodies))
        return [await stream_completion(client, url, body) for body in bodies]
