"""The gateways of two hosts as one service: idempotency keys, of which each token is counted once, and adapters."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

import penstock
from tiny_adapters import write_adapter

from .gateway_hosts import LONG, TOKENS, Hosts, request_body, text_of
from .rated_hosts import hosts_of
from .server import PATIENCE_S, PenstockServer
from .test_api_key_limits import add_key, begin_stream, code_of
from .test_api_key_limits import ask as ask_one

STORYTELLER = Path(penstock.__file__).parent / "bundled" / "storyteller"
SAVED_AFTER_S = 0.4
"""Of reading a stream until tokens of it are saved; a token is drawn in a millisecond."""


@contextmanager
def two_hosts(folder: Path, *flags: str, config: str | None = None) -> Iterator[Hosts]:
    with ExitStack() as stack:
        yield Hosts(stack, folder, *flags, config=config)


@pytest.mark.long
def test_a_key_at_the_gateways_of_two_hosts_is_counted_once(tmp_path: Path) -> None:
    """Afterwards, at the same time, with another body, and when the home of the key is killed."""
    with two_hosts(tmp_path) as hosts:
        first = hosts.ask(0, "k1")
        text, prompt = text_of(first), first.json()["usage"]["prompt_tokens"]
        assert text_of(hosts.ask(1, "k1")) == text
        found = hosts.wait_usage(
            completion=TOKENS, prompt=prompt, requests=1, generated=TOKENS, prompts=prompt, replayed=TOKENS
        )
        assert [each["completion"] for each in found] == [TOKENS, 0]
        refused = hosts.ask(1, "k1", max_tokens=5)
        assert refused.status_code == 422
        assert refused.json()["error"]["code"] == "idempotency_key_reused"
        with ThreadPoolExecutor(2) as pool:
            both = list(pool.map(lambda number: hosts.ask(number, "k2", max_tokens=900), range(2)))
        assert text_of(both[0]) == text_of(both[1])
        hosts.wait_usage(completion=TOKENS + 900, prompt=2 * prompt, requests=2, generated=TOKENS + 900)
        for worker in hosts.workers:
            os.kill(worker.worker_pid(), signal.SIGKILL)
        assert text_of(hosts.ask(0, "k3")) == text
        assert text_of(hosts.ask(1, "k1")) == text, "its home has lost it: it is counted where it was before"
        assert text_of(hosts.ask(1, "k3")) == text
        found = hosts.wait_usage(completion=2 * TOKENS + 900, requests=3)


@pytest.mark.long
def test_a_stream_whose_host_is_killed_is_counted_whole_where_it_goes_on(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as hosts:
        whole = text_of(hosts.ask(1, "plain", max_tokens=900))
        hosts.wait_usage(completion=900)
        with streamed_lines(hosts, "k1") as lines:
            events = 0
            while events < 20:
                events += next(lines).startswith("data: {")
            hosts.servers.pop(0).kill()
        with streamed_lines(hosts, "k1") as lines:
            events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == whole
        hosts.wait_usage(completion=1800, requests=2)


@pytest.mark.long
def test_a_stream_whose_gateway_is_killed_is_not_decoded_again(tmp_path: Path) -> None:
    """The other host's gateway goes on from the tokens that were saved, and workers compute the others only."""
    with two_hosts(tmp_path, config="[failover]\nsave_tokens_s = 0.05\n") as hosts:
        other = hosts.servers[1]
        whole = text_of(hosts.ask(1, "plain", max_tokens=LONG))
        hosts.wait_usage(completion=LONG)
        with streamed_lines(hosts, "k1", LONG) as lines:
            events, began = 0, time.monotonic()
            while events < 20 or time.monotonic() < began + SAVED_AFTER_S:
                events += next(lines).startswith("data: {")
            hosts.servers.pop(0).kill()
        other.wait_idle()
        drawn = other.metrics()["penstock:worker_generation_tokens_total"]
        with streamed_lines(hosts, "k1", LONG) as lines:
            pieces = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole
        resumed = other.metrics()["penstock:idempotent_resumed_tokens_total"]
        assert resumed >= events / 2
        hosts.wait_usage(completion=2 * LONG, requests=2, generated=2 * LONG - resumed)
        other.wait_idle()
        computed = other.metrics()["penstock:worker_generation_tokens_total"] - drawn
        assert 0 < computed <= LONG - resumed + 1, "the prefill worker draws a token, too"


@pytest.mark.long
def test_an_adapter_that_one_host_loads_is_served_by_the_other(tmp_path: Path) -> None:
    fox, owl = (write_adapter(tmp_path / name, STORYTELLER, rank=4, seed=seed) for seed, name in enumerate(("f", "o")))
    with two_hosts(tmp_path, "--allow-lora-updating") as hosts:
        a, b = hosts.servers
        assert adapter_call(a, "load", lora_name="fox", lora_path=str(fox)).status_code == 200
        b.wait_for(lambda: "fox" in models(b), PATIENCE_S, "shared")
        plain = text_of(hosts.ask(0, "plain"))
        texts = {text_of(hosts.ask(number, f"fox-{number}", model="fox")) for number in range(2)}
        assert len(texts) == 1
        assert texts != {plain}
        refused = adapter_call(b, "load", lora_name="fox", lora_path=str(owl))
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "adapter_exists")
        for worker in hosts.workers:
            os.kill(worker.worker_pid(), signal.SIGKILL)
        assert text_of(hosts.ask(1, "again", model="fox")) in texts
        assert adapter_call(b, "unload", lora_name="fox").status_code == 200
        a.wait_for(lambda: "fox" not in models(a), PATIENCE_S, "gone")
        assert hosts.ask(0, "gone", model="fox").status_code == 404


def adapter_call(server: PenstockServer, what: str, **body: str) -> httpx.Response:
    return httpx.post(
        f"{server.url}/v1/{what}_lora_adapter", json=body, headers=server.key_headers(), timeout=60, trust_env=False
    )


def models(server: PenstockServer) -> set[str]:
    return {card["id"] for card in server.get("/v1/models", **server.key_headers()).json()["data"]}


@pytest.mark.long
def test_open_requests_of_a_key_are_counted_over_both_hosts(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as hosts:
        key = add_key(tmp_path / "api-keys.json", "bob", max_concurrency=2)
        for server in hosts.servers:
            server.wait_for(lambda server=server: hosts_of(server) == 2, PATIENCE_S, "divided")  # type: ignore[misc]
            server.wait_for(lambda server=server: code_of(ask_one(server, key)) == (200, ""), PATIENCE_S, "known")  # type: ignore[misc]
        streams = [begin_stream(server, key) for server in hosts.servers]
        for server in hosts.servers:
            assert code_of(ask_one(server, key)) == (429, "concurrency_limit_exceeded")
        streams[0].close()
        second = hosts.servers[1]
        second.wait_for(lambda: code_of(ask_one(second, key)) == (200, ""), PATIENCE_S, "admitted")
        streams[1].close()


@contextmanager
def streamed_lines(hosts: Hosts, key: str, max_tokens: int = 900) -> Iterator[Iterator[str]]:
    """The lines of a stream from the first host that is left."""
    with (
        httpx.Client(headers=hosts.headers | {"Idempotency-Key": key}, timeout=120, trust_env=False) as client,
        client.stream(
            "POST", f"{hosts.servers[0].url}/v1/completions", json=request_body(max_tokens, stream=True)
        ) as response,
    ):
        assert response.status_code == 200
        yield response.iter_lines()
