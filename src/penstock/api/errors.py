"""The error tree as HTTP: status, headers, and OpenAI's envelope.

Messages and codes are defined with each error in ``penstock.errors``.  Any other exception is an internal error, whose
details are not sent.
"""

from __future__ import annotations

import logging

import msgspec

from penstock.errors import CapacityError, MethodNotAllowed, PenstockError, RequestError, Unauthorized, WorkerError
from penstock.telemetry.log import log_event

log = logging.getLogger("penstock.api")

Header = tuple[bytes, bytes]

JSON_TYPE: Header = (b"content-type", b"application/json")
_encode = msgspec.json.Encoder().encode


class ClientDisconnected(Exception):  # noqa: N818 - never sent
    """The client has closed the connection."""


class ErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    """An error, ready to be sent."""

    status: int
    body: bytes
    headers: tuple[Header, ...] = ()


def error_response(error: BaseException) -> ErrorResponse:
    """The response to ``error``."""
    if isinstance(error, RequestError):
        return ErrorResponse(
            status=error.status,
            body=error_body(error.message, error.type, param=error.param, code=error.code),
            headers=_request_headers(error),
        )
    if isinstance(error, CapacityError):
        return ErrorResponse(
            status=error.status,
            body=error_body(error.message, error.type, code=error.code),
            headers=((b"retry-after", str(error.retry_after).encode()),),
        )
    if isinstance(error, WorkerError):
        return ErrorResponse(
            status=error.status,
            body=error_body(error.message, error.type, code=error.code),
            headers=((b"retry-after", b"1"),),
        )
    return ErrorResponse(status=500, body=error_body("The server had an error.", "server_error", code="internal_error"))


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """OpenAI's ``{"error": {...}}``."""
    return _encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def logged_error_response(error: BaseException) -> ErrorResponse:
    """As ``error_response``, and logs errors of the server, unexpected ones with a traceback."""
    answer = error_response(error)
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
