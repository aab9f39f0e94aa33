"""Members in a JSON file, which is read again and again::

    {"members": [{"name": "worker-0", "endpoint": "tcp://10.0.0.1:9000", "labels": {"zone": "a"}}]}

or the workers or gateways of a fleet file (``config.fleet_file``), in TOML.  Who writes the file need not replace it
atomically: while it is missing, half written or invalid, the last good set stays in use.  The beginning of a fleet file
is often a valid one with fewer nodes, so it is used when two successive looks have read the same.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from penstock.config.fleet_file import FleetFile, FleetNode, parse_fleet
from penstock.config.limits import MembershipConfig
from penstock.config.schema import ServeConfig
from penstock.errors import ConfigError
from penstock.launch.members.daemon_thread import call_in_daemon_thread
from penstock.launch.members.interface import Member, MembersHandler, MembersProblem, SourceProblem, check_tcp_endpoint


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    members: tuple[Member, ...]


def parse_members(raw: bytes, limits: MembershipConfig) -> tuple[Member, ...]:
    """The members of a file's content.  Raises ConfigError in one line."""
    _check_size(raw, limits)
    try:
        members = msgspec.json.decode(raw, type=_Content).members
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(str(error).replace("\n", " ")) from None
    if len(members) > limits.max_members:
        raise ConfigError(f"{len(members)} members; at most max_members, {limits.max_members}, are used")
    for number, member in enumerate(members):
        check_tcp_endpoint(member.endpoint, f"members[{number}].endpoint")
    for what, given in (("name", [m.name for m in members]), ("endpoint", [m.endpoint for m in members])):
        text, times = Counter(given).most_common(1)[0] if given else ("", 0)
        if times > 1:
            raise ConfigError(f"{times} members have the {what} {text!r}")
    return members


def node_members(fleet: FleetFile, node: FleetNode) -> tuple[Member, ...]:
    """The workers of a node of a fleet file, as gateways elsewhere may find them."""
    return tuple(
        Member(name=worker.name, endpoint=worker.endpoint, labels={"node": node.name}) for worker in fleet.members(node)
    )


def node_gateways(node: FleetNode, port: int) -> tuple[Member, ...]:
    """The port that all its gateways share, as an endpoint picker may find it; empty if it has none."""
    if not node.gateways:
        return ()
    return (Member(name=f"{node.name}-gateway", endpoint=node.endpoint(port), labels={"node": node.name}),)


def parse_fleet_members(raw: bytes, limits: MembershipConfig, *, but: str = "") -> tuple[Member, ...]:
    """The workers of all nodes of a fleet file's content; ``but``: those of this node are left out.

    Raises ConfigError in one line.
    """
    _check_size(raw, limits)  # of a longer file only the beginning was read, and it may be a fleet of fewer nodes
    fleet = parse_fleet(raw, "fleet file:")
    found = [member for node in fleet.nodes if node.name != but for member in node_members(fleet, node)]
    if len(found) > limits.max_members:
        raise ConfigError(f"{len(found)} workers; at most max_members, {limits.max_members}, are used")
    return tuple(found)


def parse_fleet_gateways(raw: bytes, limits: MembershipConfig) -> tuple[Member, ...]:
    """The HTTP ports of all nodes with gateways of a fleet file's content.  A port that only the environment of a
    node's host sets is not known here: without ``http_port`` it is the default.

    Raises ConfigError in one line.
    """
    _check_size(raw, limits)
    fleet = parse_fleet(raw, "fleet file:")
    port = ServeConfig().port
    found = [member for node in fleet.nodes for member in node_gateways(node, node.http_port or port)]
    if len(found) > limits.max_members:
        raise ConfigError(f"{len(found)} nodes with gateways; at most max_members, {limits.max_members}, are used")
    return tuple(found)


def _check_size(raw: bytes, limits: MembershipConfig) -> None:
    """Raises ConfigError."""
    if len(raw) > limits.max_members_bytes:
        raise ConfigError(f"more than max_members_bytes, {limits.max_members_bytes}")


MembersParser = Callable[[bytes, MembershipConfig], tuple[Member, ...]]


class FileMembers:
    """``interface.Members`` of a file.  A problem is logged once, and its end, too."""

    def __init__(
        self,
        path: Path,
        limits: MembershipConfig,
        parse: MembersParser = parse_members,
        first: Sequence[Member] = (),
        *,
        read_twice: bool = False,
    ) -> None:
        """``first``: those that there are until the file can be read; ``read_twice``: what is read counts when the next
        look reads the same."""
        self._path = path
        self._parse_content = parse
        self._last = first  # good ones
        self._read_twice = read_twice
        self._limits = limits
        self._seen: bytes | None = None  # by the last look
        self._raw: bytes | None = None  # that was parsed last
        self._problem = SourceProblem(str(path))

    async def watch(self, tell: MembersHandler) -> None:
        self._raw = None
        if self._last:
            tell(self._last)
        while True:
            members = self._parse(await call_in_daemon_thread(self._read, name="members file"))
            if members is not None:
                self._last = members
                tell(members)
            await asyncio.sleep(self._limits.file_poll_s)

    def problems(self) -> Sequence[MembersProblem]:
        return () if self._problem.text is None else ((str(self._path), self._problem.text),)

    def _read(self) -> bytes | OSError:
        """Blocks, on a network file system perhaps for long."""
        try:
            with self._path.open("rb") as file:
                return file.read(self._limits.max_members_bytes + 1)
        except OSError as error:
            return error

    def _parse(self, found: bytes | OSError) -> tuple[Member, ...] | None:
        """The members, if they are others than those that were read last."""
        before, self._seen = self._seen, None if isinstance(found, OSError) else found
        if isinstance(found, OSError):
            self._raw = None
            self._problem.note((found.strerror or str(found)).lower())
            return None
        if found == self._raw or (self._read_twice and found != before):
            return None
        self._raw = found
        try:
            members = self._parse_content(found, self._limits)
        except ConfigError as error:
            self._problem.note(str(error))
            return None
        self._problem.note(None)
        return members
