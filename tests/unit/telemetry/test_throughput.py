"""A busy gateway's line in the log."""

from __future__ import annotations

import logging

import pytest

from penstock.clock import VirtualClock
from penstock.telemetry.registry import Metrics
from penstock.telemetry.throughput import ThroughputLog


def test_a_busy_gateway_says_how_fast_it_is_and_an_idle_one_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("penstock"), "propagate", True)
    caplog.set_level(logging.INFO, "penstock.gateway")
    metrics, clock = Metrics(), VirtualClock()
    metrics.worker_rows = lambda: [{"running": 2, "queued": 1}, {"running": 1, "queued": 0}]
    throughput = ThroughputLog(metrics, clock)
    throughput.write_line()
    assert not caplog.records
    metrics.on_first_token(0.1, 0.0, 500)
    metrics.on_tokens(40, 0.1)
    metrics.open_requests = lambda: 4
    clock.advance(10)
    throughput.write_line()
    metrics.open_requests = int
    clock.advance(10)
    throughput.write_line()
    (record,) = caplog.records
    assert record.__dict__["fields"] == {
        "open_requests": 4,
        "running": 3,
        "queued": 1,
        "prompt_tokens_per_s": 50.0,
        "generation_tokens_per_s": 4.0,
    }
