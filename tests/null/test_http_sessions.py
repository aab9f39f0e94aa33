"""Where a session's prompt breaks the cache is told over HTTP, with its text to operators only."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.api.auth import Tenant

from .http_stage import MODEL, Stage, check, stage
from .test_http_classes import key, ring

STORY = "Once upon a time there was a little fox who lived in the woods with his mother and his father. " * 3


async def turn(on: Stage, first: str, headers: dict[str, str] | None = None, **fields: Any) -> None:
    body = {"messages": [{"role": "user", "content": f"{first} {STORY}"}], "max_tokens": 1, "model": MODEL} | fields
    answer = await on.post("/v1/chat/completions", body, headers=headers)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("header", ["x-session-affinity", "X-Claude-Code-Session-Id", "session_id", "session-id"])
async def test_a_break_is_told_with_the_text_on_both_sides(header: str) -> None:
    lost: list[tuple[str, int]] = []
    async with stage(count_prefix_break=lambda *told: lost.append(told)) as on:
        for day in ("Monday", "Tuesday"):
            await turn(on, f"Today is {day}.", {header: "agent/7"})
        told = (await on.client.get("/debug/sessions/agent/7")).json()
        ((record,), (found,)) = told["records"], told["records"][0]["breaks"]
        assert (record["turns"], record["broken"], lost) == (2, 1, [("tokens", found["lost_tokens"])])
        assert found["reason"] == "tokens"
        assert "Monday" in found["earlier"]
        assert "Tuesday" in found["later"]
        assert found["earlier"].split("Monday")[0] == found["later"].split("Tuesday")[0]


async def test_the_first_header_counts_then_the_body() -> None:
    async with stage() as on:
        await turn(on, "A", {"session_id": "codex", "x-session-affinity": "own"}, prompt_cache_key="key")
        await turn(on, "B", {"session_id": "codex"}, prompt_cache_key="key")
        await turn(on, "C", prompt_cache_key="key")
        for name, turns in (("own", 1), ("codex", 1), ("key", 1)):
            told = (await on.client.get(f"/debug/sessions/{name}")).json()
            assert [record["turns"] for record in told["records"]] == [turns]
        assert (await on.client.get("/debug/sessions/nobody")).status_code == 404


async def test_it_is_for_operators() -> None:
    tenants = ring(ann=Tenant(id="a1"), root=Tenant(id="r0", operator=True))
    async with stage(ring=tenants) as on:
        await turn(on, "A", {"x-session-affinity": "s", **key("ann")["headers"]})
        check(await on.client.get("/debug/sessions/s"), 401, "missing_api_key", "API key")
        check(await on.client.get("/debug/sessions/s", **key("ann")), 403, "not_an_operator", "operator")
        told = (await on.client.get("/debug/sessions/s", **key("root"))).json()
        assert [record["tenant"] for record in told["records"]] == ["a1"]
