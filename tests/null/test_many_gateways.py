"""A town of 16 gateways and 200 workers whose clocks are hours apart and drift, under a budget of messages.

Each process has a host, and so a clock, of its own: the real router, discovery and rates in front of real workers
without a model, joined by the in-memory transport.  Workers die, hang and come while requests run.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from penstock.clock import Clock
from penstock.config.schema import GatewayConfig
from penstock.hashing import block_hashes, chain_root
from penstock.launch.members.interface import Member
from penstock.launch.remote_workers import RemoteWorkers
from penstock.launch.shared_rates import SharedTokenBuckets
from penstock.router.service import RouterService
from penstock.types import RequestId, ResumeKey, Role, SamplingParams, ValidRequest, pack_token_ids
from penstock.wire.gateway_messages import Hello
from penstock.wire.in_memory import InMemoryHub

from .router_town import Client, Town
from .worker_stage import IDENTITY, StageWorker

GATEWAYS, WORKERS = 16, 200
TURN_S = 0.05
TURNS_PER_BEAT = 5
MAX_OFFSET_S = 3600.0
MAX_DRIFT = 0.01
"""Clocks run by so much too fast or too slow: a hundred times what ``ntpd`` corrects at most."""

IDLE_BUDGET = {"hello": 0.55, "report": 0.55, "kv_events": 0.0, "save_tokens": 0.0}
"""Messages a second between one gateway and one worker without requests: beats, reports, which have the changes of the
worker's prefix cache, and snapshots of caches.  In towns of this size, such a worker is greeted every two seconds."""

BUSY_BUDGET = {"hello": 4.2, "report": 10.5, "kv_events": 0.0, "save_tokens": 4.2}
"""The same with a worker that computes all the time: no more, whatever the load.  All requests have idempotency keys,
so their tokens are saved."""

MET_S = 1.0
"""After which each gateway has the caches of all workers: it gets those of a worker that it meets in a report more."""

IDLE_S = 2.0
"""In which each gateway greets each idle worker once."""

RATES_BUDGET = 2.1
"""Messages a second that divide tenants' rates: those of one gateway with all workers."""
PROMPTS = 40  # different ones, so that some are cached
ROLES = (Role.BOTH, Role.PREFILL, Role.DECODE, Role.DECODE)


def hash_of(*parts: str) -> bytes:
    """As long as the digest of a key."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


class SkewedClock:
    """A host's clock: hours off, and not at the pace of the others."""

    def __init__(self, true: Clock, dice: random.Random) -> None:
        self._true = true
        self._offset = MAX_OFFSET_S + dice.uniform(-MAX_OFFSET_S, MAX_OFFSET_S)
        self._pace = 1 + dice.uniform(-MAX_DRIFT, MAX_DRIFT)

    def now(self) -> float:
        return self._offset + self._pace * self._true.now()


