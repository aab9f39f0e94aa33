"""A request with an idempotency key at two gateways: the same tokens, each counted by one of them."""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from msgspec import structs

from penstock.api.auth import StaticApiKeys, Tenant
from penstock.api.idempotency import KeyOutcome
from penstock.api.load_shedding import BucketCharge
from penstock.api.response_cache import ResponseCache
from penstock.clock import VirtualClock
from penstock.config.limits import RequestLimits
from penstock.config.schema import GatewayConfig
from penstock.engine.service.idempotency_claims import GatewayProcess, IdempotencyClaims
from penstock.engine.service.saved_tokens import SavedTokens
from penstock.errors import NoWorkers
from penstock.interfaces import BucketLevel
from penstock.router.home_calls import ANSWER_S
from penstock.router.idempotency_homes import IdempotencyHomes
from penstock.router.service import RouterService
from penstock.types import Role, WorkerId
from penstock.wire.gateway_messages import ClaimIdempotencyKey, IdempotencyKeyState, IdempotencyKeyStatus
from penstock.wire.supervisor_messages import WorkerUp

from .http_stage import TEXT, Stage, check, events_of, stage
from .router_town import Town
from .streams import NullStreams
from .test_http_idempotency import KEY, Meter, leave_after
from .test_http_idempotency import _text as text_body

TENANT = Tenant(id="t", tokens_per_minute=1_000_000)
RING = StaticApiKeys({hashlib.sha256(b"t").digest(): TENANT})
HEADERS = KEY | {"Authorization": "Bearer t"}
BODY = text_body({"max_tokens": 40, "stream": True, "seed": 1, "ignore_eos": True})


@dataclass
class Home:
    """The home of all keys, in this process."""

    claims: IdempotencyClaims = field(default_factory=IdempotencyClaims)
    saved: SavedTokens = field(default_factory=SavedTokens)
    clock: VirtualClock = field(default_factory=VirtualClock)
    gone: set[str] = field(default_factory=set)
    silent: bool = False

    def of(self, name: str) -> GatewayHomes:
        return GatewayHomes(self, name)


@dataclass
class GatewayHomes:
    """``api.idempotency.KeyHomes`` of one gateway, without a wire."""

    home: Home
    name: str
    delivers: int = 1 << 30  # of its messages
    unanswered: set[int] = field(default_factory=set)  # and not delivered, counted from 1
    held: asyncio.Queue[Callable[[], None]] | None = None  # answers that are still to come; None: they come at once
    said: int = 0
    tokens: list[tuple[int, int, int]] = field(default_factory=list)
    searches: int = 0  # for saved tokens
    resumed: int = 0

    def digest(self, name: bytes) -> bytes:
        return hashlib.blake2b(name, digest_size=16).digest()

    def send(
        self, message: ClaimIdempotencyKey, on_state: Callable[[IdempotencyKeyState | None], None] | None = None
    ) -> None:
        state = None
        self.said += 1
        if not self.home.silent and self.said <= self.delivers and self.said not in self.unanswered:
            process = GatewayProcess(self.name, 1)
            state = self.home.claims.on_claim(
                process, message, lambda other: other.name not in self.home.gone, self.home.clock.now()
            )
        if on_state is not None and self.held is not None:
            self.held.put_nowait(partial(on_state, state))
        elif on_state is not None:
            on_state(state)

    def find_saved(
        self, key: bytes, names: Sequence[bytes], on_found: Callable[[Sequence[tuple[int, ...]]], None]
    ) -> None:
        self.searches += 1
        on_found([tuple(array("I", packed)) for packed in self.home.saved.find(names, self.home.clock.now())])

    def count_tokens(self, prompts: int, generated: int, replayed: int) -> None:
        self.tokens.append((prompts, generated, replayed))

    def count_resumed(self, tokens: int) -> None:
        self.resumed += tokens

    @property
    def counted(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*self.tokens, strict=True))) if self.tokens else (0, 0, 0)


