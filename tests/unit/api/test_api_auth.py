"""Keys: kept as hashes, compared whole."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.auth import AuthFailureLog, AuthMiddleware, StaticApiKeys
from penstock.clock import VirtualClock
from penstock.interfaces import Caller


@given(st.sets(st.text(min_size=1, max_size=20), min_size=1, max_size=4), st.text(max_size=20))
def test_a_ring_opens_for_its_keys_and_no_other(keys: set[str], other: str):
    ring = StaticApiKeys.of(keys)
    assert not ring.is_open
    assert all(ring.find(key.encode()) is not None for key in keys)
    assert (ring.find(other.encode()) is not None) == (other in keys)


def test_keys_are_not_kept():
    ring = StaticApiKeys.of(["sk-secret"])
    assert "sk-secret" not in repr(vars(ring))
    assert b"sk-secret" not in repr(vars(ring)).encode()


def test_an_empty_ring_is_an_open_door():
    assert StaticApiKeys().is_open
    assert StaticApiKeys().find(b"") is None


async def test_two_keys_are_none():
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("nobody came in")

    guarded = AuthMiddleware(app, StaticApiKeys.of(["right"]), AuthFailureLog(VirtualClock()))
    right, wrong = ((b"authorization", b"Bearer " + key) for key in (b"right", b"wrong"))
    for headers in ((right, wrong), (wrong, right), (right, right)):
        assert await refused(guarded, *headers) == 401


# --- wrong keys ------------------------------------------------------------------------------------------------------


async def refused(app: AuthMiddleware, *headers: tuple[bytes, bytes]) -> int:
    """The status of a request with these headers."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("it has no body")

    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": list(headers), "client": ("10.1.2.3", 4)}
    await app(scope, receive, send)
    status: int = sent[0]["status"]
    return status


async def test_wrong_keys_are_counted_and_told_of_once_a_second(caplog: pytest.LogCaptureFixture):
    counted: list[str] = []
    clock = VirtualClock(100.0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("nobody came in")

    guarded = AuthMiddleware(app, StaticApiKeys.of(["right"]), AuthFailureLog(clock, counted.append))
    with caplog.at_level(logging.WARNING, "penstock.api"):
        for _ in range(100):
            assert await refused(guarded, (b"authorization", b"Bearer sk-guess")) == 401
        assert await refused(guarded) == 401
        clock.advance(1.0)
        assert await refused(guarded, (b"authorization", b"Bearer sk-guess")) == 401
    assert counted == ["invalid_api_key"] * 100 + ["missing_api_key", "invalid_api_key"]
    lines = [vars(record)["fields"] for record in caplog.records]
    assert lines == [{"requests": 1, "latest_from": "10.1.2.3"}, {"requests": 100, "latest_from": "10.1.2.3"}]
    assert "sk-" not in caplog.text


# --- salts -----------------------------------------------------------------------------------------------------------

salts = st.text(st.sampled_from("0123456789abcdef"), max_size=12)  # of tenants
own = st.text(st.sampled_from("0a\0"), max_size=14)  # whatever a request names


@given(salts, own, salts, own)
def test_no_tenant_comes_to_anothers_salt(salt: str, mine: str, other: str, theirs: str):
    if (salt, mine) != (other, theirs):
        assert Caller(salt=salt).cache_salt(mine) != Caller(salt=other).cache_salt(theirs)
    assert Caller(salt=salt).cache_salt("") == salt  # what was cached before stays
