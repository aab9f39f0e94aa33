"""Whether a request is admitted: classes, deadlines, tenants' rates, predicted time to first token.

The prediction takes what workers report (``TokenStreams.predict_ttft``), the share of this gateway's queue that fair
queueing serves first, and how recent predictions compare with reality; very long prompts have a correction of their
own, because decode workers process them slowly.  A request that would wait longer than it may is refused at once, with
a time to retry after.

A tenant's rates are token buckets that hold a minute's worth and fill evenly.  A request is charged when it is
admitted, its completion when the length is known, which may leave a bucket below zero: then the next request waits.
The buckets of all gateways of a host may be shared (``launch.shared_rates``); hosts divide each rate
(``router.rate_shares``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

from penstock.api.admission import MAX_RETRY_AFTER_S, Admission, Permit, QueueKey
from penstock.api.auth import NO_TENANT, ApiKeys, Tenant
from penstock.api.http import HttpExchange
from penstock.api.idempotency import UsageDelta
from penstock.api.response_format import TokenUsage
from penstock.clock import Clock
from penstock.config.limits import VERY_LONG_PROMPT_TARGETS, RequestLimits, SchedulingConfig
from penstock.errors import BadField, CapacityError, DeadlineMissed, Forbidden, Overloaded, RateLimited
from penstock.interfaces import BucketLevel, Caller, TokenStreams
from penstock.telemetry.service_levels import LatencyTarget, ServiceLevels
from penstock.types import Qos, ServiceClass

MINUTE_S = 60.0


class RateBuckets(Protocol):
    """Token buckets, by tenant and unit.  ``size``: what the tenant may use in a minute."""

    def locked(self) -> AbstractContextManager[None]:
        """The scope for reading and writing levels."""
        ...

    def ask(self, tenant: str, unit: str, size: int, amount: int, now: float) -> BucketLevel:
        """The level, of a bucket that is asked for ``amount``; it changes by ``put`` only."""
        ...

    def put(self, tenant: str, unit: str, left: float, now: float) -> None:
        """Sets the level, which may be below zero, of a bucket that was just asked."""
        ...


class LocalRateBuckets:
    """The buckets of one process."""

    def __init__(self) -> None:
        self._levels: dict[tuple[str, str], tuple[float, float]] = {}  # -> what is left, and when
        self._swept = float("-inf")

    def locked(self) -> AbstractContextManager[None]:
        return nullcontext()

    def ask(self, tenant: str, unit: str, size: int, amount: int, now: float) -> BucketLevel:
        left, at = self._levels.get((tenant, unit), (size, now))
        return BucketLevel(min(size, left + max(0.0, now - at) * size / MINUTE_S))

    def put(self, tenant: str, unit: str, left: float, now: float) -> None:
        self._levels[tenant, unit] = (left, now)
        if now >= self._swept + MINUTE_S:  # unused since: full again, so no entry is needed
            before, self._swept = now - MINUTE_S, now
            self._levels = {name: known for name, known in self._levels.items() if known[0] < 0 or known[1] > before}


@dataclass(frozen=True, slots=True)
class BucketCharge:
    """What is to be taken from one bucket."""

    unit: str
    size: int  # what the tenant may use in a minute
    amount: int


class ExactRates(Protocol):
    """Buckets outside of this host, that all hosts use (``launch.redis_rates``)."""

    async def charge_buckets(
        self, tenant: str, charges: Sequence[BucketCharge], filled: Sequence[float], *, force: bool = False
    ) -> list[BucketLevel] | None:
        """Takes all of the charges, if every bucket has as much or is full, or with ``force``; else none of them.

        Returns the levels before; None where they cannot be reached now.  ``filled``: what a new bucket has, as a part
        of its size.
        """
        ...

    @property
    def is_up(self) -> bool:
        """Whether they can be reached, as far as known."""
        ...

    def charge_later(self, tenant: str, charge: BucketCharge, filled: float) -> None:
        """Takes even what is not there, without waiting."""
        ...


class TenantRateLimiter:
    """One for an application."""

    def __init__(self, clock: Clock, buckets: RateBuckets | None = None, exact: ExactRates | None = None) -> None:
        """Charges ``exact`` while it can be reached, else ``buckets``, which follow meanwhile."""
        self._clock = clock
        self._buckets = LocalRateBuckets() if buckets is None else buckets
        self._exact = exact

    async def charge_request(self, tenant: Tenant, requests: int, tokens: int) -> None:
        """As ``charge``, exact over all hosts where that is configured."""
        asked = _charges(tenant, requests, tokens)
        levels = None
        if self._exact is not None and asked:
            levels = await self._exact.charge_buckets(tenant.id, asked, self._filled(tenant, asked))
        if levels is None:
            self.charge(tenant, requests, tokens)
            return
        taken = all(level.left >= min(each.size, each.amount) for each, level in zip(asked, levels, strict=True))
        rests = [level.left - taken * each.amount for each, level in zip(asked, levels, strict=True)]
        self._follow(tenant, asked, rests)
        for each, level in zip(asked, levels, strict=True):
            _check(each, level)

    def _filled(self, tenant: Tenant, asked: Sequence[BucketCharge]) -> list[float]:
        """How full this host's own buckets are, from 0 to 1.  Counts the demand."""
        with self._buckets.locked():
            now = self._clock.now()
            levels = [self._buckets.ask(tenant.id, each.unit, each.size, each.amount, now) for each in asked]
        return [
            min(1.0, max(0.0, level.left / (each.size * level.share)))
            for each, level in zip(asked, levels, strict=True)
        ]

    def _follow(self, tenant: Tenant, asked: Sequence[BucketCharge], rests: Sequence[float]) -> None:
        """Leaves in this host's buckets no more than its share of what is left in those of all hosts (``rests``), so
        that together they have no more, should they be needed.  Debts stay."""
        with self._buckets.locked():
            now = self._clock.now()
            for each, rest in zip(asked, rests, strict=True):
                own = self._buckets.ask(tenant.id, each.unit, each.size, 0, now)
                self._buckets.put(tenant.id, each.unit, min(own.left, max(0.0, rest * own.share)), now)

    def charge(self, tenant: Tenant, requests: int, tokens: int) -> None:
        """Charges a request.  Raises RateLimited, without charging.

        A request larger than a bucket is admitted when the bucket is full, and leaves it below zero.
        """
        asked = _charges(tenant, requests, tokens)
        if not asked:
            return
        with self._buckets.locked():
            now = self._clock.now()
            levels = [self._buckets.ask(tenant.id, each.unit, each.size, each.amount, now) for each in asked]
            for each, level in zip(asked, levels, strict=True):
                _check(each, level)
            for each, level in zip(asked, levels, strict=True):
                self._buckets.put(tenant.id, each.unit, level.left - each.amount, now)

    def charge_completion(self, tenant: Tenant, tokens: int) -> None:
        """Charges the completion."""
        size = tenant.tokens_per_minute
        if size is None or not tokens:
            return
        if self._exact is not None and self._exact.is_up:
            charge = BucketCharge("prompt tokens", size, tokens)
            (filled,) = self._filled(tenant, [charge])
            self._exact.charge_later(tenant.id, charge, filled)
            self._follow(tenant, [charge], [filled * size - tokens])
            return
        with self._buckets.locked():
            now = self._clock.now()
            level = self._buckets.ask(tenant.id, "prompt tokens", size, tokens, now)
            self._buckets.put(tenant.id, "prompt tokens", level.left - tokens, now)


