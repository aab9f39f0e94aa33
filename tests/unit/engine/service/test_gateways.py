"""Which gateways a worker remembers: one for each connection, and no more than ``MAX_GATEWAYS``."""

from __future__ import annotations

import pytest

from penstock.engine.service import gateways
from penstock.engine.service.gateways import GatewayRequests, HelloResult
from penstock.types import ModelIdentity, RequestId, RequestStage, SamplingParams
from penstock.wire.gateway_messages import Hello, Recipient, Submit

SILENCE_S = 10.0


def hello(requests: GatewayRequests, name: str, peer: bytes, now: float = 0.0) -> HelloResult:
    return requests.on_hello(peer, Hello(gateway=name, incarnation=1), now, lambda peer: True)


def submit(requests: GatewayRequests, name: str, peer: bytes) -> None:
    message = Submit(
        recipient=Recipient(worker="w", incarnation=1, identity=ModelIdentity(fingerprint="m", numerics="n")),
        request=RequestId(name),
        epoch=1,
        stage=RequestStage.WHOLE,
        prompt=bytes(4),
        sampling=SamplingParams(seed=1, max_tokens=1),
        root=bytes(32),
    )
    assert requests.submit(peer, message, 0.0) is not None


def test_a_connection_speaks_for_one_gateway() -> None:
    requests = GatewayRequests(SILENCE_S)
    hello(requests, "g", b"1")
    submit(requests, "r", b"1")
    for number in range(100):
        result = hello(requests, f"g-{number}", b"1")
        assert [ask.request for ask in result.orphans] == (["r"] if number == 0 else [])
        for ask in result.orphans:
            requests.remove(ask.request, ask.epoch)
    assert [gateway.name for gateway in requests.gateways()] == ["g-99"]
    assert requests.is_connected(b"1")


def test_names_that_are_said_are_bounded_and_none_that_lives_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateways, "MAX_GATEWAYS", 3)
    requests = GatewayRequests(SILENCE_S)
    for name, peer in (("a", b"1"), ("b", b"2"), ("c", b"3")):
        hello(requests, name, peer)
    hello(requests, "d", b"4")
    assert not requests.is_connected(b"4")
    hello(requests, "a", b"1", SILENCE_S + 1.0)
    hello(requests, "c", b"3", SILENCE_S + 1.0)
    assert requests.orphans_of_silent(SILENCE_S + 1.0) == []
    hello(requests, "d", b"2", SILENCE_S + 1.0)  # over the connection that b had
    assert [gateway.name for gateway in requests.gateways()] == ["a", "c", "d"]
    assert all(map(requests.is_connected, (b"1", b"2", b"3")))
