"""F14: two hosts with a node each; one is killed, stopped or cut off under streams.

Both nodes have a prefill worker, a decode worker and a gateway; their hosts are network namespaces, and clients are on
a third.  Streams are compared with those of one process that nothing befalls.  When all of them are over, the node
comes back amid others, which are compared, too: it harms none of them.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.faults.hosts import WORLD, HostNode, Hosts
from bench.faults.result import Budget, Result, judged, quantile
from bench.faults.resuming_client import Gateways, Stream
from bench.faults.toll import histogram

from cluster.server import PATIENCE_S, PenstockServer
from node_folder import NodeFolder

STREAMS = 200
ROUNDS = 2
"""Of each kind of loss and each way to divide the clients; one at a smaller scale."""

PROMPT, TOKENS = 16, 80
BEGUN = 5
"""Pieces that each stream has had when the blow falls."""

NO_BLOW = "no blow"
BARS_S = {"killed": 1.5, "stopped": 5.0, "cut off": 10.0, NO_BLOW: None}
"""The p99 of the longest wait for a token after the blow."""

RETURN_S = 10.0
"""From the start of a node that was killed until the gateways of both nodes have all workers."""

WAYS = {"all clients at the gateway that is left": (0,), "half of the clients at each gateway": (0, 1)}
KEY = "bench"
HTTP_PORT, FIRST_PORT = 8000, 9000

FLEET = """
name = "two hosts"
keys = "{keys}"

