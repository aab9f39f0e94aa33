"""Which gateways a worker remembers, and how many; which count as gone, and what that does to their requests."""

from __future__ import annotations

import pytest

from penstock.engine.service import gateways
from penstock.engine.service.gateways import HOST_ALIVE_S, UNREACHABLE_S, GatewayRequests, HelloResult
from penstock.engine.service.idempotency_claims import GatewayProcess
from penstock.hashing import chain_root
from penstock.types import GREEDY, ModelIdentity, RequestId, RequestStage, SamplingParams, WorkerId, pack_token_ids
from penstock.wire.gateway_messages import Hello, Recipient, Submit

IDENTITY = ModelIdentity(fingerprint="f" * 64, numerics="n")
SILENCE_S = 10.0
A, B = b"a", b"b"


def submit(name: str) -> Submit:
    return Submit(
        recipient=Recipient(worker=WorkerId("w"), incarnation=1, identity=IDENTITY),
        request=RequestId(name),
        epoch=1,
        stage=RequestStage.WHOLE,
        prompt=bytes(pack_token_ids((1,))),
        sampling=SamplingParams(seed=0, max_tokens=1, temperature=GREEDY),
        root=chain_root(IDENTITY),
    )


def hello(requests: GatewayRequests, name: str, peer: bytes, now: float = 0.0) -> HelloResult:
    return requests.on_hello(peer, Hello(gateway=name, incarnation=1), now, lambda peer: True)


def two_gateways(*working: bytes) -> GatewayRequests:
    requests = GatewayRequests(SILENCE_S)
    for peer in (A, B):
        requests.on_hello(peer, Hello(gateway=peer.decode(), incarnation=1), 0.0)
    for peer in working:
        assert requests.submit(peer, submit(f"of {peer.decode()}"), 0.0) is not None
    return requests


@pytest.mark.parametrize(
    ("now", "connected", "orphans"),
    [
        (UNREACHABLE_S, "", []),  # its connection may be made anew
        (UNREACHABLE_S + 0.1, "", ["of a", "of b"]),
        (UNREACHABLE_S + 0.1, "b", ["of a"]),
        (SILENCE_S, "ab", []),
        (SILENCE_S + 0.1, "ab", ["of a", "of b"]),  # it is connected, and stopped or cut off
    ],
)
def test_a_gateway_without_a_connection_is_gone_sooner_than_a_silent_one(
    now: float, connected: str, orphans: list[str]
) -> None:
    requests = two_gateways(A, B)
    found = requests.orphans_of_silent(now, lambda peer: peer.decode() in connected)
    assert [ask.request for ask in found] == orphans
    assert [gateway.name for gateway in requests.gateways()] == [name for name in "ab" if f"of {name}" not in orphans]


def test_only_gateways_with_requests_are_asked_for_a_connection() -> None:
    requests, asked = two_gateways(B), list[bytes]()

    def connected(peer: bytes) -> bool:
        asked.append(peer)
        return False

    assert len(requests.orphans_of_silent(UNREACHABLE_S + 0.1, connected)) == 1
    assert len(requests.orphans_of_silent(UNREACHABLE_S + 0.2, connected)) == 0
    assert asked == [B]


@pytest.mark.parametrize(
    ("now", "connected", "alive"),
    [
        (UNREACHABLE_S, "", True),
        (UNREACHABLE_S + 0.1, "", False),  # killed, and its tokens are to be counted by another
        (UNREACHABLE_S + 0.1, "a", True),
        (HOST_ALIVE_S, "a", False),
    ],
)
def test_a_gateway_that_computes_a_key_is_alive_while_it_has_a_connection_and_speaks(
    now: float, connected: str, *, alive: bool
) -> None:
    requests = two_gateways(A)
    assert requests.is_alive(GatewayProcess("a", 1), now, lambda peer: peer.decode() in connected) is alive
    assert not requests.is_alive(GatewayProcess("a", 2), now, lambda _: True)


def test_a_gateway_that_was_gone_and_speaks_is_there_again() -> None:
    requests = two_gateways(A)
    assert len(requests.orphans_of_silent(1.0, lambda peer: False)) == 1
    requests.on_hello(b"another", Hello(gateway="a", incarnation=1, connection=1), 1.1)
    assert "a" in [gateway.name for gateway in requests.gateways()]
    assert requests.is_connected(b"another")


def test_a_connection_speaks_for_one_gateway() -> None:
    requests = GatewayRequests(SILENCE_S)
    hello(requests, "g", b"1")
    assert requests.submit(b"1", submit("r"), 0.0) is not None
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
    assert requests.orphans_of_silent(SILENCE_S + 1.0, lambda peer: True) == []
    hello(requests, "d", b"2", SILENCE_S + 1.0)  # over the connection that b had
    assert [gateway.name for gateway in requests.gateways()] == ["a", "c", "d"]
    assert all(map(requests.is_connected, (b"1", b"2", b"3")))
