"""The few fields of OpenAI's streamed chunks and error bodies that a client here looks at."""

from __future__ import annotations

import msgspec


class Delta(msgspec.Struct):
    """What a chat chunk adds to its message."""

    content: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct):
    """One choice of a chunk, of either endpoint."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    def said(self) -> str:
        """The text that this chunk adds to the answer."""
        return (self.text if self.delta is None else self.delta.content) or ""

    def thought(self) -> str:
        """And to the reasoning before it."""
        return (self.delta.reasoning_content if self.delta is not None else None) or ""

    def added(self) -> str:
        """Both; empty when the chunk only opens or closes the stream."""
        return self.thought() + self.said()


class PromptDetails(msgspec.Struct):
    """Part of ``usage``."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Tokens as the server counts them."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptDetails | None = None


class ErrorBody(msgspec.Struct):
    """OpenAI's error envelope."""

    message: str = ""
    code: str | int | None = None


class Chunk(msgspec.Struct):
    """One streamed event, or the body of an error."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: ErrorBody | None = None


decode_chunk = msgspec.json.Decoder(Chunk).decode
"""Raises ``msgspec.DecodeError`` (also for fields of another type)."""


def error_of(body: bytes) -> ErrorBody:
    """The error that a body tells of; an empty one when it is none of OpenAI's shape."""
    try:
        return decode_chunk(body).error or ErrorBody()
    except msgspec.DecodeError:
        return ErrorBody()