def _charges(tenant: Tenant, requests: int, tokens: int) -> list[BucketCharge]:
    limits = (
        ("requests", tenant.requests_per_minute, requests),
        ("prompt tokens", tenant.tokens_per_minute, tokens),
    )
    return [BucketCharge(unit, size, amount) for unit, size, amount in limits if size is not None]


def _check(asked: BucketCharge, level: BucketLevel) -> None:
    """Raises RateLimited if the bucket has too little and is not full."""
    lacking = min(asked.amount, asked.size * level.share) - level.left
    if lacking > 0:
        raise _rate_limited(asked, level, lacking)


def _rate_limited(asked: BucketCharge, level: BucketLevel, lacking: float) -> RateLimited:
    pace = asked.size * level.share / MINUTE_S
    retry_after = min(MAX_RETRY_AFTER_S, max(1, math.ceil(lacking / pace)))
    kind = "tokens" if asked.unit == "prompt tokens" else asked.unit
    return RateLimited(
        f"Your key may use {asked.size} {kind} a minute. {max(0, math.floor(level.left))} are left now, and this "
        f"request asks for {asked.amount} {asked.unit}. Retry in {retry_after} s.",
        retry_after=retry_after,
    )


CLASS_HEADER = b"x-penstock-class"
"""``interactive`` or ``batch``; goes before what the body says."""

