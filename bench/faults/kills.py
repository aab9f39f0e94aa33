"""F1: processes are killed, stopped and told to end at every point of answers.  F13: those of two nodes."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from bench.faults.blows import NO_SIGNAL, Blow, Striker, plan
from bench.faults.result import Budget, Result, judged, quantile
from bench.faults.toll import NO_BLOW, Parts, Stall, Toll, histogram, together

from cluster.chaos import Record, client_loop
from cluster.server import PenstockServer
from cluster.streams import Answer, all_answers, make_client
from cluster.two_nodes import AGGREGATED, NodePair, Workers, two_nodes
from cluster.two_nodes import SPLIT as SPLIT_NODE
from cluster.varied import in_every_api, varied_conversations, varied_requests
from vision_models import image_part, write_vision_model

CLIENTS = 16
BLOWS, NODE_BLOWS = 320, 96
TOUCHED, NODE_TOUCHED = 3000, 900
"""Answers that were under way, at least."""

KILL_STALL_S, STOP_STALL_S = 1.5, 5.0
PART = 48
"""Blows between two starts of a service: a run that is cut short loses no more."""

SPLIT = ("--prefill", "2", "--decode", "2", "--gateways", "2")
TOGETHER = ("--aggregated", "--gateways", "2")
RANKS = ("--prefill-parallel", "tp2,pp2", "--decode", "2", "--decode-parallel", "tp2", "--gateways", "2")
GROUP_PLAN = "pp2"
KINDS = ("SIGKILL", "SIGSTOP", "SIGTERM", NO_BLOW)

Work = list[tuple[dict[str, Any], Answer]]


@dataclass(frozen=True)
class Nodes:
    """Two nodes of a fleet file, with a gateway each."""

    workers: Workers  # of each of them
    group: str = ""  # how the ranks of one more worker, which is on both, divide the model


@dataclass(frozen=True)
class Part:
    """Blows that one service stands one after the other."""

    name: str
    flags: tuple[str, ...]
    targets: tuple[str, ...]
    blows: int
    nodes: Nodes | None = None  # instead of one service with these flags

    def run(self) -> Toll:
        """The same blows each time."""
        dice = random.Random(self.name)
        blows = plan(self.blows, self.targets, dice)
        toll, began = Toll(), time.monotonic()
        try:
            if self.targets == ("encode",):
                _images(toll, blows)
            elif self.nodes is not None:
                of = self.nodes
                with (
                    tempfile.TemporaryDirectory() as folder,
                    two_nodes(Path(folder), workers=of.workers, group=of.group) as pair,
                ):
                    asyncio.run(_struck(pair, pair.urls, toll, blows, dice))
                    _note_what_is_left(pair, toll, self.name)
            else:
                with PenstockServer(self.flags) as server:
                    asyncio.run(_struck(server, [server.url], toll, blows, dice))
                    _note_what_is_left(server, toll, self.name)
        except AssertionError as error:  # the service did not begin, or something outlived it
            toll.left.append(f"{self.name}: {error}")
        toll.seconds, toll.load = time.monotonic() - began, os.getloadavg()[0]
        return toll


def parts(blows: int) -> list[Part]:
    """Two thirds of the blows upon a split fleet, a tenth each upon one whose workers have ranks and upon workers that
    encode, the others upon one worker of both phases."""
    images, ranks, aggregated = (max(1, round(share * blows)) for share in (0.1, 0.1, 0.15))
    split = blows - images - ranks - aggregated
    told = [("split", SPLIT, ("prefill", "decode", "gateway"), min(PART, split - at)) for at in range(0, split, PART)]
    told.append(("ranks", RANKS, ("prefill", "decode", "rank"), ranks))
    told.append(("together", TOGETHER, ("both", "gateway"), aggregated))
    told.append(("images", (), ("encode",), images))
    return [Part(f"{number}: {name}", *rest) for number, (name, *rest) in enumerate(told)]


def node_parts(blows: int) -> list[Part]:
    """Shares as in ``parts``: most blows upon a split fleet, the others upon workers of both phases, one on each node,
    alone and with one more whose ranks are on both nodes."""
    group, aggregated = (max(1, round(share * blows)) for share in (0.1, 0.15))
    split = blows - group - aggregated
    fleets = [
        ("nodes", Nodes(SPLIT_NODE), ("prefill", "decode", "gateway"), min(PART, split - at))
        for at in range(0, split, PART)
    ]
    fleets.append(("nodes with a group", Nodes(AGGREGATED, GROUP_PLAN), ("rank", "both", "gateway"), group))
    fleets.append(("nodes together", Nodes(AGGREGATED), ("both", "gateway"), aggregated))
    return [
        Part(f"{number}: {name}", (), targets, count, nodes)
        for number, (name, nodes, targets, count) in enumerate(fleets)
    ]


def f1(budget: Budget) -> Result:
    """Kills and stops over all targets and points."""
    blows = budget.count(BLOWS, least=6)
    what = "SIGKILL, SIGSTOP, SIGTERM of any process at any point"
    return _all_parts("F1", what, parts(blows), budget, touched=budget.count(TOUCHED))


def f13(budget: Budget) -> Result:
    """F1 over two nodes with a gateway each; clients go on at either gateway."""
    blows = budget.count(NODE_BLOWS, least=6)
    what = "F1 with two nodes and a gateway on each"
    return _all_parts("F13", what, node_parts(blows), budget, touched=budget.count(NODE_TOUCHED))


def _all_parts(name: str, what: str, planned: list[Part], budget: Budget, *, touched: int) -> Result:
    blows = sum(part.blows for part in planned)
    kept = Parts(budget.resume, f"{name}, {blows} blows in {len(planned)} parts")
    tolls = []
    for part in planned:
        toll = kept.get(part.name)
        if toll is None and budget.over():
            continue
        if toll is None:
            toll = part.run()
            kept.put(part.name, toll)
        tolls.append(toll)
    whole = together(tolls)
    missing = len(planned) - len(tolls)
    checks = _checks(whole, blows, touched) | ({f"{missing} parts are still to be run": False} if missing else {})
    result = judged(name, what, checks, _figures(whole))
    result.figures["stalls"] = {kind: histogram(whole.of(kind)) for kind in KINDS}
    return result


def _checks(whole: Toll, blows: int, touched: int) -> dict[str, bool]:
    return {
        "too few blows": sum(whole.blows.values()) >= blows,
        "too few answers touched": whole.touched >= touched,
        f"answers differ or failed: {whole.wrong[:2]}": not whole.wrong,
        f"something is left: {whole.left[:2]}": not whole.left,
        "hangs": whole.hangs == 0,
        "stall after SIGKILL": quantile(whole.of("SIGKILL"), 0.99) <= KILL_STALL_S,
        "stall after SIGSTOP": quantile(whole.of("SIGSTOP"), 0.99) <= STOP_STALL_S,
    }


def _figures(whole: Toll) -> dict[str, Any]:
    """The worst target of each kind of blow is told, too, and what answers waited that it served themselves."""
    figures: dict[str, Any] = {
        "blows": sum(whole.blows.values()),
        **{f"at {name}": count for name, count in sorted(whole.blows.items())},
        **dict(sorted(whole.signals.items())),
        "answers": whole.answers,
        "touched": whole.touched,
        "wrong": len(whole.wrong),
        "hangs": whole.hangs,
        "left": len(whole.left),
        "asked for again": whole.resumed,
        "seconds": whole.seconds,
        "load": whole.load,
    }
    for kind in KINDS:
        all_of = whole.of(kind)
        for share in (0.5, 0.9, 0.99, 1.0):
            figures[f"{kind} p{100 * share:g} s"] = quantile(all_of, share)
    for kind in ("SIGKILL", "SIGSTOP"):
        for target in sorted(whole.blows):
            served = whole.of(kind, lambda stall, target=target: _hurt(stall, target))
            if served:
                figures[f"{kind} p99 s, served by {target}"] = quantile(served, 0.99)
    return figures


def _hurt(stall: Stall, target: str) -> bool:
    return stall.target == target and stall.served


async def _struck(
    server: PenstockServer | NodePair, urls: Sequence[str], toll: Toll, blows: list[Blow], dice: random.Random
) -> None:
    """The undisturbed answers first, then clients and blows together until all blows have fallen.

    ``urls``: of all gateways, where each has one; clients begin at each in turn.
    """
    bodies = varied_requests(max_tokens=40) + in_every_api(varied_conversations(max_tokens=40), salt="")
    undisturbed = await all_answers(urls[0], bodies, together=False)
    work: Work = list(zip(bodies, undisturbed, strict=True))
    record = Record()
    striker = Striker(server, toll, blows, dice)
    await striker.heal()
    deadline = time.monotonic() + 60 + 6.0 * len(blows)

    def going() -> bool:
        return not striker.over and time.monotonic() < deadline

    async with make_client() as client, asyncio.TaskGroup() as tasks:
        for number in range(CLIENTS):
            own, first = random.Random(number), number % len(urls)
            places = (*urls[first:], *urls[:first])
            tasks.create_task(
                client_loop(client, places, work, record, dice=own, going=going, ask=striker.ask, hang_up=0.05)
            )
    toll.answers, toll.wrong = record.complete, record.wrong


def _images(toll: Toll, blows: list[Blow]) -> None:
    """The same of workers that encode images; chats in one piece, since a picture's answer is short."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_vision_model(Path(folder), dtype="bf16")
        flags = [str(model), "--served-model-name", "tiny-vision", "--kv-memory", "16MiB", "--encode-workers", "2"]
        with PenstockServer(flags) as server:
            asyncio.run(_struck_images(server, toll, [blow for blow in blows if blow.signum != NO_SIGNAL]))
            _note_what_is_left(server, toll, "images")


