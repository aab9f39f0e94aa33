"""What the home of an idempotency key knows: who computes it, what is counted; how much it keeps, and for how long."""

from __future__ import annotations

import pytest

from penstock.engine.service import idempotency_claims
from penstock.engine.service.idempotency_claims import (
    CLAIM_S,
    CLAIMS_BURST,
    CLAIMS_PER_S,
    MAX_COMPUTING_GATEWAYS,
    MAX_RUNNING_S,
    GatewayProcess,
    IdempotencyClaims,
)
from penstock.wire.gateway_messages import ClaimIdempotencyKey, IdempotencyKeyState, IdempotencyKeyStatus

NEW, RUNNING, KNOWN, REUSED, UNTRACKED = IdempotencyKeyStatus

A, B, C = (GatewayProcess(name, 1) for name in "abc")


class Home:
    """Claims, a clock, and the gateways that are connected."""

    def __init__(self) -> None:
        self.claims = IdempotencyClaims()
        self.now = 0.0
        self.connected = {A, B}

    def say(
        self, gateway: GatewayProcess, key: int = 1, *, mark: int = 1, tenant: int = 1, **fields: object
    ) -> IdempotencyKeyState:
        message = ClaimIdempotencyKey(
            key=key.to_bytes(16, "big"), tenant=tenant.to_bytes(16, "big"), mark=mark.to_bytes(8, "big"), **fields
        )
        return self.claims.on_claim(gateway, message, self.connected.__contains__, self.now)


def test_the_first_is_told_nothing_and_the_second_who_has_it() -> None:
    home = Home()
    first = home.say(A, serial=7, running=True)
    assert (first.serial, first.status, first.sent) == (7, NEW, ())
    assert home.say(B, running=True).status is RUNNING
    assert home.say(A, running=True).status is KNOWN, "it is its own"
    assert home.say(A, sent=(5, 3)).sent == ()
    ended = home.say(B, running=True)
    assert (ended.status, ended.sent) == (KNOWN, (5, 3))


def test_each_token_is_counted_by_the_gateway_that_says_it_first() -> None:
    home = Home()
    home.say(A, running=True)
    home.say(B, running=True)
    assert home.say(B, sent=(40,)).sent == ()
    assert home.say(A, sent=(10, 2)).sent == (40,)
    assert home.say(A, sent=(40, 8)).sent == (40, 2)
    assert home.say(B, sent=(40, 8)).sent == (40, 8)


def test_nothing_waits_for_a_gateway_that_is_gone_or_was_started_anew() -> None:
    home = Home()
    home.say(A, running=True)
    home.connected = {B}
    assert home.say(B, running=True).status is KNOWN
    home.connected = {B, GatewayProcess("a", 2)}
    assert home.say(GatewayProcess("a", 2), running=True).status is KNOWN, "the other one counts at its end"


def test_a_key_is_for_one_body_even_after_its_gateway_is_gone() -> None:
    home = Home()
    home.say(A, running=True)
    home.connected = {B}
    assert home.say(B, mark=2, running=True).status is REUSED
    assert home.say(B, mark=2, sent=(9,)).status is REUSED
    assert home.say(B, mark=1).sent == (), "what was refused has changed nothing"
    assert home.say(B, mark=1, tenant=2, running=True).status is NEW, "tenants have keys of their own"


def test_what_was_refused_at_its_gateway_was_never_there() -> None:
    home = Home()
    home.say(A, running=True)
    home.say(B, withdrawn=True)
    assert len(home.claims) == 1, "it is not for others to withdraw"
    home.say(A, withdrawn=True)
    assert len(home.claims) == 0
    home.say(A, withdrawn=True)
    assert len(home.claims) == 0
    home.say(A, running=True)
    home.say(A, sent=(1,))
    home.say(A, withdrawn=True)
    assert home.say(B, mark=2).status is REUSED, "what a client has seen stays"


def test_a_key_is_forgotten_some_time_after_its_last_use() -> None:
    home = Home()
    home.say(A, 1)
    home.say(A, 2)
    home.now = CLAIM_S - 1
    home.say(A, 1, sent=(3,))
    home.now = CLAIM_S + 1
    assert home.say(B, 1).sent == (3,)
    assert home.say(B, 2, mark=2).status is NEW
    home.now += CLAIM_S
    home.say(B, 3)
    assert len(home.claims) == 1


