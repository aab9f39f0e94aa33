"""The gateway's metrics, counted and shown in Prometheus' text format.

One registry an object, none global.  Counters of workers are added over incarnations, so a family never decreases.
``WeightedHistogram`` counts one observation several times at once; that of prometheus_client takes a lock and searches
its buckets for each.  Knows figures only.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from penstock.telemetry import metrics as names
from penstock.telemetry.metrics import MetricFamily, MetricKind
from penstock.telemetry.service_levels import ServiceLevels
from penstock.types import is_older_incarnation


class WeightedHistogram:
    """``buckets``: upper bounds, ascending, without infinity."""

    def __init__(self, buckets: Sequence[float]) -> None:
        self._bounds = [float(bound) for bound in buckets]
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._created = time.time()

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value`` ``times`` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def metric(self, name: str, help_: str, labels: Mapping[str, str]) -> Metric:
        """For a scrape."""
        metric = Metric(name, help_, "histogram")
        below = list(accumulate(self._counts))
        for bound, count in zip([*self._bounds, float("inf")], below, strict=True):
            metric.add_sample(f"{name}_bucket", {**labels, "le": _shown(bound)}, count)
        metric.add_sample(f"{name}_count", dict(labels), below[-1])
        metric.add_sample(f"{name}_sum", dict(labels), self._sum)
        metric.add_sample(f"{name}_created", dict(labels), self._created)
        return metric


def _shown(bound: float) -> str:
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]


CONTENT_TYPE = CONTENT_TYPE_LATEST
"""Of what ``Metrics.exposition`` gives."""


class CarriedTotals(msgspec.Struct, frozen=True, array_like=True):
    """What the incarnations of a worker before this one counted together."""

    incarnation: int
    values: dict[str, float]


class WorkerTotals:
    """Counters of workers over all their incarnations.

    ``carried`` holds what earlier incarnations ended with; a value of the current one is added to it.
    """

    def __init__(self) -> None:
        self._incarnations: dict[str, int] = {}
        self._carried: dict[str, dict[str, float]] = {}
        self._current: dict[str, dict[str, float]] = {}
        self._inherited: dict[str, CarriedTotals] = {}  # of workers that have not reported yet

    def on_report(self, worker: str, incarnation: int, counters: Mapping[str, float]) -> None:
        """Take a report's counters.  Those of an earlier incarnation, and names that are not ours, are ignored."""
        known = self._incarnations.get(worker)
        if known is not None and is_older_incarnation(incarnation, known):
            return
        if known is None and worker in self._inherited:
            self._carried[worker] = dict(self._inherited.pop(worker).values)
        if incarnation != known:
            self._carry(worker)
            self._incarnations[worker] = incarnation
        current = self._current.setdefault(worker, {})
        for name, value in counters.items():
            if name in names.BY_WORKER_COUNTER or name in names.BY_WORKER_MAXIMUM or name in names.TIER_COUNTERS:
                current[name] = max(value, current.get(name, 0.0))  # a late report never takes anything back

    def value(self, worker: str, name: str) -> float:
        """The counter's sum, or the maximum's largest value, over all incarnations; 0 when it was never reported."""
        carried = self._carried.get(worker, {}).get(name, 0.0)
        current = self._current.get(worker, {}).get(name, 0.0)
        return max(carried, current) if name in names.BY_WORKER_MAXIMUM else carried + current

    def workers(self) -> Sequence[str]:
        """All that ever reported, in order of name."""
        return sorted(self._incarnations)

    def remove_worker(self, worker: str) -> None:
        """It is gone for good."""
        for known in (self._incarnations, self._carried, self._current):
            known.pop(worker, None)

    def carried(self) -> dict[str, CarriedTotals]:
        """What earlier incarnations ended with, of the workers that had any."""
        return {
            worker: CarriedTotals(self._incarnations[worker], dict(values))
            for worker, values in self._carried.items()
            if values and worker in self._incarnations
        }

    def inherit(self, carried: Mapping[str, CarriedTotals]) -> None:
        """What an earlier incarnation of this gateway, or another gateway, carried for workers, before any reports."""
        for worker, theirs in carried.items():
            ours = self._inherited.get(worker)
            if ours is None or sum(theirs.values.values()) > sum(ours.values.values()):
                self._inherited[worker] = theirs

    def adopt(self, worker: str, carried: CarriedTotals) -> None:
        """Another gateway carries this for a worker; it counts if that one saw incarnations that this one missed."""
        if self._incarnations.get(worker) == carried.incarnation:
            own = self._carried.setdefault(worker, {})
            own.update({name: max(value, own.get(name, 0.0)) for name, value in carried.values.items()})

    def copy(self) -> WorkerTotals:
        """As they are now."""
        copied = WorkerTotals()
        copied._incarnations = dict(self._incarnations)
        copied._carried = {worker: dict(values) for worker, values in self._carried.items()}
        copied._current = {worker: dict(values) for worker, values in self._current.items()}
        return copied

    def _carry(self, worker: str) -> None:
        """The current incarnation is over: what it ended with stays."""
        ended = {name: self.value(worker, name) for name in self._current.get(worker, {})}
        self._carried.setdefault(worker, {}).update(ended)
        self._current[worker] = {}


