"""Metrics: names, totals over incarnations, and the text that Prometheus reads."""

from __future__ import annotations

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from penstock.telemetry import metrics as names
from penstock.telemetry.metrics import MetricFamily, MetricKind
from penstock.telemetry.registry import (
    Metrics,
    PickerMetrics,
    PrefixIndexStats,
    ResponseCacheStats,
    RoleForecast,
    WorkerTotals,
)

DASHBOARD = {  # vLLM's names, as its dashboards ask for them
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "prompt_tokens",
    "generation_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_success",
    "num_preemptions",
    "kv_transfer_bytes",
    "kv_transfer_seconds",
    "kv_transfer_pages",
    "kv_pages_leaked",
    "resubmissions",
    "worker_deaths",
    "dropped_frames",
}

ROW = {
    "id": "decode-0",
    "role": "decode",
    "state": "ready",
    "running": 3,
    "queued": 2,
    "kv_pages_used": 25,
    "kv_pages_free": 75,
    "kv_pages_leaked": 0,
    "kv_pages_loading": 0,
    "kv_tiers": [{"tier": "disk", "pages": 7}],
}


def declared() -> list[MetricFamily]:
    alone = [value for value in vars(names).values() if isinstance(value, MetricFamily)]
    by_name = (names.BY_WORKER_COUNTER, names.BY_WORKER_MAXIMUM, names.BY_TIER_FIGURE)
    return [*alone, *(family for families in by_name for family in families.values())]


