"""Workers change roles and drain while they serve: answers move and stay the same, and nobody holds anything after."""

from __future__ import annotations

import asyncio
import random

import pytest

from penstock.engine.service.migration import MAX_STOPPED_S
from penstock.errors import Conflict, UnknownWorker
from penstock.types import Duty, RequestStage, Role, WorkerState
from penstock.wire.gateway_messages import (
    AssignRole,
    Hello,
    MigrateRequests,
    RequestReturned,
    Submit,
    Tokens,
    WorkerReport,
)
from penstock.wire.transfer_messages import PageReady, PagesReceived, PrefillDone, PullPages

from .losses import BreakingHub, Nth
from .router_town import WIDE, Client, Town, rows
from .worker_stage import WINDOWED, Stage, StageWorker, expected

TOKENS = 120
"""Of an answer that is hit in its middle."""


def counted(town: Town, name: str, counter: str) -> float:
    """A worker's own counter."""
    return town.worker(name).mailbox.reporter._counts[counter]


def writer(town: Town, client: Client) -> str:
    """Who writes this answer."""
    for name in town.alive:
        found = town.worker(name).scheduler.get_request(client.request.id)
        if found is not None and found.output:
            return name
    raise AssertionError(f"nobody writes {client.request.id}")


async def crowd(town: Town, count: int, **sampling: object) -> list[Client]:
    """So many answers, all of them begun."""
    clients = [
        town.ask(f"r{i}", prompt=tuple(range(i, i + 40 + 7 * i)), **({"max_tokens": TOKENS} | sampling))
        for i in range(count)
    ]
    await town.until(lambda: all(len(client.tokens) > 3 for client in clients))
    return clients


async def all_true(town: Town, clients: list[Client]) -> None:
    await town.finish(*clients)
    for client in clients:
        client.assert_true_answer()


def resubmitted(town: Town) -> bool:
    """Was anything computed anew?"""
    return any(stream.routed.epoch > 1 for stream in town.router._streams.values())


@pytest.mark.parametrize("layout", [None, WINDOWED], ids=["plain", "windows"])
async def test_a_drained_worker_hands_its_answers_over_and_nothing_is_computed_again(layout: object) -> None:
    options = {} if layout is None else {"layout": layout}
    async with Town(*WIDE, pages=256, **options) as town:
        clients = await crowd(town, 6)
        before = sum(counted(town, name, "prompt_tokens_computed") for name in town.alive)
        mine = [client for client in clients if writer(town, client) == "decode-0"]
        assert 0 < len(mine) < 6
        row = await town.tell("decode-0", duty=Duty.DRAIN)
        assert row["state"] == "draining"
        await town.until(lambda: not len(town.worker("decode-0").mailbox._requests), turns=100)
        assert not resubmitted(town)
        assert all(not client.over for client in mine)
        await all_true(town, clients)
        assert counted(town, "decode-0", "answers_moved") == counted(town, "decode-1", "answers_joined") == len(mine)
        assert sum(counted(town, name, "prompt_tokens_computed") for name in town.alive) == before
        await town.assert_idle()
        row = await town.tell("decode-0", duty=Duty.SERVE)
        assert row["state"] == "ready"
        again = town.ask("again", prompt=tuple(range(300, 340)))
        await all_true(town, [again])


async def test_an_answer_moves_again_and_again() -> None:
    async with Town(*WIDE, pages=256) as town:
        (client,) = await crowd(town, 1, max_tokens=180)
        for _ in range(4):
            name = writer(town, client)
            await town.tell(name, duty=Duty.DRAIN)
            await town.until(lambda name=name: not len(town.worker(name).mailbox._requests), turns=60)
            assert not resubmitted(town)
            await town.tell(name, duty=Duty.SERVE)
        await all_true(town, [client])
        await town.assert_idle()


async def test_a_worker_that_ends_leaves_its_answers_to_others() -> None:
    async with Town(*WIDE, pages=256) as town:
        clients = await crowd(town, 6)
        await town.retire("decode-1")
        assert not resubmitted(town)
        town.fork("decode-1")
        await all_true(town, clients)
        await town.assert_idle()


