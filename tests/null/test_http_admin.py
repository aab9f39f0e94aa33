"""What an operator may do to workers over HTTP: who may, what is asked for, and what is refused."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.errors import AssignmentTimeout, Conflict, UnknownWorker
from penstock.types import Duty, Role

from .http_stage import Stage, stage


@dataclass
class ScriptedPosts:
    """``interfaces.WorkerAdmin``: writes down what it is told, and says what the test wants."""

    told: list[dict[str, Any]] = field(default_factory=list)
    error: Exception | None = None

    async def assign(
        self, worker: str, *, role: Role | None = None, duty: Duty | None = None, force: bool = False
    ) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        self.told.append({"worker": worker, "role": role, "duty": duty, "force": force})
        return {"id": worker, "role": (role or Role.DECODE).value}


def served(posts: ScriptedPosts, *keys: str) -> AbstractAsyncContextManager[Stage]:
    return stage(None, None, *keys, posts=posts)


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("role", {"role": "prefill"}, {"role": Role.PREFILL, "duty": None, "force": False}),
        ("role", {"role": "both", "force": True}, {"role": Role.BOTH, "duty": None, "force": True}),
        ("drain", {}, {"role": None, "duty": Duty.DRAIN, "force": False}),
        ("resume", {}, {"role": None, "duty": Duty.SERVE, "force": False}),
        ("restart", {"force": True}, {"role": None, "duty": Duty.RESTART, "force": True}),
    ],
)
async def test_each_path_says_one_thing(path: str, body: dict[str, Any], told: dict[str, Any]) -> None:
    posts = ScriptedPosts()
    async with served(posts) as on:
        answer = await on.post(f"/admin/workers/decode-0/{path}", body)
    assert answer.status_code == 200
    assert answer.json()["id"] == "decode-0"
    assert posts.told == [{"worker": "decode-0", **told}]


@pytest.mark.parametrize(
    ("path", "body", "because"),
    [
        ("role", {}, "Missing required parameter: 'role'"),
        ("role", {"role": "encode"}, "expected 'prefill' or 'decode' or 'both', got 'encode'"),
        ("role", {"role": ["decode"]}, "Invalid value for 'role'"),
        ("role", {"role": "decode", "forse": True}, "Unrecognized request argument: forse"),
        ("drain", {"role": "decode"}, "Unrecognized request argument: role"),
        ("drain", {"force": 1}, "Invalid value for 'force': expected true or false"),
        ("drain", [], "expected a JSON object"),
    ],
)
async def test_what_cannot_be_asked_for(path: str, body: Any, because: str) -> None:
    posts = ScriptedPosts()
    async with served(posts) as on:
        answer = await on.post(f"/admin/workers/decode-0/{path}", body)
    assert answer.status_code == 400
    assert because in answer.json()["error"]["message"]
    assert posts.told == []


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UnknownWorker("w", "decode-0"), 404),
        (Conflict("It is the last one.", code="x"), 409),
        (AssignmentTimeout("Slow."), 503),
    ],
)
async def test_refusals_keep_their_words(error: Exception, status: int) -> None:
    async with served(ScriptedPosts(error=error)) as on:
        answer = await on.post("/admin/workers/w/drain", {})
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == str(error)


async def test_only_who_has_the_key_may_and_no_page_in_a_browser() -> None:
    posts = ScriptedPosts()
    async with served(posts, "secret") as on:
        path = "/admin/workers/decode-0/drain"
        assert (await on.post(path, {})).status_code == 401
        plain = {"Authorization": "Bearer secret", "Content-Type": "text/plain"}
        assert (await on.client.post(path, content=b"{}", headers=plain)).status_code == 415
        assert (await on.client.get(path, headers={"Authorization": "Bearer secret"})).status_code == 405
        assert posts.told == []
        assert (await on.post(path, {}, headers={"Authorization": "Bearer secret"})).status_code == 200


async def test_a_service_without_workers_of_its_own_has_no_such_paths() -> None:
    async with stage() as on:
        assert (await on.post("/admin/workers/decode-0/drain", {})).status_code == 404
