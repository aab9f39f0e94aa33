"""What a key is for, as clients meet it: expiry while serving, models and routes everywhere, requests at once; and what
the audit log and the metrics say of it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.api.audit_log import AuditEvent
from penstock.api.auth import StaticApiKeys, Tenant
from penstock.api.concurrency import LocalRequestCounts
from penstock.api.key_permissions import ROUTE_PATHS, KeyPermissions
from penstock.catalog.http_proxy import FrontServices, make_catalog_app
from penstock.clock import MonotonicClock
from penstock.config.limits import RequestLimits
from penstock.config.schema import InputFeatures, LoraConfig, NamedAdapter, RequestConfig
from penstock.http_client import Upstream
from penstock.interfaces import ModelCard
from penstock.processing.pooling import PoolingModelProcessor, ServedPoolingModel
from penstock.processing.service import GenerationProcessor
from penstock.processing.transcription import AudioModelProcessor
from penstock.telemetry.registry import Metrics
from penstock.types import Task
from tiny_readers import bert_config, word_pieces
from whisper_models import tones, wav, write_whisper

from .http_stage import CHAT, HELLO, MODEL, STORYTELLER, TEXT, Stage, app_of, check, stage
from .streams import NullStreams
from .test_http_admin import ScriptedPosts
from .test_http_catalog_front import OneModel
from .test_http_clients import LIMITS, PATIENCE_S, listening, post

NOON = 1_800_000_000
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 4},
    TEXT: {"prompt": "Once", "max_tokens": 4},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 4},
    "/v1/messages": {"messages": HELLO, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/tokenize": {"prompt": "Once"},
    "/detokenize": {"tokens": [5, 6]},
}
"""A body that is served, without its model, of each path of a model that writes."""

READING: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "the fox"},
    "/rerank": {"query": "fox", "documents": ["the fox"]},
    "/v1/rerank": {"query": "fox", "documents": ["the fox"]},
    "/v2/rerank": {"query": "fox", "documents": ["the fox"]},
    "/classify": {"input": "the fox"},
}


class Noted:
    """``AuditSink`` of a test."""

    def __init__(self) -> None:
        self.events: list[AuditEvent] = []

    def put(self, event: AuditEvent) -> None:
        self.events.append(event)


def ring(*, operator: bool = False, **restrictions: Any) -> StaticApiKeys:
    """One restricted key, and one without restrictions."""
    limited = Tenant(id="t1", operator=operator, permissions=KeyPermissions(key="k-1", **restrictions))
    free = Tenant(id="t2", operator=True, permissions=KeyPermissions(key="k-2"))
    return StaticApiKeys({hashlib.sha256(k).digest(): tenant for k, tenant in ((b"one", limited), (b"two", free))})


ONE = {"authorization": "Bearer one"}
TWO = {"authorization": "Bearer two"}


def aliased() -> GenerationProcessor:
    """The bundled model, with an adapter that is only named here, and aliases."""
    adapter = NamedAdapter(name="fox", folder="/nowhere", fingerprint="0" * 64, nbytes=1, rank=1)
    return GenerationProcessor(
        STORYTELLER,
        name=MODEL,
        max_model_len=2048,
        limits=RequestLimits(),
        created=1,
        offers=InputFeatures(lora=LoraConfig(adapters=(adapter,))),
        requests=RequestConfig(model_alias=(f"gpt-4o={MODEL}", f"claude-*={MODEL}", "cat=fox")),
    )


def error_of(answer: httpx.Response) -> tuple[int, str | None]:
    """Status and code, of either API's envelope."""
    return answer.status_code, answer.json()["error"]["code"]


# --- expiry ----------------------------------------------------------------------------------------------------------


