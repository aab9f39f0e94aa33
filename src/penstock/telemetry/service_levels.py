"""What each class and tenant gets: waits against predictions, targets met, what was shed and missed, tokens used.

Labels are bounded: classes and reasons are few, and tenants beyond the first ``max_tenants`` share one.  A tenant's
label is the short name that ``penstock keys list`` shows, which does not reveal the tenant.
"""

from __future__ import annotations

from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram

from penstock.telemetry import metrics as names
from penstock.telemetry.metrics import MetricFamily
from penstock.types import ServiceClass

DEFAULT_TENANT = "default"
"""The tenant of requests without a tenant's key."""

OTHER_TENANTS = "other"
"""All tenants that have no label of their own."""

SHED_REASONS = ("queue_full", "rate_limit", "concurrency", "predicted_wait")


class LatencyTarget(NamedTuple):
    """What an answer must keep to count as good, in seconds."""

    ttft_s: float
    tpot_s: float


class ServiceLevels:
    """Counts into a registry, which is somebody else's unless none is given."""

    def __init__(
        self, registry: CollectorRegistry | None = None, *, model_name: str = "", max_tenants: int = 64
    ) -> None:
        self._registry = registry if registry is not None else CollectorRegistry(auto_describe=False)
        self._model = model_name
        self._tenants: set[str] = set()
        self._max_tenants = max_tenants
        self._ttft = self._histogram(names.CLASS_TTFT)
        self._tpot = self._histogram(names.CLASS_TPOT)
        self._queue = self._histogram(names.CLASS_QUEUE_TIME)
        self._predicted = self._histogram(names.PREDICTED_WAIT)
        self._error = self._histogram(names.PREDICTION_RATIO)
        self._shed = self._counter(names.REQUESTS_SHED)
        self._missed = self._counter(names.DEADLINE_MISSES)
        self._goodput = self._counter(names.ANSWERS_BY_TARGET)
        self._requests = self._counter(names.TENANT_REQUESTS)
        self._tokens = self._counter(names.TENANT_TOKENS)
        self._show_all()

    def _show_all(self) -> None:
        """What was never counted is 0, not unknown."""
        for name in map(_name, ServiceClass):
            for family in (self._ttft, self._tpot, self._queue, self._predicted, self._error, self._missed):
                family.labels(self._model, name)
            for reason in SHED_REASONS:
                self._shed.labels(self._model, name, reason)
            for target in names.TARGETS:
                self._goodput.labels(self._model, name, target)
        self._requests.labels(self._model, DEFAULT_TENANT)
        for kind in names.TOKEN_KINDS:
            self._tokens.labels(self._model, DEFAULT_TENANT, kind)

    def on_first_token(self, service: ServiceClass, ttft_s: float) -> None:
        """A first token came after so long."""
        self._ttft.labels(self._model, _name(service)).observe(max(0.0, ttft_s))

    def on_prediction(self, service: ServiceClass, waited_s: float, predicted_s: float) -> None:
        """A worker's first token came after so long, where so long was predicted."""
        name = _name(service)
        self._predicted.labels(self._model, name).observe(predicted_s)
        self._error.labels(self._model, name).observe(waited_s / max(predicted_s, 1e-6))

    def on_queued(self, service: ServiceClass, seconds: float) -> None:
        """A request waited in a worker for so long before its prompt was read."""
        self._queue.labels(self._model, _name(service)).observe(max(0.0, seconds))

    def on_finished(self, service: ServiceClass, target: LatencyTarget, ttft_s: float, tpot_s: float | None) -> None:
        """An answer is complete.  ``tpot_s``: seconds a token after the first; None when there is only that."""
        name = _name(service)
        if tpot_s is not None:
            self._tpot.labels(self._model, name).observe(tpot_s)
        late, slow = ttft_s > target.ttft_s, tpot_s is not None and tpot_s > target.tpot_s
        self._goodput.labels(self._model, name, names.TARGETS[late + 2 * slow]).inc()

    def on_shed(self, service: ServiceClass, reason: str) -> None:
        """A request was not let in."""
        self._shed.labels(self._model, _name(service), reason).inc()

    def on_deadline_missed(self, service: ServiceClass) -> None:
        """A request waited for as long as it may, in vain."""
        self._missed.labels(self._model, _name(service)).inc()

    def add_usage(self, tenant: str, tokens: tuple[int, int, int, int], requests: int = 1) -> None:
        """Count requests and their tokens of each of ``TOKEN_KINDS``."""
        label = self._label(tenant)
        self._requests.labels(self._model, label).inc(requests)
        for kind, count in zip(names.TOKEN_KINDS, tokens, strict=True):
            self._tokens.labels(self._model, label, kind).inc(count)

    def _label(self, tenant: str) -> str:
        if not tenant:
            return DEFAULT_TENANT
        if tenant not in self._tenants:
            if len(self._tenants) >= self._max_tenants:
                return OTHER_TENANTS
            self._tenants.add(tenant)
        return tenant

    def _counter(self, family: MetricFamily) -> Counter:
        labels = ("model_name", *family.labels)
        return Counter(names.PREFIX + family.name, family.help, labels, registry=self._registry)

    def _histogram(self, family: MetricFamily) -> Histogram:
        labels = ("model_name", *family.labels)
        return Histogram(
            names.PREFIX + family.name, family.help, labels, registry=self._registry, buckets=family.buckets
        )


def _name(service: ServiceClass) -> str:
    return service.name.lower()
