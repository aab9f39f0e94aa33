"""A model's gateway behind a catalogue's front: for whom it is asked, and what its front passes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from penstock.api.auth import ON_BEHALF_OF, FrontApiKey, StaticApiKeys, Tenant, tenant_header
from penstock.api.response_store import SqliteResponseStore, create_response_store
from penstock.catalog.http_proxy import FrontServices, make_catalog_app
from penstock.clock import MonotonicClock
from penstock.config.limits import RequestLimits
from penstock.config.schema import RequestConfig
from penstock.http_client import Upstream
from penstock.processing.service import GenerationProcessor
from penstock.types import ServiceClass

from .http_stage import MODEL, STORYTELLER, TEXT, check, stage
from .test_http_classes import ring
from .test_http_clients import listening

BODY = {"model": MODEL, "prompt": "Once", "max_tokens": 4, "seed": 1}
FRONT = {"authorization": "Bearer front"}
BATCH = Tenant(id="t1", weight=2.0, salt="t1", classes=(ServiceClass.BATCH,), requests_per_minute=2)


def asked_for(tenant: Tenant) -> dict[str, str]:
    return FRONT | {ON_BEHALF_OF.decode(): tenant_header(tenant).decode()}


async def test_the_front_says_for_whom_it_asks():
    known = FrontApiKey("front")
    async with stage(ring=known) as on:
        for _ in range(2):
            assert (await on.post(TEXT, BODY, headers=asked_for(BATCH))).status_code == 200
        qos = on.streams.opened[0].qos
        assert (qos.tenant, qos.weight, qos.service) == ("t1", 2.0, ServiceClass.BATCH)
        assert on.streams.opened[0].cache_salt == "t1"
        refused = await on.post(TEXT, BODY, headers=asked_for(BATCH))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert (await on.post(TEXT, BODY, headers=FRONT)).status_code == 200
        assert on.streams.opened[-1].qos.tenant == ""
        assert known.tenant_count == 1


async def test_nobody_else_is_believed():
    async with stage(ring=FrontApiKey("front")) as on:
        header = {ON_BEHALF_OF.decode(): tenant_header(BATCH).decode()}
        check(await on.post(TEXT, BODY, headers=header), 401, "missing_api_key", "API key")
        for said in ({}, header):
            wrong = await on.post(TEXT, BODY, headers=said | {"authorization": "Bearer guess"})
            check(wrong, 401, "invalid_api_key", "Incorrect API key")
        assert not on.streams.opened
        check(
            await on.post(TEXT, BODY, headers=FRONT | {ON_BEHALF_OF.decode(): '{"id": 7}'}),
            401,
            "invalid_tenant",
            "no tenant",
        )
    async with stage(ring=ring(a=Tenant(id="a"))) as on:
        assert (await on.post(TEXT, BODY, headers=header | {"authorization": "Bearer a"})).status_code == 200
        assert on.streams.opened[0].qos.tenant == "a"


async def test_idempotency_keys_belong_to_tenants():
    """Two keys of one tenant are one; two tenants are two, also behind a front, whose own key is the same for all."""
    seeds: dict[str, int] = {}
    for name, tenant in (("a", "one"), ("b", "one"), ("c", "two")):
        async with stage(ring=ring(**{name: Tenant(id=tenant)})) as on:
            headers = {"authorization": f"Bearer {name}", "idempotency-key": "k"}
            seeds[name] = (await on.post(TEXT, BODY | {"seed": None}, headers=headers)).json()["penstock"]["seed"]
    async with stage(ring=FrontApiKey("front")) as on:
        for tenant in ("one", "two"):
            headers = asked_for(Tenant(id=tenant)) | {"idempotency-key": "k"}
            seeds[tenant] = (await on.post(TEXT, BODY | {"seed": None}, headers=headers)).json()["penstock"]["seed"]
    assert seeds["a"] == seeds["b"] == seeds["one"]
    assert seeds["c"] == seeds["two"] != seeds["one"]


class OneModel:
    """``CatalogModels`` with one that is always loaded."""

    def __init__(self, at: Upstream) -> None:
        self._at = at

    def find_entry(self, name: str) -> str | None:
        return name if name == MODEL else None

    def names(self) -> list[str]:
        return [MODEL]

    def rows(self) -> list[dict[str, object]]:
        return [{"name": MODEL, "aliases": [], "adapters": [], "state": "loaded", "pinned": True}]

    @asynccontextmanager
    async def use(self, entry: str) -> AsyncIterator[Upstream]:
        yield self._at

    def loaded_upstream(self, entry: str) -> Upstream | None:
        return self._at

    async def load(self, entry: str) -> None: ...

    async def unload(self, entry: str) -> None: ...


async def test_the_front_passes_on_what_means_something_behind_it():
    heads: list[dict[str, str]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        heads.append(dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-penstock-response-cache: hit\r\nx-other: 1\r\n\r\n{}")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    keys = ring(mine=BATCH)
    assert isinstance(keys, StaticApiKeys)
    models = OneModel(Upstream("127.0.0.1", port, "front"))
    app = make_catalog_app(
        FrontServices(models=models, limits=RequestLimits(), clock=MonotonicClock(), keys=keys, created=1)
    )
    sent = {
        "idempotency-key": "k",
        "x-penstock-class": "batch",
        "x-penstock-max-wait-s": "3",
        "x-session-affinity": "s",
        "x-penstock-explain": "1",
        "cache-control": "max-age=0, no-store",
        "traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01",
    }
    lies = {ON_BEHALF_OF.decode(): tenant_header(Tenant(id="somebody else")).decode(), "x-mine": "1"}
    async with server, httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://front") as client:
        lines = {"authorization": "Bearer mine"} | sent | lies | {"cache-control": "max-age=0"}
        twice = [("cache-control", "no-store"), ("tracestate", "a=1"), ("tracestate", "b=2")]
        got = await client.post(TEXT, json=BODY, headers=[*lines.items(), *twice])
    assert got.headers["x-penstock-response-cache"] == "hit"
    assert "x-other" not in got.headers
    (head,) = heads
    assert head["authorization"] == "Bearer front"
    assert head[ON_BEHALF_OF.decode()] == tenant_header(BATCH).decode()
    assert {name: head.get(name) for name in sent} == sent
    assert head["tracestate"] == "a=1, b=2"
    assert "x-mine" not in head


async def test_a_stream_of_responses_that_breaks_off_behind_the_front_ends_with_its_own_kind_of_event():
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"a\r\ndata: {}\n\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    models = OneModel(Upstream("127.0.0.1", server.sockets[0].getsockname()[1], "front"))
    app = make_catalog_app(
        FrontServices(models=models, limits=RequestLimits(), clock=MonotonicClock(), keys=ring(), created=1)
    )
    async with server, httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://front") as client:
        got = await client.post("/v1/responses", json={"model": MODEL, "input": "Hi", "stream": True})
        listed = (await client.get("/v1/models")).json()
    name, data = got.text.strip().split("\n")[-2:]
    assert name == "event: error"
    event = json.loads(data.removeprefix("data: "))
    assert (event["type"], event["code"]) == ("error", "service_unavailable")
    assert event["sequence_number"] > 1 << 32
    assert [model["slug"] for model in listed["models"]] == [MODEL]


async def test_the_front_finds_what_any_model_has_stored_for_its_tenant(tmp_path: Path):
    limits = RequestLimits()
    path = create_response_store(tmp_path, limits)
    behind, front = (SqliteResponseStore(path, limits) for _ in range(2))
    try:
        async with stage(ring=FrontApiKey("front"), response_store=behind) as on:
            body = {"model": MODEL, "input": "Hi", "max_output_tokens": 4}
            one = (await on.post("/v1/responses", body, headers=asked_for(Tenant(id="a")))).json()
        models = OneModel(Upstream("127.0.0.1", 9, "front"))
        keys = ring(ann=Tenant(id="a"), bob=Tenant(id="b"))
        app = make_catalog_app(
            FrontServices(
                models=models, limits=limits, clock=MonotonicClock(), keys=keys, created=1, response_store=front
            )
        )
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://front") as client:
            url = f"/v1/responses/{one['id']}"
            assert (await client.get(url, headers={"authorization": "Bearer ann"})).json() == one
            assert (await client.get(url, headers={"authorization": "Bearer bob"})).status_code == 404
            assert (await client.delete(url, headers={"authorization": "Bearer ann"})).status_code == 200
            assert (await client.get(url, headers={"authorization": "Bearer ann"})).status_code == 404
    finally:
        behind.close()
        front.close()


class NamedModels(OneModel):
    """``OneModel`` with an alias of its own, as a catalogue's file has it."""

    def find_entry(self, name: str) -> str | None:
        return MODEL if name in (MODEL, "tales") else None

    def rows(self) -> list[dict[str, object]]:
        row = {"name": MODEL, "aliases": ["tales"], "adapters": [], "state": "loaded", "pinned": True}
        return [row | {"max_model_len": 2048}]