class Gateway:
    """One of several: what it counts, and its HTTP application."""

    def __init__(self, home: Home, name: str, limits: RequestLimits | None = None) -> None:
        self.meter, self.streams, self.homes = Meter(), NullStreams(batch_sizes=lambda _: 1), home.of(name)
        self.met: list[str] = []
        self.scene = stage(
            self.streams, limits, ring=RING, levels=self.meter, key_homes=self.homes, count_key_outcome=self.met.append
        )

    @property
    def usage(self) -> tuple[int, ...]:
        return self.meter.sums if self.meter.seen else (0,) * 5

    @property
    def deferred(self) -> list[bool]:
        """Of the requests that were given to workers."""
        return [request.usage_deferred for request in self.streams.opened]


async def whole(on: Stage, last: str | None = None) -> str:
    answer = await on.post(TEXT, BODY, headers=HEADERS | ({"Last-Event-ID": last} if last else {}))
    assert answer.status_code == 200, answer.text
    events = events_of(answer.text)
    assert events[-1].data == "[DONE]"
    return "".join(event.data["choices"][0]["text"] for event in events[:-1] if event.data["choices"])


def sums(*gateways: Gateway) -> tuple[int, ...]:
    return tuple(map(sum, zip(*(gateway.usage for gateway in gateways), strict=True)))


async def test_afterwards_another_gateway_counts_nothing() -> None:
    home = Home()
    a, b = Gateway(home, "a"), Gateway(home, "b")
    async with a.scene as at_a, b.scene as at_b:
        first = await whole(at_a)
        assert await whole(at_b) == first
        assert await whole(at_b) == first
    assert a.usage == sums(a, b) == (1, len(a.streams.opened[0].prompt), 40, 0, 0)
    assert (a.met, b.met) == ([KeyOutcome.NEW], [KeyOutcome.SHARED, KeyOutcome.REPLAYED])
    assert (a.deferred, b.deferred) == ([False], [True])
    assert (a.homes.counted, b.homes.counted) == ((0, 0, 0), (0, 0, 40))


async def test_at_the_same_time_each_token_is_counted_by_one() -> None:
    home = Home()
    a, b = Gateway(home, "a"), Gateway(home, "b")
    for gateway in (a, b):
        gateway.streams.gate = asyncio.Event()
    async with a.scene as at_a, b.scene as at_b:
        tasks = [asyncio.create_task(whole(at_a))]
        await a.streams.until(opened=1)
        tasks.append(asyncio.create_task(whole(at_b)))
        await b.streams.until(opened=1)
        b.streams.gate.set()
        second = await tasks[1]
        a.streams.gate.set()
        assert await tasks[0] == second
    assert sums(a, b) == (1, len(a.streams.opened[0].prompt), 40, 0, 0)
    assert (a.met, b.met) == ([KeyOutcome.NEW], [KeyOutcome.SHARED])
    assert b.homes.counted[:2] == (0, 0), "the first counts its tokens as they come"


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("resumes", [False, True])
async def test_a_stream_that_goes_on_elsewhere_counts_there_from_where_the_first_has_counted(
    *, resumes: bool, dies: bool
) -> None:
    """A gateway that is killed has counted nothing; then everything counts at the other."""
    home = Home()
    limits = RequestLimits(resume_grace_s=0.0)
    a, b = Gateway(home, "a", limits), Gateway(home, "b", limits)
    async with a.scene as at_a, b.scene as at_b:
        if dies:
            a.homes.delivers = 1
        last = await leave_after(at_a, 10, BODY, HEADERS)
        async with asyncio.timeout(60):
            await a.streams.until(none_open=True)
        if dies:
            home.gone.add("a")
        await whole(at_b, last if resumes else None)
    prompt = len(b.streams.opened[0].prompt)
    if dies:
        assert b.usage == (1, prompt, 40, 0, 0)
        assert b.homes.counted == (prompt, 40, 0)
    else:
        assert 10 <= a.usage[2] < 40
        assert sums(a, b) == (1, prompt, 40, 0, 0)
        assert b.homes.counted == (0, 40 - a.usage[2], a.usage[2])
    assert b.met == [KeyOutcome.RESUMED if resumes else KeyOutcome.SHARED]


async def test_the_same_key_for_something_else_is_refused_by_every_gateway() -> None:
    home = Home()
    a, b = Gateway(home, "a"), Gateway(home, "b")
    async with a.scene as at_a, b.scene as at_b:
        await whole(at_a)
        other = await at_b.post(TEXT, BODY | {"max_tokens": 5}, headers=HEADERS)
        check(other, 422, "idempotency_key_reused", "another request body")
        assert b.met == [KeyOutcome.REFUSED]
        assert not b.streams.opened
        await whole(at_b)


