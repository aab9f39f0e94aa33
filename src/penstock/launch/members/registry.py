"""``--members KIND:...``: the table of kinds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from penstock.clock import Clock
from penstock.config.base import expanded_path
from penstock.config.limits import MembershipConfig
from penstock.errors import ConfigError
from penstock.launch.members.dns import DnsMembers, SrvTargets, srv_look_up
from penstock.launch.members.file import FileMembers, parse_fleet_gateways, parse_fleet_members
from penstock.launch.members.interface import Member, MemberKind, Members, StaticMembers
from penstock.launch.members.nats import NatsMembers
from penstock.launch.members.ray import RayMembers
from penstock.launch.members.resolver import ResolvedMembers, WatchedName, is_numeric, system_look_up

MakeMembers = Callable[[str, MembershipConfig, Clock, MemberKind], Members]
"""Called with what stands after the kind's colon.  Raises ConfigError."""

KINDS_TEXT = "file:PATH, fleet:FLEET_FILE, dns:NAME:PORT, dns:_SERVICE._tcp.NAME, nats:URL/BUCKET, or ray:FLEET"


def open_members(text: str, limits: MembershipConfig, clock: Clock, wanted: MemberKind = MemberKind.WORKERS) -> Members:
    """The members that ``--members`` names.  Raises ConfigError in one line; looks at no file and no network."""
    kind, _, rest = text.partition(":")
    make = _KINDS.get(kind)
    if make is None or not rest:
        raise ConfigError(f"--members {text}: expected {KINDS_TEXT}")
    return make(rest, limits, clock, wanted)


def joined_members(endpoints: tuple[str, ...], limits: MembershipConfig, clock: Clock) -> Members:
    """The members of ``--join``."""
    return ResolvedMembers(StaticMembers(endpoints), limits, clock)


def other_nodes_members(
    path: str, node: str, endpoints: tuple[str, ...], limits: MembershipConfig, clock: Clock
) -> Members:
    """The workers of the other nodes of a fleet file; ``endpoints``: theirs, until it is read again."""
    first = [Member(name=endpoint, endpoint=endpoint) for endpoint in endpoints]
    parse = partial(parse_fleet_members, but=node)
    return ResolvedMembers(FileMembers(Path(path), limits, parse, first, read_twice=True), limits, clock)


def _fleet(path: str, limits: MembershipConfig, clock: Clock, wanted: MemberKind) -> Members:
    place = expanded_path(path, "--members").absolute()
    parse = parse_fleet_gateways if wanted is MemberKind.GATEWAYS else parse_fleet_members
    return ResolvedMembers(FileMembers(place, limits, parse, read_twice=True), limits, clock)


def _file(path: str, limits: MembershipConfig, clock: Clock, _: MemberKind) -> Members:
    return ResolvedMembers(FileMembers(expanded_path(path, "--members").absolute(), limits), limits, clock)


def _dns(name: str, limits: MembershipConfig, clock: Clock, _: MemberKind) -> Members:
    if name.startswith("_"):
        return _srv(name, limits, clock)
    host, colon, port = name.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16) or ":" in host:
        raise ConfigError(f"--members dns:{name}: expected dns:NAME:PORT, or dns:_SERVICE._tcp.NAME for SRV records")
    if is_numeric(host):
        raise ConfigError(f"--members dns:{name}: this is an address; use --join tcp://{name}")
    return DnsMembers(WatchedName(f"dns:{name}", system_look_up(host, int(port)), limits, clock), limits.max_members)


def _srv(name: str, limits: MembershipConfig, clock: Clock) -> Members:
    if ":" in name:
        raise ConfigError(f"--members dns:{name}: SRV records have ports of their own; leave out the last part")
    targets = SrvTargets(name, limits)
    watched = WatchedName(f"dns:{name}", srv_look_up(name, limits, targets), limits, clock)
    return DnsMembers(watched, limits.max_members, targets)


def _nats(text: str, limits: MembershipConfig, clock: Clock, _: MemberKind) -> Members:
    return ResolvedMembers(NatsMembers(text, limits, clock), limits, clock)


def _ray(fleet: str, limits: MembershipConfig, clock: Clock, wanted: MemberKind) -> Members:
    return ResolvedMembers(RayMembers(fleet, limits, wanted), limits, clock)


_KINDS: dict[str, MakeMembers] = {"file": _file, "fleet": _fleet, "dns": _dns, "nats": _nats, "ray": _ray}