async def test_a_key_expires_while_it_is_used_and_its_streams_go_on():
    now = [float(NOON - 1)]
    sink, streams = Noted(), NullStreams(gate=asyncio.Event())
    counted: list[str] = []
    behind = {"wall_time": lambda: now[0], "audit": sink, "count_auth_failure": counted.append}
    async with stage(streams, ring=ring(expires=NOON), **behind) as on:
        begun = asyncio.create_task(chat(on, stream=True))
        await asyncio.wait_for(streams.until(opened=1), PATIENCE_S)
        now[0] = NOON
        check(await chat(on), 401, "expired_api_key", "expired at 2027-01-15T08:00:00Z")
        assert (await on.client.get("/v1/models", headers=ONE)).status_code == 401
        assert (await on.client.get("/ready")).status_code == 200
        assert streams.gate is not None
        streams.gate.set()
        finished = await begun
        assert finished.status_code == 200
        assert finished.text.endswith("[DONE]\n\n")
        assert (await chat(on, headers=TWO)).status_code == 200
    assert counted == ["expired_api_key"] * 2
    first, second = sink.events
    assert (first.event, first.key, first.tenant, first.route) == ("refused", "k-1", "t1", CHAT)
    assert (first.status, first.reason, first.remote, first.method) == (401, "expired_api_key", "127.0.0.1", "POST")
    assert (second.route, second.method) == ("/v1/models", "GET")


async def chat(on: Stage, headers: dict[str, str] = ONE, **fields: Any) -> httpx.Response:
    return await on.post(CHAT, {"model": MODEL, "messages": HELLO, "max_tokens": 4} | fields, headers=headers)


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
async def test_a_model_that_a_key_is_not_for_is_refused_at_every_path_that_writes(path: str):
    sink = Noted()
    async with stage(ring=ring(models=("other",)), audit=sink) as on:
        for name in (MODEL, "nonsense"):
            refused = await on.post(path, BODIES[path] | {"model": name}, headers=ONE)
            assert error_of(refused) == (403, "model_not_found"), refused.text
            assert f"does not have access to model '{name}'. It is for 'other'" in refused.text
        unknown = await on.post(path, BODIES[path] | {"model": "other"}, headers=ONE)
        assert error_of(unknown) == (404, "model_not_found")
        assert MODEL not in unknown.text, "what there is besides is not told"
        assert (await on.post(path, BODIES[path] | {"model": MODEL}, headers=TWO)).status_code == 200
        if path in ("/tokenize", "/detokenize"):
            assert error_of(await on.post(path, BODIES[path], headers=ONE)) == (403, "model_not_found")
        assert not [request for request in on.streams.opened if request.qos.tenant == "t1"]
    assert [(event.status, event.reason) for event in sink.events][:2] == [(403, "model_not_found")] * 2


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("reader")
    (made / "config.json").write_text(json.dumps(bert_config()))
    word_pieces().save(str(made / "tokenizer.json"))
    return made


@pytest.mark.parametrize("path", READING)
async def test_the_same_of_models_that_read(path: str, reader: Path):
    task, width = (Task.EMBED, 4) if path == "/v1/embeddings" else (Task.CLASSIFY, 1)
    served = ServedPoolingModel(card=ModelCard(name="bge", created=1, max_model_len=12), task=task, width=width)
    intake = PoolingModelProcessor(reader, served, RequestLimits())
    async with stage(NullStreams(width=width), intake=intake, ring=ring(models=("other",))) as on:
        assert error_of(await on.post(path, READING[path] | {"model": "bge"}, headers=ONE)) == (403, "model_not_found")
        served_all = await on.post(path, READING[path] | {"model": "bge"}, headers=TWO)
        assert served_all.status_code == 200, served_all.text
    async with stage(ring=ring(models=("other",))) as on:  # a model that writes is not named to it, either
        assert MODEL not in (await on.post(path, READING[path] | {"model": "other"}, headers=ONE)).text


@pytest.mark.parametrize("path", ROUTE_PATHS["audio"])
async def test_the_same_of_models_that_hear(path: str, tmp_path: Path):
    card = ModelCard(name="tiny", created=1, max_model_len=104)
    intake = AudioModelProcessor(write_whisper(tmp_path / "whisper"), card, RequestLimits())
    try:
        async with stage(intake=intake, ring=ring(models=("other",))) as on:
            file = {"file": ("a.wav", wav(tones(0.5)))}
            for form in ({"model": "tiny"}, {}):
                refused = await on.client.post(path, files=file, data=form, headers=ONE)
                assert error_of(refused) == (403, "model_not_found")
            assert not on.streams.opened
            heard = await on.client.post(path, files=file, data={"model": "tiny", "language": "de"}, headers=TWO)
            assert heard.status_code == 200, heard.text
    finally:
        intake.close()