async def test_the_only_worker_that_writes_gives_its_answers_back_and_they_wait_for_it() -> None:
    async with Town("prefill-0", "decode-0", pages=256) as town:
        clients = await crowd(town, 3)
        await town.retire("decode-0")
        assert not any(client.over for client in clients)
        town.fork("decode-0")
        await all_true(town, clients)
        await town.assert_idle()


async def test_a_prefill_worker_that_ends_finishes_what_it_reads() -> None:
    async with Town(*WIDE, pages=256, max_chunk_tokens=16) as town:
        clients = [town.ask(f"r{i}", prompt=tuple(range(i, i + 150)), max_tokens=20) for i in range(12)]
        await town.until(lambda: sum(bool(client.tokens) for client in clients) >= 2)
        await town.retire("prefill-0")
        await all_true(town, clients)
        town.fork("prefill-0")
        await town.assert_idle()


async def test_workers_of_both_phases_hand_over_too() -> None:
    async with Town("both-0", "both-1", pages=256) as town:
        clients = await crowd(town, 4)
        await town.retire("both-0")
        assert not resubmitted(town)
        await all_true(town, clients)
        await town.assert_idle()


# --- roles ------------------------------------------------------------------------------------------------------------


async def test_a_decode_worker_becomes_a_prefill_worker_amid_its_answers() -> None:
    async with Town(*WIDE, pages=256) as town:
        clients = await crowd(town, 6)
        row = await town.tell("decode-0", role=Role.PREFILL)
        assert row["role"] == "prefill"
        await town.until(lambda: not len(town.worker("decode-0").mailbox._requests), turns=100)
        assert not resubmitted(town)
        more = [town.ask(f"m{i}", prompt=tuple(range(400 + i, 460 + i)), max_tokens=20) for i in range(6)]
        await all_true(town, clients + more)
        assert counted(town, "decode-0", "pages_sent") > 0
        assert counted(town, "decode-0", "role_changes") == 1
        await town.assert_idle()


async def test_a_prefill_worker_becomes_a_decode_worker_and_gives_back_what_waits() -> None:
    async with Town(*WIDE, pages=256, max_chunk_tokens=16, max_step_tokens=16) as town:
        clients = [town.ask(f"r{i}", prompt=tuple(range(i, i + 150)), max_tokens=20) for i in range(12)]
        await town.until(lambda: sum(bool(client.tokens) for client in clients) >= 2)
        await town.tell("prefill-0", role=Role.DECODE)
        more = [town.ask(f"m{i}", prompt=tuple(range(400 + i, 460 + i)), max_tokens=20) for i in range(4)]
        await all_true(town, clients + more)
        assert counted(town, "prefill-0", "generation_tokens") > 20
        await town.assert_idle()


async def test_with_nobody_to_go_on_an_answer_stays_where_it_is() -> None:
    async with Town("prefill-0", "decode-0", pages=256) as town:
        clients = await crowd(town, 2)
        await town.tell("decode-0", role=Role.PREFILL, force=True)
        await all_true(town, clients)
        assert counted(town, "decode-0", "answers_moved") == 0
        await town.assert_idle()


async def test_what_cannot_be_is_refused_with_what_would_work() -> None:
    async with Town("prefill-0", "decode-0") as town:
        with pytest.raises(UnknownWorker, match="There are: decode-0, prefill-0"):
            await town.router.admin.assign("decode-7", role=Role.PREFILL)
        with pytest.raises(Conflict, match=r"last ready one that writes answers.*role decode or both"):
            await town.router.admin.assign("decode-0", role=Role.PREFILL)
        with pytest.raises(Conflict, match="last ready one that reads prompts"):
            await town.router.admin.assign("prefill-0", duty=Duty.DRAIN)
        with pytest.raises(Conflict, match="was started for it"):
            await town.router.admin.assign("decode-0", role=Role.ENCODE)
        town.kill("decode-0")
        with pytest.raises(Conflict, match="is dead"):
            await town.router.admin.assign("decode-0", role=Role.BOTH)
    async with Town("prefill-0", "decode-0") as town:
        await town.tell("prefill-0", role=Role.BOTH)
        await town.tell("decode-0", role=Role.PREFILL)
        assert {row["id"]: row["role"] for row in town.router.workers()} == {"prefill-0": "both", "decode-0": "prefill"}
        client = town.ask()
        await all_true(town, [client])


