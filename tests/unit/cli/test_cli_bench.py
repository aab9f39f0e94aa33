"""The whole command against a server in another thread."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.scripted_server import Exchange, Script, ScriptedServer, scripted, text_chunk, usage_chunk

from penstock.cli.main import main


@contextmanager
def beside(script: Script) -> Iterator[ScriptedServer]:
    """The scripted server on a loop of its own: the command brings one along."""
    started = threading.Event()
    found: list[ScriptedServer] = []
    stop: list[Any] = []

    async def serve() -> None:
        async with scripted(script) as server:
            done = asyncio.Event()
            found.append(server)
            loop = asyncio.get_running_loop()
            stop.append(lambda: loop.call_soon_threadsafe(done.set))
            started.set()
            await done.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert started.wait(10)
    try:
        yield found[0]
    finally:
        stop[0]()
        thread.join(10)


async def model(exchange: Exchange) -> None:
    """A server of one model that answers with as many tokens as it is asked for."""
    asked = exchange.asked
    if asked.path == "/v1/models":
        await exchange.plain(200, {"data": [{"id": "teller", "max_model_len": 100}]})
    elif asked.path == "/tokenize":
        await exchange.plain(200, {"tokens": list(range(10, 60))})
    else:
        await exchange.begin_stream()
        for _ in range(asked.body["max_tokens"]):
            await exchange.event(text_chunk("x"))
        await exchange.event(usage_chunk(len(asked.body["prompt"]), asked.body["max_tokens"], cached=2))
        await exchange.end_stream()


def bench(url: str, *words: str) -> int:
    return main(["bench", "--base-url", url, "--disable-tqdm", *words])


def test_json_has_seconds_under_the_names_of_the_contract(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    saved = tmp_path / "result.json"
    with beside(model) as server:
        words = ["--num-prompts", "6", "--random-input-len", "20", "--random-output-len", "5", "--ignore-eos"]
        words += [
            "--request-rate",
            "200",
            "--goodput",
            "ttft:10000",
            "tpot:10000",
            "--metric-percentiles",
            "50,90,99.9",
        ]
        assert bench(server.url, *words, "--json", "--save-result", str(saved), "--save-detailed") == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(saved.read_text())
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        assert list(found[name]) == ["mean", "std", "min", "p50", "p90", "p99.9", "max"]
    assert (found["model"], found["prompts"]) == ("teller", "token ids")
    assert (found["completed"], found["failed"], found["errors"], found["skipped"]) == (6, 0, {}, 0)
    assert (found["prompt_tokens"], found["output_tokens"], found["cached_tokens"]) == (120, 30, 12)
    assert found["goodput"] == found["request_throughput"]
    assert len(found["detail"]) == 6
    assert server.asked[-1].body["ignore_eos"] is True
    assert server.asked[-1].body["temperature"] == 0


def test_people_get_a_table(capsys: pytest.CaptureFixture[str]):
    with beside(model) as server:
        port = server.url.rpartition(":")[2]
        words = ["--num-prompts", "3", "--max-concurrency", "2", "--random-input-len", "20", "--backend", "vllm"]
        assert main(["bench", "--host", "127.0.0.1", "--port", port, *words, "--header", "X-Who=me"]) == 0
    assert server.asked[-1].headers["x-who"] == "me"
    shown = capsys.readouterr().out
    for word in ("TTFT", "p50", "p90", "p99", "max", "3 of 3 requests", "output tokens/s"):
        assert word in shown


def test_requests_that_do_not_fit_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    trace = tmp_path / "t.jsonl"
    rows = [{"timestamp": t, "input_length": n, "output_length": 4, "hash_ids": [0]} for t, n in ((0, 30), (5, 400))]
    trace.write_text("\n".join(map(json.dumps, rows)))
    words = ("--dataset-name", "mooncake", "--dataset-path", str(trace), "--json")
    with beside(model) as server:
        assert bench(server.url, *words) == 0
        assert bench(server.url, *words, "--length-scale", "10") == 2
    shown = capsys.readouterr()
    assert json.loads(shown.out)["skipped"] == 1
    assert "none of 2 requests fits the context of 100 tokens" in shown.err


def test_failures_are_told_and_counted(capsys: pytest.CaptureFixture[str]):
    refused = 0

    async def script(exchange: Exchange) -> None:
        nonlocal refused
        if exchange.asked.path == "/v1/completions" and len(exchange.asked.body["prompt"]) == 20:
            refused += 1
            await exchange.plain(429, {"error": {"message": "full", "code": "rate_limit_exceeded"}})
        else:
            await model(exchange)

    with beside(script) as server:
        assert bench(server.url, "--num-prompts", "3", "--random-input-len", "20") == 1
    assert refused == 3
    assert "failed: 3 x http 429 rate_limit_exceeded" in capsys.readouterr().out


def test_the_long_prompt_scenario(capsys: pytest.CaptureFixture[str]):
    with beside(model) as server:
        words = ["--long-prompt-len", "60", "--long-prompt-every", "0.05", "--duration", "0.15", "--warmup", "0.05"]
        words += ["--running-answers", "2", "--random-input-len", "10", "--random-output-len", "20", "--json"]
        assert bench(server.url, *words, "--save-detailed") == 0
        assert bench(server.url, *words[:-1]) == 0
        assert bench(server.url, *words, "--long-output-len", "80") == 2
    shown = capsys.readouterr()
    found, _ = json.JSONDecoder().raw_decode(shown.out)
    assert found["long"]["completed"] == 3
    assert found["running"]["itl_s"]["max"] > 0
    assert found["detail"]["gaps"]
    assert "while they arrived" in shown.out
    assert "do not fit the context" in shown.err


@pytest.mark.parametrize(
    "words",
    [
        ["--goodput", "speed:5"],
        ["--metric-percentiles", "50,x"],
        ["--metric-percentiles", "100"],
        ["--dataset-name", "azure"],
        ["--header", "no-value"],
    ],
)
def test_wrong_flags_are_told_in_one_line(words: list[str], capsys: pytest.CaptureFixture[str]):
    with beside(model) as server:
        assert bench(server.url, "--num-prompts", "1", "--random-input-len", "20", *words) == 2
    assert capsys.readouterr().err.startswith("penstock: error: ")


def test_nobody_listens(capsys: pytest.CaptureFixture[str]):
    assert bench("http://127.0.0.1:1") == 1
    assert "nothing listens at 127.0.0.1:1" in capsys.readouterr().err