def test_a_key_is_not_forgotten_while_a_gateway_computes_it() -> None:
    home = Home()
    for key in (1, 2):
        home.say(A, key, running=True)
    for minutes in range(15, 46, 15):
        home.now = 60.0 * minutes
        assert home.say(B, 1, running=True).status is RUNNING
        assert home.say(B, 2, mark=2, running=True).status is REUSED
    home.connected = {B}
    home.now += CLAIM_S + 1
    assert home.say(B, 2, running=True).status is KNOWN, "also some time after its gateway has gone"
    for key in (1, 2):
        home.say(B, key)
    home.now += CLAIM_S + 1
    home.say(B, 3)
    assert len(home.claims) == 1


def test_what_another_gateway_has_begun_is_not_withdrawn_with_a_repeat() -> None:
    """Its tokens may be saved, and a killed gateway has counted nothing."""
    home = Home()
    home.say(A, running=True)
    home.connected = {B}
    assert home.say(B, running=True).status is KNOWN
    home.say(B, withdrawn=True)
    assert home.say(B, mark=2, running=True).status is REUSED
    assert home.say(B, running=True).status is KNOWN


def test_gateways_that_take_over_one_after_the_other_count_each_token_once() -> None:
    home = Home()
    home.say(A, running=True)
    assert home.say(B, running=True).status is RUNNING, "it is not known yet that the first is gone"
    home.connected = {B, C}
    assert home.say(C, running=True).status is KNOWN, "nobody counts as they come what these compute"
    counted = home.say(B, sent=(40,))
    assert (counted.status, counted.sent) == (KNOWN, ())
    counted = home.say(C, sent=(40,))
    assert (counted.status, counted.sent) == (KNOWN, (40,))


def test_a_key_is_kept_while_the_gateway_that_has_taken_it_over_computes_it() -> None:
    home = Home()
    home.say(A, 1, running=True)
    assert home.say(B, 1, running=True).status is RUNNING
    home.connected = {B}
    for minutes in range(15, 76, 15):
        home.now = 60.0 * minutes
        home.say(B, 2, withdrawn=True)
    assert home.say(B, 1).status is KNOWN


def test_gateways_of_one_key_are_bounded() -> None:
    home = Home()
    gateways = [GatewayProcess(f"g{number}", 1) for number in range(3 * MAX_COMPUTING_GATEWAYS)]
    home.connected = set(gateways)
    for gateway in gateways:
        home.say(gateway, running=True)
    (claim,) = (claims[key] for claims in home.claims._tenants.values() for key in claims)
    assert claim.computed_by == gateways[-MAX_COMPUTING_GATEWAYS:]


def test_a_key_whose_end_was_lost_is_forgotten_in_the_end() -> None:
    home = Home()
    home.say(A, 1, running=True)
    while home.now < MAX_RUNNING_S:
        assert len(home.claims) == 1
        home.now += CLAIM_S
        home.say(B, 2, withdrawn=True)
    home.now += CLAIM_S
    assert home.say(B, 1, mark=2).status is NEW


def test_tenants_share_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency_claims, "MAX_CLAIMED_KEYS", 100)
    monkeypatch.setattr(idempotency_claims, "MAX_TENANT_CLAIMED_KEYS", 80)
    monkeypatch.setattr(idempotency_claims, "EVICTED_AT_ONCE", 8)
    home = Home()
    for key in range(15):
        home.say(A, 1000 + key, tenant=2)
    for key in range(200):
        home.say(A, key, tenant=1)
        assert len(home.claims) <= 100
    assert len(home.claims) == 95
    assert home.say(B, 1000, tenant=2).status is KNOWN
    for key in range(20):
        home.say(A, 2000 + key, tenant=3)
    assert len(home.claims) <= 100
    assert home.say(B, 1001, tenant=2).status is KNOWN, "the tenant with the most makes room"
    assert home.say(B, 199, tenant=1).status is KNOWN
    assert home.say(B, 121, tenant=1).status is NEW, "its oldest go"


def test_a_gateway_that_says_too_much_changes_nothing_more() -> None:
    home = Home()
    for key in range(int(CLAIMS_BURST)):
        assert home.say(A, key).status is NEW
    assert home.say(A, 1, sent=(5,)).status is UNTRACKED
    assert home.say(B, 1).status is KNOWN, "another one may"
    assert home.say(B, 1).sent == ()
    home.now = 2 / CLAIMS_PER_S
    assert home.say(A, 1, sent=(5,)).status is KNOWN
