"""Every kind of message is lost with its connection, at every place: the answer is whole, and in seconds."""

from __future__ import annotations

import pytest

from penstock.engine.service.gateways import CONFIRM_INTERVAL_S
from penstock.types import RequestId, Role
from penstock.wire.gateway_messages import AwaitedStage, Cancel, Hello, RequestReturned, Submit, Tokens, WorkerReport
from penstock.wire.transfer_messages import (
    HandOverAlive,
    HandOverFailed,
    PageReady,
    PagesReceived,
    PrefillDone,
    PullPages,
)
from tiers import first_of

from .losses import BreakingHub, Nth, SwallowingHub
from .router_town import SPLIT, Client, Town
from .worker_stage import StageWorker

HEALED_S = 3.0
"""A lost message costs no more: a leg is asked about after 1 s of silence, at the next beat; pages after lease / 4."""

BUSY = 400  # tokens of an answer that keeps both workers busy meanwhile: an idle worker is easily judged


async def healed(town: Town, *clients: Client, within: float = HEALED_S) -> None:
    """The clients have their true answers in so many seconds."""
    began = town.clock.now()
    await town.until(lambda: all(client.over for client in clients), turns=round(within / 0.005), seconds=0.005)
    assert town.clock.now() - began <= within + 0.01
    for client in clients:
        client.assert_true_answer()


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("nth", first_of((1, 2, 3), 1))
@pytest.mark.parametrize(
    "kind", [Submit, Tokens, PullPages, PageReady, PrefillDone, PagesReceived, Hello, WorkerReport]
)
async def test_a_message_is_lost_with_its_connection(kind: type, nth: int, busy: bool) -> None:
    hub = BreakingHub()
    async with Town(*SPLIT, hub=hub, lease_s=4.0, pages=128, max_model_len=600, max_chunk_tokens=16) as town:
        await town.wait(0.5)
        others = [town.ask("busy", prompt=20, max_tokens=BUSY)] if busy else []
        if busy:
            await town.until(lambda: len(others[0].tokens) > 3)
        hub.loses = Nth(kind, nth)
        tokens = BUSY if kind is Hello else 8  # so short a response may see no Hello
        client = town.ask(prompt=70, max_tokens=tokens)
        await healed(town, client)
        if kind is WorkerReport:
            await town.wait(0.1 * nth)
        if kind not in (Hello, WorkerReport, PrefillDone, PagesReceived, Submit) or nth == 1:
            assert len(hub.lost) == 1
        await healed(town, *others, within=20.0)
        await town.assert_idle(within=5.0)


@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("kind", [Submit, Tokens, RequestReturned])
async def test_what_heals_a_loss_is_lost_too(kind: type, times: int) -> None:
    """Several in a row: each is asked about anew.  The word of the worker that it knows nothing is lost as well."""
    hub = BreakingHub()
    async with Town(*SPLIT, hub=hub, lease_s=4.0) as town:
        await town.wait(0.5)
        once, more = Nth(Tokens, 3), Nth(kind, 1, times)
        hub.loses = (
            (lambda message: once(message) or (once.seen >= 3 and more(message))) if kind is RequestReturned else more
        )
        client = town.ask(max_tokens=20)
        await healed(town, client, within=HEALED_S * (times + 1))
        assert len(hub.lost) >= times
        await town.assert_idle(within=5.0)


async def test_the_last_words_of_a_finished_leg_are_asked_for() -> None:
    """The worker has forgotten the request when its end is lost, and is busy with others: it says that it has none."""
    hub = BreakingHub()
    async with Town("both-0", hub=hub, pages=128, max_model_len=600) as town:
        other = town.ask("busy", prompt=20, max_tokens=BUSY)
        client = town.ask(max_tokens=8)
        hub.loses = lambda message: (
            isinstance(message, Tokens)
            and not hub.lost
            and any(item.request == client.request.id and item.finish is not None for item in message.items)
        )
        await healed(town, client)
        assert len(hub.lost) == 1
        await healed(town, other, within=20.0)
        await town.assert_idle(within=5.0)


@pytest.mark.parametrize("turns", range(1, 13))
async def test_a_cancel_that_is_lost_frees_everything_all_the_same(turns: int) -> None:
    hub = BreakingHub()
    async with Town(*SPLIT, hub=hub, lease_s=4.0, max_chunk_tokens=16) as town:
        client = town.ask(prompt=70, max_tokens=60)
        for _ in range(turns):
            await town.turn()
        hub.loses = Nth(Cancel)
        await town.leave(client)
        assert len(hub.lost) == 1
        await town.assert_idle(within=HEALED_S)


