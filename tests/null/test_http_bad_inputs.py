"""Every bad body, path, method and key: status, code and words of its refusal; and the service goes on.

Fields are in ``test_http_bad_fields``.  Nothing in here may open a token stream.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.config.limits import RequestLimits

from .http_stage import CHAT, HELLO, MODEL, TEXT, Stage, check, stage

LIMITS = RequestLimits(max_body_bytes=200_000)


@pytest.fixture
async def on() -> AsyncIterator[Stage]:
    async with stage(limits=LIMITS) as running:
        yield running
        assert running.streams.opened == [], "a bad request got to the workers"
        assert (await running.chat()).status_code == 200, "the service does not go on"


def chat_with(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HELLO} | fields


GOOD = json.dumps(chat_with())

NOT_JSON = {
    "nothing": (b"", "not JSON"),
    "words": (b"hello", "not JSON"),
    "half": (GOOD[:-1].encode(), "not JSON"),
    "two values": (GOOD.encode() + b"{}", "not JSON"),
    "a trailing comma": (b'{"model": "m",}', "not JSON"),
    "single quotes": (b"{'model': 'm'}", "not JSON"),
    "a comment": (b'{"model": "m" /* x */}', "not JSON"),
    "a control character": (b'{"model": "a\x01"}', "not JSON"),
    "a bad escape": (b'{"model": "\\x41"}', "not JSON"),
    "UTF-16": (GOOD.encode("utf-16"), "not UTF-8"),
    "UTF-16 without a mark": (GOOD.encode("utf-16-le"), "not JSON"),
    "UTF-32": (GOOD.encode("utf-32"), "not UTF-8"),
    "Latin-1": ('{"model": "é"}'.encode("latin-1"), "not UTF-8"),
    "overlong UTF-8": (b'{"model": "\xc0\xaf"}', "not UTF-8"),
    "a raw surrogate": (b'{"model": "\xed\xa0\x80"}', "not UTF-8"),
    "a byte order mark": (b"\xef\xbb\xbf" + GOOD.encode(), "byte order mark"),
    "a lone surrogate": (b'{"model": "\\ud800"}', "lone surrogate"),
    "a lone low surrogate": (b'{"model": "a\\udc00b"}', "lone surrogate"),
    "surrogates the wrong way round": (b'{"model": "\\udc00\\ud800"}', "lone surrogate"),
    "a lone surrogate in a key": (b'{"\\ud83d": 1}', "lone surrogate"),
    "NaN": (b'{"temperature": NaN}', "NaN"),
    "Infinity": (b'{"temperature": Infinity}', "Infinity"),
    "-Infinity": (b'{"temperature": -Infinity}', "-Infinity"),
    "1e999": (b'{"temperature": 1e999}', "does not fit"),
    "-1e999": (b'{"temperature": -1e999}', "does not fit"),
    "a number of 5000 digits": (b'{"seed": ' + b"1" * 5000 + b"}", "more than 64"),
    "a long fraction": (b'{"temperature": 0.' + b"1" * 5000 + b"}", "does not fit"),
    "a leading zero": (b'{"n": 01}', "not JSON"),
    "a key twice": (b'{"model": "a", "model": "b"}', "'model' twice"),
    "a key twice, escaped": (b'{"model": "a", "mod\\u0065l": "b"}', "'model' twice"),
    "a key twice inside": (b'{"messages": [{"role": "user", "role": "system"}]}', "'role' twice"),
    "deep arrays": (b"[" * 10_000 + b"]" * 10_000, "nested deeper than the limit of 64"),
    "deep objects": (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "nested deeper than the limit of 64"),
    "just too deep": (b'{"metadata": ' + b"[" * 64 + b"]" * 64 + b"}", "nested deeper than the limit of 64"),
}


@pytest.mark.parametrize(("raw", "words"), NOT_JSON.values(), ids=NOT_JSON.keys())
async def test_what_is_not_strict_json(on: Stage, raw: bytes, words: str):
    answer = await on.client.post(CHAT, content=raw, headers={"content-type": "application/json"})
    check(answer, 400, None, words)


@pytest.mark.parametrize("raw", [b"[]", b"1", b'"text"', b"null", b"true"])
async def test_json_that_is_no_object(on: Stage, raw: bytes):
    answer = await on.client.post(CHAT, content=raw, headers={"content-type": "application/json"})
    check(answer, 400, "invalid_type", "a JSON object", "body")


async def test_brackets_in_strings_are_not_depth(on: Stage):
    answer = await on.chat(messages=[{"role": "user", "content": '[{"' * 200 + "\\"}])
    assert answer.status_code == 200
    on.streams.opened.clear()


@pytest.mark.parametrize(
    "kind",
    [None, "text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-16", "application/"],
)
async def test_wrong_content_types(on: Stage, kind: str | None):
    answer = await on.client.post(CHAT, content=GOOD, headers={} if kind is None else {"content-type": kind})
    check(answer, 415, "unsupported_media_type", "Content-Type: application/json")


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", 'Application/JSON;charset="UTF-8"'])
async def test_right_content_types(on: Stage, kind: str):
    assert (await on.client.post(CHAT, content=GOOD, headers={"content-type": kind})).status_code == 200
    on.streams.opened.clear()


async def test_compressed_bodies(on: Stage):
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    check(await on.client.post(CHAT, content=b"\x1f\x8b", headers=headers), 415, "unsupported_media_type", "Compressed")
    for codings in (["identity", "gzip"], ["gzip", "identity"], ["identity, br"], ["x-gzip"]):
        several = [("content-type", "application/json"), *(("content-encoding", coding) for coding in codings)]
        answer = await on.client.post(CHAT, content=GOOD, headers=several)
        check(answer, 415, "unsupported_media_type", "Compressed")


async def test_bodies_over_the_limit(on: Stage):
    check(await on.chat(user="x" * 200_000), 413, "body_too_large", "limit of 200000 bytes")

    async def without_end() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 50_000

    answer = await on.client.post(CHAT, content=without_end(), headers={"content-type": "application/json"})
    check(answer, 413, "body_too_large", "limit of 200000 bytes")


# --- paths and methods -----------------------------------------------------------------------------------------------

PATHS = [
    ("GET", "/v1", 404, "unknown_url"),
    ("GET", "/v1/models/", 404, "model_not_found"),
    ("GET", "/v1/models/nobody", 404, "model_not_found"),
    ("GET", "/v1/models/..%2f..%2fetc%2fpasswd", 404, "model_not_found"),
    ("GET", "/v1/models/%00", 404, "model_not_found"),
    ("GET", "/v1/models/%ff%fe", 404, "model_not_found"),
    ("GET", "/v1/models/%ed%a0%80", 404, "model_not_found"),
    ("GET", "/v1/models/%0d%0aSet-Cookie:%20a", 404, "unknown_url"),
    ("GET", "/debug/requests/" + "a" * 5000, 404, "request_not_found"),
    ("GET", "//admin/workers", 404, "unknown_url"),
    ("POST", "/admin/workers/..%2f..%2fx/drain", 404, "unknown_url"),
    ("GET", "/../../etc/passwd", 404, "unknown_url"),
    ("GET", "/%2e%2e/%2e%2e/etc/passwd", 404, "unknown_url"),
    ("GET", "/health/", 404, "unknown_url"),
    ("POST", "/v1/images", 404, "unknown_url"),
    ("GET", CHAT, 405, "method_not_allowed"),
    ("PUT", CHAT, 405, "method_not_allowed"),
    ("DELETE", TEXT, 405, "method_not_allowed"),
    ("OPTIONS", CHAT, 405, "method_not_allowed"),
    ("BREW", CHAT, 405, "method_not_allowed"),
    ("POST", "/health", 405, "method_not_allowed"),
    ("POST", "/v1/models", 405, "method_not_allowed"),
]


@pytest.mark.parametrize(("method", "path", "status", "code"), PATHS)
async def test_bad_paths_and_methods(on: Stage, method: str, path: str, status: int, code: str):
    answer = await on.client.request(method, path)
    check(answer, status, code, "", says_param=False)
    assert "access-control-allow-origin" not in answer.headers
    if status == 405:
        assert answer.headers["allow"] in ("POST", "GET, HEAD", "HEAD, GET")


HEADERS = {
    "a wait that is no number": ("x-penstock-max-wait-s", "nan", "invalid_value"),
    "a wait without an end": ("x-penstock-max-wait-s", "inf", "invalid_value"),
    "a wait as Python writes it": ("x-penstock-max-wait-s", "1_0", "invalid_value"),
    "a negative wait": ("x-penstock-max-wait-s", "-1", "invalid_value"),
    "an unknown class": ("x-penstock-class", "royal", "invalid_value"),
    "a long session": ("x-session-affinity", "a" * 1000, "session_too_long"),
    "an event without a key": ("last-event-id", "0:1/0123456789abcdef", "missing_idempotency_key"),
    "a long key": ("idempotency-key", "a" * 300, "invalid_idempotency_key"),
    "a key of odd characters": ("idempotency-key", "a b", "invalid_idempotency_key"),
}


@pytest.mark.parametrize(("name", "value", "code"), HEADERS.values(), ids=HEADERS.keys())
async def test_bad_headers(on: Stage, name: str, value: str, code: str):
    answer = await on.client.post(CHAT, json=chat_with(stream=True), headers={name: value})
    check(answer, 400, code, "", says_param=False)


async def test_headers_that_mean_nothing_from_anybody(on: Stage):
    """The first is believed of a catalogue's front alone."""
    for name, value in (("x-penstock-for", '{"id":"root","operator":true}'), ("traceparent", "00-zz-zz-01")):
        assert (await on.client.get("/v1/models", headers={name: value})).status_code == 200