async def test_a_response_behind_the_front_bears_the_name_that_was_asked_for():
    """The front passes the body on as it is; the model's gateway, on a socket, knows the same names."""
    given = (f"tales={MODEL}", f"claude-*={MODEL}", f"gpt={MODEL}")
    requests = RequestConfig(model_alias=given)
    intake = GenerationProcessor(
        STORYTELLER, name=MODEL, max_model_len=2048, limits=RequestLimits(), created=1, requests=requests
    )
    async with (
        stage(intake=intake, ring=FrontApiKey("front")) as on,
        listening(on.application, RequestLimits()) as port,
    ):
        app = make_catalog_app(
            FrontServices(
                models=NamedModels(Upstream("127.0.0.1", port, "front")),
                limits=RequestLimits(),
                clock=MonotonicClock(),
                keys=ring(),
                created=1,
                model_alias=given[1:],
            )
        )
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://front") as client:
            for name in (MODEL, "tales", "gpt", "claude-opus-5"):
                answer = await client.post(TEXT, json=BODY | {"model": name})
                assert (answer.status_code, answer.json()["model"]) == (200, name)
                message = {"model": name, "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
                assert (await client.post("/v1/messages", json=message)).json()["model"] == name
                told = (await client.get(f"/v1/models/{name}")).json()
                assert (told["id"], told["context_length"]) == (name, 2048)
                assert told.get("parent") == (None if name == MODEL else MODEL)
            refused = await client.post(TEXT, json=BODY | {"model": "llama"})
            check(refused, 404, "model_not_found", f"This server has '{MODEL}'.", "model")
            listed = (await client.get("/v1/models")).json()
            assert [one["id"] for one in listed["data"]] == [MODEL, "gpt"]
            assert [one["context_window"] for one in listed["models"]] == [2048, 2048]
    intake.close()
