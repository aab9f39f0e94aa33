"""The span of an HTTP request: continues the caller's trace, returns it in a header, ends with the request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import msgspec

from penstock.api.errors import Header
from penstock.api.http import HttpExchange
from penstock.api.idempotency import TokenStreamSource
from penstock.api.response_format import TokenUsage
from penstock.clock import Clock
from penstock.interfaces import PreparedGeneration, TokenStream
from penstock.telemetry.spans import INTAKE, NO_SPAN, NoTracer, Span, Tracer
from penstock.types import RequestId, ValidRequest

TRACE_PARENT, TRACE_STATE = b"traceparent", b"tracestate"
"""W3C Trace Context, as callers send it."""

TRACE_RESPONSE = b"traceresponse"
"""The same of an answer: the trace that it is in."""


MAX_NAME_CHARS = 128
"""Of a model's name in a span."""


_UNRECORDED: AbstractContextManager[Span] = nullcontext(NO_SPAN)


def trace_headers(exchange: HttpExchange) -> list[Header]:
    """What the caller says of its trace.  Its state may come in several lines, which are one list (section 3.3.1)."""
    found = (TRACE_PARENT, exchange.header(TRACE_PARENT)), (TRACE_STATE, exchange.headers(TRACE_STATE))
    return [(name, value) for name, value in found if value]


class RequestTracing:
    """The request spans of one application.  Without a tracer it costs a call or two a request."""

    def __init__(self, tracer: Tracer, clock: Clock) -> None:
        self._tracer = tracer
        self._clock = clock
        self.on = not isinstance(tracer, NoTracer)

    def span(self, exchange: HttpExchange, operation: str, model: object) -> AbstractContextManager[Span]:
        """The scope of a request for ``model``, as its body says: an error that leaves it is the span's."""
        return self._recorded(exchange, operation, model) if self.on else _UNRECORDED

    @contextmanager
    def _recorded(self, exchange: HttpExchange, operation: str, model: object) -> Iterator[Span]:
        caller = {name.decode(): value.decode("latin-1") for name, value in trace_headers(exchange)}
        name = model[:MAX_NAME_CHARS] if isinstance(model, str) else ""
        span = self._tracer.root(caller, f"{operation} {name}".strip(), self._clock.now())
        span.set_attributes(gen_ai__operation__name=operation, gen_ai__request__model=name)
        error = ""
        try:
            yield span
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            span.end(self._clock.now(), error)

    def with_processing_span(self, span: Span, prepared: PreparedGeneration, since: float) -> PreparedGeneration:
        """The requests as parts of the span; they were made of its body ``since``."""
        if not span.context:
            return prepared
        processing = self._tracer.begin(span.context, INTAKE, since)
        processing.set_attributes(penstock__requests=len(prepared.requests))
        span.set_attributes(penstock__class=prepared.requests[0].qos.service.name.lower())
        processing.end(self._clock.now())
        requests = tuple(msgspec.structs.replace(request, trace=span.context) for request in prepared.requests)
        return msgspec.structs.replace(prepared, requests=requests)


class _TracedStreams:
    """A ``TokenStreamSource`` whose requests are parts of a span."""

    def __init__(self, streams: TokenStreamSource, context: str) -> None:
        self._streams = streams
        self._context = context

    def stream(self, request: ValidRequest) -> TokenStream:
        return self._streams.stream(msgspec.structs.replace(request, trace=self._context))

    def mark_stopped(self, request: RequestId) -> None:
        self._streams.mark_stopped(request)


def with_span(span: Span, streams: TokenStreamSource) -> TokenStreamSource:
    """The same streams, whose requests are parts of the span."""
    return _TracedStreams(streams, span.context) if span.context else streams


def note_response(span: Span, name: str, usage: TokenUsage, word: str) -> None:
    """What became of an answer.  ``word``: of the response cache."""
    if not span.context:
        return
    span.set_attributes(
        gen_ai__response__id=name,
        gen_ai__usage__input_tokens=usage.prompt_tokens,
        gen_ai__usage__output_tokens=usage.completion_tokens,
        penstock__cached_tokens=usage.prompt_tokens_details.cached_tokens,
        penstock__stored_tokens=usage.stored_tokens,
    )
    if word:
        span.set_attributes(penstock__response_cache=word)


def trace_response_header(span: Span) -> list[Header]:
    """For the answer."""
    return [(TRACE_RESPONSE, span.context.encode())] if span.context else []