@pytest.mark.parametrize("phase", ["waiting", "writing"])
async def test_a_cancel_that_is_lost_on_a_connection_that_lives_is_asked_for(phase: str) -> None:
    """A prompt that waits for somebody to pull its pages, and a long answer that nobody reads, are over in seconds."""
    hub = SwallowingHub()
    pulls: tuple[type, ...] = (PullPages,) if phase == "waiting" else ()
    async with Town(*SPLIT, hub=hub, lease_s=1.0, pages=128, max_model_len=2000) as town:
        hub.loses = lambda message: isinstance(message, (Cancel, *pulls))
        client = town.ask(prompt=70, max_tokens=1800)
        await town.until(lambda: len(client.tokens) > 3 if phase == "writing" else bool(hub.lost))
        await town.leave(client)
        hub.loses = lambda message: isinstance(message, PullPages)
        assert {Cancel, *pulls} <= {type(message) for message in hub.lost}
        began = town.clock.now()
        await town.wait(CONFIRM_INTERVAL_S - 1.0, step=0.02)
        assert town.held(), "it would be over anyway"
        await town.assert_idle(within=began + CONFIRM_INTERVAL_S + HEALED_S - town.clock.now())


async def test_what_is_still_wanted_is_let_go_on() -> None:
    async with Town(*SPLIT, pages=128, max_model_len=2000) as town:
        client = town.ask(prompt=70, max_tokens=400)
        await town.until(lambda: client.over, turns=2000, seconds=0.02)
        client.assert_true_answer()
        assert len(town.router.debug(client.request.id)) == 1
        await town.assert_idle()


@pytest.mark.parametrize("kind", [HandOverFailed, HandOverAlive, PagesReceived, RequestReturned])
async def test_what_ends_a_hand_over_is_lost(kind: type) -> None:
    """The prompt's worker gives the request up while the other one waits for its pages."""
    hub = BreakingHub()
    async with Town("prefill-0", "decode-0", "decode-1", hub=hub, lease_s=4.0, max_chunk_tokens=16) as town:
        client = town.ask(prompt=70, max_tokens=8)
        await town.until(lambda: bool(town.worker("prefill-0").sender.open_transfers))
        await town.turn()
        hub.loses = Nth(kind)
        prefill = town.worker("prefill-0").mailbox
        prefill._return(RequestId("r"), 1, "given up")
        await healed(town, client)
        await town.assert_idle(within=5.0)


async def test_an_old_connections_hello_that_is_read_late_takes_nothing_away() -> None:
    """A listener reads its connections in turn, not in order of time.

    A worker that is started anew at its port hears the old link's greeting, for that link has connected to it by
    itself, and the new link's greeting with what was asked over it.  Read in the wrong order, the first used to take
    the request away and its answer to a link that was closed: the client then met the limit for stalls.
    """
    async with Town("both-0") as town:
        worker = town.worker("both-0")
        hub = town.stage.hub
        late = hub.connect(worker.endpoint)
        client = town.ask(max_tokens=20)
        await town.until(lambda: len(client.tokens) > 3)
        late.send(Hello(gateway="g", incarnation=1, connection=0))
        await healed(town, client, within=0.5)
        assert len(town.router.debug(client.request.id)) == 1


async def test_a_worker_that_is_replaced_without_the_gateways_noticing() -> None:
    """Its successor has the same name, address and incarnation, as if it had never gone, and none of its requests."""
    async with Town("both-0") as town:
        client = town.ask(max_tokens=30)
        await town.until(lambda: len(client.tokens) > 3)
        worker = town.worker("both-0")
        town.stage.workers.remove(worker)
        worker.mailbox._listener.close()
        town.stage.workers.append(StageWorker(town.stage, "both-0", Role.BOTH))
        await healed(town, client)
        assert len(town.router.debug(client.request.id)) == 2


async def test_a_worker_says_nothing_of_what_it_has() -> None:
    """What is asked about and known goes on; a request that waits long in a queue is not sent again."""
    async with Town("both-0", pages=16) as town:
        first = town.ask("first", prompt=150, max_tokens=100)
        second = town.ask("second", prompt=tuple(range(500, 620)), max_tokens=8)
        await town.until(lambda: len(first.tokens) > 3)
        for _ in range(20):
            await town.turn(0.1)
        assert not second.tokens
        await town.finish()
        for client in (first, second):
            client.assert_true_answer()
            assert len(town.router.debug(client.request.id)) == 1


async def test_only_silent_legs_are_asked_about() -> None:
    heard: list[tuple[AwaitedStage, ...]] = []
    hub = BreakingHub()
    hub.loses = lambda message: isinstance(message, Hello) and bool(heard.append(message.awaited))
    async with Town("both-0", hub=hub) as town:
        client = town.ask(max_tokens=40)
        await town.until(lambda: len(client.tokens) > 3)
        await town.wait(0.5, step=0.05)
        assert not any(heard)
        town.stop("both-0")
        await town.wait(1.5)
        town.wake("both-0")
        assert [awaited for awaited in heard if awaited] == [(AwaitedStage(client.request.id, 1),)]
        await town.finish()
        client.assert_true_answer()