class CountingHub(InMemoryHub):
    """Counts messages between gateways and workers, by worker's endpoint and kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, str]] = Counter()
        self._endpoints: dict[bytes, str] = {}

    def to_listener(self, endpoint, parcel):  # type: ignore[no-untyped-def]
        self._endpoints[parcel.peer] = endpoint
        self.counts[endpoint, _kind(parcel.header)] += 1
        return super().to_listener(endpoint, parcel)

    def to_link(self, peer, parcel):  # type: ignore[no-untyped-def]
        self.counts[self._endpoints[peer], _kind(parcel.header)] += 1
        return super().to_link(peer, parcel)


def _kind(header: bytes) -> str:
    """The tag of an encoded message: version, head of a map, "t", and the tag.  Others ask for the version."""
    at = header.find(b"\xa1t", 1, 8) + 2
    if at == 1:
        return "version"
    return header[at + 1 : at + 1 + (header[at] & 0x1F)].decode()


async def no_answer(endpoint: str) -> str:
    """Why a worker of this process does not respond."""
    return f"{endpoint} does not respond"


class Gateway:
    """A host with one gateway: router, discovery of workers, rates of tenants."""

    def __init__(self, town: ManyTown, name: str, clock: Clock) -> None:
        self.clock = clock
        self.buckets = SharedTokenBuckets(16, b"one key for all")
        self.router = RouterService(
            GatewayConfig(name=name, model_name="null", rate_host=self.buckets.host),
            connect=town.stage.hub.connect_async,
            clock=clock,
            suspect=lambda _: None,
            rates=self.buckets,
        )
        self.joined = RemoteWorkers(
            town.stage.hub.connect_async,
            self.router.on_supervisor,
            Hello(gateway=name, incarnation=1, discovery=True),
            clock=clock,
            beat_s=0.25,
            probe=no_answer,
        )
        self.router.add_report_listener(self.joined.on_report)
        self.joined.start()
        assert self.joined._asking is not None
        self.joined._asking.cancel()  # the test says when it is time

    @property
    def ready(self) -> int:
        """Workers that it uses."""
        return sum(len(self.router.fleet.ready(role, None)) for role in Role)

    @property
    def resubmissions(self) -> float:
        """Of requests that a worker had."""
        families = {family.name: family for family in self.router.metrics.look()()}
        return families["penstock:resubmissions"].samples[0].value

    async def close(self) -> None:
        await self.joined.close()
        await self.router.close()


@dataclass
class Window:
    """What was sent in some seconds, by worker and kind."""

    seconds: float
    gateways: int
    counts: Counter[tuple[str, str]]

    def exceeding(self, endpoints: Sequence[str], budget: Mapping[str, float]) -> dict[tuple[str, str], float]:
        """Workers and kinds with more messages for each gateway than ``budget`` a second, and one at the window's edge.
        One is also what a gateway gets of the cache of a worker that it meets."""
        counts = {(at, kind): self.counts[at, kind] / self.gateways for at in endpoints for kind in budget}
        return {key: count for key, count in counts.items() if count > budget[key[1]] * self.seconds + 1}

    def of_a_gateway(self, *kinds: str) -> float:
        """Messages a second of one gateway with all workers."""
        return sum(count for (_, kind), count in self.counts.items() if kind in kinds) / self.seconds / self.gateways


class ManyTown(Town):
    """Many gateways and workers; clients ask any gateway."""

    def __init__(self, gateways: int, workers: int, seed: int) -> None:
        self.hub = CountingHub()
        super().__init__(hub=self.hub, lease_s=1.0, max_model_len=128, pages=64)
        self.dice = random.Random(seed)
        self._started = 0
        for number in range(workers):
            self.start_worker(ROLES[number % len(ROLES)])
        self.gateways = [Gateway(self, f"g{number}", self._clock()) for number in range(gateways)]
        self.publish_members()
        self._turns = 0

    def _clock(self) -> SkewedClock:
        return SkewedClock(self.clock, self.dice)

    def start_worker(self, role: Role) -> StageWorker:
        """One that no gateway knows yet."""
        name = f"{role.value}-{self._started}"
        self._started += 1
        worker = StageWorker(self.stage, name, role, clock=self._clock(), **self._scheduler)
        worker.link.close()
        self.stage.workers.append(worker)
        return worker

    def publish_members(self) -> None:
        """All gateways read the same list of members."""
        members = [Member(name=worker.name, endpoint=worker.endpoint) for worker in self.stage.workers]
        for gateway in self.gateways:
            gateway.joined.set_members(members)

    def kill_worker(self, worker: StageWorker) -> None:
        """As by a power cut: gateways on other hosts notice by its silence."""
        self.stage.workers.remove(worker)
        worker.mailbox._listener.close()

    def busy_worker(self) -> StageWorker:
        """The one that runs with the most requests: a short one may end with the worker."""
        running = [worker for worker in self.stage.workers if not worker.stopped]
        return max(running, key=lambda worker: len(worker.mailbox._requests))

    async def turn(self, seconds: float = TURN_S) -> None:
        """Time passes, and every process looks at its own clock."""
        await super().turn(seconds)
        self._turns += 1
        for number, gateway in enumerate(self.gateways):
            gateway.router.tick()
            if (self._turns + number) % TURNS_PER_BEAT == 0:
                gateway.joined.tick()
        await self.settle()

    async def steps(self, seconds: float) -> Window:
        """Let time pass; what was sent in it."""
        self.hub.counts.clear()
        for _ in range(round(seconds / TURN_S)):
            await self.turn()
        return Window(seconds, len(self.gateways), Counter(self.hub.counts))

    def send(self, name: str, *, max_tokens: int) -> Client:
        """A client asks one of the gateways."""
        gateway = self.dice.choice(self.gateways)
        prompt = tuple(range(100 * (first := self.dice.randrange(PROMPTS)), 100 * first + self.dice.randint(3, 60)))
        request = ValidRequest(
            id=RequestId(name),
            prompt=pack_token_ids(prompt),
            block_hashes=tuple(block_hashes(chain_root(IDENTITY), prompt)),
            sampling=SamplingParams(seed=self.dice.randrange(1 << 30), max_tokens=max_tokens),
            arrival=gateway.clock.now(),
            resume=ResumeKey(hash_of("key", name), hash_of("name", name), IDENTITY),
        )
        return self.serve_by(gateway.router, request)

    async def until_all_joined(self, seconds: float = 20.0) -> None:
        """All gateways use all workers."""

        def ready() -> bool:
            wanted = len(self.stage.workers)
            return all(gateway.ready == wanted for gateway in self.gateways)

        for _ in range(round(seconds / TURN_S)):
            if ready():
                return
            await self.turn()
        raise AssertionError(f"of {len(self.stage.workers)}: {[gateway.ready for gateway in self.gateways]}")


@asynccontextmanager
async def many(gateways: int, workers: int, seed: int = 7) -> AsyncIterator[ManyTown]:
    """A town in which everybody knows everybody."""
    town = ManyTown(gateways, workers, seed)
    async with town:
        try:
            await town.until_all_joined()
            yield town
        finally:
            for gateway in town.gateways:
                await gateway.close()


def assert_within(window: Window, endpoints: Sequence[str], budget: Mapping[str, float]) -> None:
    """No worker sends or gets more than its budget."""
    over = window.exceeding(endpoints, budget)
    assert over == {}, f"messages for each gateway in {window.seconds} s"
    assert window.of_a_gateway("rate_demands", "rate_totals") <= RATES_BUDGET


async def disturb(town: ManyTown, seconds: float, requests_per_s: float) -> list[Client]:
    """Requests at all gateways while workers are killed, hang and come, one of each a second."""
    clients: list[Client] = []
    hanging: list[StageWorker] = []
    for turn in range(round(seconds / TURN_S)):
        while len(clients) < (turn + 1) * TURN_S * requests_per_s:
            clients.append(town.send(f"r{len(clients)}", max_tokens=town.dice.randint(1, 12)))
        if turn % 20 == 5:
            town.kill_worker(town.busy_worker())
        elif turn % 20 == 10:
            town.start_worker(town.dice.choice(ROLES))
            town.publish_members()
        elif turn % 20 == 15:
            before, hanging = hanging, [town.busy_worker()]  # another one: what hangs keeps all of its requests
            hanging[0].stopped = True
            for worker in before:
                worker.stopped = False
        await town.turn()
    for worker in hanging:
        worker.stopped = False
    return clients


async def disturbed_town(gateways: int, workers: int, seconds: float) -> None:
    async with many(gateways, workers) as town:
        await town.steps(MET_S)
        window = await town.steps(IDLE_S)
        endpoints = [worker.endpoint for worker in town.stage.workers]
        assert_within(window, endpoints, IDLE_BUDGET)
        for kind, budget in IDLE_BUDGET.items():  # the sum over many workers needs no allowance for the window's edges
            assert window.of_a_gateway(kind) <= budget * workers, f"{kind} of one gateway, a second"
        assert window.of_a_gateway("hello") >= 0.4 * workers, "gateways look after their workers"
        shares = [gateway.router._shares.hosts for gateway in town.gateways if gateway.router._shares]
        assert shares == [gateways] * gateways, "rates are divided among all"

        town.hub.counts.clear()
        clients = await disturb(town, seconds, requests_per_s=60.0)
        window = Window(seconds, gateways, Counter(town.hub.counts))
        endpoints = [worker.endpoint for worker in town.stage.workers]
        assert_within(window, endpoints, BUSY_BUDGET)
        assert sum(count for (_, kind), count in window.counts.items() if kind == "save_tokens") >= gateways

        await town.until(lambda: all(client.over for client in clients), turns=200, seconds=TURN_S)
        for client in clients:
            client.assert_true_answer()
        assert not [gateway for gateway in town.gateways if gateway.router.open_requests()]
        assert sum(gateway.resubmissions for gateway in town.gateways) >= 2, "of workers that died or hung"
        town.publish_members()  # without those that were killed
        await town.until_all_joined()
        await town.until(lambda: not town.held(), turns=100, seconds=TURN_S)


async def test_a_town_with_skewed_clocks_keeps_its_promises_within_a_budget_of_messages() -> None:
    await disturbed_town(GATEWAYS, WORKERS, seconds=1.5)


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_a_large_town_with_skewed_clocks_does_so_for_a_minute() -> None:
    await disturbed_town(24, 300, seconds=60.0)
