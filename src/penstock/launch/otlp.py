"""Exports spans to an OpenTelemetry collector (OTLP over HTTP) and to a file, both as OTLP's JSON, one batch per line.

A thread of OpenTelemetry's SDK takes spans out of a bounded queue, so no request waits for it; threads do not survive
a fork.  Its environment variables apply, such as ``OTEL_EXPORTER_OTLP_HEADERS``.  Needs the extra ``trace``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.json.file.trace_exporter import FileSpanExporter
from opentelemetry.exporter.otlp.json.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span as SdkSpan
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from penstock import __version__
from penstock.config.base import expanded_path
from penstock.config.limits import TraceConfig
from penstock.telemetry.spans import NO_SPAN, OUTCOMES, Span, SpanAttribute, SpanFamily, Tracer

log = logging.getLogger(__name__)

PATH = "/v1/traces"
"""Default path of a collector's endpoint."""


class OtlpTracer(Tracer):
    """Use: construct it in the process that serves, after the fork; ``close()`` at its end."""

    def __init__(self, config: TraceConfig, resource: Mapping[str, str]) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # ``_Destination`` logs once
        self._flush_s = config.flush_s
        self._counts = dict.fromkeys(OUTCOMES, 0)
        named = {"service.name": "penstock", "service.version": __version__, **resource}
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.sample)),
            resource=Resource.create(named).merge(OTELResourceDetector().detect()),
            shutdown_on_exit=False,
        )
        destinations = _destinations(config, self._counts)
        self._to = len(destinations)
        for destination in destinations:
            self._provider.add_span_processor(
                BatchSpanProcessor(
                    destination,
                    max_queue_size=config.max_queued_spans,
                    schedule_delay_millis=config.send_every_s * 1000,
                    max_export_batch_size=min(config.max_batch_spans, config.max_queued_spans),
                )
            )
        self._tracer = self._provider.get_tracer("penstock", __version__)
        self._carried = TraceContextTextMapPropagator()
        self._epoch_ns = _epoch_ns()

    def root(self, caller: Mapping[str, str], name: str, at: float) -> Span:
        self._epoch_ns = _epoch_ns()  # the wall clock may have been set
        context = self._carried.extract(caller)
        span = self._tracer.start_span(name, context=context, kind=SpanKind.SERVER, start_time=self.ns(at))
        return _OtlpSpan(span, self) if span.is_recording() else NO_SPAN

    def begin(self, parent: str, family: SpanFamily, at: float) -> Span:
        if not parent:
            return NO_SPAN
        context = self._carried.extract({"traceparent": parent})
        return _OtlpSpan(self._tracer.start_span(family.name, context=context, start_time=self.ns(at)), self)

    def figures(self) -> Mapping[str, int]:
        """Number of spans by outcome, counted per destination."""
        return dict(self._counts)

    def close(self) -> None:
        """Send what is queued, within ``flush_s``."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True, name="last spans")
        closing.start()
        closing.join(self._flush_s)

    def ended(self) -> None:
        """Count an ended span."""
        self._counts["ended"] += self._to

    def ns(self, at: float) -> int:
        """Nanoseconds since 1970 of a monotonic time in seconds."""
        return self._epoch_ns + int(at * 1e9)


class _OtlpSpan(Span):
    def __init__(self, span: SdkSpan, tracer: OtlpTracer) -> None:
        self._span = span
        self._tracer = tracer

    @property
    def context(self) -> str:
        own = self._span.get_span_context()
        return f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}"

    def set_attributes(self, **facts: SpanAttribute) -> None:
        self._span.set_attributes(_named(facts))

    def add_event(self, name: str, at: float, **facts: SpanAttribute) -> None:
        self._span.add_event(name, _named(facts), self._tracer.ns(at))

    def end(self, at: float, error: str = "") -> None:
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(self._tracer.ns(at))
        self._tracer.ended()


class _Destination(SpanExporter):
    """Counts exported spans, and logs once when exports begin to fail and once when they succeed again."""

    def __init__(self, name: str, exporter: SpanExporter, counts: dict[str, int], close: Callable[[], None]) -> None:
        self._name = name
        self._exporter = exporter
        self._counts = counts
        self._close = close
        self._fails = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        fails = result is not SpanExportResult.SUCCESS
        if fails and not self._fails:
            log.warning("spans cannot be sent to %s; those that do not fit the queue are lost", self._name)
        elif self._fails and not fails:
            log.info("spans are sent to %s again", self._name)
        self._fails = fails
        self._counts["failed" if fails else "exported"] += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
        self._close()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def _destinations(config: TraceConfig, counts: dict[str, int]) -> list[_Destination]:
    """The exporters that the configuration names."""
    found: list[_Destination] = []
    if config.file is not None:
        stream = expanded_path(config.file, "--trace-file").open("a", encoding="utf-8")
        found.append(_Destination(config.file, FileSpanExporter(stream=stream), counts, stream.close))
    if config.endpoint is not None:
        exporter = OTLPSpanExporter(endpoint=_url(config.endpoint), timeout=config.send_timeout_s)
        found.append(_Destination(config.endpoint, exporter, counts, lambda: None))
    return found


def _named(facts: Mapping[str, SpanAttribute]) -> dict[str, SpanAttribute]:
    return {name.replace("__", "."): value for name, value in facts.items()}


def _url(endpoint: str) -> str:
    return endpoint.rstrip("/") + PATH if urlsplit(endpoint).path in ("", "/") else endpoint


def _epoch_ns() -> int:
    return time.time_ns() - time.monotonic_ns()
