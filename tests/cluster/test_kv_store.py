"""Law 1 with every tier of the KV store as the source of pages, and what a tier's failure costs: nothing but time."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.mooncake_rig import mooncake_store
from tests.store_rig import flip, redis_server

from .server import PATIENCE_S, PenstockServer
from .streams import Answer, all_answers
from .varied import varied_requests

LENGTHS = slice(8, None)  # prompts that have several pages
OWN = 300
"""Tokens that a request of two choices finds of its own."""

LOOKS = 40
"""At what a worker tells, without a change, until it is taken to be all."""


def bodies(salt: str) -> list[dict[str, Any]]:
    """Requests of prompts of several pages, each with a cache of its own."""
    return varied_requests(salt=salt, salt_each=True)[LENGTHS]


@pytest.fixture(scope="module")
def plain() -> list[dict[str, Any]]:
    """The answers of one worker, from nothing."""
    with PenstockServer(["--aggregated", "--no-kv-peers"]) as server:
        return [each.identical for each in asyncio.run(all_answers(server.url, bodies("plain"), together=False))]


def pages_of(asked: list[dict[str, Any]]) -> int:
    """Full ones of their prompts."""
    return sum(len(body["prompt"]) // 16 for body in asked)


def figure(server: PenstockServer, tier: str, name: str) -> int:
    """Of all workers together."""
    return sum(row[name] for worker in server.workers() for row in worker.get("kv_tiers", ()) if row["tier"] == tier)


def written_by_decode(server: PenstockServer) -> int:
    """Pages that the decode worker has told its peers of."""
    rows = [row for worker in server.workers() if worker["role"] == "decode" for row in worker.get("kv_tiers", ())]
    return sum(row["pages_written"] for row in rows if row["tier"] == "peers")


def at_rest(server: PenstockServer, count: Callable[[PenstockServer], int]) -> int:
    """What workers tell, once it has not changed for many looks: reports come every 250 ms, looks every 20 ms."""
    seen: list[int] = []

    def rests() -> bool:
        seen.append(count(server))
        return len(seen) >= LOOKS and len(set(seen[-LOOKS:])) == 1

    server.wait_idle()
    server.wait_for(rests, PATIENCE_S, "at rest")
    return seen[-1]


def complete(server: PenstockServer, body: dict[str, Any]) -> dict[str, Any]:
    """An answer that is not streamed."""
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


def settle(server: PenstockServer, tier: str, pages: int, name: str = "pages_written") -> None:
    """Until so many pages were written, however busy the disk or the machine is, and workers have said so."""
    try:
        server.wait_for(lambda: figure(server, tier, name) >= pages, 60, "settled")
    except AssertionError:
        raise AssertionError(f"{tier}: {figure(server, tier, name)} {name}, fewer than {pages}") from None


def same(answers: list[Answer], plain: list[dict[str, Any]], where: str) -> int:
    """Tokens that were cached; fails when an answer is another."""
    for number, (answer, wanted) in enumerate(zip(answers, plain, strict=True)):
        assert answer.identical == wanted, f"{where}: request {number} was answered differently"
    return sum(answer.cached_tokens for answer in answers)


ALWAYS = "[kv_store]\nalways = true\nmax_wait_s = 60.0\nhang_s = 30.0\nremote_timeout_s = 30.0\nclose_s = 20.0\n"
"""What is worth writing and reading follows from measured seconds: of so small a model, many pages are computed sooner
than a busy machine writes them.  No test here depends on that."""

BRIEF = "[kv_store]\nalways = true\nmax_wait_s = 2.0\nremote_timeout_s = 5.0\n"
"""The same, with a tier that is not waited for when it hangs, and is not thought to when it is only slow."""

SPLIT = ALWAYS + '[routing]\nsplit = "always"\n'
"""Or the decode worker, which has most of a prompt, would read the rest of it."""


def twice(
    flags: list[str], folder: Path, plain: list[dict[str, Any]], tier: str, *, together: bool = False
) -> PenstockServer:
    """Ask, start again, ask again: the second time from the tier.  The second service, ended."""
    for turn in range(2):
        with PenstockServer(flags, config=ALWAYS, folder=folder) as server:
            cached = same(asyncio.run(all_answers(server.url, bodies("s"), together=together)), plain, f"{tier} {turn}")
            if turn == 0:
                assert cached <= OWN
                settle(server, tier, pages_of(bodies("s")))
            else:
                assert cached > 3000, f"{tier}: {cached} tokens were brought"
                server.wait_idle()
                settle(server, tier, 150, "pages_read")
            assert all(worker["kv_pages_leaked"] == 0 for worker in server.workers())
    return server


@pytest.mark.timeout(400)
def test_a_restart_finds_its_pages_on_disk(tmp_path: Path):
    """Both workers share the file; the next turn of a chat finds the last answer at the decode worker."""
    flags = ["--kv-disk", str(tmp_path / "kv"), "--kv-disk-size", "64MiB"]
    few = bodies("s")[-4:]
    with PenstockServer(flags, config=SPLIT, folder=tmp_path) as server:
        computed = asyncio.run(all_answers(server.url, few, together=False))
        assert sum(answer.cached_tokens for answer in computed) <= OWN
        turn = {
            "model": "storyteller",
            "prompt": few[-1]["prompt"],
            "temperature": 0,
            "max_tokens": 64,
            "ignore_eos": True,
        }
        before = at_rest(server, written_by_decode)
        first = complete(server, turn | {"return_token_ids": True})
        longer = turn["prompt"] + first["choices"][0]["token_ids"] + [7, 8, 9]
        full = (len(longer) - 4) // 16  # pages of the prompt and of what was computed of the answer
        server.wait_for(lambda: written_by_decode(server) >= before + full, 60, "told to peers")
        second = complete(server, turn | {"prompt": longer, "max_tokens": 2})
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == full * 16
        server.wait_idle()
        settle(server, "peers", 3, "pages_read")
        settle(server, "disk", pages_of(few) + full)
    with PenstockServer(flags, config=ALWAYS, folder=tmp_path) as server:
        cached = same(
            asyncio.run(all_answers(server.url, few, together=False)), [each.identical for each in computed], "disk"
        )
        assert cached > 3000
        server.wait_idle()
        settle(server, "disk", 150, "pages_read")
        assert all(worker["kv_pages_leaked"] == 0 for worker in server.workers())
    (file,) = (tmp_path / "kv").iterdir()
    assert file.stat().st_size <= 64 << 20


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("topology", ["split", "tcp", "aggregated"])
@pytest.mark.parametrize(
    "tier", ["disk", "disk, encrypted", "redis", "redis, encrypted", "mooncake", "mooncake, encrypted"]
)
def test_pages_of_every_tier_are_the_right_ones(tmp_path: Path, plain: list[dict[str, Any]], tier: str, topology: str):
    flags = {"split": [], "tcp": ["--transfer", "tcp"], "aggregated": ["--aggregated"]}[topology]
    flags = [*flags, "--max-chunk-tokens", "64", "--no-kv-peers"]
    if "encrypted" in tier:
        key = tmp_path / "key"
        key.write_text("5a" * 32)
        key.chmod(0o600)
        flags += ["--kv-key", str(key)]
    if tier.startswith("disk"):
        twice(
            [*flags, "--kv-disk", str(tmp_path / "kv"), "--kv-disk-size", "64MiB"],
            tmp_path,
            plain,
            "disk",
            together=True,
        )
        return
    if tier.startswith("mooncake"):
        with mooncake_store(tmp_path) as store:
            twice([*flags, "--kv-mooncake", store.at], tmp_path, plain, "mooncake")
        return
    with redis_server(tmp_path) as url:
        twice([*flags, "--kv-redis", url], tmp_path, plain, "redis")


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_killed_worker_finds_its_pages_in_host_memory(tmp_path: Path, plain: list[dict[str, Any]]):
    """With both workers killed nothing is left but what they had put there; and what a peer has is found, too."""
    with PenstockServer(["--kv-host", "64MiB"], config=SPLIT, folder=tmp_path) as server:
        answers = asyncio.run(all_answers(server.url, bodies("s"), together=False))
        assert same(answers, plain, "first") <= OWN
        settle(server, "host", pages_of(bodies("s")))
        for worker in server.workers():
            os.kill(worker["pid"], signal.SIGKILL)
        server.wait_for(lambda: figure(server, "host", "pages_written") < 200, PATIENCE_S, "forked anew")
        server.wait_all_ready()
        cached = same(asyncio.run(all_answers(server.url, bodies("s"), together=False)), plain, "killed")
        assert cached > 3000
        server.wait_idle()
        settle(server, "host", 200, "pages_read")
        victim = next(worker for worker in server.workers() if worker["role"] == "prefill")
        os.kill(victim["pid"], signal.SIGKILL)
        server.wait_for(lambda: all(w["pid"] != victim["pid"] for w in server.workers()), PATIENCE_S, "forked anew")
        server.wait_all_ready()
        assert same(asyncio.run(all_answers(server.url, bodies("s"), together=False)), plain, "one killed") > 3000
        server.wait_idle()
        settle(server, "peers", 200, "pages_read")  # nearer than host memory
        assert all(worker["kv_pages_leaked"] == 0 for worker in server.workers())


@pytest.mark.long
@pytest.mark.timeout(600)
def test_flipped_bits_on_disk_never_reach_an_answer(tmp_path: Path, plain: list[dict[str, Any]]):
    """A bit in every page and entry of the file, then the same questions."""
    folder, rng = tmp_path / "kv", random.Random(11)
    flags = ["--kv-disk", str(folder), "--kv-disk-size", "64MiB", "--no-kv-peers"]
    with PenstockServer(flags, config=ALWAYS, folder=tmp_path) as server:
        same(asyncio.run(all_answers(server.url, bodies("s"), together=False)), plain, "first")
        settle(server, "disk", pages_of(bodies("s")))
    (path,) = folder.iterdir()
    size = path.stat().st_size
    for start in range(4096, size - 2048, 2048):  # the head is left: a damaged one begins anew
        flip(path, start, start + 2048, rng)
    with PenstockServer(flags, config=ALWAYS, folder=tmp_path) as server:
        cached = same(asyncio.run(all_answers(server.url, bodies("s"), together=False)), plain, "flipped")
        assert cached <= OWN
        assert figure(server, "disk", "pages_read") == 0


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_redis_that_hangs_or_dies_costs_no_answer(tmp_path: Path, plain: list[dict[str, Any]]):
    with (
        redis_server(tmp_path) as url,
        PenstockServer(["--kv-redis", url, "--no-kv-peers"], config=BRIEF, folder=tmp_path) as server,
    ):
        same(asyncio.run(all_answers(server.url, bodies("a"), together=False)), plain, "well")
        settle(server, "redis", 100)
        pid = int(_pid_of(url))
        os.kill(pid, signal.SIGSTOP)
        same(asyncio.run(all_answers(server.url, bodies("b"), together=False)), plain, "stopped")
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGKILL)
        same(asyncio.run(all_answers(server.url, bodies("c"), together=False)), plain, "dead")
        server.wait_idle()
        server.wait_for(lambda: figure(server, "redis", "errors") > 0, PATIENCE_S, "told of an error")
        assert all(worker["kv_pages_leaked"] == 0 for worker in server.workers())


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_mooncake_that_hangs_dies_or_forgets_costs_no_answer(tmp_path: Path, plain: list[dict[str, Any]]):
    """Its master is stopped, killed, started again; then the worker's own process for it is stopped and killed."""
    with (
        mooncake_store(tmp_path) as store,
        PenstockServer(["--kv-mooncake", store.at, "--no-kv-peers"], config=BRIEF, folder=tmp_path) as server,
    ):
        same(asyncio.run(all_answers(server.url, bodies("a"), together=False)), plain, "well")
        settle(server, "mooncake", 100)
        store.master.send_signal(signal.SIGSTOP)
        same(asyncio.run(all_answers(server.url, bodies("b")[:6], together=False)), plain[:6], "master stopped")
        store.master.send_signal(signal.SIGCONT)
        store.master.kill()
        store.master.wait()
        same(asyncio.run(all_answers(server.url, bodies("c")[:6], together=False)), plain[:6], "master dead")
        written = figure(server, "mooncake", "pages_written")
        store.start_master()
        same(asyncio.run(all_answers(server.url, bodies("a"), together=False)), plain, "master forgot")
        server.wait_for(lambda: figure(server, "mooncake", "errors") > 0, PATIENCE_S, "told of an error")
        salts = iter(range(1000))

        def clients() -> list[int]:
            return server.children_of_workers("kv.store.mooncake.process")

        def both_again() -> bool:
            complete(server, bodies(f"again {next(salts)}")[-1] | {"stream": False})
            return figure(server, "mooncake", "pages_written") > written and len(clients()) == 2

        server.wait_for(both_again, 90, "written to a store that is back, with a client for each worker")
        for client, how in zip(clients(), (signal.SIGSTOP, signal.SIGKILL), strict=False):
            with suppress(ProcessLookupError):
                os.kill(client, how)
        same(asyncio.run(all_answers(server.url, bodies("d"), together=False)), plain, "clients stopped and dead")
        server.wait_idle()
        assert all(worker["kv_pages_leaked"] == 0 for worker in server.workers())


def _pid_of(url: str) -> str:
    import redis

    return redis.Redis.from_url(url).info("server")["process_id"]
