"""Which gateways count as gone, and what that does to their requests."""

from __future__ import annotations

import pytest

from penstock.engine.service.gateways import UNREACHABLE_S, GatewayRequests
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


def test_a_gateway_that_was_gone_and_speaks_is_there_again() -> None:
    requests = two_gateways(A)
    assert len(requests.orphans_of_silent(1.0, lambda peer: False)) == 1
    requests.on_hello(b"another", Hello(gateway="a", incarnation=1, connection=1), 1.1)
    assert "a" in [gateway.name for gateway in requests.gateways()]
    assert requests.is_connected(b"another")
