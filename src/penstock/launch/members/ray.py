"""Members by Ray: the workers or the gateways of a fleet that ``penstock ray up`` runs, from its named actors.

Ray's client is a library with threads that ends its process when the cluster is away for long, so a child process asks
(``ray_process``) and a gateway only reads what it writes.  While the child has no answer, the last good members stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from importlib.util import find_spec

import msgspec

from penstock import sidecar
from penstock.config.limits import MembershipConfig
from penstock.errors import ConfigError
from penstock.launch.members.interface import (
    Member,
    MemberKind,
    MembersHandler,
    MembersProblem,
    SourceProblem,
    check_tcp_endpoint,
)

ASKS_RAY = "penstock.launch.members.ray_process"
"""The module of the child."""


class RayQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """What the child is started with."""

    descriptor: int  # of its end of the socket
    fleet: str
    address: str | None
    poll_s: float
    wanted: MemberKind = MemberKind.WORKERS


class RayAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the child: all members there are now, or why they are not known."""

    members: tuple[Member, ...] = ()
    silent: tuple[str, ...] = ()  # nodes with an actor that has not answered this child yet: their members stay
    problem: str | None = None


class RayMembers:
    """``interface.Members`` of a fleet."""

    def __init__(self, fleet: str, limits: MembershipConfig, wanted: MemberKind = MemberKind.WORKERS) -> None:
        """Raises ConfigError if Ray is not installed."""
        if find_spec("ray") is None:
            raise ConfigError(f"--members ray:{fleet}: Ray is not installed: pip install 'penstock[ray]'")
        self._fleet = fleet
        self._limits = limits
        self._wanted = wanted
        self._members: tuple[Member, ...] | None = None  # the last good ones
        self._problem = SourceProblem(f"ray:{fleet}")

    async def watch(self, tell: MembersHandler) -> None:
        self._members = None
        while True:
            try:
                await self._session(tell)
            except (OSError, ValueError, ConfigError, msgspec.DecodeError) as error:
                self._problem.note(str(error) or type(error).__name__)
            await asyncio.sleep(self._limits.ray_poll_s)

    def problems(self) -> Sequence[MembersProblem]:
        return () if self._problem.text is None else ((f"ray:{self._fleet}", self._problem.text),)

    async def _session(self, tell: MembersHandler) -> None:
        """Until the child ends or is silent.  Raises OSError, ValueError, ConfigError, DecodeError."""
        ours, theirs = socket.socketpair()
        question = RayQuestion(
            descriptor=theirs.fileno(),
            fleet=self._fleet,
            address=self._limits.ray_address or None,
            poll_s=self._limits.ray_poll_s,
            wanted=self._wanted,
        )
        child = sidecar.ChildProcess(
            ASKS_RAY,
            msgspec.json.encode(question).decode(),
            (theirs.fileno(),),
            name="members of Ray",
            handed_over=theirs,
            secrets=sidecar.RAY_CREDENTIALS,
        )
        try:
            reader, writer = await asyncio.open_connection(sock=ours, limit=self._limits.max_members_bytes)
            with contextlib.closing(writer):
                await self._follow(reader, tell)
        finally:
            child.kill()

    async def _follow(self, reader: asyncio.StreamReader, tell: MembersHandler) -> None:
        while True:
            try:
                async with asyncio.timeout(self._limits.ray_silent_s):
                    line = await reader.readline()
            except TimeoutError:
                raise ConfigError("Ray does not answer") from None
            if not line:
                raise ConfigError(self._problem.text or "the process that asks Ray has ended")
            answer = msgspec.json.decode(line, type=RayAnswer)
            self._problem.note(answer.problem)
            if answer.problem is None:
                taken = {one.endpoint for one in answer.members}
                kept = [
                    one
                    for one in self._members or ()
                    if one.labels.get("node") in answer.silent and one.endpoint not in taken
                ]
                members = self._checked((*answer.members, *kept))
                if members != self._members:
                    self._members = members
                    tell(members)

    def _checked(self, members: tuple[Member, ...]) -> tuple[Member, ...]:
        """Raises ConfigError."""
        if len(members) > self._limits.max_members:
            raise ConfigError(f"{len(members)} members; at most max_members, {self._limits.max_members}, are used")
        for member in members:
            check_tcp_endpoint(member.endpoint, member.name)
        return tuple({member.endpoint: member for member in members}.values())
