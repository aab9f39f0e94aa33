"""Classes, deadlines, tenants and their limits as clients meet them: what a request becomes, and who is sent away."""

from __future__ import annotations

import asyncio
import hashlib
import re
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from penstock.api.auth import StaticApiKeys, Tenant
from penstock.config.limits import RequestLimits
from penstock.errors import DeadlineMissed
from penstock.interfaces import TtftForecast
from penstock.telemetry.service_levels import ServiceLevels
from penstock.types import FinishReason, ServiceClass

from .http_stage import CHAT, HELLO, MODEL, check, stage
from .streams import NullStreams

INTERACTIVE, BATCH = ServiceClass


def ring(**tenants: Tenant) -> StaticApiKeys:
    """Each tenant's key is its name here."""
    return StaticApiKeys({hashlib.sha256(name.encode()).digest(): tenant for name, tenant in tenants.items()})


def key(name: str, **headers: str) -> dict[str, Any]:
    return {"headers": {"authorization": f"Bearer {name}"} | headers}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HELLO, "max_tokens": 4, "seed": 1} | fields


# --- what a request becomes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "header", "service"),
    [
        ({}, None, INTERACTIVE),
        ({"service_tier": "auto"}, None, INTERACTIVE),
        ({"service_tier": "default"}, None, INTERACTIVE),
        ({"service_tier": "flex"}, None, BATCH),
        ({"priority": "batch"}, None, BATCH),
        ({"priority": 0}, None, INTERACTIVE),
        ({"priority": 7}, None, BATCH),
        ({"service_tier": "flex", "priority": 1}, None, BATCH),
        ({"priority": "interactive"}, "batch", BATCH),
        ({}, "batch", BATCH),
    ],
)
async def test_the_class_of_a_request(fields: dict[str, Any], header: str | None, service: ServiceClass):
    async with stage() as on:
        headers = {"x-penstock-class": header} if header else {}
        answer = await on.post(CHAT, body(**fields), headers=headers)
        assert answer.status_code == 200, answer.text
        qos = on.streams.opened[0].qos
        assert qos.service is service
        assert qos.max_wait_s == (None if service is INTERACTIVE else 600.0)


@pytest.mark.parametrize(
    ("fields", "words", "param"),
    [
        ({"service_tier": "gold"}, "expected one of auto, default", "service_tier"),
        ({"service_tier": 3}, "expected a string", "service_tier"),
        ({"priority": "low"}, "expected one of interactive, batch, or an integer", "priority"),
        ({"priority": 1.5}, "or an integer, got 1.5", "priority"),
        ({"priority": True}, "or an integer, got True", "priority"),
        ({"service_tier": "flex", "priority": "interactive"}, "leave one out", "priority"),
    ],
)
async def test_classes_that_do_not_exist(fields: dict[str, Any], words: str, param: str):
    async with stage() as on:
        answer = await on.post(CHAT, body(**fields))
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == param
        assert not on.streams.opened


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "1e9"])
async def test_waits_that_cannot_be(value: str):
    async with stage() as on:
        answer = await on.post(CHAT, body(), headers={"x-penstock-max-wait-s": value})
        check(answer, 400, "invalid_value", "seconds, above 0 and up to 3600", "x-penstock-max-wait-s")


async def test_tenants_share_neither_turns_nor_pages():
    keys = ring(
        ann=Tenant(id="a1", salt="a1", weight=2.0),
        bob=Tenant(id="b2", salt="b2", classes=(BATCH,)),
    )
    async with stage(ring=keys) as on:
        assert (await on.post(CHAT, body(), **key("ann"))).status_code == 200
        assert (await on.post(CHAT, body(), **key("bob", **{"x-penstock-max-wait-s": "5"}))).status_code == 200
        assert (await on.post(CHAT, body(), **key("eve"))).status_code == 401
        ann, bob = on.streams.opened
        assert (ann.qos.tenant, ann.qos.weight, ann.qos.service) == ("a1", 2.0, INTERACTIVE)
        assert (bob.qos.tenant, bob.qos.service, bob.qos.max_wait_s) == ("b2", BATCH, 5.0)
        assert ann.prompt == bob.prompt
        assert ann.cache_salt != bob.cache_salt


@pytest.mark.parametrize("how", [{"fields": {"priority": "interactive"}}, {"header": "interactive"}])
async def test_a_class_that_a_key_has_not(how: dict[str, Any]):
    async with stage(ring=ring(bob=Tenant(id="b2", classes=(BATCH,)))) as on:
        headers = {"x-penstock-class": how["header"]} if "header" in how else {}
        answer = await on.post(CHAT, body(**how.get("fields", {})), **key("bob", **headers))
        check(
            answer, 403, "class_not_allowed", "This key is for batch requests, and this one is interactive", "priority"
        )
        assert not on.streams.opened


# --- who is sent away -------------------------------------------------------------------------------------------------


async def test_who_would_wait_in_vain_is_told_when_to_come_back():
    streams = NullStreams(foreseen=TtftForecast(wait_s=9.0, prefill_s=1.5))
    async with stage(streams) as on:
        answer = await on.post(CHAT, body(), headers={"x-penstock-max-wait-s": "4"})
        check(
            answer, 503, "overloaded", "the first token would come in about 10.5 s, and this request may wait for 4 s"
        )
        assert answer.headers["retry-after"] == "7"
        assert (await on.post(CHAT, body(), headers={"x-penstock-max-wait-s": "11"})).status_code == 200


