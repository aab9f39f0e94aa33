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


async def test_a_session_name_belongs_to_its_tenant() -> None:
    """Two tenants with one session name: neither is compared with the other, and an operator sees both apart."""
    told: list[tuple[str, int]] = []
    tenants = ring(ann=Tenant(id="a1", salt="a1"), bob=Tenant(id="b1", salt="b1"), root=Tenant(id="r0", operator=True))
    async with stage(ring=tenants, count_prefix_break=lambda *one: told.append(one)) as on:
        for name, first in (("ann", "Of Ann."), ("bob", "Of Bob."), ("ann", "Of Ann.")):
            await turn(on, first, {"session-id": "same", **key(name)["headers"]})
        assert told == []
        await turn(on, "Other.", {"session-id": "same", **key("bob")["headers"]})
        assert [reason for reason, _ in told] == ["tokens"]
        shown = (await on.client.get("/debug/sessions/same", **key("root"))).json()["records"]
        assert {record["tenant"]: (record["turns"], record["broken"]) for record in shown} == {
            "a1": (2, 0),
            "b1": (2, 1),
        }
        assert "Ann" not in str(shown)


async def test_another_salt_is_told_as_the_reason() -> None:
    async with stage() as on:
        for salt in ("x", "y"):
            await turn(on, "A", {"session-id": "s"}, cache_salt=salt)
        (record,) = (await on.client.get("/debug/sessions/s")).json()["records"]
        (found,) = record["breaks"]
        assert (found["reason"], found["token"]) == ("cache_salt", 0)
        assert found["earlier"] == found["later"]


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/messages", {"metadata": {"user_id": '{"device_id": "d", "session_id": "s1"}'}}, "s1"),
        ("/v1/messages", {"metadata": {"user_id": "user_d_account_a_session_s2"}}, "s2"),
        ("/v1/responses", {"prompt_cache_key": "s3"}, "s3"),
    ],
)
async def test_other_apis_name_sessions_in_their_bodies(path: str, body: dict[str, Any], name: str) -> None:
    asked = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": STORY}]}
    asked = {"model": MODEL, "max_output_tokens": 1, "input": STORY} if path.endswith("responses") else asked
    async with stage() as on:
        assert (await on.post(path, asked | body)).status_code == 200
        assert (await on.client.get(f"/debug/sessions/{name}")).json()["records"][0]["turns"] == 1
        assert on.streams.opened[0].session == name
        headers = {"x-claude-code-session-id": "header"}
        assert (await on.post(path, asked | body, headers=headers)).status_code == 200
        assert on.streams.opened[1].session == "header"


async def test_long_names_are_refused_wherever_they_stand() -> None:
    async with stage() as on:
        for header in ("x-claude-code-session-id", "session_id"):
            answer = await on.post(
                "/v1/chat/completions", {"model": MODEL, "messages": []}, headers={header: "n" * 257}
            )
            check(answer, 400, "session_too_long", header)
        check(await on.chat(prompt_cache_key="n" * 257), 400, "string_above_max_length", "256", "prompt_cache_key")
