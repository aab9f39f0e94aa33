"""Members by Ray, as a gateway reads them from the process that asks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

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