MAX_WAIT_HEADER = b"x-penstock-max-wait-s"
"""The most seconds that the client waits for the first token."""

_NAMES = {service.name.lower(): service for service in ServiceClass}
_LEARNING = 0.1  # what the latest request counts for in how far predictions are off
_MAX_CORRECTION = 10.0
_MIN_LEARNED_S = 0.05  # waits below this say nothing about predictions


class PredictedTtft(NamedTuple):
    """A predicted time to first token."""

    seconds: float
    long: bool  # of a very long prompt (``config.limits.VERY_LONG_PROMPT_TARGETS``)


class LoadShedder:
    """Admits or refuses the requests of one application."""

    def __init__(
        self,
        admission: Admission,
        streams: TokenStreams,
        levels: ServiceLevels,
        *,
        limits: RequestLimits,
        scheduling: SchedulingConfig,
        keys: ApiKeys,
        buckets: RateBuckets | None = None,
        exact: ExactRates | None = None,
    ) -> None:
        """``buckets`` of tenants' rates; None: of this process alone.  ``exact``: as for ``TenantRateLimiter``."""
        self._limits = limits
        self._keys = keys
        self._admission = admission
        self._streams = streams
        self._levels = levels
        self._rates = TenantRateLimiter(admission.clock, buckets, exact)
        self._waits_s = (scheduling.interactive_max_wait_s, scheduling.batch_max_wait_s)
        self._targets = (
            LatencyTarget(scheduling.interactive_ttft_ms / 1000, scheduling.interactive_tpot_ms / 1000),
            LatencyTarget(scheduling.batch_ttft_ms / 1000, scheduling.batch_tpot_ms / 1000),
        )
        self._off: dict[tuple[ServiceClass, bool], float] = {}  # what came over what was predicted, smoothed

    def caller(self, exchange: HttpExchange) -> Caller:
        """The caller.  Raises RequestError for invalid headers, Forbidden for a class that the key does not have."""
        tenant: Tenant = exchange.tenant or NO_TENANT
        asked = _class_of(exchange.header(CLASS_HEADER))
        if asked is not None:
            _check_class(tenant, asked)
        return Caller(
            tenant=tenant.id,
            weight=tenant.weight,
            salt=tenant.salt,
            service=tenant.classes[0],
            requested_class=asked,
            max_wait_s=_wait_of(exchange.header(MAX_WAIT_HEADER), self._limits.max_stated_wait_s),
            waits_s=self._waits_s,
        )

    async def count_request(self, exchange: HttpExchange) -> None:
        """Charges a request that needs no worker.  Raises RateLimited."""
        tenant: Tenant = exchange.tenant or NO_TENANT
        try:
            await self._rates.charge_request(tenant, 1, 0)
        except CapacityError as error:
            self._levels.on_shed(tenant.classes[0], error.reason)
            raise

    async def admit(self, exchange: HttpExchange, qos: Qos, costs: Sequence[int]) -> AdmittedRequest:
        """The scope in which an HTTP request is served, to be entered at once.

        ``costs``: prompt tokens of each engine request, 0 for those that share a prompt; none where workers are not
        asked at all.  Raises CapacityError, Forbidden.
        """
        tenant: Tenant = exchange.tenant or NO_TENANT
        _check_class(tenant, qos.service)
        tokens = sum(costs)
        try:
            foreseen = self._look_ahead(qos, tokens) if costs else None
            party = QueueKey(int(qos.service), qos.tenant, qos.weight)
            bounded = self._keys.tenant_count > 1 or qos.service is not ServiceClass.INTERACTIVE
            permit = self._admission.admit(costs, party, bounded=bounded)
            try:
                await self._rates.charge_request(tenant, max(1, len(costs)), tokens)
            except BaseException:
                permit.close()
                raise
        except CapacityError as error:
            self._levels.on_shed(qos.service, error.reason)
            raise
        return AdmittedRequest(self, permit, qos, foreseen, (tenant, tokens))

    # --- how long it will take ---------------------------------------------------------------------------------------

    def _predict(self, qos: Qos, tokens: int) -> PredictedTtft | None:
        """The predicted time to first token; None without experience."""
        forecast = self._streams.predict_ttft(tokens, qos.service)
        if forecast is None:
            return None
        party = QueueKey(int(qos.service), qos.tenant, qos.weight)
        wait_s = forecast.wait_s * self._admission.share_before(party, tokens)
        long = forecast.prefill_s > VERY_LONG_PROMPT_TARGETS * self._targets[qos.service].ttft_s
        return PredictedTtft((wait_s + forecast.prefill_s) * self._off.get((qos.service, long), 1.0), long)

    def _look_ahead(self, qos: Qos, tokens: int) -> PredictedTtft | None:
        """The prediction.  Raises Overloaded if the request would wait longer than it may."""
        foreseen = self._predict(qos, tokens)
        may_s = self._limits.first_byte_s if qos.max_wait_s is None else qos.max_wait_s
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

    def on_first_token(self, qos: Qos, waited_s: float) -> None:
        """A choice has its first token, computed or stored."""
        self._levels.on_first_token(qos.service, waited_s)

    def on_computed_token(self, qos: Qos, waited_s: float, foreseen: PredictedTtft | None) -> None:
        """A choice has its first token from a worker."""
        if foreseen is None:
            return
        self._levels.on_prediction(qos.service, waited_s, foreseen.seconds)
        if max(waited_s, foreseen.seconds) < _MIN_LEARNED_S:
            return
        kind = (qos.service, foreseen.long)
        before = self._off.get(kind, 1.0)
        came = waited_s / max(foreseen.seconds / before, 1e-6)
        self._off[kind] = min(_MAX_CORRECTION, max(1 / _MAX_CORRECTION, before * (came / before) ** _LEARNING))

    def on_finished(self, qos: Qos, ttft_s: float, tpot_s: float | None) -> None:
        """A choice is complete; ``tpot_s`` is None for a single token."""
        self._levels.on_finished(qos.service, self._targets[qos.service], ttft_s, tpot_s)

    def on_usage(self, qos: Qos, usage: TokenUsage, part: UsageDelta) -> None:
        """An HTTP request is finished; ``part`` of its usage is billed."""
        if part.first:
            cached = usage.prompt_tokens_details.cached_tokens
            self._levels.add_usage(qos.tenant, (usage.prompt_tokens, part.tokens, cached, part.stored))
        elif part.tokens:
            self._levels.add_usage(qos.tenant, (0, part.tokens, 0, part.stored), requests=0)

    def on_request_ended(
        self, qos: Qos, charged: tuple[Tenant, int], completion_tokens: int, error: BaseException | None
    ) -> None:
        """An HTTP request has ended, with this error.  ``charged``: whom, and its prompt tokens."""
        tenant, prompt_tokens = charged
        self._rates.charge_completion(tenant, completion_tokens)
        if isinstance(error, DeadlineMissed):
            foreseen = self._predict(qos, prompt_tokens)
            error.retry_after = self._retry_after(1.0 if foreseen is None else foreseen.seconds)
            self._levels.on_deadline_missed(qos.service)
        elif isinstance(error, CapacityError):
            self._levels.on_shed(qos.service, error.reason)

    def now(self) -> float:
        """Monotonic seconds."""
        return self._admission.now()