async def test_who_has_waited_in_vain_is_told_when_to_come_back():
    streams = NullStreams(fail_at={0: DeadlineMissed("The request waited for 2 s.")})
    streams.foreseen = TtftForecast(wait_s=1.0, prefill_s=1.2)
    levels = ServiceLevels()
    async with stage(streams, levels=levels) as on:
        answer = await on.post(CHAT, body(), headers={"x-penstock-max-wait-s": "3"})
        check(answer, 503, "deadline_exceeded", "waited for 2 s")
        assert answer.headers["retry-after"] == "3"


async def test_requests_a_minute():
    async with stage(ring=ring(ann=Tenant(id="a1", requests_per_minute=2), bob=Tenant(id="b2"))) as on:
        for _ in range(2):
            assert (await on.post(CHAT, body(), **key("ann"))).status_code == 200
        answer = await on.post(CHAT, body(), **key("ann"))
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert "may use 2 requests a minute" in answer.json()["error"]["message"]
        assert 25 <= int(answer.headers["retry-after"]) <= 30
        assert (await on.post(CHAT, body(), **key("bob"))).status_code == 200


async def test_tokens_a_minute_count_answers_too():
    async with stage(ring=ring(ann=Tenant(id="a1", tokens_per_minute=60))) as on:
        on.streams.script = lambda _: (tuple(range(10, 110)), FinishReason.LENGTH)
        first = await on.post(CHAT, body(max_tokens=100), **key("ann"))
        assert first.status_code == 200
        used = first.json()["usage"]["total_tokens"]
        again = await on.post(CHAT, body(), **key("ann"))
        assert again.status_code == 429
        asked = first.json()["usage"]["prompt_tokens"]
        assert int(again.headers["retry-after"]) == pytest.approx(used - 60 + asked, abs=2)


async def test_a_tenant_that_fills_the_queue_leaves_room_for_others():
    limits = RequestLimits(max_queued_requests=4)
    streams = NullStreams(gate=asyncio.Event())
    async with stage(streams, limits, ring=ring(ann=Tenant(id="a1"), bob=Tenant(id="b2"))) as on:
        waiting = [asyncio.create_task(on.post(CHAT, body(), **key("ann"))) for _ in range(2)]
        await streams.until(opened=2)
        refused = await on.post(CHAT, body(), **key("ann"))
        assert refused.status_code == 429
        assert "2 requests of yours are waiting" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        waiting.append(asyncio.create_task(on.post(CHAT, body(), **key("bob"))))
        await streams.until(opened=3)
        assert streams.gate is not None
        streams.gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200, 200]


# --- what is counted --------------------------------------------------------------------------------------------------


async def test_what_classes_and_tenants_got_is_counted():
    registry = CollectorRegistry()
    levels = ServiceLevels(registry, model_name="m", max_tenants=1)
    keys = ring(ann=Tenant(id="a1"), bob=Tenant(id="b2"), eve=Tenant(id="e3", requests_per_minute=1))
    streams = NullStreams(cached=3, foreseen=TtftForecast(wait_s=0.2, prefill_s=0.1))
    async with stage(streams, ring=keys, levels=levels) as on:
        for name in ("ann", "bob", "eve", "eve"):
            await on.post(CHAT, body(priority="batch"), **key(name))
        on.streams.fail_at = {0: DeadlineMissed("Late.")}
        await on.post(CHAT, body(), **key("ann"))
    text = generate_latest(registry).decode()

    def value(name: str, **labels: str) -> float:
        wanted = {"model_name": "m"} | labels
        for line in text.splitlines():
            found = re.fullmatch(r"penstock:(\w+)\{(.*)\} (\S+)", line)
            if found and found[1] == name and dict(re.findall(r'(\w+)="([^"]*)"', found[2])) == wanted:
                return float(found[3])
        raise AssertionError(f"{name} {wanted} is not in\n{text}")

    used = {"class": "batch"}
    assert value("class_time_to_first_token_seconds_count", **used) == 3
    assert value("answers_by_target_total", target="met", **used) == 3
    assert value("predicted_wait_seconds_sum", **used) == pytest.approx(0.9, rel=0.8)
    assert value("requests_shed_total", reason="rate_limit", **used) == 1
    assert value("deadline_misses_total", **{"class": "interactive"}) == 1
    assert value("tenant_requests_total", tenant="a1") == 1
    assert value("tenant_requests_total", tenant="other") == 2
    assert value("tenant_tokens_total", tenant="a1", kind="cached") == 3
    assert value("tenant_tokens_total", tenant="a1", kind="completion") >= 1


@pytest.mark.parametrize("path", ["/admin/workers", "/debug/requests/x", "/v1/unload_lora_adapter"])
async def test_tenants_are_no_operators(path: str):
    async with stage(ring=ring(ann=Tenant(id="a1"), root=Tenant(id="r0", operator=True))) as on:
        check(await on.client.get(path, **key("ann")), 403, "not_an_operator", "needs the key of an operator")
        assert (await on.client.get(path, **key("root"))).status_code in (200, 404, 405)


async def test_questions_that_no_worker_is_asked_count_among_the_requests():
    questions = (("/tokenize", {"prompt": "Once"}), ("/detokenize", {"tokens": [1]}))
    async with stage(ring=ring(ann=Tenant(id="a1", requests_per_minute=5))) as on:
        codes = [(await on.post(path, asked, **key("ann"))).status_code for path, asked in questions * 4]
        assert codes == [200] * 5 + [429] * 3
        refused = await on.post(CHAT, body(), **key("ann"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "5 requests a minute" in refused.json()["error"]["message"]