# --- trouble ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["decode-0", "decode-1"])
@pytest.mark.parametrize(
    "after", [1, 3, 5, *(pytest.param(turns, marks=pytest.mark.long) for turns in (0, 2, 4, 7, 9))]
)
async def test_either_end_dies_amid_the_move(victim: str, after: int) -> None:
    """``after``: so many turns after the drain began."""
    async with Town(*WIDE, pages=256) as town:
        clients = await crowd(town, 6)
        town.worker("decode-0").mailbox.begin_shutdown()
        for _ in range(after):
            await town.turn()
        town.kill(victim)
        await town.turn()
        town.fork(victim)
        await all_true(town, clients)
        await town.assert_idle(within=3.0)


@pytest.mark.parametrize("nth", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "kind", [MigrateRequests, Submit, PullPages, PageReady, PrefillDone, PagesReceived, RequestReturned, Tokens]
)
async def test_a_message_is_lost_amid_the_move(kind: type, nth: int) -> None:
    hub = BreakingHub()
    async with Town(*WIDE, hub=hub, lease_s=4.0, pages=256, max_model_len=500) as town:
        clients = await crowd(town, 3, max_tokens=200)
        hub.loses = Nth(kind, nth)
        await town.tell("decode-0", duty=Duty.DRAIN)
        await town.until(lambda: not len(town.worker("decode-0").mailbox._requests))
        await all_true(town, clients)
        await town.assert_idle(within=6.0)


async def test_an_operators_word_is_lost_and_said_again() -> None:
    hub = BreakingHub()
    async with Town(*WIDE, hub=hub) as town:
        hub.loses = Nth(AssignRole)
        lost = asyncio.wait_for(town.router.admin.assign("decode-0", role=Role.BOTH), 0.05)
        with pytest.raises(TimeoutError):
            await lost
        await town.wait(0.5)
        assert (await town.tell("decode-0", role=Role.BOTH))["role"] == "both"


async def test_two_gateways_come_to_the_same_view() -> None:
    async with Town(*WIDE) as town:
        worker = town.worker("decode-0")
        other = town.stage.hub.connect(worker.endpoint)
        other.send(Hello(gateway="h", incarnation=1))
        await town.turn()
        await town.tell("decode-0", role=Role.PREFILL)
        told = []
        while (received := other.recv()) is not None:
            told.append(received.message)
        assert [message.role for message in told if isinstance(message, WorkerReport)][-1] is Role.PREFILL


SHUFFLES = [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 200))]


@pytest.mark.parametrize("seed", SHUFFLES)
async def test_any_order_of_words_deaths_and_losses(seed: int) -> None:
    dice = random.Random(seed)
    hub = BreakingHub()
    layout = {"layout": WINDOWED} if seed % 2 else {}
    async with Town(*WIDE, "decode-2", hub=hub, lease_s=1.0, pages=200, max_model_len=400, **layout) as town:
        clients = await crowd(town, 8, max_tokens=200)
        for _ in range(14):
            trouble(town, hub, dice)
            for _ in range(dice.randrange(1, 25)):
                await town.turn(dice.choice([0.001, 0.001, 0.005, 0.05]))
        hub.loses = lambda message: False
        for name in town.alive:
            role = Role(name.split("-")[0])
            town.worker(name).mailbox._assign(AssignRole(role=role, duty=Duty.SERVE), town.clock.now())
        await town.until(lambda: set(rows(town).values()) == {WorkerState.READY.value}, seconds=0.01)
        await all_true(town, clients)
        await town.assert_idle(within=6.0)


