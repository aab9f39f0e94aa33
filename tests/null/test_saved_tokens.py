"""A gateway that takes over a request with an idempotency key goes on from the tokens that the other has saved."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest
from msgspec import structs

from penstock.api.idempotency import IdempotentRequest, KeyClaim, KeyOutcome
from penstock.api.response_cache import ResponseCache
from penstock.api.resumed_streams import usable_tokens
from penstock.api.sse import EventSigner
from penstock.config.limits import FailoverConfig, RequestLimits
from penstock.engine.service.idempotency_claims import IdempotencyClaims
from penstock.errors import KeyReused
from penstock.router import home_calls
from penstock.router.home_calls import ANSWER_S
from penstock.router.service import RouterService
from penstock.types import ResumeKey, SamplingParams, WorkerId, WorkerState
from penstock.wire.gateway_messages import FoundTokens, SavedPiece, SaveTokens
from penstock.wire.supervisor_messages import WorkerDown

from .http_stage import CHAT, HELLO, MODEL, TEXT, Event, Stage, events_of, stage
from .router_town import Client
from .streams import answer_tokens
from .test_http_idempotency import KEY, leave_after, told
from .test_idempotency_homes import BODY, HEADERS, RING, Gateway, Home, Town2, sums, whole
from .worker_stage import IDENTITY, VOCAB

SAVED = 12
"""Tokens of each choice that the first gateway has saved when it dies."""


async def streamed(on: Stage, path: str, body: dict[str, Any]) -> list[Event]:
    options = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}}
    answer = await on.post(path, body | options, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    return events_of(answer.text)


def save(home: Home, gateway: Gateway, count: int = SAVED) -> None:
    """Saves the first tokens of all requests of a gateway, as its router would."""
    for request in gateway.streams.opened:
        tokens, _ = answer_tokens(request, gateway.streams.vocabulary)
        if request.resume is not None:
            home.saved.save([SavedPiece(request.resume.name, 0, array("I", tokens[:count]).tobytes())], 0.0)


@pytest.mark.parametrize("resumes", [False, True])
async def test_a_stream_goes_on_from_saved_tokens_and_is_counted_as_one_that_is_computed_again(
    *, resumes: bool
) -> None:
    home, limits = Home(), RequestLimits(resume_grace_s=0.0)
    a, b, c = (Gateway(home, name, limits) for name in "abc")
    async with a.scene as at_a, b.scene as at_b, c.scene as at_c:
        a.homes.delivers = 1
        last = await leave_after(at_a, 10, BODY, HEADERS)
        save(home, a)
        home.gone.add("a")
        text = await whole(at_b, last if resumes else None)
        assert text == await whole(at_c, last if resumes else None)
    (request,) = b.streams.opened
    assert request.begun.tokens == answer_tokens(request, b.streams.vocabulary)[0][:SAVED]
    assert request.begun.identity is not None
    assert b.homes.resumed == SAVED
    assert b.usage == sums(b, c) == (1, len(request.prompt), 40, 0, 0)
    assert (a.deferred, b.deferred) == ([False], [True])
    assert b.homes.counted == (0, 40 - SAVED, 0), "the first has counted its prompt and tokens as they came"
    assert b.met == [KeyOutcome.RESUMED if resumes else KeyOutcome.SHARED]


async def test_saved_tokens_are_found_though_the_home_of_the_key_does_not_answer() -> None:
    """It answers again at the end of the response, and each token is counted once."""
    home, limits = Home(), RequestLimits(resume_grace_s=0.0)
    a, b = (Gateway(home, name, limits) for name in "ab")
    b.homes.unanswered = {1}
    async with a.scene as at_a, b.scene as at_b:
        last = await leave_after(at_a, 10, BODY, HEADERS)
        save(home, a)
        await whole(at_b, last)
    assert b.homes.resumed == SAVED
    assert b.deferred == [True]
    assert sums(a, b) == (1, len(b.streams.opened[0].prompt), 40, 0, 0)
    assert b.homes.counted[:2] == (0, 40 - max(SAVED, a.usage[2]))


async def test_what_the_home_has_forgotten_counts_from_the_clients_last_event_on() -> None:
    """Saved tokens are found before the home's answer has come."""
    home, limits = Home(), RequestLimits(resume_grace_s=0.0)
    a, b = (Gateway(home, name, limits) for name in "ab")
    async with a.scene as at_a, b.scene as at_b:
        last = await leave_after(at_a, 10, BODY, HEADERS)
        async with asyncio.timeout(60):
            await a.streams.until(none_open=True)
        save(home, a)
        home.claims = IdempotencyClaims()
        b.homes.held = answers = asyncio.Queue()
        task = asyncio.create_task(whole(at_b, last))
        first = await answers.get()
        b.homes.held = None
        first()
        await task
    assert b.homes.resumed == SAVED
    assert b.usage == (0, 0, 40 - 10, 0, 0)
    assert b.deferred == [True]
    assert b.homes.counted[:2] == (0, 40 - SAVED)


