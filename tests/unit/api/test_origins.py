"""Without keys: requests that were meant for this host, and are of no other web site."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from penstock.api.origins import HostCheckMiddleware

HOSTS, ORIGINS = ("penstock.example.org", "fd00::1"), ("https://chat.example.org",)
ADMIN = "/admin/workers/prefill-0/drain"


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def answer(checked: HostCheckMiddleware, headers: dict[str, str], path: str = "/v1/models", method: str = "POST"):
    transport = httpx.ASGITransport(checked)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        return await client.request(method, path, headers=headers)


OWN_HOSTS = ["localhost", "localhost:8000", "LOCALHOST", "localhost.", "127.0.0.1:8000", "127.9.9.9", "[::1]:8000",
             "[::1]", "a.localhost:80", "", "penstock.example.org:80", "Penstock.Example.org", "[fd00::1]"]  # fmt: skip
OTHER_HOSTS = ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1",
               "evil-localhost", "0.0.0.0", "[::]", "[fe80::1]", "2130706433", "*"]  # fmt: skip


@pytest.mark.parametrize("host", OWN_HOSTS)
async def test_names_of_this_host(host: str):
    assert (await answer(HostCheckMiddleware(app, HOSTS), {"host": host})).status_code == 200


@pytest.mark.parametrize("host", OTHER_HOSTS)
async def test_other_names_are_refused(host: str):
    """A page may let its own name point to 127.0.0.1."""
    refused = await answer(HostCheckMiddleware(app, HOSTS), {"host": host, "origin": f"http://{host}"})
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "host_not_allowed"
    assert (await answer(HostCheckMiddleware(app, ["*"]), {"host": host})).status_code == 200


OWN_PAGES = ["http://localhost:3000", "http://127.0.0.1:8000", "https://[::1]", "https://chat.example.org",
             "chrome-extension://abcdef", "app://obsidian.md", "vscode-webview://x"]  # fmt: skip
OTHER_PAGES = ["https://evil.example", "null", "http://localhost.evil.example", "https://chat.example.org:444",
               "http://chat.example.org", "http://", "http://[", "evil"]  # fmt: skip


@pytest.mark.parametrize("origin", OWN_PAGES)
async def test_pages_of_this_host_and_of_allowed_origins(origin: str):
    assert (await answer(HostCheckMiddleware(app, HOSTS, ORIGINS), {"origin": origin})).status_code == 200


@pytest.mark.parametrize("origin", OTHER_PAGES)
@pytest.mark.parametrize("hosts", [HOSTS, ("*",)])
async def test_other_pages_are_refused(origin: str, hosts: tuple[str, ...]):
    refused = await answer(HostCheckMiddleware(app, hosts, ORIGINS), {"origin": origin, "sec-fetch-site": "cross-site"})
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "origin_not_allowed"


async def test_operators_paths_are_closed_to_allowed_origins_too():
    checked = HostCheckMiddleware(app, HOSTS, ORIGINS)
    assert (await answer(checked, {"origin": ORIGINS[0]}, ADMIN)).status_code == 403
    assert (await answer(checked, {"origin": "http://localhost:8000"}, ADMIN)).status_code == 200


@pytest.mark.parametrize(
    ("site", "mode", "method", "status"),
    [
        ("cross-site", "no-cors", "GET", 403),  # <img src=...>
        ("cross-site", "no-cors", "POST", 403),
        ("cross-site", "navigate", "POST", 403),  # a form
        ("cross-site", "navigate", "GET", 200),  # a link that somebody follows
        ("same-origin", "cors", "POST", 200),
        ("same-site", "cors", "POST", 200),
        ("none", "navigate", "GET", 200),  # typed
    ],
)
async def test_what_browsers_say_where_they_name_no_origin(site: str, mode: str, method: str, status: int):
    headers = {"sec-fetch-site": site, "sec-fetch-mode": mode}
    assert (await answer(HostCheckMiddleware(app), headers, method=method)).status_code == status


async def test_clients_that_are_no_browsers():
    assert (await answer(HostCheckMiddleware(app), {})).status_code == 200