class PrefixIndexStats(NamedTuple):
    """Figures of the index of workers' prefix caches."""

    blocks: int = 0
    memory_bytes: int = 0
    gaps: int = 0  # since the start
    refused: int = 0  # the same


class RoleForecast(NamedTuple):
    """What a router predicts of the workers of one role, in seconds."""

    queue_s: float  # that a request would wait at the best of them
    step_s: float  # of a step in which they decode what they have, on average


class ResponseCacheStats(NamedTuple):
    """Figures of stored responses."""

    found: Mapping[str, int]  # by outcome
    tokens: int = 0
    evictions: int = 0
    entries: int = 0
    memory_bytes: int = 0


class Metrics:
    """Everything that is counted in the gateway.  What others hold is asked for when the metrics are read."""

    def __init__(
        self,
        *,
        model_name: str = "",
        max_tenants: int = 64,
        spans: Callable[[], Mapping[str, int]] | None = None,
        gateway: str = "gateway",
    ) -> None:
        """``spans``: counts of spans by outcome; ``gateway``: the name of this process on its host."""
        self._registry = CollectorRegistry(auto_describe=False)
        self.levels = ServiceLevels(self._registry, model_name=model_name, max_tenants=max_tenants)
        self._model = model_name
        self._gateway = gateway
        self.worker_rows: Callable[[], Sequence[Mapping[str, Any]]] = tuple
        self.forecasts: Callable[[], Mapping[str, RoleForecast]] = dict
        self.open_requests: Callable[[], int] = int
        self.audit_events_lost: Callable[[], int] = int
        self.rate_limit_hosts: Callable[[], int] = lambda: 1
        self.limits_redis_up: Callable[[], int] = int
        self._dropped_frames: Callable[[], int] = int
        self._prefix_index: Callable[[], PrefixIndexStats] = PrefixIndexStats
        self._responses: Callable[[], ResponseCacheStats] = lambda: ResponseCacheStats({})
        self._spans: Callable[[], Mapping[str, int]] = spans or dict[str, int]
        self.totals = WorkerTotals()
        self._prompt_tokens = self._counter(names.PROMPT_TOKENS).labels(model_name)
        self._prompts = 0  # their tokens
        self._generation_tokens = 0
        self._began = time.time()
        self._resubmissions = self._counter(names.RESUBMISSIONS).labels(model_name)
        self._returns = self._counter(names.RETURNS)
        self._success = self._counter(names.REQUEST_SUCCESS)
        self._deaths = self._counter(names.WORKER_DEATHS)
        self._suspicions = self._counter(names.WORKER_SUSPICIONS)
        self._probes = self._counter(names.WORKER_PROBES)
        self._retries = self._counter(names.RETRIES)
        self._fenced = self._counter(names.FENCED)
        self._poisoned = self._counter(names.POISONED).labels(model_name)
        self._keyed = self._counter(names.KEYED)
        self._replayed = self._counter(names.REPLAYED_TOKENS).labels(model_name)
        self._resumed = self._counter(names.RESUMED_TOKENS).labels(model_name)
        self._prefix_breaks = self._counter(names.PREFIX_BREAKS)
        self._prefix_lost = self._counter(names.PREFIX_LOST).labels(model_name)
        self._unauthorized = self._labelled(names.UNAUTHORIZED, names.UNAUTHORIZED_CODES)
        self._forbidden = self._labelled(names.FORBIDDEN, names.FORBIDDEN_CODES)
        self._peer_refusals = self._labelled(names.PEER_REFUSALS, names.PEER_REFUSAL_REASONS)
        decisions = self._counter(names.DECISIONS)
        self._decisions = [decisions.labels(model_name, outcome) for outcome in names.OUTCOMES]
        self._deciding = self._histogram(names.DECISION_TIME)
        for reason in names.FINISHED_REASONS:
            self._success.labels(model_name, reason)
        self._ttft = self._histogram(names.TTFT)
        self._itl = WeightedHistogram(names.ITL.buckets)
        self._e2e = self._histogram(names.E2E)
        self._queue = self._histogram(names.QUEUE_TIME)
        self._prefill = self._histogram(names.PREFILL_TIME)
        self._decode = self._histogram(names.DECODE_TIME)

    # --- what happens -----------------------------------------------------------------------------------------------

    def on_first_token(self, ttft_s: float, queued_s: float, prompt_tokens: int) -> None:
        """A request of ``prompt_tokens`` tokens got its first token, ``ttft_s`` after its arrival."""
        self._ttft.observe(max(0.0, ttft_s))
        self._queue.observe(queued_s)
        self._prefill.observe(max(0.0, ttft_s - queued_s))
        self._prompt_tokens.inc(prompt_tokens)
        self._prompts += prompt_tokens

    def on_tokens(self, count: int, gap_s: float | None, answers: int = 1, *, counted: bool = True) -> None:
        """``count`` tokens of each of ``answers`` requests were delivered.

        ``gap_s``: the time since the tokens before them; None for the first.  Not ``counted``: see
        ``on_settled_usage``.
        """
        if counted:
            self._generation_tokens += count * answers
        if gap_s is not None and count:
            self._itl.observe(gap_s / count, count * answers)

    def on_settled_usage(self, prompt_tokens: int, generated: int, replayed: int) -> None:
        """A response has ended that another gateway has begun, too: tokens that only this gateway counts, and tokens
        that the other one has counted."""
        self._prompt_tokens.inc(prompt_tokens)
        self._prompts += prompt_tokens
        self._generation_tokens += generated
        self._replayed.inc(replayed)

    def on_resumed_tokens(self, count: int) -> None:
        """A request goes on from so many tokens that another gateway had saved."""
        self._resumed.inc(count)

    def token_totals(self) -> tuple[int, int]:
        """Tokens of prompts and of responses, so far."""
        return self._prompts, self._generation_tokens

    def on_finished(self, reason: str, e2e_s: float, decode_s: float | None) -> None:
        """A request ended for one of ``FINISHED_REASONS``; ``decode_s`` after its first token, if there was one."""
        self._success.labels(self._model, reason).inc()
        self._e2e.observe(max(0.0, e2e_s))
        if decode_s is not None:
            self._decode.observe(max(0.0, decode_s))

    def on_returned(self, reason: str) -> None:
        """A worker returned a request unfinished; ``reason`` is a ``ReturnReason.label``."""
        self._returns.labels(self._model, reason).inc()

    def on_resubmitted(self) -> None:
        """A request was given to workers once more."""
        self._resubmissions.inc()

    def on_decision(self, seconds: float, *, legs: int) -> None:
        """Workers for ``legs`` stages were chosen within ``seconds``."""
        self._decisions[legs].inc()
        self._deciding.observe(seconds)

    def on_worker_died(self, worker: str) -> None:
        """A worker process ended."""
        self._deaths.labels(self._model, worker).inc()

    def on_worker_suspected(self, worker: str) -> None:
        """A worker was given up by the gateway."""
        self._suspicions.labels(self._model, worker).inc()

    def on_worker_probed(self, worker: str, outcome: str) -> None:
        """A worker in quarantine was "sent" a probe, has "answered" it, or has left it "unanswered"."""
        self._probes.labels(self._model, worker, outcome).inc()

    def on_retried(self, *, delayed: bool) -> None:
        """A failure makes a resubmission necessary; the budget lets it go at once, or later."""
        self._retries.labels(self._model, "delayed" if delayed else "at_once").inc()

    def on_fenced(self, kind: str) -> None:
        """A message of an older "epoch" or "incarnation" was ignored."""
        self._fenced.labels(self._model, kind).inc()

    def on_poisoned(self) -> None:
        """A request was failed because workers died of it."""
        self._poisoned.inc()

    def on_idempotency_key(self, how: str) -> None:
        """A request with an idempotency key came."""
        self._keyed.labels(self._model, how).inc()

    def on_prefix_break(self, reason: str, lost_tokens: int) -> None:
        """A session's prompt left an earlier one before its end."""
        self._prefix_breaks.labels(self._model, reason).inc()
        self._prefix_lost.inc(lost_tokens)

    def on_unauthorized(self, code: str) -> None:
        """A request had no valid key."""
        self._unauthorized.labels(self._model, code).inc()

    def on_forbidden(self, code: str) -> None:
        """A request was refused with 403."""
        self._forbidden.labels(self._model, code).inc()

    def on_peer_refused(self, reason: str) -> None:
        """A worker's message was refused because of its key."""
        self._peer_refusals.labels(self._model, reason).inc()

    def on_worker_report(self, worker: str, incarnation: int, counters: Mapping[str, float]) -> None:
        """``WorkerTotals.on_report``."""
        self.totals.on_report(worker, incarnation, counters)

    def remove_worker(self, worker: str) -> None:
        """No more is shown of a worker that has been gone for long."""
        self.totals.remove_worker(worker)
        for counter in (self._deaths, self._suspicions):
            with suppress(KeyError):
                counter.remove(self._model, worker)
        for outcome in ("sent", "answered", "unanswered"):
            with suppress(KeyError):
                self._probes.remove(self._model, worker, outcome)

    # --- what is shown ----------------------------------------------------------------------------------------------

    def exposition(self) -> bytes:
        """All families in Prometheus' text format, of type ``CONTENT_TYPE``."""
        return self.snapshot()()

    def register_router(
        self,
        *,
        worker_rows: Callable[[], Sequence[Mapping[str, Any]]],
        forecasts: Callable[[], Mapping[str, RoleForecast]],
        open_requests: Callable[[], int],
        dropped_frames: Callable[[], int],
        prefix_index: Callable[[], PrefixIndexStats],
    ) -> None:
        """What a router holds; ``worker_rows`` as ``Fleet.status_rows``, ``forecasts`` by role."""
        self.worker_rows = worker_rows
        self.forecasts = forecasts
        self.open_requests = open_requests
        self._dropped_frames = dropped_frames
        self._prefix_index = prefix_index

    def register_response_cache(self, stats: Callable[[], ResponseCacheStats]) -> None:
        """What a response cache holds."""
        self._responses = stats

    def snapshot(self) -> Callable[[], bytes]:
        """Looks at what is not counted in the registry, and returns what makes the page of it.

        That may be called on a thread: it asks for nothing else, and what stands in the registry has locks.
        """
        own, workers = self.look(), self.look_at_workers()
        return lambda: render_page([*own(), *workers.families()])

    def look(self) -> Callable[[], list[Metric]]:
        """As ``snapshot``, of what this gateway counts itself; the returned function gives the families."""
        seen = _Seen(
            forecasts=self.forecasts(),
            generation_tokens=self._generation_tokens,
            itl=self._itl.metric(names.PREFIX + names.ITL.name, names.ITL.help, {"model_name": self._model}),
            open_requests=self.open_requests(),
            dropped_frames=self._dropped_frames(),
            audit_events_lost=self.audit_events_lost(),
            rate_limit_hosts=self.rate_limit_hosts(),
            limits_redis_up=self.limits_redis_up(),
            prefix_index=self._prefix_index(),
            responses=self._responses(),
            spans=dict(self._spans()),
        )
        return lambda: [*self._registry.collect(), *self._looked_up(seen)]

    def look_at_workers(self) -> ReportedMetrics:
        """What workers report, to all gateways, as it is now."""
        return ReportedMetrics(self._model, self.worker_rows(), self.totals.copy())

    def _looked_up(self, seen: _Seen) -> Iterable[Metric]:
        """The families that are not counted here but looked up."""
        for family, field in ((names.PREDICTED_QUEUE, "queue_s"), (names.PREDICTED_STEP, "step_s")):
            gauge = _looked_up_family(family)
            for role, forecast in seen.forecasts.items():
                gauge.add_metric([self._model, role], getattr(forecast, field))
            yield gauge
        yield self._single_counter(names.GENERATION_TOKENS, seen.generation_tokens, created=self._began)
        yield seen.itl
        opened = _looked_up_family(names.REQUESTS_OPEN)
        opened.add_metric([self._model], seen.open_requests)
        yield opened
        yield self._single_counter(names.DROPPED_FRAMES, seen.dropped_frames)
        yield self._single_counter(names.AUDIT_LOST, seen.audit_events_lost)
        figures, responses = seen.prefix_index, seen.responses
        for family, figure in (
            (names.PREFIX_BLOCKS, figures.blocks),
            (names.PREFIX_BYTES, figures.memory_bytes),
            (names.RESPONSE_ENTRIES, responses.entries),
            (names.RESPONSE_BYTES, responses.memory_bytes),
            (names.RATE_LIMIT_HOSTS, seen.rate_limit_hosts),
            (names.LIMITS_REDIS_UP, seen.limits_redis_up),
        ):
            gauge = _looked_up_family(family)
            gauge.add_metric([self._model, *([self._gateway] if "gateway" in family.labels else [])], figure)
            yield gauge
        yield self._single_counter(names.PREFIX_GAPS, figures.gaps)
        yield self._single_counter(names.PREFIX_REFUSED, figures.refused)
        yield self._single_counter(names.RESPONSE_TOKENS, responses.tokens)
        yield self._single_counter(names.RESPONSE_EVICTIONS, responses.evictions)
        yield self._by_outcome(names.RESPONSE_LOOKUPS, responses.found)
        yield self._by_outcome(names.TRACE_SPANS, seen.spans)

    # --- making families --------------------------------------------------------------------------------------------

    def _counter(self, family: MetricFamily) -> Counter:
        labels = ("model_name", *family.labels)
        return Counter(names.PREFIX + family.name, family.help, labels, registry=self._registry)

    def _labelled(self, family: MetricFamily, labels: Iterable[str]) -> Counter:
        """A counter that shows each of these labels from the start."""
        counter = self._counter(family)
        for label in labels:
            counter.labels(self._model, label)
        return counter

    def _histogram(self, family: MetricFamily) -> Histogram:
        made = Histogram(
            names.PREFIX + family.name, family.help, ("model_name",), registry=self._registry, buckets=family.buckets
        )
        return made.labels(self._model)

    def _single_counter(self, family: MetricFamily, value: float, created: float | None = None) -> Metric:
        counter = _looked_up_family(family)
        counter.add_metric([self._model], value, created)
        return counter

    def _by_outcome(self, family: MetricFamily, values: Mapping[str, int]) -> Metric:
        counter = _looked_up_family(family)
        for outcome, value in values.items():
            counter.add_metric([self._model, outcome], value)
        return counter