async def test_a_choice_of_which_nothing_was_saved_is_counted_whole() -> None:
    home, limits = Home(), RequestLimits(resume_grace_s=0.0)
    a, b = (Gateway(home, name, limits) for name in "ab")
    body = BODY | {"prompt": ["Once", "Twice upon a time"]}
    async with a.scene as at_a, b.scene as at_b:
        a.homes.delivers = 1
        await leave_after(at_a, 10, body, HEADERS)
        a.streams.opened.pop()
        save(home, a)
        home.gone.add("a")
        assert (await at_b.post(TEXT, body, headers=HEADERS)).status_code == 200
    prompts = {bool(request.begun.tokens): len(request.prompt) for request in b.streams.opened}
    assert b.usage == (1, prompts[True] + prompts[False], 80, 0, 0)
    assert b.homes.counted == (prompts[False], 80 - SAVED, 0)


async def test_a_request_that_is_new_everywhere_is_not_searched_for() -> None:
    a = Gateway(Home(), "a")
    async with a.scene as at_a:
        await whole(at_a)
    assert a.homes.searches == 0


SAME: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HELLO, "max_tokens": 24, "n": 3}),
    (TEXT, {"prompt": "Once", "max_tokens": 30, "stop": ["e", "zz"]}),
    (TEXT, {"prompt": ["Once", "Twice"], "max_tokens": 14, "n": 2, "echo": True, "return_token_ids": True}),
    (TEXT, {"prompt": "Once", "max_tokens": SAVED}),
    (TEXT, {"prompt": "Once", "max_tokens": 1}),
]


@pytest.mark.parametrize(("path", "body"), SAME)
@pytest.mark.parametrize("has_cache", [False, True])
async def test_every_choice_is_the_same(path: str, body: dict[str, Any], *, has_cache: bool) -> None:
    home, cache = Home(), ResponseCache(1 << 20) if has_cache else None
    a, b = Gateway(home, "a"), Gateway(home, "b")
    b.scene = stage(b.streams, ring=RING, key_homes=b.homes, response_cache=cache)
    body = body | {"seed": 4}
    async with a.scene as at_a, b.scene as at_b:
        first = await streamed(at_a, path, body)
        save(home, a)
        again = await streamed(at_b, path, body)
        assert told(again) == told(first)
        known = [request.resume is not None and len(request.begun.tokens) for request in b.streams.opened]
        assert all(count == min(SAVED, body["max_tokens"] - 1) for count in known)
        ends_in_saved = "stop" in body  # so no worker is asked at all
        assert len(known) == (0 if ends_in_saved else len(told(first)))
        usage, later = first[-2].data["usage"], again[-2].data["usage"]
        for name in ("prompt_tokens", "completion_tokens"):
            assert later[name] == usage[name]
        if cache is not None and not ends_in_saved:
            headers = {name: value for name, value in HEADERS.items() if name not in KEY}
            third = await at_b.post(path, {"model": MODEL} | body, headers=headers)
            assert third.headers["x-penstock-response-cache"] == "hit"
            texts = [(part.get("message") or {}).get("content") or part.get("text") for part in third.json()["choices"]]
            assert texts == [choice["text"] for _, choice in sorted(told(first).items())]


async def test_log_probabilities_are_computed_again() -> None:
    home = Home()
    a, b = Gateway(home, "a"), Gateway(home, "b")
    async with a.scene as at_a, b.scene as at_b:
        for key, body in {"with": {"logprobs": 1}, "echo": {"logprobs": 0, "echo": True}}.items():
            for on in (at_a, at_b):
                answer = await on.post(TEXT, BODY | body, headers=HEADERS | {"Idempotency-Key": key})
                assert answer.status_code == 200, answer.text
    assert [request.resume for request in a.streams.opened + b.streams.opened] == [None] * 4


async def test_names_are_of_all_that_the_tokens_follow_from() -> None:
    """The same key for the same body, whose prompt another gateway has rendered in another way."""
    home = Home()
    a, b = Gateway(home, "a"), Gateway(home, "b")
    async with a.scene as at_a, b.scene as at_b:
        await whole(at_a)
        (request,) = a.streams.opened
        assert request.resume is not None
        other = structs.replace(request.resume, name=bytes(16))
        home.saved.save([SavedPiece(other.name, 0, bytes(4 * SAVED))], 0.0)
        await whole(at_b)
        await at_a.post(TEXT, BODY | {"max_tokens": 9}, headers=HEADERS | {"Idempotency-Key": "another"})
    assert b.homes.searches == 1
    assert [request.begun.tokens for request in b.streams.opened] == [()]
    assert a.streams.opened[1].resume.name != request.resume.name  # type: ignore[union-attr]


