"""The parts of ``bench/faults`` that need no processes, and the two runs that have none."""

from __future__ import annotations

import asyncio
import itertools
import random
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import pytest
from bench.faults import bits, clocks, hedges, kills, messages, network, resources
from bench.faults.__main__ import RUNS, one, save
from bench.faults.blows import POINTS, plan
from bench.faults.engine import Engine
from bench.faults.hedges import Patience, Round
from bench.faults.loads import Burst, burst, polite
from bench.faults.plain_client import PlainClient
from bench.faults.plot import plot
from bench.faults.result import BEGIN, END, Budget, NotHereError, Result, judged, quantile, rewritten, table
from bench.faults.resuming_client import Gateways, Stream
from bench.faults.toll import NO_BLOW, Parts, Stall, Toll, together
from bench.faults.waiting_streams import Waiting

from cluster.chaos import Record
from cluster.streams import Answer

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
    for blows, parts in itertools.product((6, 96, 320), (kills.parts, kills.node_parts)):
        planned = parts(blows)
        assert sum(part.blows for part in planned) == blows
        assert max(part.blows for part in planned) <= kills.PART
        assert len({part.name for part in planned}) == len(planned)
    split, *_, group, aggregated = kills.node_parts(96)
    assert [part.nodes for part in (split, group, aggregated)] == [
        kills.Nodes((("prefill", 1), ("decode", 1))),
        kills.Nodes((("both", 1),), "pp2"),
        kills.Nodes((("both", 1),)),
    ]
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
    ways = {f"killed|{way}": values for way, values in zip(("here", "there"), stalls.values(), strict=True)}
    plot([Result(name="F14", what="", held=True, figures={"stalls": ways})], path)
    words = [text.text for text in ET.parse(path).getroot().iter("{http://www.w3.org/2000/svg}text")]
    assert "killed, here: p99 0.99 s (bar 1.5 s, dashed)" in words
    assert "killed, there: p99 5 s (bar 1.5 s, dashed)" in words


EVENT = b'id: 0:%d/ab\ndata: {"choices": [{"text": "%d ", "finish_reason": null}]}\n\n'
LAST = b'data: {"choices": [], "usage": {"completion_tokens": 4}}\n\nid: done\ndata: [DONE]\n\n'


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_stream_is_resumed_behind_the_last_event_that_came_whole(size: int):
    """Two pieces of it, of two gateways; what came behind the last id of the first comes again."""
    stream = Stream({}, "key")
    first = EVENT % (1, 1) + EVENT % (2, 2) + (EVENT % (3, 3))[:30]
    for at in range(0, len(first), size):
        stream.take(first[at : at + size])
    assert b"Last-Event-ID: 0:2/ab\r\n" in stream.begin_attempt(1, "there", "Bearer x")
    assert not stream.complete
    second = EVENT % (3, 3) + EVENT % (4, 4) + LAST
    for at in range(0, len(second), size):
        stream.take(second[at : at + size])
    assert stream.complete
    assert stream.identical() == ("1 2 3 4 ", None, 4)
    assert stream.at == 1


def test_the_longest_wait_begins_with_the_blow():
    stream = Stream({}, "key")
    stream.moments = [1.0, 2.0, 6.0, 7.0]
    assert stream.longest_wait(5.0) == 1.0
    assert stream.longest_wait(2.5) == 3.5
    assert stream.longest_wait(8.0) == 0.0


async def test_clients_leave_a_gateway_that_is_silent_and_go_to_one_that_answers():
    """One takes connections and says nothing, as a process that is stopped does."""

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.read()  # until the client has gone
        writer.close()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        body = b"" if head.startswith(b"GET") else EVENT % (1, 1) + LAST
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    answers = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with silent, answers:
        places = [server.sockets[0].getsockname()[:2] for server in (silent, answers)]
        stream = Stream({}, "key")
        async with Gateways(places, "Bearer x") as gateways:
            await stream.read(gateways)
        assert (stream.error, stream.gateways, stream.identical()[2]) == ("", [0, 1], 4)


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
    assert (ttft, noise, refused > 0) == ([], 0, True)


