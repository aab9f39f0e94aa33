"""What gateways of a host count, in memory that they share: sums, restarts, deaths, and pages that parsers accept."""

from __future__ import annotations

import asyncio
import os
import re

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as strict_families
from prometheus_client.parser import text_string_to_metric_families

from penstock.clock import VirtualClock
from penstock.config.limits import RequestLimits
from penstock.launch.shared_metrics import MAX_SNAPSHOT_BYTES, HostMetrics, SharedMetrics
from penstock.telemetry import registry
from penstock.telemetry.merged_metrics import GatewaySnapshot, MetricSample, MetricSamples
from penstock.telemetry.registry import Metrics, PrefixIndexStats, RoleForecast
from penstock.types import RESTART_BITS

LIMITS = RequestLimits()


class Gateway:
    """One process' metrics on a host of several."""

    def __init__(self, shared: SharedMetrics, name: str, clock: VirtualClock) -> None:
        self.metrics = Metrics(model_name="m", gateway=name)
        self.metrics.register_router(
            worker_rows=tuple,
            forecasts=lambda: {"both": RoleForecast(self.queue_s, 0.1)},
            open_requests=lambda: self.open,
            dropped_frames=int,
            prefix_index=lambda: PrefixIndexStats(blocks=7),
        )
        self.queue_s, self.open = 1.0, 0
        self.host = HostMetrics(self.metrics, shared, name, clock=clock, limits=LIMITS)

    def publish(self) -> None:
        self.host._publisher(ended=False)()

    def page(self) -> dict[str, dict[tuple[str, ...], float]]:
        return parsed(self.host.snapshot()().decode())


