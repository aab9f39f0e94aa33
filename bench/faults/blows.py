"""A hand that strikes processes of a service at a chosen point of a chosen answer, one blow at a time.

A client takes the next blow with its question and lets it fall when its answer is at the blow's point.  The next blow
waits until everybody is there again and every answer that was hit has gone on, so that each meets a whole fleet and no
answer waits for two of them.  A blow without a signal strikes nobody: the
stalls after it are the machine's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from bench.faults.toll import NO_BLOW, Stall, Toll

from cluster.server import PenstockServer
from cluster.streams import Answer, keyed_completion, max_tokens_of
from cluster.two_nodes import NodePair

POINTS = ("queued", "mid-prefill", "mid-transfer", "first token", "mid-decode", "last token")
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
NO_SIGNAL = 0
CONTROLS = 6
"""A blow that strikes nobody for so many that do."""

HEALED_S = 60.0
LOOK_S = 0.1

_PART = {"queued": 0.0, "mid-prefill": 0.5, "mid-transfer": 0.95}
"""Of the usual time to the first token: when a blow falls that is meant for before it."""


@dataclass(frozen=True)
class Blow:
    """Whom, when, with what."""

    target: str  # "prefill", "decode", "both", "encode", "gateway", or "rank": of a worker, not the one that leads
    point: str
    signum: int

    @property
    def kind(self) -> str:
        """In words."""
        return signal.Signals(self.signum).name if self.signum else NO_BLOW


@dataclass(frozen=True)
class Hit:
    """A blow, as an answer that was under way met it."""

    at: float
    blow: Blow
    served: bool  # by who was struck; of a gateway it is known afterwards
    begun: bool
    resumed: int  # how often the answer had been asked for again


@dataclass(eq=False)
class Open:
    """An answer that is being waited for."""

    began: float
    answer: Answer | None = None
    hits: list[Hit] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        """Has it had a token since the last blow?"""
        told = self.answer.times if self.answer is not None else []
        return not self.hits or (bool(told) and told[-1] >= self.hits[-1].at)


class Striker:
    """Strikes ``server`` and adds to ``toll``.  ``blows`` are given out in order, until there are none."""

    def __init__(self, server: PenstockServer | NodePair, toll: Toll, blows: list[Blow], dice: random.Random) -> None:
        self.toll = toll
        self.open: set[Open] = set()
        self.ttft_s = 0.05  # usual, smoothed
        self._server = server
        self._blows = blows
        self._dice = dice
        self._given = False
        self._pids: dict[str, list[tuple[str, int]]] = {}
        self._healing: set[asyncio.Task[None]] = set()

    @property
    def over(self) -> bool:
        """Has everything been done, and healed?"""
        return not self._blows and not self._given

    def take(self) -> Blow | None:
        """The next blow, for a client that begins to ask."""
        if self._given or not self._blows:
            return None
        self._given = True
        return self._blows.pop(0)

    def give_back(self, blow: Blow) -> None:
        """Its moment never came."""
        self._blows.append(blow)
        self._given = False

    def strike(self, blow: Blow, route: str = "") -> None:
        """Now.  ``route`` tells which workers serve the answer that it is meant for."""
        known = self._pids.get(blow.target, [])
        choice = [one for one in known if _serves(route, one[0])] or known
        if not choice:
            self.give_back(blow)
            return
        name, pid = self._dice.choice(choice)
        try:
            os.kill(pid, blow.signum)
        except ProcessLookupError:
            self.give_back(blow)
            return
        now = time.monotonic()
        for one in self.open:
            self.toll.touched += blow.signum != NO_SIGNAL and not any(hit.blow.signum for hit in one.hits)
            had = one.answer
            begun, resumed = (False, 0) if had is None else (bool(had.times), had.resumed)
            one.hits.append(Hit(now, blow, had is not None and _serves(had.route, name), begun, resumed))
        if blow.signum != NO_SIGNAL:
            self.toll.blows[blow.target] += 1
            self.toll.points[blow.point] += 1
            self.toll.signals[blow.kind] += 1
        task = asyncio.get_running_loop().create_task(self.heal(again=blow.signum != NO_SIGNAL))
        self._healing.add(task)
        task.add_done_callback(self._healing.discard)

    async def heal(self, *, again: bool = False) -> None:
        """Until all processes are there; then the next blow may be taken.  When they do not come, no more fall."""
        deadline = time.monotonic() + HEALED_S
        before = {pid for pids in self._pids.values() for _, pid in pids}
        while time.monotonic() < deadline:
            await asyncio.sleep(LOOK_S)
            with contextlib.suppress(AssertionError, httpx.HTTPError, ValueError, OSError):
                rows, gateways = await asyncio.to_thread(self._look)
                pids = {row["pid"] for row in rows} | set(_followers(rows)) | gateways
                if (
                    all(row["state"] == "ready" for row in rows)
                    and (not again or not before <= pids)
                    and len(pids) >= len(before)
                    and all(one.goes_on for one in self.open)
                ):
                    self._note(rows, gateways)
                    self._given = False
                    return
        self.toll.left.append(f"not healed within {HEALED_S:g} s: {self._server.read_log()[-2000:]}")
        self._blows.clear()
        self._given = False

    def _look(self) -> tuple[list[dict[str, Any]], set[int]]:
        rows = self._server.workers()
        return rows, self._server.gateway_pids(rows)

    def _note(self, rows: list[dict[str, Any]], gateways: set[int]) -> None:
        self._pids = {"gateway": [("gateway", pid) for pid in gateways]}
        for row in rows:
            self._pids.setdefault(row["role"], []).append((row["id"], row["pid"]))
            self._pids.setdefault("rank", []).extend((row["id"], pid) for pid in _followers([row]))

    # --- a client's side ---

    async def ask(
        self,
        client: httpx.AsyncClient,
        url: str | Sequence[str],
        body: dict[str, Any],
        *,
        hang_up_after: int | None = None,
    ) -> Answer:
        """As ``streams.stream_completion``, by a client with a key; lets a blow fall when it has taken one."""
        blow = None if hang_up_after is not None else self.take()
        mine = Open(time.monotonic())
        self.open.add(mine)
        early = None if blow is None or blow.point not in _PART else asyncio.create_task(self._early(blow))
        late = None if early is not None else blow

        def on_chunk(answer: Answer) -> None:
            nonlocal late
            if mine.answer is None:
                self.ttft_s += 0.1 * (time.monotonic() - mine.began - self.ttft_s)
            mine.answer = answer
            if late is not None and _at(late.point, answer, max_tokens_of(body)):
                fallen, late = late, None
                self.strike(fallen, answer.route)

        try:
            key = f"{self._dice.getrandbits(96):024x}"
            answer = await keyed_completion(client, url, body, key=key, on_chunk=on_chunk, hang_up_after=hang_up_after)
        finally:
            self.open.discard(mine)
            if late is not None:
                self.give_back(late)
            if early is not None:
                await early
        self._count(mine, answer)
        return answer

    async def _early(self, blow: Blow) -> None:
        await asyncio.sleep(_PART[blow.point] * self.ttft_s)
        self.strike(blow)

    def _count(self, mine: Open, answer: Answer) -> None:
        self.toll.resumed += answer.resumed > 0
        for hit in mine.hits:
            after = next((when for when in answer.times if when >= hit.at), None)
            if after is not None:
                served = answer.resumed > hit.resumed if hit.blow.target == "gateway" else hit.served
                self.toll.stalls.append(Stall(after - hit.at, hit.blow.kind, hit.blow.target, served, hit.begun))


def _followers(rows: list[dict[str, Any]]) -> list[int]:
    """The processes of workers' ranks, but for those that lead."""
    return [rank["pid"] for row in rows for rank in row.get("ranks", ()) if rank["pid"] != row["pid"]]


def _serves(route: str, name: str) -> bool:
    """Does the route that a header tells name this worker?"""
    return re.search(rf"={re.escape(name)}\b", route) is not None


def _at(point: str, answer: Answer, max_tokens: int) -> bool:
    told = len(answer.times)
    if point == "first token":
        return told >= 1
    return told >= (max_tokens // 2 if point == "mid-decode" else max(1, max_tokens - 6))


def plan(count: int, targets: tuple[str, ...], dice: random.Random) -> list[Blow]:
    """``count`` blows over all targets, points and signals in turn, shuffled; and some that strike nobody."""
    blows = [
        Blow(
            targets[i % len(targets)], POINTS[(i // len(targets)) % len(POINTS)], SIGNALS[dice.randrange(len(SIGNALS))]
        )
        for i in range(count)
    ]
    blows += [Blow(targets[0], POINTS[i % len(POINTS)], NO_SIGNAL) for i in range(count // CONTROLS)]
    dice.shuffle(blows)
    return blows