async def test_a_browser_of_another_site_is_not_let_in(on: Stage):
    headers = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    answer = await on.client.request("OPTIONS", CHAT, headers=headers)
    assert answer.status_code == 405
    assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_head_of_what_can_be_got(on: Stage):
    for path in ("/health", "/ready", "/version", "/v1/models", "/metrics"):
        assert (await on.client.head(path)).status_code == 200
    assert (await on.client.head(CHAT)).status_code == 405


# --- keys ------------------------------------------------------------------------------------------------------------

KEY = "sk-right"
WRONG_KEYS = [
    ({}, "missing_api_key"),
    ({"authorization": "Bearer sk-wrong"}, "invalid_api_key"),
    ({"authorization": "Bearer "}, "invalid_api_key"),
    ({"authorization": "Bearer sk-righ"}, "invalid_api_key"),
    ({"authorization": f"Bearer {KEY}x"}, "invalid_api_key"),
    ({"authorization": KEY}, "invalid_api_key"),
    ({"authorization": f"Basic {KEY}"}, "invalid_api_key"),
    ({"x-api-key": "another"}, "invalid_api_key"),
]


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/tokenize", "/admin/workers", "/nowhere"])
@pytest.mark.parametrize(("headers", "code"), WRONG_KEYS)
async def test_wrong_keys(path: str, headers: dict[str, str], code: str):
    async with stage(None, None, KEY, "sk-other") as on:
        answer = await on.client.post(path, json=chat_with(), headers=headers)
        check(answer, 401, code, "API key")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "sk-" not in answer.text
        assert on.streams.opened == []


async def test_right_keys_and_open_paths():
    async with stage(None, None, KEY, "sk-other") as on:
        for key in (KEY, "sk-other"):
            for kind in ("Bearer", "bearer"):
                answer = await on.client.get("/v1/models", headers={"authorization": f"{kind} {key}"})
                assert answer.status_code == 200
        for path in ("/health", "/ready", "/version"):
            assert (await on.client.get(path)).status_code == 200
