"""The port through which a gateway learns where workers may be, and an endpoint picker where gateways.

Members say where to look.  Whether a worker is there, which one, and whether it lives is found out by messages
(``launch.remote_workers``, ``launch.picker.live_gateways``), so a wrong answer does no harm.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Annotated, Protocol, TypeAlias

import msgspec

from penstock.config.base import check_endpoint
from penstock.errors import ConfigError
from penstock.wire.supervisor_messages import Labels

log = logging.getLogger(__name__)

MAX_NAME_CHARS = 253
MAX_ENDPOINT_CHARS = 300

RETRY_WATCH_S = 1.0
"""After an error of a source, before its members are watched again."""


class MemberKind(StrEnum):
    """What members are.  Lists have either; sources that know a fleet must know which are wanted."""

    WORKERS = "workers"
    GATEWAYS = "gateways"


class Member(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A place where a worker or a gateway may be.  ``name`` is for people; a worker says itself what it is called."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS)]
    endpoint: Annotated[str, msgspec.Meta(max_length=MAX_ENDPOINT_CHARS)]  # tcp://HOST:PORT
    labels: Labels = msgspec.field(default_factory=dict)

    @property
    def shown(self) -> str:
        """Its name and its endpoint, or only that if it has no other name."""
        return self.endpoint if self.name == self.endpoint else f"{self.name} ({self.endpoint})"


MembersHandler: TypeAlias = Callable[[Sequence[Member]], None]
"""Called with all members that there are now."""

MembersProblem: TypeAlias = tuple[str, str]
"""What could not be read or resolved, and why."""


class Members(Protocol):
    """A source of members."""

    async def watch(self, tell: MembersHandler) -> None:
        """Call ``tell`` with the first known set and after each change, until cancelled."""
        ...

    def problems(self) -> Sequence[MembersProblem]:
        """What is wrong now.  The last good set stays in use meanwhile."""
        ...


async def follow_members(members: Members, tell: MembersHandler) -> None:
    """Watch until cancelled.  An error does not end it: the members that are known stay."""
    while True:
        try:
            await members.watch(tell)
        except Exception:
            log.exception("the members cannot be watched")
        await asyncio.sleep(RETRY_WATCH_S)


class SourceProblem:
    """Why a source of members cannot be read, logged once, and its end, too.  The last good members stay meanwhile."""

    def __init__(self, source: str) -> None:
        """``source``: how the log calls it."""
        self._source = source
        self.text: str | None = None  # None: it can be read

    def note(self, text: str | None) -> None:
        """What is wrong now; None: nothing."""
        if text == self.text:
            return
        self.text = text
        if text is None:
            log.info("the members in %s are read again", self._source)
        else:
            log.warning("members are not read from %s, the last good ones stay: %s", self._source, text)


class StaticMembers:
    """Members that never change, such as those of ``penstock serve --join``."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._members = tuple(Member(name=endpoint, endpoint=endpoint) for endpoint in dict.fromkeys(endpoints))

    async def watch(self, tell: MembersHandler) -> None:
        tell(self._members)
        await asyncio.get_running_loop().create_future()

    def problems(self) -> Sequence[MembersProblem]:
        return ()


def check_tcp_endpoint(endpoint: str, source: str) -> None:
    """Raises ConfigError, which begins with ``source``, unless this is ``tcp://HOST:PORT`` to connect to."""
    try:
        check_endpoint(endpoint)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or host.startswith("*") or int(port) == 0 or ";" in host or "/" in host:
        raise ConfigError(f"{source}: {endpoint}: expected tcp://HOST:PORT")
