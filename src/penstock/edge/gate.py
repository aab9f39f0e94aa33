"""Whether a request is let in, and what becomes of it is counted here: classes, deadlines, tenants, predicted waits.

How long a request would wait is predicted from what workers report (``TokenStreams.forecast``), from the part of this
gateway's queue that fair queueing serves before it, and from how such predictions of late compare with what came: those
of very long prompts by themselves, for where answers are written they are read gently.  Who would wait for longer than
it may is told at once, and when it would be worth while to come again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from penstock.config.limits import LONG_PROMPT, Limits, SchedulingConfig
from penstock.edge.admission import MAX_RETRY_AFTER_S, Admission, Party, Permit
from penstock.edge.auth import EVERYBODY, Ring, Tenant
from penstock.edge.counted import Part
from penstock.edge.exchange import Exchange
from penstock.edge.openai_shapes import Usage
from penstock.edge.rates import Buckets, Rates
from penstock.errors import BadField, CapacityError, DeadlineMissed, Forbidden, Overloaded
from penstock.telemetry.service_levels import ServiceLevels, Target
from penstock.types import Qos, ServiceClass
from penstock.wire.ports import Caller, TokenStreams

CLASS = b"x-penstock-class"
"""``interactive`` or ``batch``; goes before what the body says."""

MAX_WAIT = b"x-penstock-max-wait-s"
"""Seconds that the client would wait for the first token."""

_NAMES = {service.name.lower(): service for service in ServiceClass}
_LEARNING = 0.1  # what the latest request counts for in how far predictions are off
_MOST_OFF = 10.0
_TOLD_S = 0.05  # waits below this say nothing about predictions


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the gate goes by."""

    limits: Limits
    scheduling: SchedulingConfig
    ring: Ring
    buckets: Buckets | None = None  # of tenants' rates; None: of this process alone


class Foreseen(NamedTuple):
    """A first token, as it was predicted."""

    seconds: float
    long: bool  # of a very long prompt (``config.scheduling.LONG_PROMPT``)


class Gate:
    """One for an application."""

    def __init__(self, rules: Rules, admission: Admission, streams: TokenStreams, levels: ServiceLevels) -> None:
        config = rules.scheduling
        self._rules = rules
        self._admission = admission
        admission.readers = streams.readers
        self._streams = streams
        self._levels = levels
        self._rates = Rates(admission.clock, rules.buckets)
        self._waits_s = (config.interactive_max_wait_s, config.batch_max_wait_s)
        self._targets = (
            Target(config.interactive_ttft_ms / 1000, config.interactive_tpot_ms / 1000),
            Target(config.batch_ttft_ms / 1000, config.batch_tpot_ms / 1000),
        )
        self._off: dict[tuple[ServiceClass, bool], float] = {}  # what came over what was predicted, smoothed

    def caller(self, exchange: Exchange) -> Caller:
        """Who asks.  Raises RequestError for headers that cannot be, Forbidden for a class that the key has not."""
        tenant: Tenant = exchange.tenant or EVERYBODY
        asked = _class_of(exchange.header(CLASS))
        if asked is not None:
            _check_class(tenant, asked)
        return Caller(
            tenant=tenant.id,
            weight=tenant.weight,
            salt=tenant.salt,
            service=tenant.classes[0],
            asked=asked,
            max_wait_s=_wait_of(exchange.header(MAX_WAIT), self._rules.limits.max_stated_wait_s),
            waits_s=self._waits_s,
        )

    def count(self, exchange: Exchange) -> None:
        """A request that no worker is asked for.  Raises RateLimited."""
        tenant: Tenant = exchange.tenant or EVERYBODY
        try:
            self._rates.take(tenant, 1, 0)
        except CapacityError as error:
            self._levels.shed(tenant.classes[0], error.reason)
            raise

    @contextmanager
    def enter(self, exchange: Exchange, claim: Qos, costs: Sequence[int]) -> Iterator[Visit]:
        """The scope in which an HTTP request is served.

        ``costs``: prompt tokens of each engine request, 0 for those that share a prompt; none where workers are not
        asked at all.  Raises CapacityError, Forbidden.
        """
        tenant: Tenant = exchange.tenant or EVERYBODY
        _check_class(tenant, claim.service)
        try:
            foreseen = self._look_ahead(claim, sum(costs)) if costs else None
            party = Party(int(claim.service), claim.tenant, claim.weight)
            bounded = self._rules.ring.tenants > 1 or claim.service is not ServiceClass.INTERACTIVE
            with self._admission.admit(costs, party, bounded=bounded) as permit:
                self._rates.take(tenant, max(1, len(costs)), sum(costs))
                visit = Visit(self, permit, claim, foreseen)
                try:
                    yield visit
                finally:
                    self._rates.used(tenant, visit.written)
        except DeadlineMissed as error:
            foreseen = self._predict(claim, sum(costs))
            error.retry_after = self._retry_after(1.0 if foreseen is None else foreseen.seconds)
            self._levels.missed(claim.service)
            raise
        except CapacityError as error:
            self._levels.shed(claim.service, error.reason)
            raise

    # --- how long it will take ---------------------------------------------------------------------------------------

    def _predict(self, claim: Qos, tokens: int) -> Foreseen | None:
        """The first token; None while nobody knows."""
        forecast = self._streams.forecast(tokens, claim.service)
        if forecast is None:
            return None
        party = Party(int(claim.service), claim.tenant, claim.weight)
        wait_s = forecast.wait_s * self._admission.share_before(party, tokens)
        long = forecast.read_s > LONG_PROMPT * self._targets[claim.service].ttft_s
        return Foreseen((wait_s + forecast.read_s) * self._off.get((claim.service, long), 1.0), long)

    def _look_ahead(self, claim: Qos, tokens: int) -> Foreseen | None:
        """Raises Overloaded for who would wait in vain."""
        foreseen = self._predict(claim, tokens)
        may_s = self._rules.limits.first_byte_s if claim.max_wait_s is None else claim.max_wait_s
        if foreseen is None or foreseen.seconds <= may_s:
            return foreseen
        retry_after = self._retry_after(foreseen.seconds - may_s)
        raise Overloaded(
            f"The server is busy: the first token would come in about {foreseen.seconds:.1f} s, and this request "
            f"may wait for {may_s:g} s. Retry in {retry_after} s.",
            retry_after=retry_after,
        )

    def _retry_after(self, seconds: float) -> int:
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(seconds)))

    # --- what came ---------------------------------------------------------------------------------------------------

    def began(self, claim: Qos, waited_s: float) -> None:
        """A choice has its first token, wherever it comes from."""
        self._levels.began(claim.service, waited_s)

    def came(self, claim: Qos, waited_s: float, foreseen: Foreseen | None) -> None:
        """A choice has its first token of a worker."""
        if foreseen is None:
            return
        self._levels.foretold(claim.service, waited_s, foreseen.seconds)
        if max(waited_s, foreseen.seconds) < _TOLD_S:
            return
        kind = (claim.service, foreseen.long)
        before = self._off.get(kind, 1.0)
        came = waited_s / max(foreseen.seconds / before, 1e-6)
        self._off[kind] = min(_MOST_OFF, max(1 / _MOST_OFF, before * (came / before) ** _LEARNING))

    def ended(self, claim: Qos, ttft_s: float, tpot_s: float | None) -> None:
        """A choice is complete; ``tpot_s`` is None for a single token."""
        self._levels.ended(claim.service, self._targets[claim.service], ttft_s, tpot_s)

    def used(self, claim: Qos, usage: Usage, part: Part) -> None:
        """An HTTP request is over, and was served ``part`` for the first time."""
        if part.first:
            cached = usage.prompt_tokens_details.cached_tokens
            self._levels.used(claim.tenant, (usage.prompt_tokens, part.tokens, cached, part.stored))
        elif part.tokens:
            self._levels.used(claim.tenant, (0, part.tokens, 0, part.stored), requests=0)

    def now(self) -> float:
        """Monotonic seconds."""
        return self._admission.now()


