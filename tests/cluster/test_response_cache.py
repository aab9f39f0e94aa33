"""Law 1 with stored responses: twenty varied requests, computed and told again, longer and shorter, over topologies."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from .server import PenstockServer
from .streams import Answer, all_answers
from .varied import varied_requests

TOPOLOGIES = {
    "split": ["--transfer", "shm"],
    "aggregated": ["--aggregated"],
    "two-gateways": ["--gateways", "2"],
    "guessing": ["--speculate", "lookup"],
}


def answers(server: PenstockServer, bodies: list[dict[str, Any]]) -> list[Answer]:
    return asyncio.run(all_answers(server.url, bodies, together=True))


def with_length(bodies: list[dict[str, Any]], share: float) -> list[dict[str, Any]]:
    return [body | {"max_tokens": max(1, int(body["max_tokens"] * share))} for body in bodies]


@pytest.fixture(scope="module")
def plain() -> dict[float, list[dict[str, Any]]]:
    """Without a cache, one after another, by the share of the length that is asked for."""
    bodies = varied_requests()
    with PenstockServer(["--aggregated"]) as server:
        return {
            share: [
                answer.identical
                for answer in asyncio.run(all_answers(server.url, with_length(bodies, share), together=False))
            ]
            for share in (0.5, 1.0)
        }


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_what_is_stored_is_what_would_be_computed(topology: str, plain: dict[float, list[dict[str, Any]]]) -> None:
    bodies = varied_requests()
    with PenstockServer([*TOPOLOGIES[topology], "--response-cache", "64MiB"]) as server:
        for share in (0.5, 1.0, 1.0, 0.5):  # computed; gone on from; told again; told in part
            for number, (answer, wanted) in enumerate(
                zip(answers(server, with_length(bodies, share)), plain[share], strict=True)
            ):
                assert answer.identical == wanted, f"{topology}, {share} of the length: request {number}"
        server.wait_idle()
        metrics = server.metrics()
        # Of two gateways each knows what it has told itself, and these are the figures of one.
        assert metrics["penstock:response_cache_tokens_total"] > (0 if topology == "two-gateways" else 1000)
        assert metrics["penstock:response_cache_entries"] > 0
        assert all(worker["kv_pages_leaked"] == 0 for worker in server.workers())


@pytest.mark.long
def test_streamed_and_whole_share_what_is_stored() -> None:
    body = {"model": "storyteller", "prompt": "Once upon a time", "max_tokens": 60, "temperature": 0}
    with PenstockServer(["--aggregated", "--response-cache", "1MiB"]) as server:
        first = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        second = httpx.post(f"{server.url}/v1/completions", json=body | {"seed": 9}, timeout=60)
        assert first.headers["x-penstock-response-cache"] == "miss"
        assert second.headers["x-penstock-response-cache"] == "hit"
        assert second.json()["choices"] == first.json()["choices"]
        assert second.json()["usage"]["penstock"]["stored_tokens"] == second.json()["usage"]["completion_tokens"]
