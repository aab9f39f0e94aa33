"""The parts of ``bench/faults`` that need no processes, and the two runs that have none."""

from __future__ import annotations

import asyncio
import random
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
from bench.faults import bits, kills, messages
from bench.faults.__main__ import RUNS, one, save
from bench.faults.blows import POINTS, plan
from bench.faults.engine import Engine
from bench.faults.loads import Burst, burst, polite
from bench.faults.plain_client import PlainClient
from bench.faults.plot import plot
from bench.faults.result import BEGIN, END, Budget, NotHereError, Result, judged, quantile, rewritten, table
from bench.faults.toll import NO_BLOW, Parts, Stall, Toll, together

SMALL = Budget(seconds=1.0, scale=0.005)


def test_blows_are_spread_over_targets_and_points():
    every = plan(60, ("prefill", "decode"), random.Random(1))
    blows = [blow for blow in every if blow.signum]
    assert Counter(blow.target for blow in blows) == {"prefill": 30, "decode": 30}
    assert set(Counter(blow.point for blow in blows)) == set(POINTS)
    assert len({blow.signum for blow in blows}) == 3
    assert {blow.kind for blow in every} == {"SIGKILL", "SIGSTOP", "SIGTERM", NO_BLOW}


def test_parts_have_all_blows_and_those_that_are_done_are_kept(tmp_path: Path):
    path = tmp_path / "parts.json"
    for blows in (6, 320):
        planned = kills.parts(blows)
        assert sum(part.blows for part in planned) == blows
        assert max(part.blows for part in planned) <= kills.PART
        assert len({part.name for part in planned}) == len(planned)
    done = Toll(blows=Counter(decode=2), touched=3, wrong=["TimeoutError: x"], load=2.5)
    done.stalls.append(Stall(0.25, "SIGKILL", "decode", served=True, begun=False))
    Parts(path, "F1, 6 blows").put("0: split", done)
    kept = Parts(path, "F1, 6 blows")
    assert kept.get("0: split") == done
    assert kept.get("1: together") is None
    assert Parts(path, "F1, 320 blows").get("0: split") is None
    whole = together([done, done])
    assert (whole.blows["decode"], whole.touched, whole.hangs, whole.load) == (4, 6, 2, 2.5)
    assert whole.of("SIGKILL", lambda stall: stall.served) == [0.25, 0.25]
    assert whole.of("SIGSTOP") == []


def test_the_page_gets_the_table(tmp_path: Path):
    page = f"# Title\n\n{BEGIN}\nold\n{END}\n\nrest\n"
    told = rewritten(page, [judged("F1", "blows", {"a|b": False}, {"p99 s": 1.23456, "stalls": {"SIGKILL": [1.0]}})])
    assert told.startswith(f"# Title\n\n{BEGIN}\n| ")
    assert told.endswith(f"{END}\n\nrest\n")
    assert "| F1 | blows | missed | p99 s 1.23. a/b |" in told
    with pytest.raises(ValueError, match="no lines"):
        rewritten("# Title\n", [])


def test_a_verdict_names_what_is_broken_and_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def lacking(budget: Budget) -> Result:
        """Something rare."""
        raise NotHereError("a telescope")

    def failing(budget: Budget) -> Result:
        """Something brittle."""
        raise RuntimeError("it fell")

    broken = judged("F1", "blows", {"stall": False, "wrong": True}, {"p99_s": 1.23456})
    assert (broken.held, broken.why, broken.verdict) == (False, "stall", "missed")
    monkeypatch.setitem(RUNS, "F1", lacking)
    missing = one("F1", SMALL)
    assert (missing.held, missing.why, missing.what) == (None, "needs a telescope", "Something rare")
    assert "p99_s 1.23" in table([broken, missing])
    monkeypatch.setitem(RUNS, "F2", failing)
    fell = one("F2", SMALL)
    assert (fell.held, fell.why, fell.what) == (False, "RuntimeError: it fell", "Something brittle")
    saved = tmp_path / "faults.json"
    save(saved, [missing])
    save(saved, [judged("F2", "cuts", {}, {})])
    assert '"F1"' in saved.read_text()
    assert '"F2"' in saved.read_text()


def test_quantiles():
    assert quantile([], 0.99) == 0.0
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([3.0, 1.0, 2.0], 1.0) == 3.0


def test_the_plot_is_a_picture(tmp_path: Path):
    stalls = {"SIGKILL": [0.01 * share for share in range(101)], "SIGSTOP": [0.05 * share for share in range(101)]}
    path = tmp_path / "faults.svg"
    plot([Result(name="F1", what="", held=True, figures={"stalls": stalls})], path)
    assert len(ET.parse(path).getroot().findall("{http://www.w3.org/2000/svg}polyline")) == 2


def test_answers_are_right_over_a_network_that_loses_a_quarter():
    result = messages.f3(SMALL)
    assert result.held, result.why
    assert result.figures["dropped"] > 0


def test_flipped_bits_are_found():
    result = bits.f6(SMALL)
    assert result.held, result.why


def test_a_damaged_page_leaves_the_cache_and_nothing_leaks():
    with closing(Engine()) as engine:
        prompt = list(range(10, 10 + 50))
        wanted = engine.answer(prompt)
        pages = engine.cached_pages(prompt)
        engine.memory.view(pages[1])[7] ^= 4
        assert engine.answer(prompt) == wanted
        assert engine.damaged == 1
        assert engine.answer(prompt) == wanted
        assert engine.damaged == 1
        assert engine.check().total == 0


@asynccontextmanager
async def answering(*answers: bytes) -> AsyncIterator[int]:
    """The port of a service that gives these answers in turn, the last again and again; an empty one: none at all."""
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0]))
            answer = left.pop(0) if len(left) > 1 else left[0]
            if answer:
                writer.write(answer)
            else:
                await reader.read()  # until the client gives up

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


def answer(status: bytes, more: bytes = b"") -> bytes:
    return b"HTTP/1.1 " + status + b"\r\nConnection: close\r\nContent-Length: 0\r\n" + more + b"\r\n"


async def test_who_never_gets_an_answer_is_counted():
    busy = answer(b"503 Service Unavailable", b"Retry-After: 2\r\n")
    async with answering(answer(b"200 OK"), busy, answer(b"500 Oh")) as port:
        found = await burst(port, 1000, 0.003)
    assert found == Burst(answered=1, refused=2, honest=1, seconds=found.seconds)
    async with answering(b"") as port:
        assert await burst(port, 1000, 0.002, timeout_s=0.01) == Burst(hangs=2)


async def test_a_connection_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch):
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "open_connection", never)
    with closing(PlainClient(1, timeout_s=0.01)) as client, pytest.raises(TimeoutError):
        await client.post("/", {})


async def test_a_refusal_is_no_quick_first_token():
    async with answering(answer(b"503 Service Unavailable")) as port:
        ttft, noise, refused = await polite(port, 0.5, "key")
    assert (ttft, noise, refused > 0) == (0.0, 0, True)