@pytest.mark.parametrize(
    ("models", "listed", "served"),
    [
        (None, [MODEL, "fox", "gpt-4o", "cat"], [MODEL, "gpt-4o", "claude-opus-5"]),
        ((MODEL,), [MODEL, "gpt-4o"], [MODEL, "gpt-4o", "claude-opus-5"]),
        (("fox",), ["fox", "cat"], []),
        (("gpt-4o",), ["gpt-4o"], ["gpt-4o"]),
        (("claude-opus-5",), [], ["claude-opus-5"]),
    ],
)
async def test_lists_show_what_the_key_is_for(models: Any, listed: list[str], served: list[str]):
    async with stage(intake=aliased(), ring=ring(models=models)) as on:
        page = (await on.client.get("/v1/models", headers=ONE)).json()
        assert [card["id"] for card in page["data"]] == [model["slug"] for model in page["models"]] == listed
        assert page["first_id"] == (listed[0] if listed else None)
        for name in (MODEL, "gpt-4o", "claude-opus-5"):
            answer = await on.post(TEXT, {"model": name, "prompt": "Once", "max_tokens": 2}, headers=ONE)
            assert answer.status_code == (200 if name in served else 403), (name, answer.text)
            card = await on.client.get(f"/v1/models/{name}", headers=ONE)
            assert card.status_code == (200 if name in served else 404)
        props = await on.client.get("/props", headers=ONE)
        assert (props.status_code, props.json().get("model_alias")) == ((200, listed[0]) if listed else (404, None))


# --- routes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTE_PATHS)
async def test_a_key_for_one_route_is_refused_at_all_others(route: str):
    sink, forbidden = Noted(), []
    async with stage(ring=ring(routes=(route,)), audit=sink, count_forbidden=forbidden.append) as on:
        for other, paths in ROUTE_PATHS.items():
            for path in paths:
                answer = await on.post(path, {"model": MODEL}, headers=ONE)
                assert (error_of(answer) == (403, "route_not_allowed")) == (other != route), (path, answer.text)
        for path in ("/v1/responses/resp_1", "/metrics", "/admin/workers", "/elsewhere"):
            answer = await on.client.get(path, headers=ONE)
            assert answer.status_code == (404 if route == "responses" and "resp_1" in path else 403), path
        assert (await on.client.get("/v1/models", headers=ONE)).status_code == 200
    assert forbidden.count("route_not_allowed") == len(sink.events) - 2
    assert forbidden.count("not_an_operator") == 2


async def test_an_operator_may_be_restricted_to_routes_and_still_operate():
    async with stage(ring=ring(operator=True, routes=("chat",)), posts=ScriptedPosts()) as on:
        assert (await on.client.get("/metrics", headers=ONE)).status_code == 200
        assert (await on.post("/admin/workers/decode-0/drain", {}, headers=ONE)).status_code == 200
        assert (await chat(on)).status_code == 200
        assert error_of(await on.post(TEXT, {}, headers=ONE)) == (403, "route_not_allowed")


# --- requests at once ------------------------------------------------------------------------------------------------


class Counting(LocalRequestCounts):
    """Tells how many requests are open."""

    def __init__(self) -> None:
        super().__init__()
        self.open = 0

    def acquire(self, key: str, limit: int) -> int | None:
        ticket = super().acquire(key, limit)
        self.open += ticket is not None
        return ticket

    def release(self, key: str, ticket: int) -> None:
        super().release(key, ticket)
        self.open -= 1


