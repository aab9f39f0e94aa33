"""Spans of answers over real workers without a model: every phase has one, whatever happens to workers."""

from __future__ import annotations

import msgspec
import pytest

from penstock.router.links import WorkerLink
from penstock.telemetry import spans
from penstock.types import RequestId, ResumeFrom, ValidRequest, WorkerId
from penstock.wire.gateway_messages import Submit, TokenItem, Tokens

from .losses import Nth
from .router_town import SPLIT, WHOLE, WIDE, Client, Town
from .span_notes import SpanNotes
from .test_standing_still import stand_still
from .worker_stage import IDENTITY


def traced(town: Town, *, trace: str = "caller", prompt: int = 40, **sampling: object) -> ValidRequest:
    """A request that somebody records."""
    plain = town.ask("plain", prompt=prompt, **sampling)
    assert plain.task is not None
    plain.task.cancel()
    town.clients.remove(plain)
    return msgspec.structs.replace(plain.request, id=RequestId("r"), trace=trace)


def ask(town: Town, **fields: object) -> Client:
    """Ask it."""
    return town.serve(traced(town, **fields))


async def test_workers_that_stand_still_are_a_retry():
    notes = SpanNotes()
    async with Town(*WIDE, tracer=notes) as town:
        client = ask(town, max_tokens=40)
        await town.until(lambda: len(client.tokens) > 3)
        (decision,) = town.router.debug(client.request.id)
        for leg in decision.stages:
            stand_still(town.worker(leg.worker))
        await town.until(lambda: client.over, turns=1200, seconds=0.01)
        client.assert_true_answer()
    notes.assert_whole()
    assert "still" in notes.facts(spans.RETRY, "reason")
    assert "still" in notes.facts(spans.LEG, "outcome")


async def test_a_split_answer_has_every_phase():
    notes = SpanNotes()
    async with Town(*SPLIT, tracer=notes) as town:
        client = ask(town)
        await town.finish(client)
        client.assert_true_answer()
        await town.assert_idle()
    notes.assert_whole()
    (answer,) = notes.of(spans.ANSWER)
    assert answer.parent == "caller"
    assert [name for name, _ in answer.events] == ["first_token"]
    assert answer.facts["penstock.tokens"] == 8
    assert answer.facts["penstock.finish"] == "length"
    assert notes.facts(spans.DECISION, "outcome") == ["split"]
    assert (notes.facts(spans.DECISION, "prefill"), notes.facts(spans.DECISION, "decode")) == (
        ["prefill-0"],
        ["decode-0"],
    )
    assert sorted(notes.facts(spans.LEG, "leg")) == ["decode", "prefill"]
    assert len(notes.of(spans.QUEUE)) == 1
    assert [note.facts["penstock.tokens"] for note in notes.of(spans.DECODE)] == [8]
    legs = {note.context: note.facts["penstock.leg"] for note in notes.of(spans.LEG)}
    assert sorted(legs[note.parent] for note in notes.of(spans.WORKER_QUEUE)) == ["decode", "prefill"]
    assert [legs[note.parent] for note in notes.of(spans.PREFILL)] == ["prefill"]
    assert [legs[note.parent] for note in notes.of(spans.TRANSFER)] == ["decode"]
    assert notes.facts(spans.PREFILL, "tokens") == [40]
    assert notes.facts(spans.TRANSFER, "tokens") == [40]
    assert not notes.of(spans.RETRY)


async def test_what_was_cached_is_told():
    notes = SpanNotes()
    async with Town(*WHOLE, tracer=notes) as town:
        await town.finish(town.ask("before"))
        await town.finish(ask(town))
    assert notes.facts(spans.PREFILL, "cached_tokens") == [32]
    assert notes.facts(spans.PREFILL, "tokens") == [8]


