"""Services with a gateway each, as on hosts of their own, one set of workers, and clients of one tenant with keys; what
four of them count together, and how many workers one request ends there."""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from penstock.config.api_keys import TenantEntry
from penstock.wire.curve_keys import CurveKeys

from .rated_hosts import key_file
from .server import MOST_OUT_S, PATIENCE_S, PenstockServer, PenstockWorker

TOKENS = 64
LONG = 1800

_TENANT_TOKENS = re.compile(r'^penstock:tenant_tokens_total\{kind="(\w+)".*\} (\S+)$', re.MULTILINE)


class Hosts:
    """Services with a gateway each, and workers of which all know; keys of one tenant."""

    def __init__(
        self, stack: ExitStack, folder: Path, *more: str, config: str | None = None, services: int = 2, workers: int = 2
    ) -> None:
        CurveKeys.ephemeral().save(folder / "keys")
        self.headers = key_file(folder / "api-keys.json", TenantEntry(requests_per_minute=6000))
        keys = ["--keys", str(folder / "keys")]
        names = [f"w-{number}" for number in range(workers)]
        self.workers = [stack.enter_context(PenstockWorker([*keys, "--name", name])) for name in names]
        joins = [word for worker in self.workers for word in ("--join", worker.endpoint)]
        flags = [*keys, *joins, "--api-keys", str(folder / "api-keys.json"), "--api-key", "sk-of-the-test", *more]
        self.servers = [
            stack.enter_context(PenstockServer(flags, config=config, folder=folder)) for _ in range(services)
        ]
        for server in self.servers:
            server.wait_for(lambda server=server: len(server.workers()) == workers, PATIENCE_S, "whole")  # type: ignore[misc]
            server.wait_all_ready()

    def ask(self, number: int, key: str, **fields: Any) -> httpx.Response:
        """A completion from one of the hosts."""
        return httpx.post(
            f"{self.servers[number].url}/v1/completions",
            json=request_body(**fields),
            headers=self.headers | {"Idempotency-Key": key},
            timeout=120,
            trust_env=False,
        )

    def wait_same_worker(self) -> None:
        """Until every gateway has joined the process that the one worker now has; that tells them of verdicts."""

        def same() -> bool:
            rows = [row for server in self.servers for row in server.workers()]
            return len({row["pid"] for row in rows}) == 1 and all(row["state"] == "ready" for row in rows)

        self.servers[0].wait_for(same, MOST_OUT_S, "the same worker")

    def usage(self, number: int) -> dict[str, float]:
        """What one of the hosts has counted for tenants, and in all."""
        server = self.servers[number]
        kinds: dict[str, float] = {}
        for kind, value in _TENANT_TOKENS.findall(server.get("/metrics", **server.key_headers()).text):
            kinds[kind] = kinds.get(kind, 0.0) + float(value)
        metrics = server.metrics()
        return kinds | {
            "requests": metrics["penstock:tenant_requests_total"],
            "generated": metrics["penstock:generation_tokens_total"],
            "prompts": metrics["penstock:prompt_tokens_total"],
            "replayed": metrics["penstock:idempotent_replayed_tokens_total"],
        }

    def seen_usage(self, **wanted: float) -> list[dict[str, float]]:
        """What each host has counted, once this is the sum, or at last; usage is counted some moments after a response
        has ended."""
        found: list[dict[str, float]] = []

        def counted() -> bool:
            found[:] = [self.usage(number) for number in range(len(self.servers))]
            return {name: sum(each[name] for each in found) for name in wanted} == wanted

        with suppress(AssertionError):
            self.servers[0].wait_for(counted, PATIENCE_S, "counted")
        return found

    def wait_usage(self, **wanted: float) -> list[dict[str, float]]:
        """The same, where this must be the sum."""
        found = self.seen_usage(**wanted)
        assert {name: sum(each[name] for each in found) for name in wanted} == wanted, f"not {wanted}: {found}"
        return found


def request_body(max_tokens: int = TOKENS, **fields: Any) -> dict[str, Any]:
    return {
        "model": "storyteller",
        "prompt": "Once upon a time",
        "max_tokens": max_tokens,
        "seed": 3,
        "ignore_eos": True,
        **fields,
    }


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text = answer.json()["choices"][0]["text"]
    assert isinstance(text, str)
    return text


# --- four gateways ----------------------------------------------------------------------------------------------------

GATEWAYS = 4
AT_ONCE_TOKENS = 300
POISON = "The cat sat on the mat"
STRICT = "[failover]\nno_path_s = 60.0\npoison_tokens = 2000\n"
"""A signal plays what ends a worker: it comes when the request has had some tokens, which here do not clear it."""


