"""Members by Ray, as a gateway reads them from the process that asks."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from penstock import sidecar
from penstock.config.limits import MembershipConfig
from penstock.errors import ConfigError
from penstock.launch.members import ray
from penstock.launch.members.interface import Member
from penstock.launch.members.ray import RayAnswer, RayMembers


def member(node: str) -> Member:
    return Member(name=f"{node}-both-0", endpoint=f"tcp://{node}:9000", labels={"node": node})


async def follow(members: RayMembers, *answers: RayAnswer) -> list[list[str]]:
    """What is told of these lines of one child, after which it ends."""
    told: list[list[str]] = []

    def tell(found: Sequence[Member]) -> None:
        told.append([one.name for one in found])

    reader = asyncio.StreamReader()
    for answer in answers:
        reader.feed_data(msgspec.json.encode(answer) + b"\n")
    reader.feed_eof()
    with pytest.raises(ConfigError, match="has ended"):
        await members._follow(reader, tell)
    return told


async def test_a_node_that_has_not_answered_the_next_child_keeps_its_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when Ray was away for long: the child has ended, and an actor is being started again."""
    monkeypatch.setattr(ray, "find_spec", lambda name: name)
    members = RayMembers("f", MembershipConfig())
    assert await follow(members, RayAnswer(members=(member("a"), member("b")))) == [["a-both-0", "b-both-0"]]
    assert await follow(members, RayAnswer(members=(member("a"),), silent=("b",))) == []
    moved = msgspec.structs.replace(member("c"), endpoint=member("b").endpoint)
    answer = RayAnswer(members=(member("a"), moved), silent=("b",))
    assert await follow(members, answer) == [["a-both-0", "c-both-0"]], "another node has the place of b"
    assert await follow(members, RayAnswer(members=(member("a"),))) == [["a-both-0"]]


async def first_told(members: RayMembers) -> list[str]:
    """The names of the members that are told first."""
    told: asyncio.Queue[list[str]] = asyncio.Queue()
    watching = asyncio.create_task(members.watch(lambda found: told.put_nowait([one.name for one in found])))
    try:
        return await asyncio.wait_for(told.get(), 60)
    finally:
        watching.cancel()


STUB = """
import json, os, socket, sys
lane = socket.socket(fileno=json.loads(sys.argv[1])["descriptor"])
names = [name for name in sorted(os.environ) if name.startswith("RAY_") or name == "HF_TOKEN"]
members = [{"name": name, "endpoint": f"tcp://10.0.0.1:{number + 1}"} for number, name in enumerate(names)]
lane.sendall(json.dumps({"members": members}).encode() + b"\\n")
lane.recv(1)
"""


async def test_only_the_process_that_asks_ray_is_given_its_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_TLS_SERVER_KEY", "RAY_OTHER_TOKEN", "HF_TOKEN"):
        monkeypatch.setenv(name, "x")
    (tmp_path / "asks_ray_stub.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(ray, "ASKS_RAY", "asks_ray_stub")
    monkeypatch.setattr(ray, "find_spec", lambda name: name)
    sidecar.drop_secrets(keep=sidecar.gateway_secrets("ray:f"))
    given = ["RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_TLS_SERVER_KEY"]
    assert await first_told(RayMembers("f", MembershipConfig())) == given
    ours, theirs = socket.socketpair()
    with ours, sidecar.start_child("asks_ray_stub", json.dumps({"descriptor": theirs.fileno()}), [theirs.fileno()]):
        theirs.close()
        answer = msgspec.json.decode(ours.recv(4096), type=RayAnswer)
        ours.shutdown(socket.SHUT_RDWR)
    assert [one.name for one in answer.members] == ["RAY_AUTH_MODE"]


async def test_whatever_ray_raises_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ray.py").write_text("def init(*_, **__):\n    raise TypeError('no certificate')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "find_spec", lambda name: name)
    with pytest.raises(ConfigError, match="TypeError: no certificate"):
        await RayMembers("f", MembershipConfig())._session(print)
