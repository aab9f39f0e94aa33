from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.scripted_server import Exchange, scripted, text_chunk, usage_chunk

from penstock.cli.benchmark.interference import InterferenceScenario, run_interference
from penstock.cli.benchmark.load_generator import LoadGenerator, LoadProgress, TimedRequest
from penstock.cli.benchmark.metrics import RequestRecord, gaps, gaps_during
from penstock.cli.benchmark.workload import PromptKind, PromptMaker, RequestShape, RequestSpec
from penstock.http_client import HttpStreamClient

BODY = b'{"prompt": "x"}'


async def one_answer(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    await exchange.event({"choices": [{"index": 0, "delta": {"content": "a"}}]})
    await exchange.event(text_chunk("b"))
    await exchange.event({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
    await exchange.event(usage_chunk(7, 3, cached=5))
    await exchange.end_stream()


async def ask(script: Any, patience: float = 5.0) -> RequestRecord:
    async with scripted(script) as server, HttpStreamClient(server.url) as client:
        load = LoadGenerator(client, "/v1/completions", timeout=patience)
        record = load.record()
        await load.ask(BODY, record)
        return record


async def test_only_events_with_text_count_and_usage_is_the_servers():
    record = await ask(one_answer)
    assert record.error is None
    assert len(record.events) == 2
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (7, 5, 3)
    assert record.due <= record.sent <= record.events[0] <= record.events[1]


async def test_without_usage_events_are_counted():
    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        for _ in range(4):
            await exchange.event(text_chunk("x"))
        await exchange.end_stream()

    assert (await ask(script)).output_tokens == 4


async def refuse(exchange: Exchange) -> None:
    await exchange.plain(429, {"error": {"message": "full", "code": "rate_limit_exceeded"}})


async def refuse_without_words(exchange: Exchange) -> None:
    await exchange.plain(502, b"<html>")


async def error_event(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.event({"error": {"message": "gone", "code": "service_unavailable"}})
    await exchange.end_stream()


async def no_json(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.event("{")
    await exchange.end_stream()


async def no_done(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.event(text_chunk("x"))
    exchange.writer.write(b"0\r\n\r\n")


async def no_text(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.end_stream()


async def silence(exchange: Exchange) -> None:
    await exchange.begin_stream()


async def hang_up(exchange: Exchange) -> None:
    exchange.writer.close()


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (refuse, "http 429 rate_limit_exceeded"),
        (refuse_without_words, "http 502"),
        (error_event, "error event service_unavailable"),
        (no_json, "bad chunk"),
        (no_done, "stream ended early"),
        (no_text, "no text"),
        (silence, "timeout after 0.2 s"),
        (hang_up, "connection lost"),
    ],
)
async def test_every_failure_has_its_kind(script: Any, kind: str):
    assert (await ask(script, patience=0.2 if script is silence else 30.0)).error == kind


async def test_an_open_loop_charges_a_stall_to_every_request_behind_it():
    """Ten requests are due 10 ms apart; the server answers none before the last has come."""
    all_here = asyncio.Event()
    came = 0

    async def script(exchange: Exchange) -> None:
        nonlocal came
        came += 1
        if came == 10:
            all_here.set()
        await all_here.wait()
        await one_answer(exchange)

    async with scripted(script) as server, HttpStreamClient(server.url) as client:
        load = LoadGenerator(client, "/v1/completions", timeout=60)
        progress = LoadProgress(10)
        jobs = [TimedRequest(BODY, at=n * 0.01) for n in range(10)]
        found = await load.run(jobs, max_concurrency=None, closed_loop=False, progress=progress)
    assert (progress.sent, progress.done, progress.failed, progress.output_tokens) == (10, 10, 0, 30)
    dues = [record.due - found[0].due for record in found]
    assert dues == pytest.approx([n * 0.01 for n in range(10)])
    assert found[0].ttft >= 0.09 - 1e-3
    assert all(record.ttft >= 0.09 - record.due + found[0].due - 1e-3 for record in found)


@pytest.mark.parametrize("closed_loop", [True, False])
async def test_waiting_for_a_slot_counts_in_an_open_loop_only(closed_loop: bool):
    running = most = 0
    both_here = asyncio.Barrier(2)

    async def script(exchange: Exchange) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await both_here.wait()
        await asyncio.sleep(0.02)
        running -= 1
        await one_answer(exchange)

    async with scripted(script) as server, HttpStreamClient(server.url) as client:
        load = LoadGenerator(client, "/v1/completions", timeout=60)
        found = await load.run([TimedRequest(BODY)] * 6, max_concurrency=2, closed_loop=closed_loop)
    assert most == 2
    waited = max(record.sent - record.due for record in found)
    assert waited == 0 if closed_loop else waited >= 0.03


async def tokenizer(exchange: Exchange) -> None:
    """One token a word, and three for the template."""
    body = exchange.asked.body
    text = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
    await exchange.plain(200, {"tokens": [100 + len(word) for word in text.split()] + [0] * 3 * ("messages" in body)})


async def make(
    endpoint: str, wanted: list[RequestSpec], script: Any = tokenizer, seed: int = 0
) -> tuple[PromptKind, list[Any]]:
    async with scripted(script) as server, HttpStreamClient(server.url) as client:
        maker = PromptMaker(client, RequestShape(model="m", endpoint=endpoint, extra={"ignore_eos": True}), seed)
        await maker.learn()
        return maker.kind, [json.loads(body) for body in await maker.bodies(wanted)]


async def test_prompts_of_token_ids_have_their_length_and_share_what_the_trace_shares():
    shared = RequestSpec(input_len=40, output_len=5, blocks=(7, 8), block_tokens=16)
    kind, bodies = await make("/v1/completions", [shared, shared, RequestSpec(input_len=40, output_len=5)])
    assert kind is PromptKind.IDS
    one, two, other = (body["prompt"] for body in bodies)
    assert [len(one), len(two), len(other)] == [40, 40, 40]
    assert one[:32] == two[:32]
    assert one[32:] != two[32:]
    assert one[:16] != other[:16]
    assert bodies[0] | {"prompt": []} == {
        "model": "m",
        "prompt": [],
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


async def test_prompts_repeat_with_their_seed():
    wanted = [RequestSpec(input_len=20, output_len=1)] * 2
    assert await make("/v1/completions", wanted, seed=1) == await make("/v1/completions", wanted, seed=1)
    assert await make("/v1/completions", wanted, seed=1) != await make("/v1/completions", wanted, seed=2)


async def test_chat_prompts_are_fitted_with_their_template():
    kind, (body,) = await make("/v1/chat/completions", [RequestSpec(input_len=40, output_len=5)])
    assert kind is PromptKind.FITTED
    assert len(body["messages"][0]["content"].split()) == 37


async def test_llama_servers_tokenizer_is_asked_in_its_own_words():
    async def script(exchange: Exchange) -> None:
        await exchange.plain(200, {"tokens": [7, 8, 9] if "content" in exchange.asked.body else []})

    kind, (body,) = await make("/v1/completions", [RequestSpec(input_len=40, output_len=5)], script)
    assert kind is PromptKind.IDS
    assert len(body["prompt"]) == 40
    assert set(body["prompt"]) <= {7, 8, 9}


async def test_a_tokenizer_that_finds_no_token_is_none():
    async def script(exchange: Exchange) -> None:
        await exchange.plain(200, {"tokens": []})

    kind, _ = await make("/v1/completions", [RequestSpec(input_len=40, output_len=5)], script)
    assert kind is PromptKind.WORDS


async def test_a_server_without_a_tokenizer_gets_words():
    async def script(exchange: Exchange) -> None:
        await exchange.plain(404, {})

    kind, (body,) = await make("/v1/completions", [RequestSpec(input_len=40, output_len=5)], script)
    assert kind is PromptKind.WORDS
    assert len(body["prompt"].split()) == 40


async def test_long_prompts_amid_running_answers():
    """The server stalls every stream while it answers a long prompt; the stall shows in the gaps of all of them."""
    free = asyncio.Event()
    free.set()
    stalling = asyncio.Lock()
    heard: set[int] = set()  # running streams that said something since the last stall

    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        if exchange.asked.body["prompt"] == "long":
            async with stalling:  # each stall is one, though the machine may bring two prompts at once
                free.clear()
                heard.clear()
                await asyncio.sleep(0.05)
                free.set()
                while len(heard) < 3:  # noqa: ASYNC110 - a set signals nothing
                    await asyncio.sleep(0.001)
            await exchange.event(text_chunk("x"))
        else:
            for _ in range(4000):
                await free.wait()
                await exchange.event(text_chunk("x"))
                heard.add(id(exchange))
                await asyncio.sleep(0.001)
        await exchange.end_stream()

    async with scripted(script) as server, HttpStreamClient(server.url) as client:
        load = LoadGenerator(client, "/v1/completions", timeout=60)
        result = await run_interference(
            load,
            InterferenceScenario(running=3, every=0.1, warmup=0.3),
            [b'{"prompt": "short"}'],
            [b'{"prompt": "long"}'] * 3,
        )
    report = result.report([50.0, 99.0])
    assert report["long"]["completed"] == 3
    assert report["long"]["ttft_s"]["min"] >= 0.045
    assert report["running"]["failed"] == 0
    assert report["running"]["itl_s"]["max"] >= 0.045
    assert report["running"]["itl_before_s"]["p50"] < report["running"]["itl_s"]["max"]
    stalls = [gap for gap in gaps_during(result.answers, result.since, result.until) if gap >= 0.045]
    assert len(stalls) >= 3 * 3
    assert len(result.raw()["gaps"]) == len(gaps(result.answers))