async def test_streams_count_until_they_end_or_their_clients_have_gone():
    streams, sink, metrics = NullStreams(gate=asyncio.Event()), Noted(), Metrics()
    counts, keys = Counting(), ring(max_concurrency=2)
    application = app_of(streams, LIMITS, ring=keys, levels=metrics.levels, audit=sink, request_counts=counts)
    header = "Authorization: Bearer one"
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 4, "stream": True}
    async with (
        listening(application, LIMITS) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client,
    ):

        async def begin(opened: int) -> asyncio.StreamWriter:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(post(CHAT, body, header))
            await asyncio.wait_for(streams.until(opened=opened), PATIENCE_S)
            return writer

        async def ask(**fields: Any) -> httpx.Response:
            return await client.post(CHAT, json=body | {"stream": False} | fields, headers=ONE)

        writers = [await begin(1), await begin(2)]
        for path in (CHAT, "/v1/messages"):
            over = await client.post(path, json=body, headers=ONE)
            assert error_of(over) == (429, "concurrency_limit_exceeded")
            assert int(over.headers["retry-after"]) >= 1
            assert over.json()["error"]["type"] == "rate_limit_error"
            assert "2 requests open at once" in over.text
        assert (await client.get("/v1/models", headers=ONE)).status_code == 200
        for gone in range(3):  # one that leaves makes room for one more, each time
            writers[gone].transport.abort()
            await asyncio.wait_for(until(lambda: counts.open == 1), PATIENCE_S)
            writers.append(await begin(3 + gone))
            assert (await ask()).status_code == 429
        assert streams.gate is not None
        streams.gate.set()  # the two that are left end
        await asyncio.wait_for(until(lambda: counts.open == 0), PATIENCE_S)
        both = await asyncio.gather(ask(), ask())
        assert [answer.status_code for answer in both] == [200, 200]
        assert (await ask(temperature=9)).status_code == 400
        assert (await ask()).status_code == 200, "what is refused holds nothing"
        for writer in writers:
            writer.close()
    page = metrics.snapshot()().decode()
    assert 'requests_shed_total{class="interactive",model_name="",reason="concurrency"} 5.0' in page
    assert {(event.key, event.status, event.reason) for event in sink.events} == {("k-1", 429, "concurrency")}


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.002)


# --- what operators do -----------------------------------------------------------------------------------------------


async def test_what_operators_do_is_audited_with_its_result():
    sink, posts = Noted(), ScriptedPosts()
    async with stage(ring=ring(), posts=posts, audit=sink) as on:
        await on.post("/admin/workers/decode-0/role", {"role": "both", "force": True}, headers=TWO)
        await on.post("/admin/workers/decode-0/drain", {"wrong": 1}, headers=TWO)
        await on.post("/v1/load_lora_adapter", {"lora_name": "fox", "lora_path": "/secret/path"}, headers=TWO)
        await on.client.get("/debug/sessions/s", headers=TWO)
        await on.client.get("/admin/workers", headers=TWO)  # `penstock status` asks all the time
        await on.client.get("/metrics", headers=TWO)
        await on.post("/admin/workers/decode-0/drain", {}, headers=ONE)
        await chat(on, headers=TWO)
    shown = [(event.event, event.key, event.route, event.status, event.reason, event.detail) for event in sink.events]
    worker = "/admin/workers/decode-0"
    assert shown == [
        ("admin", "k-2", f"{worker}/role", 200, "", "role=both force"),
        ("admin", "k-2", f"{worker}/drain", 400, "unknown_parameter", ""),
        ("refused", "k-2", "/v1/load_lora_adapter", 403, shown[2][4], "adapter=fox"),
        ("admin", "k-2", "/debug/sessions/s", 404, "", ""),
        ("refused", "k-1", f"{worker}/drain", 403, "not_an_operator", ""),
    ]
    assert "secret" not in repr(sink.events)


async def test_wrong_keys_are_audited_without_what_was_sent():
    sink = Noted()
    async with stage(ring=ring(), audit=sink) as on:
        await on.post(CHAT, {"model": MODEL, "messages": HELLO}, headers={"authorization": "Bearer sk-guess"})
        await on.post(CHAT, {})
    assert [(event.key, event.status, event.reason) for event in sink.events] == [
        ("", 401, "invalid_api_key"),
        ("", 401, "missing_api_key"),
    ]
    assert "sk-" not in repr(sink.events)
    assert "story" not in repr(sink.events)


# --- a catalog's front -----------------------------------------------------------------------------------------------


class TwoModels(OneModel):
    """``CatalogModels``: big, which has an alias and an adapter, and small; whoever uses one is noted."""

    def __init__(self, at: Upstream) -> None:
        super().__init__(at)
        self.used: list[str] = []

    def find_entry(self, name: str) -> str | None:
        return {"big": "big", "grand": "big", "fox": "big", "small": "small"}.get(name)

    def names(self) -> list[str]:
        return ["big", "small"]

    def rows(self) -> list[dict[str, object]]:
        row = {"state": "unloaded", "pinned": False}
        big = row | {"name": "big", "aliases": ["grand"], "adapters": ["fox"]}
        return [big, row | {"name": "small", "aliases": [], "adapters": []}]

    def use(self, entry: str) -> Any:
        self.used.append(entry)
        return super().use(entry)

    async def load(self, entry: str) -> None:
        self.used.append(entry)