@dataclass(frozen=True)
class Metered:
    """The responses to one key, and what the gateways counted from its first request on until that had settled."""

    how: str
    answers: list[str]
    tokens: int
    """Of the response, which is computed once."""
    prompt: int
    counted: list[dict[str, float]]
    """Of each gateway, as ``Hosts.usage``."""

    def total(self, name: str) -> float:
        """Of all gateways."""
        return sum(each[name] for each in self.counted)

    @property
    def surplus(self) -> tuple[float, float]:
        """Tokens of the response and of the prompt that the tenant has had counted more than once; less than 0: not."""
        return self.total("completion") - self.tokens, self.total("prompt") - self.prompt


class Meter:
    """Asks for keys, and attributes to each what the gateways count from then on."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._before = self._usage()
        self._keys = 0

    def _usage(self) -> list[dict[str, float]]:
        return [self._hosts.usage(number) for number in range(len(self._hosts.servers))]

    def one_after_the_other(self, first: int) -> Metered:
        """The same key at each gateway, from this one on."""
        gateways = [(first + number) % GATEWAYS for number in range(GATEWAYS)]
        key = self._next_key()
        answers = [self._hosts.ask(number, key) for number in gateways]
        return self._metered("one after the other", answers, TOKENS, replayed=(GATEWAYS - 1) * TOKENS)

    def at_once(self) -> Metered:
        """The same key at all gateways.

        Where its home does not answer within a second, on a busy machine, two gateways may count what they generate.
        """
        key = self._next_key()
        with ThreadPoolExecutor(GATEWAYS) as pool:
            asked = pool.map(lambda number: self._hosts.ask(number, key, max_tokens=AT_ONCE_TOKENS), range(GATEWAYS))
            return self._metered("all at once", list(asked), AT_ONCE_TOKENS)

    def at_one(self, number: int) -> Metered:
        """A key at one gateway alone.  What that gateway counted late for those before is attributed to this one."""
        return self._metered("at one gateway", [self._hosts.ask(number, self._next_key())], TOKENS, replayed=0)

    def _next_key(self) -> str:
        self._keys += 1
        return f"k{self._keys}"

    def _metered(self, how: str, answers: list[httpx.Response], tokens: int, replayed: int | None = None) -> Metered:
        """``replayed``: to be waited for as well, with what is generated; None: how much is, is not known."""
        texts, prompt = [text_of(answer) for answer in answers], answers[0].json()["usage"]["prompt_tokens"]
        more = {"completion": tokens, "prompt": prompt, "requests": 1}
        if replayed is not None:
            more |= {"generated": tokens, "prompts": prompt, "replayed": replayed}
        before = {name: sum(each.get(name, 0.0) for each in self._before) for name in more}
        after = self._hosts.seen_usage(**{name: before[name] + count for name, count in more.items()})
        counted = [
            {name: value - old.get(name, 0.0) for name, value in new.items()}
            for new, old in zip(after, self._before, strict=True)
        ]
        self._before = after
        return Metered(how, texts, tokens, prompt, counted)


@dataclass(frozen=True)
class Ending:
    """What a request did that every worker dies of."""

    ended: int
    """Workers, whichever gateways were asked for it."""
    verdicts: list[tuple[int, str]]
    """Of the gateway that was asked first, and then of each one: the status, and the code of the error."""


def end_workers(hosts: Hosts, first: int, prompt: str = POISON) -> Ending:
    """Ask for this at one gateway until it has failed, and then at each with another key and another seed.

    Gateways hear of the verdict from the worker that comes next.  One that is asked before it has joined that worker
    does not know it, and a third worker may end; so they are asked when all have.
    """
    other, crashed = hosts.servers[(first + 1) % len(hosts.servers)], set[int]()

    def verdict(number: int, key: str, **fields: Any) -> tuple[int, str]:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(hosts.ask, number, key, prompt=prompt, max_tokens=LONG, **fields)

            def crash() -> bool:
                """The worker that has it crashes, as another gateway sees it, until the request has failed."""
                (row,) = other.workers()
                if row["running"] and row["pid"] not in crashed:
                    os.kill(row["pid"], signal.SIGSEGV)
                    crashed.add(row["pid"])
                return asked.done()

            other.wait_for(crash, 4 * PATIENCE_S, "failed")
            return error_code(asked.result())

    verdicts = [verdict(first, f"poison-{first}")]
    hosts.wait_same_worker()
    verdicts += [verdict(number, f"again-{first}-{number}", seed=10 + number) for number in range(len(hosts.servers))]
    return Ending(len(crashed), verdicts)


def error_code(answer: httpx.Response) -> tuple[int, str]:
    """The status, and the error's code."""
    return answer.status_code, answer.json().get("error", {}).get("code", "")
