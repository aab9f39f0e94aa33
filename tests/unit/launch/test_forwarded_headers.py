"""Headers of a proxy in front: whose they are believed to be, and what requests without them cost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.launch.http_server import ForwardedHeaders


@pytest.mark.parametrize(
    ("peer", "headers", "client", "scheme"),
    [
        ("127.0.0.1", [(b"x-forwarded-for", b"203.0.113.9")], "203.0.113.9", "http"),
        ("127.0.0.1", [(b"x-forwarded-proto", b"https")], "127.0.0.1", "https"),
        (
            "198.51.100.7",
            [(b"x-forwarded-for", b"203.0.113.9"), (b"x-forwarded-proto", b"https")],
            "198.51.100.7",
            "http",
        ),
        ("127.0.0.1", [(b"accept", b"*/*")], "127.0.0.1", "http"),
    ],
)
async def test_only_a_trusted_proxy_says_for_whom_it_asks(
    peer: str, headers: list[tuple[bytes, bytes]], client: str, scheme: str
):
    seen: list[dict[str, Any]] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        seen.append(scope)

    scope = {"type": "http", "client": (peer, 1), "scheme": "http", "headers": headers}
    await ForwardedHeaders(app, "127.0.0.1")(scope, None, None)
    assert (seen[0]["client"][0], seen[0]["scheme"]) == (client, scheme)


async def test_a_request_without_such_headers_has_no_coroutine_more():
    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        pass

    called = ForwardedHeaders(app, "127.0.0.1")({"type": "http", "headers": [(b"host", b"a")]}, None, None)
    assert asyncio.iscoroutine(called)
    assert called.__qualname__ == app.__qualname__
    await called