async def test_a_dead_worker_is_a_retry():
    notes = SpanNotes()
    async with Town(*WIDE, tracer=notes) as town:
        client = ask(town, max_tokens=40)
        await town.until(lambda: len(client.tokens) >= 5)
        (writer,) = notes.facts(spans.DECISION, "decode")
        town.kill(writer)
        await town.finish(client)
        client.assert_true_answer()
        await town.assert_idle()
    notes.assert_whole()
    (retry,) = notes.of(spans.RETRY)
    assert retry.facts["penstock.worker"] == writer
    assert retry.facts["penstock.reason"] == "killed"
    assert retry.facts["penstock.tokens"] >= 5
    assert not retry.error
    lost = [note for note in notes.of(spans.LEG) if note.error]
    assert [(note.facts["penstock.worker"], note.error) for note in lost] == [(writer, "killed")]
    assert len(notes.of(spans.DECISION)) == len(notes.of(spans.QUEUE)) == 2
    assert notes.of(spans.ANSWER)[0].facts["penstock.epochs"] == 2


async def test_a_link_that_takes_nothing_more_is_a_retry(monkeypatch: pytest.MonkeyPatch):
    notes, full, plain = SpanNotes(), Nth(Submit), WorkerLink.send
    monkeypatch.setattr(WorkerLink, "send", lambda link, message: not full(message) and plain(link, message))
    async with Town(*WIDE, tracer=notes) as town:
        client = town.serve(traced(town, max_tokens=8))
        await town.finish(client)
        client.assert_true_answer()
        await town.assert_idle()
    notes.assert_whole()
    assert notes.facts(spans.RETRY, "reason") == ["queue_full"]
    assert [note.error for note in notes.of(spans.LEG) if note.error] == ["queue_full"]


async def test_what_was_known_before_is_not_decoded():
    notes = SpanNotes()
    async with Town(*WHOLE, tracer=notes) as town:
        first = town.ask(max_tokens=12)
        await town.finish(first)
        begun = ResumeFrom(tuple(first.tokens[:5]), IDENTITY)
        rest = msgspec.structs.replace(first.request, id=RequestId("rest"), begun=begun, trace="caller")
        await town.finish(town.serve(rest))
    assert notes.facts(spans.DECODE, "tokens") == [7]
    assert notes.facts(spans.ANSWER, "tokens") == [12]


async def test_what_a_fenced_worker_says_is_an_event():
    notes = SpanNotes()
    async with Town(*WHOLE, tracer=notes) as town:
        client = ask(town, max_tokens=40)
        await town.until(lambda: len(client.tokens) >= 2)
        late = TokenItem(request=client.request.id, epoch=0, index=0, tokens=(1,))
        worker, incarnation = WorkerId("both-0"), town.worker("both-0").incarnation
        town.router.on_message(worker, incarnation, Tokens(worker=worker, incarnation=incarnation, items=(late,)))
        await town.finish(client)
        client.assert_true_answer()
    (answer,) = notes.of(spans.ANSWER)
    assert [name for name, _ in answer.events] == ["first_token", "fence"]


async def test_an_answer_that_its_client_leaves_has_an_end():
    notes = SpanNotes()
    async with Town(*SPLIT, tracer=notes) as town:
        client = ask(town, max_tokens=200)
        await town.until(lambda: len(client.tokens) >= 3)
        assert client.task is not None
        client.task.cancel()
        await town.settle()
        await town.assert_idle()
        assert notes.of(spans.ANSWER)[0].facts["penstock.finish"] == "abort"
    notes.assert_whole()


async def test_nothing_is_measured_of_what_nobody_records():
    notes = SpanNotes()
    async with Town(*SPLIT, tracer=notes) as town:
        client = town.ask(max_tokens=20)
        await town.until(lambda: len(client.tokens) >= 3)
        asks = [ask for name in SPLIT for ask in town.worker(name).mailbox._requests.all()]
        assert asks
        assert all(ask.phases is None for ask in asks)
        await town.finish(client)
    assert not notes.notes