async def test_what_is_refused_by_its_own_gateway_is_not_claimed_at_a_home_that_has_lost_the_key() -> None:
    home = Home()
    a = Gateway(home, "a", RequestLimits(max_kept_tokens=1))
    async with a.scene as at_a:
        await whole(at_a)
        home.claims = IdempotencyClaims()
        other = await at_a.post(TEXT, BODY | {"max_tokens": 5}, headers=HEADERS)
        check(other, 422, "idempotency_key_reused", "another request body")
    assert len(home.claims) == 0


async def test_what_was_refused_before_it_began_is_no_other_gateways_either() -> None:
    home = Home()
    keys = StaticApiKeys({hashlib.sha256(b"t").digest(): Tenant(id="t", requests_per_minute=1)})
    a, b = Gateway(home, "a"), Gateway(home, "b")
    a.scene = stage(a.streams, ring=keys, key_homes=a.homes)
    async with a.scene as at_a, b.scene as at_b:
        assert (await at_a.post("/tokenize", {"prompt": "Once"}, headers=HEADERS)).status_code == 200
        assert (await at_a.post(TEXT, BODY, headers=HEADERS)).status_code == 429
        assert len(home.claims) == 0
        other = await at_b.post(TEXT, BODY | {"max_tokens": 5}, headers=HEADERS)
        assert other.status_code == 200


async def begin_claims(gateway: Gateway, on: Stage) -> tuple[list[asyncio.Task[str]], list[Callable[[], None]]]:
    """Two requests with one key that wait for the home's answers, and these."""
    held = gateway.homes.held = asyncio.Queue()
    tasks, answers = list[asyncio.Task[str]](), list[Callable[[], None]]()
    for _ in range(2):
        tasks.append(asyncio.create_task(whole(on)))
        async with asyncio.timeout(60):
            answers.append(await held.get())
    gateway.homes.held = None
    return tasks, answers


@pytest.mark.parametrize("leaves", [0, 1])
async def test_a_request_that_leaves_does_not_withdraw_the_claim_of_another(leaves: int) -> None:
    home = Home()
    a, b = Gateway(home, "a"), Gateway(home, "b")
    async with a.scene as at_a, b.scene as at_b:
        a.streams.gate = asyncio.Event()
        tasks, answers = await begin_claims(a, at_a)
        tasks[leaves].cancel()
        await asyncio.wait([tasks[leaves]])
        for answer in answers:
            answer()
        await a.streams.until(opened=1)
        await whole(at_b)
        assert (b.met, b.deferred) == ([KeyOutcome.SHARED], [True])
        assert b.homes.counted[:2] == (0, 0), "the first still runs, and counts"
        a.streams.gate.set()
        await tasks[1 - leaves]
    assert sums(a, b)[:3] == (1, len(b.streams.opened[0].prompt), 40)


async def test_the_last_request_that_leaves_withdraws_the_claim() -> None:
    home = Home()
    a = Gateway(home, "a")
    async with a.scene as at_a:
        tasks, _ = await begin_claims(a, at_a)
        for task in tasks:
            assert len(home.claims) == 1
            task.cancel()
            await asyncio.wait([task])
        assert len(home.claims) == 0


@dataclass
class HeldBuckets:
    """``ExactRates`` whose buckets hold ``left``.  Charges are in ``asked``; each one of ``answers`` answers one."""

    left: float
    is_up: bool = True
    asked: asyncio.Queue[dict[str, int]] = field(default_factory=asyncio.Queue)
    answers: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    async def charge_buckets(
        self, tenant: str, charges: Sequence[BucketCharge], filled: Sequence[float], *, force: bool = False
    ) -> list[BucketLevel]:
        self.asked.put_nowait({each.unit: each.amount for each in charges})
        await self.answers.acquire()
        return [BucketLevel(self.left) for _ in charges]

    def charge_later(self, tenant: str, charge: BucketCharge, filled: float) -> None:
        """Of responses."""

    async def next_charge(self) -> int:
        """Prompt tokens of the next request that waits for its answer."""
        async with asyncio.timeout(60):
            return (await self.asked.get())["prompt tokens"]


