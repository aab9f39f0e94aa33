"""F3: a quarter of all messages between gateway and workers is dropped, delayed, doubled or overtaken by the next.

Real router, real schedulers, real hand-overs and the real codec over the in-memory transport, under a clock that is
turned by hand: the network of one process can be made as bad as no real one is, and each run is repeatable.  Workers
compute hashes instead of a model, so every right answer is known.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from bench.faults.result import Budget, Result, judged

from null.router_town import WIDE, Client, Town
from penstock.config.limits import FailoverConfig
from penstock.config.schema import GatewayConfig
from penstock.wire.in_memory import InMemoryHub

SHARE = 0.25
ANSWERS = 600
TOGETHER = 12
PATIENCE_S = 120.0  # of the virtual clock, for one group


class BadHub(InMemoryHub):
    """Loses, delays, doubles and swaps ``share`` of all messages, each kind as often."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.share = 0.0
        self.done: Counter[str] = Counter()
        self._dice = dice
        self._late: list[tuple[str | bytes, object]] = []  # come with a later message of anybody

    def to_listener(self, endpoint, parcel):
        return self._fate(endpoint, parcel, super().to_listener)

    def to_link(self, peer, parcel):
        return self._fate(peer, parcel, super().to_link)

    def _fate(self, where, parcel, pass_on):
        self.done["messages"] += 1
        if self._dice.random() >= self.share:
            passed = pass_on(where, parcel)
            self._let_go(1)
            return passed
        kind = self._dice.choice(("dropped", "delayed", "doubled", "swapped"))
        self.done[kind] += 1
        if kind == "doubled":
            pass_on(where, parcel)
            return pass_on(where, parcel)
        if kind != "dropped":
            self._late.append((where, parcel))
            if kind == "delayed" and len(self._late) < 8:
                return True
            self._let_go(len(self._late) if kind == "delayed" else 0)
        return True

    def _let_go(self, count: int) -> None:
        for _ in range(min(count, len(self._late))):
            where, parcel = self._late.pop(self._dice.randrange(len(self._late)))
            (super().to_listener if isinstance(where, str) else super().to_link)(where, parcel)


def f3(budget: Budget) -> Result:
    """Answers by groups of twelve until there are enough."""
    return asyncio.run(_f3(budget.count(ANSWERS, least=TOGETHER)))


async def _f3(answers: int) -> Result:
    dice = random.Random(33)
    hub = BadHub(dice)
    config = GatewayConfig(name="g", model_name="null", failover=FailoverConfig(max_attempts=100))
    wrong: list[str] = []
    asked: list[Client] = []
    slowest = 0.0
    async with Town(*WIDE, hub=hub, config=config, lease_s=2.0, pages=256, max_model_len=600) as town:
        await town.wait(0.5)
        hub.share = SHARE
        while len(asked) < answers:
            group = [
                town.ask(f"r{len(asked)}-{i}", seed=dice.getrandbits(32), prompt=dice.randrange(1, 200),
                         max_tokens=dice.randrange(1, 40))
                for i in range(TOGETHER)
            ]  # fmt: skip
            asked += group
            began = town.clock.now()
            await town.until(
                lambda: all(client.over for client in group),  # noqa: B023 - asked before the next group is
                turns=round(PATIENCE_S / 0.01),
                seconds=0.01,
            )
            slowest = max(slowest, town.clock.now() - began)
            for client in group:
                try:
                    client.assert_true_answer()
                except AssertionError as error:
                    wrong.append(f"{client.request.id}: {client.error or error}")
        hub.share = 0.0
        await town.wait(20.0)
        schedulers = [worker.scheduler for worker in town.stage.workers]
        loads = [(scheduler.load().pages_used, scheduler.check_leaks().total) for scheduler in schedulers]
        records = sum(len(worker.mailbox._requests) for worker in town.stage.workers)
    checks = {
        f"answers differ or failed: {wrong[:2]}": not wrong,
        f"pages are held or lost: {loads}": not any(map(any, loads)),
        f"{records} requests that nobody wants are still known": records == 0,
    }
    figures = {
        "answers": len(asked),
        "wrong": len(wrong),
        **dict(hub.done),
        "slowest_group_s": slowest,
        "records left": records,
    }
    return judged("F3", "a quarter of internal messages lost, late, doubled or swapped", checks, figures)
