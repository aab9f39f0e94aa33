"""What somebody finds who does not know the service: `/`, `/openapi.json`, unknown paths; pages of other origins."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from penstock.config.limits import RequestLimits
from penstock.processing.requests.schemas import request_schemas

from .http_stage import CHAT, HELLO, MODEL, TEXT, Stage, check, stage

PAGE = "https://chat.example.org"
SCHEMAS = {"schemas": lambda: request_schemas(RequestLimits())}


async def test_the_front_page_and_the_openapi_document_need_no_key_and_list_every_route():
    async with stage(None, None, "secret", **SCHEMAS) as on:
        page = await on.client.get("/")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/plain; charset=utf-8")
        assert (await on.client.head("/")).status_code == 200
        document = (await on.client.get("/openapi.json")).json()
    assert document["openapi"] == "3.1.0"
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert f"{method.upper():4} {path} " in page.text + " "
            assert operation["summary"], path
    assert {CHAT, TEXT, "/v1/embeddings", "/v1/models/{name}", "/health"} <= set(document["paths"])


def properties(document: dict[str, Any], path: str) -> dict[str, Any]:
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    jsonschema.Draft202012Validator.check_schema(body)
    return body["properties"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_bounds_of_the_openapi_document_are_those_that_are_held(path: str):
    """Every bound is taken, and nothing beyond it."""
    tried = 0
    async with stage(**SCHEMAS) as on:
        fields = properties((await on.client.get("/openapi.json")).json(), path)
        for name, schema in fields.items():
            for bound, step in (("minimum", -1), ("maximum", 1)):
                if bound not in schema or name in ("min_tokens", "top_logprobs", "best_of", "truncate_prompt_tokens"):
                    continue  # those depend on others
                tried += 1
                beyond = schema[bound] + step
                assert (await ask(on, path, **{name: beyond})).status_code == 400, (name, beyond)
                answer = await ask(on, path, **{name: schema[bound]})
                fits = answer.status_code == 200 or answer.json()["error"]["code"] == "context_length_exceeded"
                assert fits or (name, path, schema[bound]) == ("max_tokens", TEXT, 0), (name, answer.text)
    assert tried > 15


async def ask(on: Stage, path: str, **fields: Any) -> Any:
    own = {"messages": HELLO} if path == CHAT else {"prompt": "Once"}
    body = {"model": MODEL, "max_tokens": 1, "seed": 1, **own} | fields
    if "max_completion_tokens" in fields:
        del body["max_tokens"]
    return await on.post(path, body)


async def test_every_field_of_the_document_says_what_it_takes():
    ignored = {
        *("metadata", "store", "safety_identifier", "verbosity", "prediction", "modalities", "audio", "moderation"),
        *("functions", "function_call", "web_search_options", "prompt_cache_retention", "prompt_cache_options"),
    }
    async with stage(**SCHEMAS) as on:
        document = (await on.client.get("/openapi.json")).json()
    for path in (CHAT, TEXT, "/v1/embeddings", "/rerank", "/tokenize", "/detokenize"):
        untold = {name for name, schema in properties(document, path).items() if not schema}
        assert untold <= ignored, path


def test_the_document_allows_unknown_fields_where_they_are_passed_over():
    bodies = [request_schemas(RequestLimits(), unknown_fields=what)[CHAT] for what in ("refuse", "ignore")]
    assert [body["additionalProperties"] for body in bodies] == [False, True]


UNKNOWN = [
    ("POST", "/v1/response", "There is no /v1/response here; /v1/responses is."),
    ("GET", "/api/tags", "There is no /api/tags here; /v1/models is."),
    ("POST", "/chat/completions", "There is no /chat/completions here; /v1/chat/completions is."),
    ("GET", "/v1/v1/models", "There is no /v1/v1/models here; /v1/models is."),
    ("POST", "/v1/chat/completion", "There is no /v1/chat/completion here; /v1/chat/completions is."),
    ("POST", "/v1/chat/completions/", "There is no /v1/chat/completions/ here; /v1/chat/completions is."),
    ("POST", "/v1//messages", "There is no /v1//messages here; /v1/messages is."),
    ("POST", "/v1/v1/messages", "There is no /v1/v1/messages here; /v1/messages is."),
    ("POST", "/openai/v1/responses", "There is no /openai/v1/responses here; /v1/responses is."),
    ("POST", "/api/v1/chat/completions", "There is no /api/v1/chat/completions here; /v1/chat/completions is."),
    ("POST", "/v1/model", "There is no /v1/model here; GET /v1/models is."),
    ("POST", "/api/show", "There is no /api/show here; GET /v1/models is."),
    ("GET", "/v1/message", "There is no /v1/message here; POST /v1/messages is."),
    ("POST", "/v1/files", "GET / lists what there is."),
]


@pytest.mark.parametrize(("method", "path", "words"), UNKNOWN, ids=[path for _, path, _ in UNKNOWN])
async def test_an_unknown_path_names_what_there_is(method: str, path: str, words: str):
    async with stage() as on:
        answer = await on.client.request(method, path, json={})
    check(answer, 404, "unknown_url", f"Unknown request URL: {method} {path}. {words}")


PREFLIGHT = {"origin": PAGE, "access-control-request-method": "POST",
             "access-control-request-headers": "authorization,content-type,x-stainless-lang"}  # fmt: skip
ALLOWS = "access-control-allow-origin"


async def test_pages_of_allowed_origins_may_use_the_service():
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 2, "stream": True}
    async with stage(None, None, "secret", allowed_origins=(PAGE,)) as on:
        preflight = await on.client.options(CHAT, headers=PREFLIGHT)
        assert (preflight.status_code, preflight.headers[ALLOWS]) == (200, PAGE)
        assert "x-stainless-lang" in preflight.headers["access-control-allow-headers"]
        answer = await on.post(CHAT, body, headers={"origin": PAGE, "authorization": "Bearer secret"})
        assert (answer.status_code, answer.headers[ALLOWS]) == (200, PAGE)
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        refused = await on.post(CHAT, body, headers={"origin": PAGE})
        assert (refused.status_code, refused.headers[ALLOWS]) == (401, PAGE)


async def test_other_pages_may_not_and_none_may_use_what_operators_have():
    async with stage(allowed_origins=(PAGE,)) as on:
        other = await on.client.options(CHAT, headers={**PREFLIGHT, "origin": "https://evil.example"})
        assert (other.status_code, ALLOWS in other.headers) == (400, False)
        assert ALLOWS not in (await on.client.get("/admin/workers", headers={"origin": PAGE})).headers
        assert (await on.client.options("/admin/workers", headers=PREFLIGHT)).status_code == 405
    async with stage() as on:
        assert (await on.client.options(CHAT, headers=PREFLIGHT)).status_code == 405
        assert ALLOWS not in (await on.client.get("/v1/models", headers={"origin": PAGE})).headers