@pytest.mark.parametrize("has_cache", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
async def test_a_repeat_of_a_request_that_is_refused_or_leaves_is_charged_as_the_first(
    *, leaves: bool, has_cache: bool
) -> None:
    """While the first waits for its admission, the second may be the one that is computed."""
    home, buckets = Home(), HeldBuckets(1e6 if leaves else 0.0)
    a, b = Gateway(home, "a"), Gateway(home, "b")
    a.scene = stage(
        a.streams,
        ring=RING,
        key_homes=a.homes,
        exact_rates=buckets,
        response_cache=ResponseCache(1 << 20) if has_cache else None,
        levels=a.meter,
        count_key_outcome=a.met.append,
    )
    async with a.scene as at_a, b.scene as at_b:
        first = asyncio.create_task(at_a.post(TEXT, BODY, headers=HEADERS))
        charge = await buckets.next_charge()
        second = asyncio.create_task(at_a.post(TEXT, BODY, headers=HEADERS))
        assert await buckets.next_charge() == charge > 0
        assert a.met == [KeyOutcome.NEW, KeyOutcome.JOINED]
        if leaves:
            first.cancel()
            await asyncio.wait([first])
            assert len(home.claims) == 1, "the second has the request"
        for _ in range(2):
            buckets.answers.release()
        if not leaves:
            assert [(await task).status_code for task in (first, second)] == [429, 429]
            assert (len(a.streams.opened), len(home.claims)) == (0, 0)
            return
        assert (await second).status_code == 200
        await whole(at_b)
        assert a.usage == sums(a, b) == (1, len(a.streams.opened[0].prompt), 40, 0, 0)
        assert b.met == [KeyOutcome.SHARED]


async def test_what_failed_before_its_first_token_counts_where_it_is_sent_next() -> None:
    home = Home()
    a, b = Gateway(home, "a"), Gateway(home, "b")
    a.streams.fail_at = {0: NoWorkers("all gone")}
    async with a.scene as at_a, b.scene as at_b:
        assert (await at_a.post(TEXT, BODY | {"stream": False}, headers=HEADERS)).status_code == 503
        answer = await at_b.post(TEXT, BODY | {"stream": False}, headers=HEADERS)
        assert answer.status_code == 200
    assert (a.usage[2], b.usage[2]) == (0, 40)
    assert b.homes.counted == (len(b.streams.opened[0].prompt), 40, 0)


async def test_without_an_answer_of_the_home_a_key_is_computed_and_counted_again() -> None:
    home = Home(silent=True)
    a, b = Gateway(home, "a"), Gateway(home, "b")
    async with a.scene as at_a, b.scene as at_b:
        assert await whole(at_a) == await whole(at_b)
    assert (a.usage, b.met) == (b.usage, [KeyOutcome.NEW])


async def test_at_the_end_of_a_response_the_home_that_there_is_by_then_is_told() -> None:
    home = Home()
    a, b = Gateway(home, "a"), Gateway(home, "b")
    a.homes.unanswered = {3}  # its claim, its end, and then what it has sent
    async with a.scene as at_a, b.scene as at_b:
        assert await whole(at_a) == await whole(at_b)
    assert a.usage == sums(a, b) == (1, len(a.streams.opened[0].prompt), 40, 0, 0)


async def test_a_home_that_is_lost_amid_an_answer_changes_nothing_for_its_client() -> None:
    home = Home()
    a, b = Gateway(home, "a"), Gateway(home, "b")
    a.streams.gate = asyncio.Event()
    async with a.scene as at_a, b.scene as at_b:
        task = asyncio.create_task(whole(at_a))
        await a.streams.until(opened=1)
        home.claims = IdempotencyClaims()  # another worker
        a.streams.gate.set()
        first = await task
        assert await whole(at_b) == first
    assert sums(a, b)[2] == 40, "what was sent is told to the new home"


# --- over real workers ------------------------------------------------------------------------------------------------


class Town2(Town):
    """With gateways of other hosts."""

    def __init__(self, *names: str) -> None:
        super().__init__(*names)
        self.others: list[RouterService] = []

    def add_gateway(self, name: str) -> RouterService:
        router = RouterService(
            GatewayConfig(name=name, model_name="null"),
            connect=self.stage.hub.connect_async,
            clock=self.clock,
            suspect=self.suspects.append,
        )
        for name in self.alive:
            router.on_supervisor(self.worker_up(name))
        self.others.append(router)
        return router

    def worker_up(self, name: str) -> WorkerUp:
        known = self.worker(name)
        return WorkerUp(
            worker=known.name, incarnation=known.incarnation, role=Role.BOTH, pid=1, endpoint=known.endpoint
        )

    async def turn(self, seconds: float = 0.001) -> None:
        await super().turn(seconds)
        for router in self.others:
            router.tick()

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        for router in self.others:
            await router.close()


async def say(town: Town2, homes: IdempotencyHomes, key: int, **fields: Any) -> IdempotencyKeyState | None:
    """The home's answer."""
    got: list[IdempotencyKeyState | None] = []
    message = ClaimIdempotencyKey(
        key=homes.digest(str(key).encode()), tenant=homes.digest(b"t"), mark=bytes(8), running=True
    )
    homes.send(structs.replace(message, **fields), got.append)
    await town.until(lambda: bool(got), seconds=0.02)
    (state,) = got
    return state


async def test_all_gateways_ask_the_same_worker_about_a_key_and_workers_share_the_keys() -> None:
    async with Town2("both-0", "both-1", "both-2") as town:
        other = town.add_gateway("other")
        await town.until(other.ready, seconds=0.1)
        for key in range(60):
            state = await say(town, town.router.idempotency, key)
            assert state is not None
            assert state.status is IdempotencyKeyStatus.NEW
        for key in range(60):
            state = await say(town, other.idempotency, key)
            assert state is not None
            assert state.status is IdempotencyKeyStatus.RUNNING
        parts = [len(town.worker(name).mailbox.exchange.claims) for name in town.alive]
        assert sum(parts) == 60
        assert min(parts) >= 10


async def test_a_home_that_dies_or_hangs_holds_up_nothing() -> None:
    async with Town2("both-0", "both-1") as town:
        other = town.add_gateway("other")
        await town.until(other.ready, seconds=0.1)
        homes = town.router.idempotency
        for key in range(20):
            await say(town, homes, key, sent=(5,))
        of_first = len(town.worker("both-0").mailbox.exchange.claims)
        assert 0 < of_first < 20
        town.stop("both-0")
        began, unanswered = town.clock.now(), 0
        states: list[IdempotencyKeyState | None] = []
        for key in range(20):
            message = ClaimIdempotencyKey(
                key=homes.digest(str(key).encode()), tenant=homes.digest(b"t"), mark=bytes(8), sent=(5,)
            )
            homes.send(message, states.append)
        await town.until(lambda: len(states) == 20, seconds=0.02)
        unanswered = sum(state is None for state in states)
        assert unanswered == of_first
        assert town.clock.now() - began <= ANSWER_S + 0.1
        town.kill("both-0")
        again = [await say(town, homes, key) for key in range(20)]
        lost = [state for state in again if state is not None and state.status is IdempotencyKeyStatus.NEW]
        assert len(lost) == of_first, "keys of other homes have stayed where they were"


async def test_an_answer_of_a_worker_that_was_not_asked_is_ignored() -> None:
    async with Town2("both-0", "both-1") as town:
        homes = town.router.idempotency
        got: list[IdempotencyKeyState | None] = []
        homes.send(ClaimIdempotencyKey(key=homes.digest(b"k"), tenant=bytes(16), mark=bytes(8)), got.append)
        ((serial, pending),) = homes._calls._pending.items()
        wrong = next(name for name in town.alive if name != pending.link.worker)
        for worker, incarnation in ((wrong, 1), (pending.link.worker, 2)):
            state = IdempotencyKeyState(serial=serial, status=IdempotencyKeyStatus.REUSED)
            homes.on_state(WorkerId(worker), incarnation, state)
        assert got == []
        await town.until(lambda: bool(got), seconds=0.02)
        assert got[0] is not None
        assert got[0].status is IdempotencyKeyStatus.NEW
