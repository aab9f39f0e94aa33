"""Four services with a gateway each: what crashes workers, and what is counted, by all of them together."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from .server import PATIENCE_S
from .test_two_gateway_hosts import LONG, TOKENS, Hosts, text_of

GATEWAYS = 4
POISON = "The cat sat on the mat"
STRICT = "[failover]\nno_path_s = 60.0\npoison_tokens = 2000\n"
"""A signal plays what ends a worker: it comes when the request has had some tokens, which here do not clear it."""


@pytest.mark.long
def test_a_key_at_four_gateways_is_counted_once(tmp_path: Path) -> None:
    """One after the other, then at all at once."""
    with ExitStack() as stack, ThreadPoolExecutor(GATEWAYS) as pool:
        hosts = Hosts(stack, tmp_path, services=GATEWAYS)
        first = hosts.ask(0, "k1")
        text, prompt = text_of(first), first.json()["usage"]["prompt_tokens"]
        assert {text_of(hosts.ask(number, "k1")) for number in range(1, GATEWAYS)} == {text}
        replayed = (GATEWAYS - 1) * TOKENS
        found = hosts.wait_usage(
            completion=TOKENS, prompt=prompt, requests=1, generated=TOKENS, prompts=prompt, replayed=replayed
        )
        assert [each["completion"] for each in found] == [TOKENS, 0, 0, 0]
        answers = pool.map(lambda number: hosts.ask(number, "k2", max_tokens=300), range(GATEWAYS))
        assert len(set(map(text_of, answers))) == 1
        hosts.wait_usage(completion=TOKENS + 300, prompt=2 * prompt, requests=2, generated=TOKENS + 300)


@pytest.mark.long
def test_a_request_ends_two_workers_in_all_whichever_gateways_are_asked_for_it(tmp_path: Path) -> None:
    """With one worker none can die before the death of the one before it is known, so it is two exactly."""
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        hosts = Hosts(stack, tmp_path, config=STRICT, services=GATEWAYS, workers=1)
        asked = pool.submit(hosts.ask, 0, "poison", prompt=POISON, max_tokens=LONG)
        crashed: set[int] = set()

        def crash() -> bool:
            """The worker that has it crashes, as another gateway sees it, until the request has failed."""
            (row,) = hosts.servers[1].workers()
            if row["running"] and row["pid"] not in crashed:
                os.kill(row["pid"], signal.SIGSEGV)
                crashed.add(row["pid"])
            return asked.done()

        hosts.servers[0].wait_for(crash, 4 * PATIENCE_S, "failed")
        assert error_code(asked.result()) == (422, "poison_request")
        assert len(crashed) == 2
        for server in hosts.servers:
            server.wait_all_ready()
        (pid,) = {row["pid"] for server in hosts.servers for row in server.workers()}
        for number, server in enumerate(hosts.servers):
            again = hosts.ask(number, f"again-{number}", prompt=POISON, max_tokens=LONG, seed=10 + number)
            assert error_code(again) == (422, "poison_request")
            assert server.metrics()["penstock:poison_requests_total"] == 1 + (number == 0)
            text_of(hosts.ask(number, f"other-{number}"))
        assert {row["pid"] for server in hosts.servers for row in server.workers()} == {pid}


def error_code(answer: httpx.Response) -> tuple[int, str]:
    """The status, and the error's code."""
    return answer.status_code, answer.json()["error"]["code"]