def scrape(metrics: Metrics) -> dict[str, dict[tuple[str, ...], float]]:
    """Sample name -> label values but the model's, in order of label names -> value."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        assert family.documentation, family.name
        for sample in family.samples:
            labels = tuple(value for name, value in sorted(sample.labels.items()) if name != "model_name")
            assert sample.labels["model_name"] == "m"
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def test_every_counter_of_a_worker_has_a_family():
    assert set(names.BY_WORKER_COUNTER) == set(names.WORKER_COUNTERS)
    assert set(names.BY_WORKER_MAXIMUM) == set(names.WORKER_MAXIMA)


def test_every_name_is_declared_once_and_dashboards_find_theirs():
    told = [family.name for family in declared()]
    assert len(told) == len(set(told))
    assert set(told) >= DASHBOARD


def test_workers_need_no_metrics_library_to_count():
    code = "import sys, penstock.telemetry.metrics; print('prometheus_client' in sys.modules)"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    told = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True, timeout=60
    )
    assert told.stdout.strip() == "False"


def test_all_declared_families_are_shown():
    metrics = Metrics(model_name="m", spans=lambda: {"ended": 1})
    metrics.worker_rows = lambda: [ROW]
    metrics.forecasts = lambda: {"decode": RoleForecast(0.5, 0.25)}
    counters = (*names.WORKER_COUNTERS, *names.WORKER_MAXIMA, *names.TIER_COUNTERS)
    metrics.on_worker_report("decode-0", 1, dict.fromkeys(counters, 1.0))
    metrics.on_worker_died("decode-0")
    metrics.on_worker_suspected("decode-0")
    metrics.on_worker_probed("decode-0", "sent")
    metrics.on_retried(delayed=False)
    metrics.on_returned("preempted")
    metrics.on_fenced("epoch")
    metrics.on_idempotency_key("new")
    metrics.on_prefix_break("tokens", 16)
    metrics.register_response_cache(lambda: ResponseCacheStats({"hit": 1}))
    shown = scrape(metrics)
    of_the_picker = {sample.name for family in PickerMetrics().registry.collect() for sample in family.samples}
    for family in declared():
        suffix = {MetricKind.COUNTER: "_total", MetricKind.GAUGE: "", MetricKind.HISTOGRAM: "_bucket"}[family.kind]
        assert names.PREFIX + family.name + suffix in shown.keys() | of_the_picker
    assert shown["penstock:kv_store_pages"] == {("disk", "decode-0"): 7.0}
    assert shown["penstock:kv_store_pages_read_total"][("redis", "decode-0")] == 1.0


def test_what_workers_are_is_looked_up_when_somebody_asks():
    metrics = Metrics(model_name="m")
    rows = [ROW]
    metrics.register_router(
        worker_rows=lambda: rows,
        forecasts=lambda: {"decode": RoleForecast(queue_s=0.5, step_s=0.25)},
        open_requests=lambda: 5,
        dropped_frames=lambda: 2,
        prefix_index=PrefixIndexStats,
    )
    shown = scrape(metrics)
    assert shown["penstock:predicted_queue_seconds"] == {("decode",): 0.5}
    assert shown["penstock:predicted_step_seconds"] == {("decode",): 0.25}
    assert shown["penstock:num_requests_running"] == {("decode", "decode-0"): 3.0}
    assert shown["penstock:num_requests_waiting"] == {("decode", "decode-0"): 2.0}
    assert shown["penstock:kv_cache_usage_perc"] == {("decode", "decode-0"): 0.25}
    assert shown["penstock:worker_up"] == {("decode", "decode-0"): 1.0}
    assert shown["penstock:requests_open"] == {(): 5.0}
    assert shown["penstock:dropped_frames_total"] == {(): 2.0}
    rows[:] = [ROW | {"state": "dead", "kv_pages_used": 0, "kv_pages_free": 0}]
    shown = scrape(metrics)
    assert shown["penstock:kv_cache_usage_perc"] == {("decode", "decode-0"): 0.0}
    assert shown["penstock:worker_up"] == {("decode", "decode-0"): 0.0}


def test_a_request_is_counted_in_its_phases():
    metrics = Metrics(model_name="m")
    metrics.on_first_token(0.5, 0.1, 40)
    metrics.on_tokens(1, None)
    metrics.on_tokens(2, 0.2)
    metrics.on_finished("stop", 0.9, 0.4)
    metrics.on_finished("error", 0.1, None)
    shown = scrape(metrics)
    assert shown["penstock:prompt_tokens_total"] == {(): 40.0}
    assert shown["penstock:generation_tokens_total"] == {(): 3.0}
    assert shown["penstock:time_to_first_token_seconds_sum"] == {(): 0.5}
    assert shown["penstock:request_queue_time_seconds_sum"] == {(): 0.1}
    assert shown["penstock:request_prefill_time_seconds_sum"] == {(): 0.4}
    assert shown["penstock:inter_token_latency_seconds_count"] == {(): 2.0}
    assert shown["penstock:inter_token_latency_seconds_sum"] == {(): 0.2}
    assert shown["penstock:request_decode_time_seconds_count"] == {(): 1.0}
    assert shown["penstock:e2e_request_latency_seconds_count"] == {(): 2.0}
    assert shown["penstock:request_success_total"] == {
        ("stop",): 1.0,
        ("length",): 0.0,
        ("abort",): 0.0,
        ("error",): 1.0,
    }


def test_two_registries_do_not_meet():
    one, two = Metrics(model_name="m"), Metrics(model_name="m")
    one.on_resubmitted()
    assert scrape(one)["penstock:resubmissions_total"] == {(): 1.0}
    assert scrape(two)["penstock:resubmissions_total"] == {(): 0.0}


def test_a_new_incarnation_goes_on_where_the_last_one_ended():
    totals = WorkerTotals()
    totals.on_report("w", 1, {"steps": 10.0, "batch_rows_max": 4.0, "unknown": 9.0})
    totals.on_report("w", 2, {"steps": 1.0, "batch_rows_max": 2.0})
    assert totals.value("w", "steps") == 11.0
    assert totals.value("w", "batch_rows_max") == 4.0
    assert totals.value("w", "unknown") == 0.0
    totals.on_report("w", 1, {"steps": 99.0})
    totals.on_report("w", 3, {"batch_rows_max": 7.0})
    assert totals.value("w", "steps") == 11.0
    assert totals.value("w", "batch_rows_max") == 7.0
    assert totals.workers() == ["w"]
    assert totals.value("nobody", "steps") == 0.0


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.dictionaries(st.sampled_from(["steps", "batch_rows_max"]), st.floats(0, 9)))
    )
)
def test_a_total_never_goes_back(reports):
    totals, seen = WorkerTotals(), {"steps": 0.0, "batch_rows_max": 0.0}
    for incarnation, counters in reports:
        totals.on_report("w", incarnation, counters)
        for name, before in seen.items():
            assert totals.value("w", name) >= before
            seen[name] = totals.value("w", name)