async def test_answers_over_a_slow_link_are_compared_with_those_before(monkeypatch: pytest.MonkeyPatch):
    async def answers(tokens: int) -> tuple[int, list[str]]:
        async def stream(*_: object, **__: object) -> Answer:
            return Answer(usage={"completion_tokens": tokens}, done=True)

        monkeypatch.setattr(network, "stream_completion", stream)
        await network.timed("http://127.0.0.1:9", record, 1, wanted)
        return record.complete, record.wrong

    record, wanted = Record(), {}
    assert await answers(5) == (20, [])
    complete, wrong = await answers(6)
    assert (complete, len(wrong)) == (40, 20)


def test_a_clock_that_did_not_jump_is_told():
    assert clocks.jumped([float(jump) for jump in clocks.JUMPS])
    assert clocks.jumped([float(jump) - 0.9 for jump in clocks.JUMPS])
    assert not clocks.jumped([0.0] * len(clocks.JUMPS))
    assert not clocks.jumped([])


def test_memory_is_taken_away_by_the_cgroups_that_a_host_has(tmp_path: Path):
    assert resources.MemoryGroup.under(tmp_path) is None
    (tmp_path / "cgroup.controllers").write_text("cpu io")
    assert resources.MemoryGroup.under(tmp_path) is None
    (tmp_path / "cgroup.controllers").write_text("cpu memory")
    (tmp_path / "cgroup.subtree_control").write_text("cpu")
    group = resources.MemoryGroup.under(tmp_path)
    assert group is not None
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory"
    group.folder.mkdir()
    group.take(42)
    assert (group.folder / "cgroup.procs").read_text() == "42"
    assert (group.folder / "memory.max").read_text() == "0"
    first = tmp_path / "memory"
    first.mkdir()
    (first / "cgroup.procs").write_text("")
    group = resources.MemoryGroup.under(tmp_path)
    assert group is not None
    group.folder.mkdir()
    group.take(42)
    assert (group.folder / "memory.limit_in_bytes").read_text() == "0"


def test_half_a_run_is_not_held():
    whole = judged("F10", "x", {"answers differ": True}, {})
    assert resources.with_memory(whole, True).held is True
    lacking = resources.with_memory(whole, None)
    assert (lacking.held, "memory cgroup" in lacking.why) == (None, True)
    assert resources.with_memory(judged("F10", "x", {"answers differ": False}, {}), None).held is False


def test_a_stream_that_waits_tells_what_came_of_it():
    def event(text: str) -> bytes:
        return f'data: {{"choices": [{{"text": "{text}"}}]}}\n\n'.encode()

    stream = Waiting(b"")
    stream.transport = asyncio.Transport()
    assert (stream.came, stream.refused, stream.done) == (b"", False, False)
    events = event("Once") + event(" upon") + b"data: [DONE]\n\n"
    cut = (events[:11], events[11:60], events[60:])
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in cut) + b"0\r\n\r\n"
    stream.data_received(b"HTTP/1.1 200 OK\r\n\r\n" + chunks[:20])
    stream.data_received(chunks[20:])
    stream.connection_lost(None)
    assert (stream.text, stream.done, stream.refused) == ("Once upon", True, False)
    hung_up, other = Waiting(b""), Waiting(b"")
    assert hung_up.refused
    other.transport = asyncio.Transport()
    other.data_received(b"HTTP/1.1 429 Too Many Requests\r\n\r\n")
    assert other.refused


async def test_a_late_first_token_is_hedged_and_the_slower_answer_is_hung_up_on():
    hung_up, asked = asyncio.Event(), []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            asked.append(await reader.readexactly(size))
            if len(asked) == 1:
                await reader.read()
                hung_up.set()
                return
            event = b'data: {"choices": [{"text": "Once"}]}\n\n'
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + b"%x\r\n%s\r\n" % (len(event), event) * 2 + b"0\r\n\r\n")

    found = Round()
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, asyncio.timeout(20):
        await hedges._hedged(server.sockets[0].getsockname()[1], 3, "salt", Patience([0.001]), found)
        await hung_up.wait()
    assert (found.hedges, found.texts, found.failed) == (1, {3: "OnceOnce"}, [])
    assert asked[0] == asked[1]


def test_patience_follows_the_latest_first_tokens():
    patience = Patience([0.001] * 100)
    assert patience.seconds == 0.001
    for _ in range(50):
        patience.add(2.0)
    assert patience.seconds == 2.0
    assert Patience([1.0], at_once=True).seconds == 0.0