[settings]
kv_memory = "128MiB"
"""

NODE = """
[[nodes]]
name = "{name}"
address = "{address}"
gateways = 1
http_host = "{address}"
http_port = {http}
port = {port}
workers = [{{ role = "prefill", count = 1 }}, {{ role = "decode", count = 1 }}]
"""

OPENED_S = 0.01
"""Between two streams that are opened: all at once would be a burst, which is another load."""

Answers = list[tuple[str, str | None, int | None]]


@dataclass
class Losses:
    """What came of one kind of loss, over all rounds."""

    open: int = 0  # streams that had begun and not ended at the blow
    at_lost: int = 0  # of those, how many the gateway that is left had at the lost node's workers
    stalls: list[float] = field(default_factory=list)
    stalls_stayed: list[float] = field(default_factory=list)
    stalls_resumed: list[float] = field(default_factory=list)  # of those read on from another gateway
    returns: list[float] = field(default_factory=list)  # until both gateways had all workers again
    at_return: int = 0  # streams that had begun and not ended when the node came back
    while_away: int = 0  # streams that were begun after the blow, before the node was whole again
    lost: list[str] = field(default_factory=list)
    differ: int = 0

    def compare(self, streams: Sequence[Stream], wanted: Answers) -> None:
        """Count those that are lost or not as they must be; all are over."""
        for stream, answer in zip(streams, wanted, strict=True):
            if stream.error:
                self.lost.append(stream.error)
            else:
                self.differ += stream.identical() != answer


def bodies(count: int) -> list[dict[str, Any]]:
    """Requests of equal length, each with a prompt and a seed of its own."""
    dice = random.Random(20261129)
    return [
        {
            "model": "storyteller",
            "prompt": [dice.randrange(6, 4096) for _ in range(PROMPT)],
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "temperature": 1.0,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for seed in range(count)
    ]


def f14(budget: Budget) -> Result:
    """A node of two is lost under streams: killed, stopped, cut off."""
    asked = bodies(budget.count(STREAMS, least=20))
    with PenstockServer(["--aggregated", "--kv-memory", "128MiB", "--api-key", KEY]) as server:
        wanted = asyncio.run(_undisturbed(asked, server.port))
    losses: dict[tuple[str, str], Losses] = {}
    left: list[str] = []
    rounds = ROUNDS if budget.scale >= 1 else 1
    scenes = [(kind, way) for _ in range(rounds) for kind in BARS_S for way in WAYS]
    with _two_hosts() as (hosts, nodes):
        while scenes and not budget.over():
            kind, way = scenes.pop(0)
            blow = Blow(kind, hosts, nodes[1], nodes[0])
            into = losses.setdefault((kind, way), Losses())
            asyncio.run(_struck(asked, wanted, WAYS[way], hosts, blow, into))
            if kind != NO_BLOW:
                asyncio.run(_returned(asked, wanted, WAYS[way], hosts, blow, into))
            left += _left(nodes, f"{kind}, {way}")
            print(f"F14: {kind}, {way}: stall p99 {quantile(into.stalls, 0.99):.2f} s", file=sys.stderr, flush=True)
        again = asyncio.run(_all(asked, (0, 1), _gateways(hosts)))
        left += ["afterwards: another answer"] * (again != wanted)
    result = _judged(losses, left)
    if scenes:
        result.held, result.why = (
            False,
            "; ".join(filter(None, (result.why, f"{len(scenes)} scenes are still to be run"))),
        )
    return result


def _judged(losses: dict[tuple[str, str], Losses], left: list[str]) -> Result:
    checks = {f"something is left: {left[:2]}": not left}
    figures: dict[str, Any] = {}
    stalls: dict[str, list[float]] = {}
    for (kind, way), one in losses.items():
        p99, bar = quantile(one.stalls, 0.99), BARS_S[kind]
        where = f"{kind}, {way}"
        checks |= {
            f"{where}: lost {one.lost[:2]}": not one.lost,
            f"{where}: {one.differ} differ": not one.differ,
            f"{where}: nothing was hit": one.open > 0 and one.at_lost > 0,
            f"{where}: nothing was hit by the return": kind == NO_BLOW or one.at_return > 0,
            f"{where}: stall p99 {p99:.2f} s": bar is None or p99 <= bar,
            f"{where}: whole again after {max(one.returns, default=0.0):.1f} s": kind != "killed"
            or max(one.returns) <= RETURN_S,
        }
        figures[where] = f"{one.open} streams, {one.at_lost} requests there, {one.differ} differ, {len(one.lost)} lost"
        groups = (one.stalls, one.stalls_stayed, one.stalls_resumed)
        for name, seconds in zip(("all", "at the same gateway", "at another"), groups, strict=True):
            if seconds:
                shares = (quantile(seconds, share) for share in (0.5, 0.99, 1.0))
                figures[f"{where}, {len(seconds)} {name}: p50, p99, max"] = " ".join(f"{value:.2f}" for value in shares)
        if one.returns:
            seconds = " ".join(f"{value:.1f}" for value in one.returns)
            told = f"{one.at_return} streams, all workers ready after {seconds} s"
            figures[f"{where}, return amid"] = told
        stalls[f"{kind}|{way}"] = histogram(one.stalls)
    figures |= {
        "answers": sum(one.open + one.while_away for one in losses.values()),
        "wrong": sum(one.differ + len(one.lost) for one in losses.values()),
        "left": len(left),
        "stalls": stalls,
    }
    return judged("F14", "a node of two hosts is lost under streams", checks, figures)


@contextmanager
def _two_hosts() -> Iterator[tuple[Hosts, tuple[HostNode, HostNode]]]:
    """Both nodes, ready."""
    with Hosts(("a", "b")) as hosts, tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        keys = NodeFolder(Path(folder), **dict.fromkeys("ab", "gateway,worker"))
        file = Path(folder) / "fleet.toml"
        parts = [NODE.format(name=name, address=hosts.address(name), http=HTTP_PORT, port=FIRST_PORT) for name in "ab"]
        file.write_text("".join((FLEET.format(keys=keys.host("")), *parts)))
        a, b = (HostNode(hosts, file, name, HTTP_PORT, KEY) for name in "ab")
        for node in (a, b):
            node.start()
            stack.push(node.__exit__)
        for node in (a, b):
            _wait_whole(node)
        yield hosts, (a, b)


def _wait_whole(node: HostNode) -> None:
    node.wait_ready()
    node.wait_for(lambda: len(node.workers()) == 4, PATIENCE_S, "whole")
    node.wait_all_ready()


@dataclass(frozen=True)
class Blow:
    """One kind of loss of a node, and its end."""

    kind: str
    hosts: Hosts
    node: HostNode
    other: HostNode

    def strike(self) -> None:
        """Now."""
        match self.kind:
            case "killed":
                self.node.signal_all(signal.SIGKILL)
            case "stopped":
                self.node.signal_all(signal.SIGSTOP)
            case "cut off":
                self._at_links(self.hosts.cut)

    def requests_there(self) -> int:
        """Requests at the node's workers, as the other node's gateway knows."""
        rows = [row for row in self.other.workers() if row["id"].startswith(f"{self.node.name}-")]
        return sum(row["running"] + row["queued"] for row in rows)

    def heal(self) -> None:
        """The node is there again, and part of the fleet, as both gateways know."""
        match self.kind:
            case "killed":
                self.node.process.wait()
                self.node.start()
            case "stopped":
                self.node.signal_all(signal.SIGCONT)
            case "cut off":
                self._at_links(self.hosts.mend)
        for node in (self.node, self.other):
            _wait_whole(node)

    def _at_links(self, do: Callable[[str, str], None]) -> None:
        for other in (self.other.name, WORLD):
            do(self.node.name, other)


def _gateways(hosts: Hosts) -> Gateways:
    return Gateways([(hosts.address(name), HTTP_PORT) for name in "ab"], f"Bearer {KEY}")


async def _undisturbed(asked: list[dict[str, Any]], port: int) -> Answers:
    return await _all(asked, (0,), Gateways([("127.0.0.1", port)], f"Bearer {KEY}"))


async def _all(asked: list[dict[str, Any]], firsts: Sequence[int], gateways: Gateways) -> Answers:
    streams = _streams(asked, firsts)
    async with gateways:
        await _read(streams, gateways)
    assert not any(stream.error for stream in streams), next(stream.error for stream in streams if stream.error)
    return [stream.identical() for stream in streams]


async def _read(streams: Sequence[Stream], gateways: Gateways) -> None:
    async with asyncio.TaskGroup() as tasks:
        for stream in streams:
            tasks.create_task(stream.read(gateways))
            await asyncio.sleep(OPENED_S)


def _streams(asked: list[dict[str, Any]], firsts: Sequence[int]) -> list[Stream]:
    """Nothing of an earlier round is found in a cache, or under its key."""
    salt = f"{time.monotonic()}"
    return [
        Stream(body | {"cache_salt": f"{salt}-{number}"}, f"{salt}-{number}", firsts[number % len(firsts)])
        for number, body in enumerate(asked)
    ]


async def _struck(
    asked: list[dict[str, Any]], wanted: Answers, firsts: Sequence[int], hosts: Hosts, blow: Blow, into: Losses
) -> None:
    """All streams at once; the blow falls when each has begun."""
    streams = _streams(asked, firsts)
    async with _gateways(hosts) as gateways:
        whole = asyncio.create_task(_read(streams, gateways))
        await _begun(streams)
        into.at_lost += await asyncio.to_thread(blow.requests_there)
        hit = [(stream, stream.at) for stream in streams if not stream.ended]
        struck_at = time.monotonic()
        await asyncio.to_thread(blow.strike)
        await whole
    for stream, gateway in hit:
        stall = stream.longest_wait(struck_at)
        into.open += 1
        into.stalls.append(stall)
        (into.stalls_stayed if stream.at == gateway else into.stalls_resumed).append(stall)
    into.compare(streams, wanted)


async def _begun(streams: Sequence[Stream]) -> None:
    """Until each has had ``BEGUN`` pieces, or is over."""
    while not all(len(stream.moments) >= BEGUN or stream.ended for stream in streams):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def _returned(
    asked: list[dict[str, Any]], wanted: Answers, firsts: Sequence[int], hosts: Hosts, blow: Blow, into: Losses
) -> None:
    """All streams again, and again until the node that was struck is whole; it comes back when each has begun."""
    async with _gateways(hosts) as gateways:
        streams = _streams(asked, firsts)
        whole = asyncio.create_task(_read(streams, gateways))
        await _begun(streams)
        into.at_return += sum(not stream.ended for stream in streams)
        back = asyncio.create_task(_seconds(blow.heal))
        while True:
            await whole
            into.while_away += len(streams)
            into.compare(streams, wanted)
            if back.done():
                break
            streams = _streams(asked, firsts)
            whole = asyncio.create_task(_read(streams, gateways))
        into.returns.append(await back)


async def _seconds(act: Callable[[], object]) -> float:
    """That it takes, in a thread."""
    began = time.monotonic()
    await asyncio.to_thread(act)
    return time.monotonic() - began


def _left(nodes: Sequence[HostNode], when: str) -> list[str]:
    """Workers that do not come back, and pages that somebody still holds."""
    left = []
    for node in nodes:
        try:
            node.wait_all_ready(60.0)
            node.wait_idle(20.0)
        except AssertionError as error:
            left.append(f"{when}, node {node.name}: {error}")
        left += [f"{when}: {row}" for row in node.workers() if row["kv_pages_leaked"]]
    return left
