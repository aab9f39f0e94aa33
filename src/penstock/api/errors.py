"""The error tree as HTTP: status, headers, and the envelope of each API.

Messages and codes are defined with each error in ``penstock.errors``.  Any other exception is an internal error, whose
details are not sent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from penstock.errors import (
    CapacityError,
    MethodNotAllowed,
    PenstockError,
    PromptTooLong,
    RequestError,
    Unauthorized,
    WorkerError,
)
from penstock.telemetry.log import log_event

log = logging.getLogger("penstock.api")

Header = tuple[bytes, bytes]

JSON_TYPE: Header = (b"content-type", b"application/json")
_encode = msgspec.json.Encoder().encode


class ClientDisconnected(Exception):  # noqa: N818 - never sent
    """The client has closed the connection."""


class ErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    """An error as clients may see it."""

    status: int
    message: str
    type: str  # in OpenAI's words
    param: str | None = None
    code: str | None = None
    headers: tuple[Header, ...] = ()
    too_long: PromptTooLong | None = None  # the error, where it is this one: each API has its own fields that help
    request_id: str = ""  # as the headers have it

    @property
    def body(self) -> bytes:
        """OpenAI's ``{"error": {...}}``."""
        return _encode({"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}})


ErrorFormat = Callable[[ErrorResponse], bytes]
"""How one API writes errors."""


def openai_error(error: ErrorResponse) -> bytes:
    """OpenAI's envelope."""
    return error.body


MESSAGES_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(error: ErrorResponse) -> bytes:
    """Anthropic's envelope.  ``code`` is ours; prompts that are too long are told in the words that agents look for."""
    message, long = error.message, error.too_long
    if long is not None:
        advice = long.advice(None, cuts=False)
        message = f"prompt is too long: {long.prompt_tokens} tokens > {long.limit} maximum. {advice}"
    default = "invalid_request_error" if error.status < 500 else "api_error"
    told = {"type": _ANTHROPIC_TYPES.get(error.status, default), "message": message, "code": error.code}
    return _encode({"type": "error", "error": told, "request_id": error.request_id or None})


_RESPONSES_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of chats, and what they are called in responses, whose bodies are translated before they are checked."""


def responses_error(error: ErrorResponse) -> bytes:
    """OpenAI's envelope, with the names that fields have in responses."""
    given = error.param
    if given is None:
        return error.body
    if error.too_long is not None:
        advice = error.too_long.advice("max_output_tokens", cuts=False)
        return msgspec.structs.replace(error, param="input", message=advice).body
    if given.startswith("messages"):
        meant = "input"
    else:
        chat = next((name for name in _RESPONSES_NAMES if given == name or given.startswith(f"{name}.")), None)
        meant = given if chat is None else _RESPONSES_NAMES[chat] + given[len(chat) :]
    message = error.message.replace(f"'{given}'", f"'{meant}'")
    return msgspec.structs.replace(error, param=meant, message=message).body


def error_format_of(path: str) -> ErrorFormat:
    """The envelope in which clients of ``path`` expect errors, whoever raises them."""
    if path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/"):
        return anthropic_error
    return responses_error if path == RESPONSES_PATH else openai_error


def error_response(error: BaseException) -> ErrorResponse:
    """The response to ``error``."""
    if isinstance(error, RequestError):
        return ErrorResponse(
            status=error.status,
            message=error.message,
            type=error.type,
            param=error.param,
            code=error.code,
            headers=_request_headers(error),
            too_long=error if isinstance(error, PromptTooLong) else None,
        )
    if isinstance(error, CapacityError | WorkerError):
        wait = error.retry_after if isinstance(error, CapacityError) else 1
        return ErrorResponse(
            status=error.status,
            message=error.message,
            type=error.type,
            code=error.code,
            headers=((b"retry-after", str(wait).encode()),),
        )
    return ErrorResponse(status=500, message="The server had an error.", type="server_error", code="internal_error")


def logged_error_response(error: BaseException, request_id: str = "") -> ErrorResponse:
    """As ``error_response``, and logs errors of the server, unexpected ones with a traceback."""
    answer = msgspec.structs.replace(error_response(error), request_id=request_id)
    if not isinstance(error, PenstockError):
        log.error("a request failed", exc_info=error)
    elif answer.status >= 500:
        log_event(log, logging.WARNING, "request not served", status=answer.status, error=type(error).__name__)
    return answer


def error_code(error: BaseException) -> str:
    """One word for ``error`` in logs: the code that its client gets, or its type."""
    return str(getattr(error, "code", None) or type(error).__name__)


def _request_headers(error: RequestError) -> tuple[Header, ...]:
    if isinstance(error, Unauthorized):
        return ((b"www-authenticate", b"Bearer"),)
    if isinstance(error, MethodNotAllowed):
        return ((b"allow", error.allow.encode("latin-1", "replace")),)
    return ()