def front(catalog: TwoModels, **restrictions: Any) -> tuple[httpx.AsyncClient, Noted]:
    sink = Noted()
    app = make_catalog_app(
        FrontServices(
            models=catalog,
            limits=RequestLimits(),
            clock=MonotonicClock(),
            keys=ring(operator=True, **restrictions),
            created=1,
            wall_time=lambda: NOON,
            audit=sink,
            model_alias=("claude-*=grand", "gpt=small"),
        )
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://front", headers=ONE), sink


@pytest.mark.parametrize(
    ("models", "may", "listed"),
    [
        (("small",), {"small", "gpt"}, ["small", "gpt"]),
        (("big",), {"big", "grand", "claude-1"}, ["big"]),
        (("fox",), {"fox"}, ["fox"]),
        (("grand",), {"grand", "claude-1"}, []),
    ],
)
async def test_a_key_loads_no_model_that_it_is_not_for(models: Any, may: set[str], listed: list[str]):
    known = TwoModels(Upstream("127.0.0.1", 9, "front"))  # where nothing listens: what may pass gets a 503
    client, sink = front(known, models=models)
    async with client:
        for name in ("big", "grand", "fox", "claude-1", "small", "gpt", "none"):
            for path, body in (BODIES | READING).items():
                before = len(known.used)
                answer = await client.post(path, json=body | {"model": name})
                assert answer.status_code == (503 if name in may else 403), (name, path, answer.text)
                assert len(known.used) - before == (name in may)
            form = {"files": {"file": ("a.wav", b"x")}, "data": {"model": name}}
            heard = await client.post("/v1/audio/transcriptions", **form)
            assert heard.status_code == (503 if name in may else 403)
            loaded = await client.post("/admin/load_model", json={"model": name})
            assert loaded.status_code == (200 if name in may else 403)
            card = await client.get(f"/v1/models/{name}")
            assert card.status_code == (200 if name in may else 404)
        page = (await client.get("/v1/models")).json()
        assert [card["id"] for card in page["data"]] == [model["slug"] for model in page["models"]] == listed
    refused = {(event.key, event.reason) for event in sink.events if event.event == "refused"}
    assert refused == {("k-1", "model_not_found")}
    assert {event.detail for event in sink.events if event.event == "admin"} == {f"model={known.used[-1]}"}


async def test_a_front_checks_expiry_routes_and_requests_at_once():
    known = TwoModels(Upstream("127.0.0.1", 9, "front"))
    client, _ = front(known, expires=NOON)
    async with client:
        assert error_of(await client.post(TEXT, json={"model": "big"})) == (401, "expired_api_key")
    client, _ = front(known, routes=("chat",))
    async with client:
        assert error_of(await client.post(TEXT, json={"model": "big"})) == (403, "route_not_allowed")
    assert known.used == []
    held, go = asyncio.Event(), asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        held.set()
        await go.wait()
        refusal = b'{"error": {"message": "m", "type": "rate_limit_error", "code": "rate_limit_exceeded"}}'
        writer.write(b"HTTP/1.1 429 X\r\nretry-after: 7\r\ncontent-type: application/json\r\n")
        writer.write(b"content-length: %d\r\n\r\n" % len(refusal) + refusal)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    behind = TwoModels(Upstream("127.0.0.1", server.sockets[0].getsockname()[1], "front"))
    client, sink = front(behind, max_concurrency=1)
    async with server, client:
        first = asyncio.create_task(client.post(TEXT, json={"model": "big"}))
        await asyncio.wait_for(held.wait(), PATIENCE_S)
        assert error_of(await client.post(TEXT, json={"model": "small"})) == (429, "concurrency_limit_exceeded")
        go.set()
        assert ((await first).status_code, (await first).headers["retry-after"]) == (429, "7")
    assert behind.used == ["big"]
    assert [event.reason for event in sink.events] == ["concurrency", "rate_limit_exceeded"]