def trouble(town: Town, hub: BreakingHub, dice: random.Random) -> None:
    """One blow, or one word."""
    name = dice.choice(town.alive)
    kind = dice.choice(["drain", "drain", "serve", "role", "role", "kill", "lose"])
    if kind == "kill":
        town.kill(name)
        town.fork(name)
    elif kind == "lose":
        kinds = (
            MigrateRequests,
            Submit,
            PullPages,
            PageReady,
            PrefillDone,
            PagesReceived,
            RequestReturned,
            Tokens,
            WorkerReport,
        )
        hub.loses = Nth(dice.choice(kinds), dice.randrange(1, 4))
    else:
        words = {
            "drain": AssignRole(duty=Duty.DRAIN),
            "serve": AssignRole(duty=Duty.SERVE),
            "role": AssignRole(role=dice.choice([Role.PREFILL, Role.DECODE, Role.BOTH])),
        }
        worker = town.worker(name)
        worker.mailbox._assign(words[kind], town.clock.now())


# --- two workers by themselves ----------------------------------------------------------------------------------------


def moving(hub: BreakingHub | None = None) -> tuple[Stage, StageWorker, StageWorker]:
    """One worker that writes an answer and is to be relieved of it, and another one."""
    stage = Stage(hub=hub, lease_s=10.0)
    one, other = (stage.worker(name, Role.DECODE, pages=64) for name in ("one", "other"))
    stage.ask(range(100), to=one, max_tokens=60)
    while len(stage.tokens) < 10:
        stage.turn()
    one.link.send(AssignRole(duty=Duty.DRAIN))
    while not stage.relieve:
        stage.turn()
    return stage, one, other


def test_the_answer_stops_for_two_turns_at_most() -> None:
    stage, one, other = moving()
    emitted = tuple(stage.answer())
    stage.ask(range(100), to=other, leg=RequestStage.DECODE, pages_from=one, emitted=emitted, joins=True, max_tokens=60)
    silent = longest = 0
    for _ in range(120):
        before = len(stage.tokens)
        stage.turn()
        silent = 0 if len(stage.tokens) > before else silent + 1
        longest = max(longest, silent) if len(stage.answer()) < 60 else longest
    assert stage.answer() == expected(100, tokens=60)
    assert {name for name, _ in stage.tokens} == {"one", "other"}
    assert longest <= 2
    stage.assert_idle()


def test_an_answer_that_nobody_takes_goes_on_within_a_second() -> None:
    hub = BreakingHub()
    hub.loses = lambda message: isinstance(message, PrefillDone)
    stage, one, other = moving(hub)
    ask = {
        "leg": RequestStage.DECODE,
        "pages_from": one,
        "emitted": tuple(stage.answer()),
        "joins": True,
        "max_tokens": 60,
    }
    stage.ask(range(100), to=other, **ask)
    while one.scheduler.load().handing_over == 0:
        stage.turn()
    began, before = stage.clock.now(), len(stage.answer())
    while len(stage.answer()) == before:
        stage.turn(0.01)
    assert stage.clock.now() - began <= MAX_STOPPED_S + 0.1
    stage.run()
    assert stage.answer() == expected(100, tokens=60)
    assert {name for name, _ in stage.tokens} == {"one"}


def test_more_than_the_receiver_has_room_for_is_not_written_before_it_moves() -> None:
    stage, one, other = moving()
    other.receiver.fetch_pages = lambda now, budget=None: type(other.receiver).fetch_pages(
        other.receiver, now, 0
    )  # a page a turn
    stage.ask(
        range(100),
        to=other,
        leg=RequestStage.DECODE,
        pages_from=one,
        emitted=tuple(stage.answer()),
        joins=True,
        max_tokens=60,
    )
    stage.run()
    assert stage.answer() == expected(100, tokens=60)
    stage.assert_idle()
