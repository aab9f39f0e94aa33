"""The metrics of several gateways of one host as one page.

A gateway writes down what it counted as a ``GatewaySnapshot``; ``merge`` makes one value of each series of all of
them.  Counters and histograms are added, also those of gateways that have ended, so that no sum ever decreases.  A
gauge of a gateway that has ended says nothing any more.  What workers report is not in a snapshot: it is the same at
all gateways, and must not be added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias, cast

import msgspec
from prometheus_client.metrics_core import Metric

from penstock.telemetry.metrics import MERGE_RULES, MergeRule
from penstock.telemetry.registry import CarriedTotals

FamilyKind: TypeAlias = Literal["counter", "gauge", "histogram"]

_CREATED = "_created"  # the end of the name of a sample that says since when a counter counts, in Unix seconds
_COMBINED: dict[MergeRule, Callable[[float, float], float]] = {
    MergeRule.SUM: lambda one, other: one + other,
    MergeRule.MAX: max,
    MergeRule.MIN: min,
}


class MetricSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One value: of a series, or of a bucket of a histogram."""

    name: str
    labels: dict[str, str]
    value: float


class MetricSamples(msgspec.Struct, frozen=True, array_like=True):
    """The values of one family."""

    name: str  # with the prefix, without ``_total``
    help: str
    kind: FamilyKind
    samples: list[MetricSample]

    @classmethod
    def of(cls, metric: Metric) -> MetricSamples:
        """What a scrape would show of it."""
        values = [MetricSample(sample.name, dict(sample.labels), float(sample.value)) for sample in metric.samples]
        return cls(metric.name, metric.documentation, cast(FamilyKind, metric.type), values)

    def metric(self) -> Metric:
        """For a scrape."""
        made = Metric(self.name, self.help, self.kind)
        for sample in self.samples:
            made.add_sample(sample.name, sample.labels, sample.value)
        return made


class GatewaySnapshot(msgspec.Struct, frozen=True, array_like=True):
    """What a gateway counted in all its incarnations, and its gauges."""

    at_s: float  # CLOCK_MONOTONIC of the host
    ended: bool  # in order; who was killed does not get to say so
    families: list[MetricSamples]
    carried: dict[str, CarriedTotals]  # by worker

    def without_gauges(self) -> list[MetricSamples]:
        """What still counts after the gateway has ended."""
        return [family for family in self.families if family.kind != "gauge"]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(GatewaySnapshot).decode


def encode_snapshot(snapshot: GatewaySnapshot) -> bytes:
    """For ``decode_snapshot``."""
    return _encode(snapshot)


def decode_snapshot(encoded: bytes) -> GatewaySnapshot:
    """Raises msgspec.DecodeError."""
    return _decode(encoded)


def continue_counters(own: Sequence[MetricSamples], earlier: Iterable[MetricSamples]) -> list[MetricSamples]:
    """What a gateway counted, added to what its earlier incarnations did, which has no gauges."""
    before = list(earlier)
    return _merged([own, before], lambda name: MergeRule.SUM) if before else list(own)


def merge(gateways: Sequence[Sequence[MetricSamples]]) -> list[MetricSamples]:
    """One page of those of several gateways."""
    return _merged(gateways, lambda name: MERGE_RULES.get(name, MergeRule.SUM))


def _merged(pages: Sequence[Sequence[MetricSamples]], rule: Callable[[str], MergeRule]) -> list[MetricSamples]:
    """In the order of the first page; what others have besides comes after it, series by series."""
    firsts: dict[str, MetricSamples] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for family in (family for page in pages for family in page):
        firsts.setdefault(family.name, family)
        if firsts[family.name].kind != family.kind:
            continue
        combined, known = _COMBINED[rule(family.name)], values.setdefault(family.name, {})
        for sample in family.samples:
            series = (sample.name, tuple(sorted(sample.labels.items())))
            both = min if sample.name == family.name + _CREATED else combined
            known[series] = both(known[series], sample.value) if series in known else sample.value
    return [
        MetricSamples(
            name,
            first.help,
            first.kind,
            [MetricSample(sample, dict(labels), value) for (sample, labels), value in values[name].items()],
        )
        for name, first in firsts.items()
    ]