def test_saved_tokens_never_end_a_response() -> None:
    sampling = SamplingParams(seed=1, max_tokens=5, min_tokens=2, stop_token_ids=(7,))
    assert usable_tokens((1, 2, 3), sampling) == (1, 2, 3)
    assert usable_tokens((1, 2, 3, 4, 5, 6), sampling) == (1, 2, 3, 4)
    assert usable_tokens((7, 2, 7), sampling) == (), "a grammar left nothing else"
    assert usable_tokens((1, 7, 3), sampling) == (1,)


# --- over real workers ------------------------------------------------------------------------------------------------

RESUME = ResumeKey(key=b"k" * 16, name=b"n" * 16, identity=IDENTITY)
EVERY_S = FailoverConfig().save_tokens_s


def begin(town: Town2, router: RouterService, name: str, resume: ResumeKey = RESUME, tokens: int = 150) -> Client:
    """A request with this key at one of the gateways."""
    client = town.ask(name, max_tokens=tokens)
    assert client.task is not None
    client.task.cancel()
    return town.serve_by(router, structs.replace(client.request, resume=resume, id=client.request.id + "/0"))


async def find(town: Town2, router: RouterService, resume: ResumeKey = RESUME) -> tuple[int, ...]:
    """What this gateway finds of it."""
    got: list[list[tuple[int, ...]]] = []
    router.idempotency.find_saved(resume.key, [resume.name], got.append)
    await town.until(lambda: bool(got), seconds=0.02)
    ((tokens,),) = got
    return tokens


async def claim(town: Town2, router: RouterService, number: int, mark: int = 1) -> KeyClaim:
    """A gateway's claim on this key, after all that it waits for.  Raises KeyReused."""
    homes = router.idempotency
    keyed = IdempotentRequest(
        key=bytes([number]), name=str(number), seed=1, mark=f"{mark:016x}", signer=EventSigner(b"", b"")
    )
    resume = ResumeKey(homes.digest(keyed.key), homes.digest(b"tokens of %d" % number), IDENTITY)
    made = KeyClaim(homes, keyed, {0: resume})
    task = asyncio.create_task(made.open())
    await town.until(task.done, seconds=0.02)
    task.result()
    return made


def keepers(town: Town2) -> list[str]:
    """Workers that have saved something."""
    return [name for name in town.alive if len(town.worker(name).mailbox.exchange.saved)]


async def test_another_gateway_finds_what_one_has_saved_and_goes_on_from_it() -> None:
    async with Town2("both-0", "both-1", "both-2") as town:
        other = town.add_gateway("other")
        await town.until(other.ready, seconds=0.1)
        client = begin(town, town.router, "a")
        await town.until(lambda: len(client.tokens) >= 40, seconds=0.02)
        await town.wait(2 * EVERY_S)
        known = await find(town, other)
        assert 40 <= len(known) < 150
        assert list(known) == client.truth()[: len(known)]
        assert len(keepers(town)) == 1
        begun = structs.replace(client.request, id=client.request.id + "/b")
        begun = structs.replace(begun, begun=structs.replace(begun.begun, tokens=known, identity=IDENTITY))
        second = town.serve_by(other, begun)
        await town.until(lambda: client.over and second.over, seconds=0.02)
        client.assert_true_answer()
        assert [*known, *second.tokens] == client.truth()
        assert len(await find(town, other)) <= 150
        assert not len(town.router._saved)


async def test_the_last_gateway_takes_over_all_keys_of_another_that_is_gone() -> None:
    """Also after an answer by which there is no other gateway any more."""
    async with Town2("both-0", "both-1") as town:
        other = town.add_gateway("other")
        await town.until(other.ready, seconds=0.1)
        for number in range(3):
            began = await claim(town, other, number)
            assert not began.is_shared
            resume = began.take_resume_key(0)
            assert resume is not None
            other._homes.possible_links(resume.key)[0].send(
                SaveTokens(pieces=(SavedPiece(resume.name, 0, array("I", range(1, 5)).tobytes()),))
            )
        await town.turn(0.02)
        town.others.remove(other)
        await other.close()
        requests = [town.worker(name).mailbox._requests for name in town.alive]
        await town.until(lambda: all(len(each.gateways()) == 1 for each in requests), seconds=0.05)
        for number in range(2):
            taken = await claim(town, town.router, number)
            assert taken.is_shared
            resume = taken.take_resume_key(0)
            assert resume is not None
            assert resume.tokens == (1, 2, 3, 4)
        with pytest.raises(KeyReused):
            await claim(town, town.router, 2, mark=2)


