"""Classes and tenants through real processes: who gives way, who is sent away; and law 1 all the same."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.cli.main import main
from penstock.config.api_keys import load_keys

from .server import PATIENCE_S, PenstockServer
from .streams import Answer, make_client, stream_completion

LONG = {"model": "storyteller", "ignore_eos": True, "temperature": 1.0, "logprobs": 1}
FLAGS = ["--aggregated", "--kv-memory", "4MiB"]
"""128 pages: one full context."""

RUNNING = "penstock:num_requests_running"


def key_of(path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    """The header of a new key."""
    assert main(["keys", "add", str(path), *words]) == 0
    return {"authorization": f"Bearer {capsys.readouterr().out.split()[0]}"}


def batch(index: int) -> dict[str, Any]:
    """Both have room; beside the first an interactive prompt of 1,700 tokens has none, however little is written."""
    prompt, max_tokens = ([50] * 1300, 300) if index == 0 else ([51] * 200, 200)
    return {**LONG, "prompt": prompt, "max_tokens": max_tokens, "seed": index, "priority": "batch"}


async def crowd(server: PenstockServer, headers: dict[str, str]) -> tuple[list[Answer], list[Answer]]:
    """Batch answers, amid which interactive requests with long prompts come; each of them takes nearly all pages."""
    async with make_client() as client:
        client.headers.update(headers)
        begun = asyncio.Event()
        works = [
            asyncio.create_task(
                stream_completion(client, server.url, batch(index), on_chunk=lambda _, told=told: told.set())
            )
            for index, told in enumerate((begun, asyncio.Event()))
        ]
        await begun.wait()
        urgent = []
        for index in range(3):
            body = {**LONG, "prompt": [60 + index] * 1700, "max_tokens": 4, "seed": index}
            urgent.append(await stream_completion(client, server.url, body))
        return await asyncio.gather(*works), urgent


async def alone(server: PenstockServer, headers: dict[str, str]) -> list[Answer]:
    async with make_client() as client:
        client.headers.update(headers)
        return [await stream_completion(client, server.url, batch(index) | {"cache_salt": "x"}) for index in range(2)]


@pytest.mark.timeout(300)
def test_batch_work_gives_way_and_answers_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys.json"
    root = key_of(keys, capsys, "--tenant", "ops", "--operator")
    small = key_of(keys, capsys, "--tenant", "small", "--requests-per-minute", "1", "--classes", "interactive")
    with PenstockServer([*FLAGS, "--api-keys", str(keys)], environ={"PENSTOCK_API_KEY": "sk-of-the-test"}) as server:
        plain = asyncio.run(alone(server, root))
        before = server.metrics().get("penstock:requests_yielded_total", 0)
        for _ in range(5):  # this process may be so slow to read that the batch work is written before it asks
            crowded, urgent = asyncio.run(crowd(server, root))
            assert [answer.identical for answer in crowded] == [answer.identical for answer in plain]
            assert all(answer.done for answer in urgent)
            server.wait_for(lambda: server.metrics()[RUNNING] == 0, PATIENCE_S, "idle")
            if server.metrics().get("penstock:requests_yielded_total", 0) > before:
                break
        else:
            pytest.fail("nobody gave way: batch work was waited for")

        def ask(headers: dict[str, str], **fields: Any) -> httpx.Response:
            body = {"model": "storyteller", "prompt": "Once", "max_tokens": 2} | fields
            return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)

        began = time.monotonic()
        assert ask(small).status_code == 200
        limited = ask(small)
        took_s = time.monotonic() - began
        assert limited.status_code == 429
        assert 59 - took_s <= int(limited.headers["retry-after"]) <= 60
        assert ask(small, priority="batch").status_code == 403
        hasty = ask(root | {"x-penstock-max-wait-s": "0.000001"}, prompt=[70] * 1500)
        assert (hasty.status_code, hasty.json()["error"]["code"]) == (503, "overloaded")
        assert int(hasty.headers["retry-after"]) >= 1
        assert main(["keys", "revoke", str(keys), load_keys(keys, 9).keys[1].id]) == 0
        server.wait_for(lambda: ask(small).status_code == 401, PATIENCE_S, "without the revoked key")