class AdmittedRequest:
    """One admitted HTTP request: a scope that records what becomes of its choices.

    A class, not a generator: it lasts as long as the response, and a generator's frame takes 0.5 KiB.
    """

    __slots__ = (
        "_charged",
        "_first",
        "_foreseen",
        "_gate",
        "_permit",
        "_qos",
        "_served",
        "_since",
        "completion_tokens",
    )

    def __init__(
        self,
        gate: LoadShedder,
        permit: Permit,
        qos: Qos,
        foreseen: PredictedTtft | None,
        charged: tuple[Tenant, int],
    ) -> None:
        """``charged``: the tenant, and the prompt tokens."""
        self._gate = gate
        self._permit = permit
        self._charged = charged
        self._qos = qos
        self._foreseen = foreseen
        self._since = gate.now()
        self._first: dict[int, float] = {}  # choice -> when its first token came
        self._served: tuple[int, ...] = ()  # choices that have a token of a worker
        self.completion_tokens = 0  # tokens of answers that were computed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._permit.close()
        self._gate.on_request_ended(self._qos, self._charged, self.completion_tokens, error)

    def on_token(self, choice: int, *, computed: bool = True) -> None:
        """This choice has a token; until one is ``computed``, it waits for a worker.  Idempotent."""
        if choice not in self._first:
            self._first[choice] = self._gate.now()
            self._gate.on_first_token(self._qos, self._first[choice] - self._since)
        if computed and choice not in self._served:
            self._served += (choice,)
            self._permit.on_first_token(choice)
            self._gate.on_computed_token(self._qos, self._gate.now() - self._since, self._foreseen)

    def on_finished(self, choice: int, tokens: int) -> None:
        """This choice is finished, with ``tokens`` tokens."""
        self._permit.on_finished(choice)
        first = self._first.get(choice)
        if first is not None:
            tpot_s = (self._gate.now() - first) / (tokens - 1) if tokens > 1 else None
            self._gate.on_finished(self._qos, first - self._since, tpot_s)

    @property
    def first_token(self) -> float | None:
        """Time of the first token, in monotonic seconds."""
        return min(self._first.values(), default=None)

    @property
    def has_started(self) -> bool:
        """Whether a token has come."""
        return bool(self._first)

    def record_usage(self, usage: TokenUsage) -> None:
        """Records the usage, all of it; nothing without a token."""
        if self._first:
            whole = UsageDelta(True, usage.completion_tokens, usage.stored_tokens)
            self.record_rates(whole)
            self.bill(usage, whole)

    def record_rates(self, part: UsageDelta) -> None:
        """This part of the usage, of which computed tokens count in the tenant's rates."""
        self.completion_tokens = part.tokens - part.stored

    def bill(self, usage: TokenUsage, part: UsageDelta) -> None:
        """This part of the usage is the tenant's, be the request over."""
        self._gate.on_usage(self._qos, usage, part)


def _class_of(value: bytes | None) -> ServiceClass | None:
    if value is None:
        return None
    name = value.strip().decode("latin-1")
    if name not in _NAMES:
        raise BadField(CLASS_HEADER.decode(), got=name[:64], want=f"one of {', '.join(_NAMES)}")
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
        raise BadField(MAX_WAIT_HEADER.decode(), got=text, want=f"seconds, above 0 and up to {most_s:g}")
    return seconds


def _check_class(tenant: Tenant, service: ServiceClass) -> None:
    if service not in tenant.classes:
        has = ", ".join(own.name.lower() for own in tenant.classes)
        raise Forbidden(
            f"This key is for {has} requests, and this one is {service.name.lower()}: say so in 'priority' or in the "
            f"header {CLASS_HEADER.decode()}, or leave both out.",
            param="priority",
            code="class_not_allowed",
        )
