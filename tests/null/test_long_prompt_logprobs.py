"""Log-probabilities of long prompts, and other messages that are too large: nothing of the service ends by them."""

from __future__ import annotations

import threading

import pytest

from penstock.engine.service import gateways
from penstock.errors import RequestError
from penstock.interfaces import OutputDelta
from penstock.processing.detokenizer import IncrementalDetokenizer
from penstock.types import TokenBatch
from penstock.wire import codec
from penstock.wire.gateway_messages import Tokens
from penstock.wire.transfer_messages import PrefillDone

from .http_stage import MODEL, Stage, events_of, stage
from .losses import BreakingHub, Nth
from .router_town import SPLIT, WHOLE, Town

FRAME_BYTES = 6000
"""Of a message here: a token with 20 alternatives takes 300, so 200 of them fit no message."""


@pytest.fixture
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", FRAME_BYTES)
    monkeypatch.setattr(gateways, "MAX_LOGPROBS_PER_MESSAGE", 100, raising=False)


@pytest.mark.parametrize("names", [SPLIT, WHOLE])
async def test_they_come_whole_though_they_fit_no_message(names: tuple[str, ...], small_frames: None) -> None:
    async with Town(*names) as town:
        client = town.ask(prompt=200, prompt_logprobs=20, logprobs=1)
        await town.finish()
        client.assert_true_answer()
        told = client.batches[0].prompt_logprobs or ()
        assert [one.token for one in told] == list(range(1, 200))
        assert {len(one.top) for one in told} == {20}
        assert all(batch.prompt_logprobs is None for batch in client.batches[1:])
        await town.assert_idle()


async def test_a_decode_worker_is_not_told_them() -> None:
    said: list[PrefillDone] = []

    class Noting(BreakingHub):
        def to_link(self, peer: bytes, parcel: object) -> bool:
            message = codec.decode_peer(parcel.header)  # type: ignore[attr-defined]
            if isinstance(message, PrefillDone):
                said.append(message)
            return super().to_link(peer, parcel)  # type: ignore[arg-type]

    async with Town(*SPLIT, hub=Noting()) as town:
        client = town.ask(prompt=100, prompt_logprobs=20)
        await town.finish()
        assert len(client.batches[0].prompt_logprobs or ()) == 99
    assert [message.first.prompt_logprobs for message in said] == [None]


@pytest.mark.parametrize("nth", [1, 5, 20])
async def test_one_part_is_lost_with_its_connection(nth: int, small_frames: None) -> None:
    hub = BreakingHub()
    async with Town(*SPLIT, hub=hub, lease_s=4.0) as town:
        hub.loses = Nth(Tokens, nth)
        client = town.ask(prompt=200, prompt_logprobs=20)
        await town.finish(turns=6000)
        assert len(hub.lost) == 1
        client.assert_true_answer()
        assert [one.token for one in client.batches[0].prompt_logprobs or ()] == list(range(1, 200))


@pytest.mark.parametrize("names", [SPLIT, WHOLE])
async def test_a_step_of_an_answer_that_fits_no_message_fails_its_own_request_alone(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Town(*names) as town:
        other = town.ask("other", max_tokens=40)
        await town.until(lambda: len(other.tokens) > 2)
        monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 1500)
        client = town.ask("large", prompt=10, logprobs=200)
        await town.finish()
        assert isinstance(client.error, RequestError)
        assert client.error.code == "message_too_large"
        other.assert_true_answer()
        assert {row["state"] for row in town.router.workers()} == {"ready"}
        await town.assert_idle()


async def test_a_request_that_fits_no_message_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 1000)
    async with Town(*WHOLE, max_model_len=2048, pages=128) as town:
        client, other = town.ask("large", prompt=1200), town.ask("small", prompt=20)
        await town.finish()
        assert isinstance(client.error, RequestError)
        assert client.error.code == "message_too_large"
        other.assert_true_answer()
        await town.assert_idle()


# --- the HTTP face ---------------------------------------------------------------------------------------------------


async def on_threads(monkeypatch: pytest.MonkeyPatch, on: Stage, body: dict[str, object]) -> set[bool]:
    """Ask; was any of the text made on the event loop's thread, and any beside it?"""
    own, found = threading.get_ident(), set[bool]()
    push = IncrementalDetokenizer.push

    def noted(text: IncrementalDetokenizer, batch: TokenBatch) -> OutputDelta:
        if batch.prompt_logprobs is not None:
            found.add(threading.get_ident() == own)
        return push(text, batch)

    monkeypatch.setattr(IncrementalDetokenizer, "push", noted)
    reply = await on.post("/v1/completions", {"model": MODEL, **body})
    assert reply.status_code == 200, reply.text
    return found


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("length", "here"), [(20, True), (500, False)])
async def test_many_are_put_into_words_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, length: int, here: bool, streams: bool
) -> None:
    async with stage() as on:
        body = {"prompt": list(range(5, 5 + length)), "echo": True, "logprobs": 5, "max_tokens": 2, "stream": streams}
        assert await on_threads(monkeypatch, on, body) == {here}
        reply = await on.post("/v1/completions", {"model": MODEL, **body})
        parts = [e.data["choices"][0] for e in events_of(reply.text)[:-1]] if streams else reply.json()["choices"]
        told = [name for part in parts if part["logprobs"] for name in part["logprobs"]["tokens"]]
        assert len(told) == length + 2


async def test_too_many_are_refused_with_both_numbers() -> None:
    async with stage() as on:
        body = {"model": MODEL, "prompt": [[7] * 600] * 21, "echo": True, "logprobs": 20, "max_tokens": 1}
        reply = await on.post("/v1/completions", body)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["code"]) == (400, "logprobs", "too_many_logprobs")
        assert "264600 log-probabilities" in error["message"]
        assert "at most 262144" in error["message"]
