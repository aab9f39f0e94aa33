"""Log lines: one line an event, fields that cannot be mistaken, nothing long."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from penstock.telemetry.log import MAX_FIELD_CHARS, ROOT, configure_logging, log_event

log = logging.getLogger("penstock.test")


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    root = logging.getLogger(ROOT)
    before = (root.handlers, root.level, root.propagate)
    yield
    root.handlers, root.level, root.propagate = before


def test_a_line_for_people():
    out = io.StringIO()
    configure_logging("gateway", to=out)
    log_event(log, logging.WARNING, "worker is down", worker="decode-0", requests=3, after=1.23456, last=None, ok=True)
    line = out.getvalue()
    assert line[2] == line[5] == ":"
    expected = "W gateway  worker is down  worker=decode-0 requests=3 after=1.235 last=None ok=True\n"
    assert line[13:] == expected


def test_a_line_for_machines():
    out = io.StringIO()
    configure_logging("gateway", as_json=True, to=out)
    log_event(log, logging.INFO, "request goes on", request_id="cmpl-1/0", epoch=2)
    line = json.loads(out.getvalue())
    when = line.pop("time")
    assert when.endswith("+00:00")
    assert line == {
        "level": "info",
        "process": "gateway",
        "logger": "penstock.test",
        "message": "request goes on",
        "request_id": "cmpl-1/0",
        "epoch": 2,
    }


@pytest.mark.parametrize("value", ["a b", "x=1", 'quo"te', "two\nlines", "", "bell\x07", "é" * 3, "a,b"])
def test_a_field_cannot_look_like_another_field_or_line(value):
    out = io.StringIO()
    configure_logging("gateway", to=out)
    log_event(log, logging.INFO, "message", field=value, other=1)
    line = out.getvalue()
    assert line.count("\n") == 1
    _, _, tail = line.partition("field=")
    assert tail.endswith(" other=1\n")
    shown = tail.removesuffix(" other=1\n")
    assert (json.loads(shown) if shown.startswith('"') else shown) == value


@pytest.mark.parametrize("as_json", [False, True])
def test_long_fields_are_cut(as_json):
    out = io.StringIO()
    configure_logging("gateway", as_json=as_json, to=out)
    log_event(log, logging.INFO, "message", field="x" * 10_000)
    assert out.getvalue().count("x") == MAX_FIELD_CHARS


def test_a_field_cannot_replace_what_every_line_has():
    out = io.StringIO()
    configure_logging("gateway", as_json=True, to=out)
    log_event(log, logging.INFO, "message", process="liar", time="never")
    line = json.loads(out.getvalue())
    assert line["process"] == "gateway"
    assert line["time"] != "never"


@pytest.mark.parametrize("as_json", [False, True])
def test_an_exception_brings_its_trace(as_json):
    out = io.StringIO()
    configure_logging("gateway", as_json=as_json, to=out)
    try:
        raise ValueError("boom")
    except ValueError:
        log.exception("it failed\nbadly")
    text = out.getvalue()
    assert "ValueError: boom" in text
    if as_json:
        assert json.loads(text)["message"] == "it failed\nbadly"
    else:
        assert "it failed badly\nTraceback" in text


def test_lines_below_the_level_cost_nothing_and_a_fork_may_configure_anew():
    first, second = io.StringIO(), io.StringIO()
    configure_logging("supervisor", to=first)
    configure_logging("gateway", level=logging.WARNING, to=second)
    log_event(log, logging.INFO, "not shown")
    log_event(log, logging.ERROR, "shown")
    assert first.getvalue() == ""
    assert second.getvalue().endswith("E gateway  shown\n")
