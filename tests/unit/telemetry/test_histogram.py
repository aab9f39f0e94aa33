"""The histogram that counts an observation as often as it stands for shows what prometheus_client's own would."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

from penstock.telemetry.registry import WeightedHistogram

BOUNDS = (0.01, 0.1, 1.0)
SEEN = ((0.005, 3), (0.01, 1), (0.010001, 2), (1.0, 4), (7.5, 2))


def test_weighted_observations_show_as_so_many_single_ones():
    registry = CollectorRegistry()
    theirs = Histogram("gap_seconds", "gaps", ("model_name",), registry=registry, buckets=BOUNDS).labels("m")
    ours = WeightedHistogram(BOUNDS)
    for value, times in SEEN:
        ours.observe(value, times)
        for _ in range(times):
            theirs.observe(value)
    (expected,) = registry.collect()
    shown = ours.metric("gap_seconds", "gaps", {"model_name": "m"})
    told, wanted = ({(each.name, each.labels.get("le")): each.value for each in of.samples} for of in (shown, expected))
    told.pop(("gap_seconds_created", None))
    wanted.pop(("gap_seconds_created", None))
    total = ("gap_seconds_sum", None)
    assert abs(told.pop(total) - wanted.pop(total)) < 1e-9
    assert told == wanted
    assert (shown.name, shown.type, shown.documentation) == (expected.name, expected.type, expected.documentation)