class Visit:
    """One HTTP request that was let in: told what becomes of its choices."""

    __slots__ = ("_claim", "_first", "_foreseen", "_gate", "_permit", "_served", "_since", "written")

    def __init__(self, gate: Gate, permit: Permit, claim: Qos, foreseen: Foreseen | None) -> None:
        self._gate = gate
        self._permit = permit
        self._claim = claim
        self._foreseen = foreseen
        self._since = gate.now()
        self._first: dict[int, float] = {}  # choice -> when its first token came
        self._served: tuple[int, ...] = ()  # choices that have a token of a worker
        self.written = 0  # tokens of answers that were computed

    def started(self, choice: int, *, computed: bool = True) -> None:
        """This choice has a token; until one is ``computed`` for it, it waits for a worker.  Harmless if repeated."""
        if choice not in self._first:
            self._first[choice] = self._gate.now()
            self._gate.began(self._claim, self._first[choice] - self._since)
        if computed and choice not in self._served:
            self._served += (choice,)
            self._permit.started(choice)
            self._gate.came(self._claim, self._gate.now() - self._since, self._foreseen)

    def ended(self, choice: int, tokens: int) -> None:
        """This choice is complete with so many tokens."""
        self._permit.ended(choice)
        first = self._first.get(choice)
        if first is not None:
            tpot_s = (self._gate.now() - first) / (tokens - 1) if tokens > 1 else None
            self._gate.ended(self._claim, first - self._since, tpot_s)

    @property
    def first_token(self) -> float | None:
        """When the first token came, in monotonic seconds."""
        return min(self._first.values(), default=None)

    @property
    def begun(self) -> bool:
        """Has a token come?"""
        return bool(self._first)

    def used(self, usage: Usage, *, rated: Part | None = None, metered: Part | None = None) -> None:
        """So much was used; nothing when not a token came.  What of it is counted now, if not all: among the tenant's
        rates, which go by what is computed, and for the tenant, whom a token is told once."""
        if not self._first:
            return
        whole = Part(True, usage.completion_tokens, usage.stored_tokens)
        rated = rated or whole
        self.written = rated.tokens - rated.stored
        self._gate.used(self._claim, usage, metered or whole)


def _class_of(value: bytes | None) -> ServiceClass | None:
    if value is None:
        return None
    name = value.strip().decode("latin-1")
    if name not in _NAMES:
        raise BadField(CLASS.decode(), got=name[:64], want=f"one of {', '.join(_NAMES)}")
    return _NAMES[name]


def _wait_of(value: bytes | None, most_s: float) -> float | None:
    if value is None:
        return None
    text = value.strip().decode("latin-1")[:64]
    try:
        seconds = math.nan if "_" in text else float(text)  # 1_0 is Python's
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= most_s:
        raise BadField(MAX_WAIT.decode(), got=text, want=f"seconds, above 0 and up to {most_s:g}")
    return seconds


def _check_class(tenant: Tenant, service: ServiceClass) -> None:
    if service not in tenant.classes:
        has = ", ".join(own.name.lower() for own in tenant.classes)
        raise Forbidden(
            f"This key is for {has} requests, and this one is {service.name.lower()}: say so in 'priority' or in the "
            f"header {CLASS.decode()}, or leave both out.",
            param="priority",
            code="class_not_allowed",
        )
