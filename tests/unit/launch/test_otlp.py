"""Spans as a collector and a file get them: names, parents, times, sampling; and what nobody takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra `trace` is not installed: no spans are tested")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from tests.cluster.collector import Collector, Got, spans_of

from penstock.config.limits import TraceConfig
from penstock.config.schema import ServeConfig
from penstock.errors import ConfigError
from penstock.launch.compose import trace_config
from penstock.launch.gateway_process import open_tracer
from penstock.launch.otlp import OtlpTracer, _Destination
from penstock.telemetry.spans import ANSWER, DECODE, NO_SPAN, OUTCOMES

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def header(sampled: str) -> dict[str, str]:
    return {"traceparent": f"00-{TRACE}-{CALLER}-{sampled}"}


def one_request(tracer: OtlpTracer) -> None:
    root = tracer.root(header("01"), "chat m", 100.0)
    answer = tracer.begin(root.context, ANSWER, 100.25)
    answer.set_attributes(penstock__tokens=3, penstock__finish="stop")
    answer.add_event("first_token", 100.5)
    decode = tracer.begin(answer.context, DECODE, 100.5)
    decode.end(101.0)
    answer.end(101.0, "it broke")
    root.end(101.5)


def is_that_request(spans: list[Got]) -> None:
    root, answer, decode = (
        next(span for span in spans if span.name == name) for name in ("chat m", "answer", "decode")
    )
    assert {span.trace for span in spans} == {TRACE}
    assert (root.parent, answer.parent, decode.parent) == (CALLER, root.own, answer.own)
    assert answer.begin_ns - root.begin_ns == 250_000_000
    assert root.end_ns - root.begin_ns == 1_500_000_000
    assert str(answer.facts["penstock.tokens"]) == "3"
    assert (answer.facts["penstock.finish"], answer.events, answer.error) == ("stop", ["first_token"], "it broke")
    assert root.resource["penstock.model"] == "m"


def test_a_collector_and_a_file_get_the_same(tmp_path: Path):
    with Collector() as collector:
        config = TraceConfig(endpoint=collector.url, file=str(tmp_path / "spans.jsonl"), send_every_s=0.01)
        tracer = open_tracer(config, model="m", process="gateway-0-1")
        assert tracer is not None
        one_request(tracer)
        is_that_request(collector.wait(lambda spans: len(spans) == 3))
        tracer.close()
    lines = (tmp_path / "spans.jsonl").read_text().splitlines()
    is_that_request([span for line in lines for span in spans_of(json.loads(line))])
    assert tracer.figures() == {"ended": 6, "exported": 6, "failed": 0}


def test_the_caller_decides_and_then_the_share():
    tracer = OtlpTracer(TraceConfig(sample=0.0), {})
    assert tracer.root({}, "chat m", 1.0) is NO_SPAN
    assert tracer.root(header("01"), "chat m", 1.0).context.split("-")[1] == TRACE
    assert tracer.begin("", ANSWER, 1.0) is NO_SPAN
    tracer.close()
    always = OtlpTracer(TraceConfig(sample=1.0), {})
    assert always.root({}, "chat m", 1.0).context
    assert always.root(header("00"), "chat m", 1.0) is NO_SPAN
    always.close()


class Moody(SpanExporter):
    """Takes a batch or not, as it is told beforehand."""

    def __init__(self, *takes: bool) -> None:
        self._takes = list(takes)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS if self._takes.pop(0) else SpanExportResult.FAILURE


def test_that_spans_cannot_be_sent_is_told_once_and_once_that_they_are_again(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "penstock")
    counts = dict.fromkeys(OUTCOMES, 0)
    moody = Moody(True, False, False, False, True, True, False)
    destination = _Destination("there", moody, counts, lambda: None)
    said: list[list[str]] = []
    for _ in range(7):
        caplog.clear()
        destination.export([ReadableSpan("answer")])
        said.append(["again" if "again" in text else "cannot" for text in caplog.messages])
    assert said == [[], ["cannot"], [], [], ["again"], [], ["cannot"]]
    assert (counts["exported"], counts["failed"]) == (3, 4)


def test_a_collector_that_refuses_has_no_spans(caplog: pytest.LogCaptureFixture):
    with Collector(refuses=True) as collector:
        config = TraceConfig(endpoint=collector.url, send_every_s=0.01, send_timeout_s=0.2, max_queued_spans=4)
        tracer = OtlpTracer(config, {})
        for _ in range(3):
            one_request(tracer)
        tracer.close()
    figures = tracer.figures()
    assert figures["ended"] == 9
    assert figures["exported"] == 0
    assert 0 < figures["failed"] <= 9
    assert len([text for text in caplog.messages if "cannot be sent" in text]) == 1
    assert not collector.spans


def test_what_the_environment_calls_the_service_goes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def resource(name: str) -> dict[str, Any]:
        path = tmp_path / name
        tracer = OtlpTracer(TraceConfig(file=str(path)), {"penstock.model": "m"})
        one_request(tracer)
        tracer.close()
        return next(span.resource for line in path.read_text().splitlines() for span in spans_of(json.loads(line)))

    assert resource("plain")["service.name"] == "penstock"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "stories")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    named = resource("named")
    assert (named["service.name"], named["deployment.environment.name"]) == ("stories", "test")
    assert named["penstock.model"] == "m"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"trace_endpoint": "localhost:4318"}, "expected a URL such as http"),
        ({"trace_file": "/nowhere/at/all/spans"}, "no such folder"),
    ],
)
def test_what_cannot_be_traced_is_refused_at_the_start(settings: dict[str, str], words: str):
    with pytest.raises(ConfigError, match=words):
        trace_config(ServeConfig(**settings))


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("penstock.launch.compose.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--trace-endpoint needs OpenTelemetry.*penstock\[trace\]"):
        trace_config(ServeConfig(trace_endpoint="http://127.0.0.1:4318"))
    assert not trace_config(ServeConfig()).enabled