def parsed(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Sample name -> label values but the model's -> value.  Raises ValueError for a page that is not well-formed."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families), "a family is declared once"
    list(strict_families(as_openmetrics(text)))  # also checks the order of samples and the sums of buckets
    for family in families:
        for sample in family.samples:
            labels = tuple(value for name, value in sorted(sample.labels.items()) if name != "model_name")
            assert labels not in found.setdefault(sample.name, {}), "a series has one value"
            found[sample.name][labels] = sample.value
    return found


def as_openmetrics(text: str) -> str:
    """The same page for a parser that is stricter than Prometheus' own: counters are named without ``_total``."""
    kept = [line for line in text.splitlines() if "_created" not in line]
    renamed = [re.sub(r"^(# (?:HELP|TYPE) \S+?)_total ", r"\1 ", line) for line in kept]
    return "\n".join([*renamed, "# EOF", ""])


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(100.0)


def two(clock: VirtualClock) -> tuple[SharedMetrics, Gateway, Gateway]:
    shared = SharedMetrics(("gateway-0", "gateway-1"))
    return shared, Gateway(shared, "gateway-0", clock), Gateway(shared, "gateway-1", clock)


def test_the_page_adds_what_gateways_count_and_not_what_workers_report(clock: VirtualClock) -> None:
    _, one, other = two(clock)
    for gateway, ttft_s, tokens in ((one, 0.03, 5), (other, 0.3, 7)):
        gateway.metrics.on_first_token(ttft_s, 0.01, 10)
        gateway.metrics.on_tokens(tokens, 0.02)
        gateway.metrics.on_finished("stop", 1.0, 0.5)
        gateway.metrics.levels.add_usage("ann" if gateway is one else "ben", (10, tokens, 0, 0))
        gateway.metrics.on_worker_report("decode-0", 1, {"steps": 40.0, "batch_rows_max": 3.0})
        gateway.metrics.on_worker_died("decode-0")
        gateway.open = tokens
    other.queue_s = 2.5
    other.publish()
    page = one.page()
    assert page["penstock:generation_tokens_total"] == {(): 12.0}
    assert page["penstock:prompt_tokens_total"] == {(): 20.0}
    assert page["penstock:request_success_total"][("stop",)] == 2.0
    assert page["penstock:requests_open"] == {(): 12.0}
    assert page["penstock:tenant_tokens_total"][("completion", "ann")] == 5.0
    assert page["penstock:tenant_tokens_total"][("completion", "ben")] == 7.0
    assert page["penstock:tenant_tokens_total"][("completion", "default")] == 0.0
    buckets = page["penstock:time_to_first_token_seconds_bucket"]
    assert (buckets[("0.04",)], buckets[("0.25",)], buckets[("0.5",)], buckets[("+Inf",)]) == (1.0, 1.0, 2.0, 2.0)
    assert page["penstock:inter_token_latency_seconds_count"] == {(): 12.0}
    assert page["penstock:prefix_index_blocks"] == {("gateway-0",): 7.0, ("gateway-1",): 7.0}
    assert page["penstock:predicted_queue_seconds"] == {("both",): 2.5}
    assert page["penstock:engine_steps_total"] == {("decode-0",): 40.0}, "both were told of the same steps"
    assert page["penstock:engine_batch_rows_max"] == {("decode-0",): 3.0}
    assert page["penstock:worker_deaths_total"] == {("decode-0",): 1.0}, "both saw the same death"
    assert page["penstock:rate_limit_hosts"] == {(): 1.0}
    one.publish()
    assert other.page() == page, "each gateway shows the same"


def test_a_restarted_gateway_goes_on_counting_and_no_sum_decreases(clock: VirtualClock) -> None:
    shared, one, other = two(clock)
    for gateway in (one, other):
        gateway.metrics.on_first_token(0.03, 0.01, 10)
        gateway.metrics.on_worker_died("decode-0")
        gateway.open = 4
        gateway.publish()
    killed = other.page()
    assert killed["penstock:time_to_first_token_seconds_count"] == {(): 2.0}
    clock.advance(LIMITS.metrics_stale_s + 0.1)
    other.publish()
    page = other.page()
    assert page["penstock:time_to_first_token_seconds_count"] == {(): 2.0}, "what a killed gateway counted stays"
    assert page["penstock:requests_open"] == {(): 4.0}, "what it had open does not"

    again = Gateway(shared, "gateway-0", clock)
    again.metrics.on_first_token(0.03, 0.01, 10)
    again.metrics.on_worker_report("decode-0", 2, {})
    again.metrics.on_worker_died("decode-0")
    page = again.page()
    assert page["penstock:time_to_first_token_seconds_count"] == {(): 3.0}
    assert page["penstock:prompt_tokens_total"] == {(): 30.0}
    assert page["penstock:worker_deaths_total"] == {("decode-0",): 2.0}
    assert page["penstock:requests_open"] == {(): 4.0}
    again.publish()
    assert other.page()["penstock:prompt_tokens_total"] == {(): 30.0}
    third = Gateway(shared, "gateway-0", clock)
    assert third.page()["penstock:prompt_tokens_total"] == {(): 30.0}, "it inherits from all before it"


def test_totals_of_workers_are_the_same_at_a_gateway_that_missed_their_restarts(clock: VirtualClock) -> None:
    shared, one, other = two(clock)
    early = Gateway(shared, "gateway-0", clock)  # when nothing was written yet, so it inherits nothing
    for restarts in range(3):
        for gateway in (one, other):
            gateway.metrics.on_worker_report("decode-0", (1 << RESTART_BITS) + restarts, {"steps": 10.0})
    one.publish()
    other.publish()
    again = Gateway(shared, "gateway-0", clock)
    for gateway in (again, early):
        gateway.metrics.on_worker_report("decode-0", (1 << RESTART_BITS) + 2, {"steps": 12.0})
        assert gateway.page()["penstock:engine_steps_total"] == {("decode-0",): 32.0}


def test_a_worker_that_is_gone_does_not_come_back_with_a_restarted_gateway(clock: VirtualClock) -> None:
    shared, one, _ = two(clock)
    one.metrics.on_worker_report("gone", 1, {"steps": 1.0})
    one.metrics.on_worker_died("gone")
    one.publish()
    again = Gateway(shared, "gateway-0", clock)
    assert "penstock:worker_deaths_total" not in again.page()
    assert "penstock:engine_steps_total" not in again.page()


def test_a_gateway_that_ended_has_no_gauges_at_once(clock: VirtualClock) -> None:
    shared, one, other = two(clock)
    one.open, other.open = 1, 2
    other.publish()
    assert one.page()["penstock:requests_open"] == {(): 3.0}
    other.host.end()
    assert one.page()["penstock:requests_open"] == {(): 1.0}
    other.publish()  # by a thread that ran on
    assert one.page()["penstock:requests_open"] == {(): 1.0}
    assert shared.read("gateway-1") is not None


def test_the_page_of_one_gateway_has_what_it_counted_alone(clock: VirtualClock) -> None:
    _, one, other = two(clock)
    one.metrics.on_tokens(5, None)
    other.metrics.on_tokens(7, None)
    other.metrics.on_worker_report("decode-0", 1, {"steps": 40.0})
    empty = one.host.gateway_page("gateway-1")
    assert empty is not None
    assert empty() == b""
    other.publish()
    make = one.host.gateway_page("gateway-1")
    assert make is not None
    page = parsed(make().decode())
    assert page["penstock:generation_tokens_total"] == {(): 7.0}
    assert "penstock:engine_steps_total" not in page
    assert one.host.gateway_page("gateway-2") is None


async def test_snapshots_are_published_by_themselves(clock: VirtualClock) -> None:
    shared = SharedMetrics(("gateway-0",))
    one = Gateway(shared, "gateway-0", clock)
    task = asyncio.create_task(one.host.publish_periodically())
    for _ in range(1000):
        if shared.read("gateway-0") is not None:
            break
        await asyncio.sleep(0.01)
    task.cancel()
    snapshot = shared.read("gateway-0")
    assert snapshot is not None
    assert not snapshot.ended
    assert snapshot.at_s == 100.0


def snapshot_of(value: float) -> GatewaySnapshot:
    samples = [MetricSample("penstock:x_total", {"model_name": "m"}, value)]
    return GatewaySnapshot(value, False, [MetricSamples("penstock:x", "x", "counter", samples)], {})


def test_a_snapshot_that_was_not_written_to_its_end_leaves_the_one_before() -> None:
    shared = SharedMetrics(("gateway-0", "gateway-1"))
    assert shared.read("gateway-1") is None
    for value in (1.0, 2.0, 3.0):
        shared.write("gateway-1", snapshot_of(value))
        assert shared.read("gateway-1") == snapshot_of(value)
    assert shared.read("gateway-0") is None
    at = shared._offset("gateway-1", 3 % 2)
    byte = os.pread(shared.descriptor, 1, at + 40)
    os.pwrite(shared.descriptor, bytes([byte[0] ^ 1]), at + 40)  # killed before it wrote the rest
    assert shared.read("gateway-1") == snapshot_of(2.0)
    shared.write("gateway-1", snapshot_of(4.0))
    assert shared.read("gateway-1") == snapshot_of(4.0)


def test_what_is_too_large_or_cannot_be_read_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    shared = SharedMetrics(("gateway-0",))
    shared.write("gateway-0", snapshot_of(1.0))
    huge = MetricSamples("penstock:x", "x" * MAX_SNAPSHOT_BYTES, "counter", [])
    shared.write("gateway-0", GatewaySnapshot(2.0, False, [huge], {}))
    assert shared.read("gateway-0") == snapshot_of(1.0)
    assert "are not shared" in caplog.text


def test_bounded_memory_is_taken_for_what_is_written_only() -> None:
    shared = SharedMetrics([f"gateway-{number}" for number in range(64)])
    for _ in range(3):
        shared.write("gateway-63", snapshot_of(1.0))
    assert os.fstat(shared.descriptor).st_blocks * 512 < 64 << 10


def test_series_of_a_family_of_another_kind_are_left_out() -> None:
    """A gateway of another version of Penstock cannot be on this host; one that lies changes no type."""
    from penstock.telemetry.merged_metrics import merge

    counter = MetricSamples("penstock:x", "x", "counter", [MetricSample("penstock:x_total", {}, 1.0)])
    gauge = MetricSamples("penstock:x", "x", "gauge", [MetricSample("penstock:x", {}, 1.0)])
    assert merge([[counter], [gauge]]) == [counter]
    assert registry.CONTENT_TYPE.startswith("text/plain")