async def test_a_worker_that_has_saved_tokens_dies_and_another_gets_them_from_the_first_on() -> None:
    async with Town2("both-0", "both-1", "both-2") as town:
        other = town.add_gateway("other")
        await town.until(other.ready, seconds=0.1)
        resumes = [ResumeKey(key=bytes([number]) * 16, name=RESUME.name, identity=IDENTITY) for number in range(30)]
        client = begin(town, town.router, "a", resumes[0], tokens=200)
        await town.until(lambda: bool(keepers(town)), seconds=0.02)
        (keeper,) = keepers(town)
        before = len(client.tokens)
        town.kill(keeper)
        await town.until(lambda: bool(keepers(town)), seconds=0.02)
        await town.until(lambda: len(client.tokens) > before + 20, seconds=0.02)
        await town.wait(2 * EVERY_S)
        known = await find(town, town.router, resumes[0])
        assert list(known) == client.truth()[: len(known)]
        assert len(known) > before


@pytest.mark.parametrize("noticed", [False, True])
async def test_tokens_are_saved_on_another_host_than_the_gateways(
    monkeypatch: pytest.MonkeyPatch, *, noticed: bool
) -> None:
    """And found there, whether or not the other gateway has noticed that the host is gone."""
    names = ("both-0", "both-1", "both-2", "both-3")
    monkeypatch.setattr(home_calls, "host_of", lambda endpoint: "ab"[endpoint[-1] in "23"])
    async with Town2(*names) as town:
        other = town.add_gateway("other")
        for name in names[:2]:
            town.router.add_local_worker(WorkerId(name))
        for name in names[2:]:
            other.add_local_worker(WorkerId(name))
        await town.until(other.ready, seconds=0.1)
        resumes = [
            ResumeKey(key=bytes([number]) * 16, name=bytes([number]) * 16, identity=IDENTITY) for number in range(8)
        ]
        clients = [begin(town, town.router, f"a{number}", resume) for number, resume in enumerate(resumes)]
        await town.until(lambda: all(len(client.tokens) >= 20 for client in clients), seconds=0.02)
        await town.wait(2 * EVERY_S)
        assert keepers(town) == list(names[2:]), "both of the other host's workers, and none of this one's"
        for name in names[:2]:
            town.kill(name)  # the host of the gateway is gone
            if noticed:
                down = WorkerDown(worker=WorkerId(name), incarnation=1, state=WorkerState.DEAD, reason="killed")
                other.on_supervisor(down)
        for resume in resumes:
            assert len(await find(town, other, resume)) >= 20


async def test_a_worker_that_does_not_answer_holds_up_no_one_for_long() -> None:
    async with Town2("both-0", "both-1") as town:
        town.stop("both-0")
        town.stop("both-1")
        began = town.clock.now()
        assert await find(town, town.router) == ()
        assert town.clock.now() - began <= ANSWER_S + 0.1


async def test_an_answer_with_tokens_of_another_vocabulary_is_none() -> None:
    async with Town2("both-0", "both-1") as town:
        homes = town.router._saved
        homes._vocabulary = VOCAB
        for tokens in ((VOCAB - 1,), (VOCAB,)):
            got: list[list[tuple[int, ...]]] = []
            homes.find(RESUME.key, [RESUME.name], got.append)
            for serial, pending in list(homes._calls._pending.items()):
                answer = FoundTokens(serial=serial, tokens=(array("I", tokens).tobytes(),))
                homes.on_answer(pending.link.worker, pending.link.incarnation, answer)
            assert got == [[tokens if tokens[0] < VOCAB else ()]]


async def test_nothing_is_sent_while_nothing_is_new_or_where_it_is_turned_off() -> None:
    async with Town2("both-0") as town:
        client = begin(town, town.router, "a")
        await town.finish(client)
        await town.wait(2 * EVERY_S)
        saved = town.worker("both-0").mailbox.exchange.saved
        assert saved.tokens <= 150
        idle = begin(town, town.router, "idle")
        town.stop("both-0")
        sent: list[object] = []
        link = town.router._homes.link(RESUME.key)
        assert link is not None
        original = link.send
        link.send = lambda message: (sent.append(type(message).__name__), original(message))[1]  # type: ignore[method-assign,func-returns-value]
        await town.wait(0.6)
        assert "SaveTokens" not in sent
        await town.leave(idle)
        town.router._saved._every_s = 0.0
        town.wake("both-0")
        last = begin(town, town.router, "b")
        await town.finish(last)
        assert not len(town.router._saved)
        await asyncio.sleep(0)
