"""Spans: what one request goes through, declared as data, and the port that takes them.

Times are monotonic seconds of the gateway's host; a context is a ``traceparent`` (W3C Trace Context), and "" where
nothing is recorded.  Knows nothing about who keeps spans, and nothing about requests but names and figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock.telemetry.metrics import TIERS as TIER_NAMES

SpanAttribute = str | int | float | bool


@dataclass(frozen=True, slots=True)
class SpanFamily:
    """One kind of span."""

    name: str
    help: str
    facts: tuple[str, ...] = ()  # attributes that it may have
    events: tuple[str, ...] = ()


REQUEST = SpanFamily(
    "request",
    "An HTTP request, from its body to the end of its answer.",
    (
        *("gen_ai.operation.name", "gen_ai.request.model", "gen_ai.response.id"),
        *("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"),
        *("penstock.cached_tokens", "penstock.stored_tokens", "penstock.class", "penstock.response_cache"),
    ),
)
INTAKE = SpanFamily("intake", "Its template, tokens and checks.", ("penstock.requests",))
ANSWER = SpanFamily(
    "answer",
    "One choice, from the router's point of view.",
    ("penstock.request", "penstock.prompt_tokens", "penstock.tokens", "penstock.epochs", "penstock.finish"),
    ("first_token", "fence"),
)
QUEUE = SpanFamily("queue", "Until workers were found.", ("penstock.epoch",))
DECISION = SpanFamily(
    "decision",
    "The choice of workers.",
    ("penstock.outcome", "penstock.policy", "penstock.because", "penstock.prefill", "penstock.decode"),
)
LEG = SpanFamily(
    "leg",
    "A worker's part in the answer, from its submission to its end.",
    (
        *("penstock.leg", "penstock.worker", "penstock.incarnation", "penstock.epoch"),
        *("penstock.tokens_to_compute", "penstock.outcome"),
    ),
)
RETRY = SpanFamily(
    "retry",
    "From a loss or return to the next token.",
    ("penstock.worker", "penstock.reason", "penstock.epoch", "penstock.tokens"),
)
DECODE = SpanFamily("decode", "From the first token to the last.", ("penstock.tokens",))
WORKER_QUEUE = SpanFamily("worker_queue", "In a worker, until the first step for it, or until it asked for its pages.")
TIERS = SpanFamily(
    "tiers",
    "Waiting for pages from tiers of the KV store.",
    ("penstock.wanted_tokens", "penstock.found_tokens", *(f"penstock.{tier}_pages" for tier in TIER_NAMES)),
)
PREFILL = SpanFamily(
    "prefill", "The prompt, from its first step to the first token.", ("penstock.tokens", "penstock.cached_tokens")
)
TRANSFER = SpanFamily("transfer", "Pages from the worker that read the prompt.", ("penstock.tokens",))

SPANS: tuple[SpanFamily, ...] = (
    *(REQUEST, INTAKE, ANSWER, QUEUE, DECISION, LEG, RETRY, DECODE),
    *(WORKER_QUEUE, TIERS, PREFILL, TRANSFER),
)

WORKER_SPANS: Mapping[str, SpanFamily] = {family.name: family for family in (WORKER_QUEUE, TIERS, PREFILL, TRANSFER)}
"""Those that workers measure, by the names in ``wire.gateway_messages.PhaseTiming``."""

OUTCOMES = ("ended", "exported", "failed")
"""What became of spans; those that ended and were neither exported nor failed wait, or were dropped."""


class Span(Protocol):
    """One that is open."""

    @property
    def context(self) -> str:
        """The context of this span's children; "" where nothing is recorded."""
        ...

    def set_attributes(self, **facts: SpanAttribute) -> None:
        """Attributes; ``a__b`` is the name ``a.b``."""
        ...

    def add_event(self, name: str, at: float, **facts: SpanAttribute) -> None:
        """Something that happened at one time."""
        ...

    def end(self, at: float, error: str = "") -> None:
        """It is over.  ``error``: why it failed."""
        ...


class Tracer(Protocol):
    """Takes spans.  Never waits, never raises, and drops what it has no room for."""

    def root(self, caller: Mapping[str, str], name: str, at: float) -> Span:
        """The span of an HTTP request whose headers ``traceparent`` and ``tracestate`` are these, if it is sampled."""
        ...

    def begin(self, parent: str, family: SpanFamily, at: float) -> Span:
        """A part of the span with this context."""
        ...


class NoSpan(Span):
    """``Span`` where nothing is recorded."""

    context = ""

    def set_attributes(self, **facts: SpanAttribute) -> None:
        pass

    def add_event(self, name: str, at: float, **facts: SpanAttribute) -> None:
        pass

    def end(self, at: float, error: str = "") -> None:
        pass


NO_SPAN = NoSpan()


class NoTracer(Tracer):
    """``Tracer`` that records nothing."""

    def root(self, caller: Mapping[str, str], name: str, at: float) -> Span:
        return NO_SPAN

    def begin(self, parent: str, family: SpanFamily, at: float) -> Span:
        return NO_SPAN
