"""Spans of real processes: what a collector gets of answers, split and cached, and of one whose worker is killed."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.telemetry import spans

from .collector import Collector, Got, spans_of
from .server import PATIENCE_S, PenstockServer

pytest.importorskip("opentelemetry.sdk", reason="the extra `trace` is not installed: no spans are tested")

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BODY: dict[str, Any] = {"model": "storyteller", "prompt": [5 + i % 50 for i in range(300)], "seed": 1}
QUICK = '[trace]\nsend_every_s = 0.05\n[routing]\nsplit = "always"\n'
"""Whatever steps take on this machine, a split answer is split."""


def ask(server: PenstockServer, trace: str = TRACE, *, sampled: str = "01", **fields: Any) -> httpx.Response:
    headers = {"traceparent": f"00-{trace}-{CALLER}-{sampled}"}
    answer = httpx.post(f"{server.url}/v1/completions", json=BODY | fields, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def named(got: list[Got], family: spans.SpanFamily) -> list[Got]:
    return [span for span in got if span.name == family.name]


def is_over(got: list[Got]) -> bool:
    """The request's own span is the last to end."""
    return any(span.parent == CALLER for span in got)


def is_a_tree(got: list[Got]) -> None:
    """Every span has its parent, within its time but for what clocks cost."""
    known = {span.own: span for span in got}
    for span in got:
        if span.parent == CALLER:
            continue
        parent = known[span.parent]
        assert parent.trace == span.trace
        assert parent.begin_ns - 2_000_000 <= span.begin_ns <= span.end_ns


@pytest.mark.long
def test_a_collector_gets_every_phase_of_a_split_answer_and_the_retry_of_a_killed_worker(tmp_path: Path) -> None:
    with Collector() as collector:
        flags = ["--trace-endpoint", collector.url, "--decode", "2", "--response-cache", "1MiB"]
        environ = {"OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=mine"}
        with PenstockServer(flags, config=QUICK, folder=tmp_path, environ=environ) as server:
            answer = ask(server, max_tokens=12)
            assert answer.headers["traceresponse"].split("-")[1] == TRACE
            got = collector.wait(is_over)
            assert collector.headers["x-tenant"] == "mine"
            phases_of_a_split_answer(got)
            ask(server, "b" * 32, max_tokens=12)
            got = collector.wait(lambda spans_: is_over(of_trace(spans_, "b" * 32)))
            (hit,) = [span for span in of_trace(got, "b" * 32) if span.parent == CALLER]
            assert hit.facts["penstock.response_cache"] == "hit"
            assert not named(of_trace(got, "b" * 32), spans.ANSWER)
            a_killed_worker(server, collector)
            ask(server, "d" * 32, sampled="00", max_tokens=2)
            server.wait_idle()
            server.wait_counted("trace_spans_total")
        assert not of_trace(collector.spans, "d" * 32)


def phases_of_a_split_answer(got: list[Got]) -> None:
    is_a_tree(got)
    split = {family.name for family in spans.SPANS} - {"request", spans.RETRY.name, spans.TIERS.name}
    assert {span.name for span in got} == split | {"text_completion storyteller"}
    assert {span.trace for span in got} == {TRACE}
    (root,) = [span for span in got if span.parent == CALLER]
    assert root.facts["gen_ai.usage.output_tokens"] == "12"
    assert root.resource["service.name"] == "penstock"
    assert {span.facts["penstock.leg"] for span in named(got, spans.LEG)} == {"prefill", "decode"}
    (transfer,) = named(got, spans.TRANSFER)
    assert float(transfer.facts["penstock.tokens"]) == 300


def a_killed_worker(server: PenstockServer, collector: Collector) -> None:
    """Kill the worker that writes, in the middle of an answer, and find out what the trace says of it."""
    for attempt in range(1, 9):
        trace = f"{attempt:032x}"
        writer = kill_in_the_middle(server, trace)
        got = collector.wait(lambda spans_, trace=trace: is_over(of_trace(spans_, trace)))
        got = of_trace(got, trace)
        is_a_tree(got)
        retries = named(got, spans.RETRY)
        if retries:  # else the answer had ended before its worker did
            assert [span.facts["penstock.worker"] for span in retries] == [writer]
            assert any(span.error for span in named(got, spans.LEG))
            epochs = {str(span.facts["penstock.epoch"]) for span in named(got, spans.LEG)}
            assert epochs >= {"1", "2"}  # on a busy machine there may be a third
            assert len(named(got, spans.DECISION)) == len(epochs)
            return
        server.wait_all_ready()
    raise AssertionError("no kill hit an answer in the middle")


def kill_in_the_middle(server: PenstockServer, trace: str) -> str:
    body = BODY | {"max_tokens": 1600, "stream": True, "ignore_eos": True, "seed": 2}
    headers = {"traceparent": f"00-{trace}-{CALLER}-01", "x-penstock-explain": "1", "cache-control": "no-store"}
    rows = {row["id"]: row["pid"] for row in server.workers()}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=60) as stream:
        route = stream.headers["x-penstock-route"]
        (writer,) = [name for name in rows if re.search(rf"(decode|whole)={name}\b", route)]
        os.kill(rows[writer], signal.SIGKILL)
        assert "data: [DONE]" in list(stream.iter_lines())
    return writer


def of_trace(got: list[Got], trace: str) -> list[Got]:
    return [span for span in got if span.trace == trace]


@pytest.mark.long
def test_a_file_gets_the_same_and_a_collector_that_is_away_costs_nothing(tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    flags = ["--trace-endpoint", "http://127.0.0.1:9", "--trace-file", str(file), "--kv-host", "16MiB"]
    with PenstockServer([*flags, "--aggregated"], config=QUICK, folder=tmp_path) as server:
        plain = [ask(server, max_tokens=8, seed=seed).json()["choices"] for seed in (1, 2)]
        assert len(plain) == 2
        server.wait_for(lambda: "spans cannot be sent to http://127.0.0.1:9" in server.read_log(), PATIENCE_S, "said")
    got = [span for line in file.read_text().splitlines() for span in spans_of(json.loads(line))]
    assert len(named(got, spans.ANSWER)) == 2
    is_a_tree(got)