def _chat(seed: int) -> dict[str, Any]:
    words = {"type": "text", "text": "t3 t4 t5 t6 " * 5}
    content = [words, image_part(150, 90, seed=seed), words, image_part(61, 230, seed=seed + 1), words]
    return {
        "model": "tiny-vision",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 24,
        "temperature": 0.8,
        "seed": seed,
        "logprobs": True,
        "ignore_eos": True,
    }


async def _struck_images(server: PenstockServer, toll: Toll, blows: list[Blow]) -> None:
    striker = Striker(server, toll, blows, random.Random(3))
    await striker.heal()
    wanted: dict[int, Any] = {}

    async def ask(client: httpx.AsyncClient, seed: int, *, salt: str) -> Any:
        body = _chat(seed) | {"cache_salt": salt}
        answer = await client.post(f"{server.url}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]

    async def one(client: httpx.AsyncClient, number: int) -> None:
        own = random.Random(number)
        while not striker.over:
            seed = own.randrange(8)
            blow = striker.take()
            if blow is not None:
                asyncio.get_running_loop().call_later(own.uniform(0, 0.02), striker.strike, blow)
            try:
                async with asyncio.timeout(60):
                    # A picture that was not seen before must be encoded: its seed is new, and so is the answer's.
                    await ask(client, 1000 + own.randrange(10**6), salt="new")
                    got = await ask(client, seed, salt=str(own.random()))
            except (AssertionError, httpx.HTTPError, TimeoutError) as error:
                toll.wrong.append(f"{type(error).__name__}: {error}")
                continue
            toll.answers += 1
            toll.touched += blow is not None
            if got != wanted[seed]:
                toll.wrong.append(f"image {seed}: another answer")

    async with make_client() as client:
        for seed in range(8):
            wanted[seed] = await ask(client, seed, salt="first")
        async with asyncio.TaskGroup() as tasks:
            for number in range(4):
                tasks.create_task(one(client, number))


def _note_what_is_left(server: PenstockServer | NodePair, toll: Toll, when: str) -> None:
    """Idle, and no page without an owner; what outlives the service is looked for when it ends."""
    try:
        server.wait_all_ready(30.0)
        server.wait_idle(10.0)
    except AssertionError as error:
        toll.left.append(f"{when}: {error}")
    toll.left += [f"{when}: {row}" for row in server.workers() if row["kv_pages_leaked"] or row["kv_pages_used"]]
