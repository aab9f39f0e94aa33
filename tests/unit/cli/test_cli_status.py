"""``penstock status``: the head line, rates between two looks, columns, and what is watched."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.cli import status
from penstock.cli.main import main

SERVICE = {"model": "storyteller", "max_model_len": 2048, "version": "0.1.0", "uptime_s": 11_000.0}


def row(worker: str, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "id": worker,
        "role": "decode",
        "pid": 7,
        "state": "ready",
        "cores": 1,
        "running": 0,
        "queued": 0,
        "kv_pages_used": 0,
        "kv_pages_free": 100,
        "kv_pages_leaked": 0,
        "incarnation": 1,
        "prompt_tokens_computed": 1000,
        "generation_tokens": 5000,
    }
    return fields | changes


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Answers of ``/admin/workers``, one after the other, a second apart."""
    answers: list[dict[str, Any]] = []
    clock = iter(float(n) for n in range(100))

    def ask(*_: Any) -> tuple[int, Any]:
        if not answers:
            raise KeyboardInterrupt
        return 200, answers.pop(0)

    monkeypatch.setattr(status, "request_json", ask)
    monkeypatch.setattr("penstock.cli.status.time.sleep", lambda _: None)
    monkeypatch.setattr("penstock.cli.status.time.monotonic", lambda: next(clock))
    return answers


def test_the_head_tells_what_is_served_and_how_fast(
    looks: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    busy = row("decode-0", running=3, queued=1, kv_pages_used=41, kv_pages_free=59)
    later = busy | {"generation_tokens": 5340, "prompt_tokens_computed": 2200}
    looks += [{"service": SERVICE, "workers": [busy]}, {"service": SERVICE, "workers": [later]}]
    assert main(["status"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "storyteller (context 2,048) at http://127.0.0.1:8000, penstock 0.1.0, up 3 h"
    assert second == "3 running, 1 queued; 340 tokens/s generated, 1,200 prefilled, KV 41 %"


def test_an_idle_service_is_asked_once(looks: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    looks += [{"service": SERVICE, "workers": [row("decode-0")]}]
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    assert "0 running, 0 queued; 0 tokens/s generated" in shown
    assert "leaked" not in shown
    assert "reason" not in shown


def test_rare_columns_are_asked_for_and_reasons_are_shown_when_there_are_some(
    looks: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    looks += [{"service": SERVICE, "workers": [row("decode-0", reason="silent for 7.0 s")]}]
    assert main(["status", "--verbose"]) == 0
    shown = capsys.readouterr().out
    assert "pages leaked" in shown
    assert "silent for 7.0 s" in shown


def test_ranks_are_shown_with_the_rare_columns(looks: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    ranks = [
        {
            "rank": rank,
            "node": 1 - rank,
            "pid": 70 + rank,
            "weight_bytes": 3 << 30,
            "kv_bytes": 1 << 30,
            "step_cpu_s": 2.5001,
        }
        for rank in range(2)
    ]
    for flags, shown in (([], False), (["--verbose"], True)):
        looks.append({"service": SERVICE, "workers": [row("w0", ranks=ranks)]})
        assert main(["status", *flags]) == 0
        table = capsys.readouterr().out
        assert ("step cpu s" in table) is shown
        assert (["w0", "1", "0", "71", "3GiB", "1GiB", "2.5"] in [line.split() for line in table.splitlines()]) is shown


def test_a_restarted_worker_does_not_count_backwards() -> None:
    before = {"workers": [row("decode-0", generation_tokens=9000)]}
    after = {"workers": [row("decode-0", incarnation=2, generation_tokens=30, prompt_tokens_computed=0)]}
    assert status.rates(before, after, 1.0) == (0.0, 30.0)


def test_watching_goes_on_until_it_is_stopped(looks: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    looks += [{"service": SERVICE, "workers": [row("decode-0", generation_tokens=n)]} for n in (0, 10, 30)]
    assert main(["status", "--watch", "--json"]) == 130
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["workers"][0]["generation_tokens"] for line in lines] == [0, 10, 30]
    assert main(["status", "--watch", "0"]) == 2


def test_models_of_a_catalogue_have_sizes_for_people(
    looks: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"name": "a", "state": "loaded", "bytes": 557_205_992}
    looks += [{"workers": [], "models": [model]}]
    assert main(["status"]) == 0
    assert "531MiB" in capsys.readouterr().out


@pytest.mark.parametrize(("seconds", "words"), [(45.2, "45 s"), (600, "10 min"), (11_000, "3 h"), (900_000, "10 days")])
def test_durations_in_words(seconds: float, words: str) -> None:
    assert status.format_duration(seconds) == words
