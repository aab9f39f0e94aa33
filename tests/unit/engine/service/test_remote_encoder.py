"""Encoders on workers of their own: who is asked, what comes back, and what happens when nothing does."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import pytest

from penstock.clock import VirtualClock
from penstock.engine.service.peer_links import PeerLinks
from penstock.engine.service.readiness import NoImages
from penstock.engine.service.remote_encoder import SILENCE_S, EncodeRequests, RemoteEncoders
from penstock.errors import ImageRefused
from penstock.types import ImageInput, MediaInput, ModelIdentity, PlacedImage, WorkerId
from penstock.wire.gateway_messages import PageSource
from penstock.wire.in_memory import InMemoryHub
from penstock.wire.transfer_messages import EncodeImage, ImageEncoded
from penstock.wire.transport import Listener

IDENTITY = ModelIdentity(fingerprint="f", numerics="n")
PICTURE = ImageInput(1, 2, b"xyz", 1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
WIDTH = 4
ROWS = np.arange(8, dtype=np.float32).reshape(2, WIDTH)


def source(name: str) -> PageSource:
    return PageSource(worker=WorkerId(name), incarnation=1, endpoint=f"memory://{name}")


def image(name: int) -> PlacedImage:
    return PlacedImage(bytes([name] * 32), 3, 1, 2)


class Pair:
    """One that asks and one that encodes."""

    def __init__(self, identity: ModelIdentity = IDENTITY) -> None:
        hub, self.clock = InMemoryHub(), VirtualClock()
        self.asking = RemoteEncoders(PeerLinks(hub, 60.0), identity, self.clock)
        self.listener: Listener = hub.listen("memory://e")
        self.served = EncodeRequests(IDENTITY, self.listener.send)

    def ask(self, name: int = 1, sources: Sequence[PageSource] = (source("e"),)) -> bool:
        return self.asking.request_rows(sources, image(name), PICTURE, WIDTH)

    def hear(self) -> list[bool]:
        """What the encoder is asked: is each new to it?"""
        told = []
        while (received := self.listener.recv()) is not None:
            assert isinstance(received.message, EncodeImage)
            assert received.message.media == PICTURE
            told.append(self.served.add(received.peer, received.message))
        return told


def test_rows_come_back_with_their_bits():
    pair = Pair()
    assert pair.ask()
    assert pair.hear() == [True]
    assert list(pair.asking.results()) == []
    pair.served.send_rows(image(1).content, ROWS)
    ((content, rows_ND),) = pair.asking.results()
    assert content == image(1).content
    assert rows_ND is not None
    np.testing.assert_array_equal(rows_ND, ROWS)
    assert list(pair.asking.results()) == []
    assert pair.served.contents == ()


def test_silence_is_not_waited_for_and_signs_of_life_are():
    pair = Pair()
    pair.ask()
    pair.hear()
    for _ in range(4):
        pair.clock.advance(SILENCE_S * 0.9)
        pair.served.send_alive()
        assert list(pair.asking.results()) == []
    pair.clock.advance(SILENCE_S)
    assert list(pair.asking.results()) == [(image(1).content, None)]
    pair.served.send_rows(image(1).content, ROWS)
    assert list(pair.asking.results()) == []  # too late: nobody waits for it


def test_what_is_no_answer_is_none():
    for rows_ND, lie in ((ROWS[:1], {}), (None, {}), (ROWS, {"checksum": bytes(16)}), (ROWS, {"width": 5})):
        pair = Pair()
        pair.ask()
        received = pair.listener.recv()
        assert received is not None
        if lie:
            fields = {"content": image(1).content, "tokens": 2, "width": WIDTH} | lie
            pair.listener.send(received.peer, ImageEncoded(**fields), ROWS.data.cast("B"))
        else:
            assert isinstance(received.message, EncodeImage)
            pair.served.add(received.peer, received.message)
            pair.served.send_rows(image(1).content, rows_ND)
        assert list(pair.asking.results()) == [(image(1).content, None)]


def test_another_model_is_refused_at_once():
    pair = Pair(ModelIdentity(fingerprint="other", numerics="n"))
    pair.ask()
    assert pair.hear() == [False]
    assert list(pair.asking.results()) == [(image(1).content, None)]


def test_one_image_is_always_asked_of_the_same_and_all_are_asked():
    pair = Pair()
    sources = tuple(source(name) for name in "abcd")
    assert not pair.ask(1, ())
    assert not pair.ask(1, (PageSource(worker=WorkerId("x"), incarnation=1, endpoint="nowhere://x"),))
    for name in range(40):
        pair.ask(name, sources)
        pair.ask(name, sources[::-1])
    assert len(pair.asking.links()) == 4


def test_two_who_ask_for_one_image_are_both_told():
    hub, clock = InMemoryHub(), VirtualClock()
    askers = [RemoteEncoders(PeerLinks(hub, 60.0), IDENTITY, clock) for _ in range(2)]
    listener = hub.listen("memory://e")
    served = EncodeRequests(IDENTITY, listener.send)
    for asker in askers:
        asker.request_rows((source("e"),), image(1), PICTURE, WIDTH)
    new = []
    while (received := listener.recv()) is not None:
        assert isinstance(received.message, EncodeImage)
        new.append(served.add(received.peer, received.message))
    assert new == [True, False]
    served.send_rows(image(1).content, ROWS)
    assert [len(list(asker.results())) for asker in askers] == [1, 1]


@pytest.mark.parametrize("error", [ImageRefused("no image"), ValueError("a defect")])
def test_an_image_that_cannot_be_encoded_is_not_waited_for(error: Exception):
    class Failing(NoImages):
        def encode_for_peer(self, content: bytes, picture: MediaInput) -> None:
            raise error

    pair = Pair()
    assert pair.ask()
    received = pair.listener.recv()
    assert received is not None
    assert isinstance(received.message, EncodeImage)
    with contextlib.suppress(ValueError):
        pair.served.encode(received.peer, received.message, Failing())
    assert list(pair.asking.results()) == [(image(1).content, None)]
    assert list(pair.served.contents) == []