class PickerMetrics:
    """The metrics of ``penstock picker``."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        requests = Counter(
            names.PREFIX + names.PICKER_REQUESTS.name,
            names.PICKER_REQUESTS.help,
            names.PICKER_REQUESTS.labels,
            registry=self.registry,
        )
        self._requests = {outcome: requests.labels(outcome) for outcome in names.PICKER_OUTCOMES}
        self._seconds = Histogram(
            names.PREFIX + names.PICKER_TIME.name,
            names.PICKER_TIME.help,
            buckets=names.PICKER_TIME.buckets,
            registry=self.registry,
        )
        self._gateways = Gauge(
            names.PREFIX + names.PICKER_GATEWAYS.name,
            names.PICKER_GATEWAYS.help,
            names.PICKER_GATEWAYS.labels,
            registry=self.registry,
        )
        self._refused = Counter(
            names.PREFIX + names.PICKER_REFUSED.name, names.PICKER_REFUSED.help, registry=self.registry
        )
        self.set_gateways(0, 0)

    def on_choice(self, outcome: str, seconds: float) -> None:
        """``outcome``: one of ``metrics.PICKER_OUTCOMES``."""
        self._requests[outcome].inc()
        self._seconds.observe(seconds)

    def on_refused_stream(self) -> None:
        self._refused.inc()

    def set_gateways(self, ready: int, members: int) -> None:
        self._gateways.labels("ready").set(ready)
        self._gateways.labels("not_ready").set(members - ready)


def _usage(row: Mapping[str, Any]) -> float:
    pages = row["kv_pages_used"] + row["kv_pages_free"]
    return row["kv_pages_used"] / pages if pages else 0.0


_ROW_GAUGES: tuple[tuple[MetricFamily, Callable[[Mapping[str, Any]], float]], ...] = (
    (names.NUM_REQUESTS_RUNNING, lambda row: row["running"]),
    (names.NUM_REQUESTS_WAITING, lambda row: row["queued"]),
    (names.KV_CACHE_USAGE, _usage),
    (names.KV_PAGES_LEAKED, lambda row: row["kv_pages_leaked"]),
    (names.KV_PAGES_LOADING, lambda row: row["kv_pages_loading"]),
    (names.WORKER_UP, lambda row: float(row["state"] in ("ready", "draining"))),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What is looked up, as it was at one moment."""

    forecasts: Mapping[str, RoleForecast]
    generation_tokens: int
    itl: Metric
    open_requests: int
    dropped_frames: int
    audit_events_lost: int
    rate_limit_hosts: int
    limits_redis_up: int
    prefix_index: PrefixIndexStats
    responses: ResponseCacheStats
    spans: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ReportedMetrics:
    """What workers reported, as it was at one moment; may be read on any thread."""

    model: str
    rows: Sequence[Mapping[str, Any]]
    totals: WorkerTotals  # a copy

    def families(self) -> Iterable[Metric]:
        """For a scrape."""
        for family, value in _ROW_GAUGES:
            gauge = _looked_up_family(family)
            for row in self.rows:
                gauge.add_metric([self.model, row["id"], row["role"]], value(row))
            yield gauge
        for name, family in (names.BY_WORKER_COUNTER | names.BY_WORKER_MAXIMUM).items():
            metric = _looked_up_family(family)
            for worker in self.totals.workers():
                metric.add_metric([self.model, worker], self.totals.value(worker, name))
            yield metric
        yield from self._tiers()

    def _tiers(self) -> Iterable[Metric]:
        """Metrics of the KV store: a sample for each worker and tier that has counted something or has pages."""
        families = {figure: _looked_up_family(family) for figure, family in names.BY_TIER_FIGURE.items()}
        for worker in self.totals.workers():
            for name, (tier, figure) in names.TIER_COUNTERS.items():
                value = self.totals.value(worker, name)
                if value:
                    families[figure].add_metric([self.model, worker, tier], value)
        yield from families.values()
        pages = _looked_up_family(names.KV_STORE_PAGES)
        for row in self.rows:
            for tier in row.get("kv_tiers", ()):
                pages.add_metric([self.model, row["id"], tier["tier"]], tier["pages"])
        yield pages


def _looked_up_family(family: MetricFamily) -> CounterMetricFamily | GaugeMetricFamily:
    made = CounterMetricFamily if family.kind is MetricKind.COUNTER else GaugeMetricFamily
    return made(names.PREFIX + family.name, family.help, labels=("model_name", *family.labels))


def render_page(families: Iterable[Metric]) -> bytes:
    """Prometheus' text format of these families, of type ``CONTENT_TYPE``."""
    return generate_latest(_Page(families))


class _Page(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        yield from self._families
