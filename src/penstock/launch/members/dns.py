"""Members by DNS: every address of a name, as of a headless Service of Kubernetes, or every SRV record of one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib.util import find_spec

from penstock.config.limits import MembershipConfig
from penstock.errors import ConfigError
from penstock.launch.members.interface import Member, MembersHandler, MembersProblem, SourceProblem
from penstock.launch.members.resolver import (
    LookUp,
    LookUpError,
    NameNotFoundError,
    WatchedName,
    is_numeric,
    look_up_addresses,
)


class DnsMembers:
    """``interface.Members`` of one name."""

    def __init__(self, name: WatchedName, max_members: int) -> None:
        self._name = name
        self._max_members = max_members

    async def watch(self, tell: MembersHandler) -> None:
        def changed() -> None:
            found = sorted(self._name.last.endpoints)[: self._max_members]
            tell([Member(name=endpoint, endpoint=endpoint) for endpoint in found])

        await self._name.follow(changed)

    def problems(self) -> Sequence[MembersProblem]:
        problem = self._name.last.problem
        return () if problem is None else ((self._name.shown, problem),)


def srv_look_up(name: str, limits: MembershipConfig) -> LookUp:
    """A look-up of all SRV records (RFC 2782) of ``name``, by dnspython.

    Priorities and weights are ignored: gateways choose workers by load.  Raises ConfigError if dnspython is not
    installed or this host has no name server.
    """
    if find_spec("dns") is None:
        raise ConfigError(f"--members dns:{name}: SRV records need dnspython: pip install 'penstock[dns]'")
    import dns.asyncresolver
    import dns.exception
    import dns.resolver

    try:
        resolver = dns.asyncresolver.Resolver(configure=not limits.name_server)
    except dns.resolver.NoResolverConfiguration as error:
        raise ConfigError(f"--members dns:{name}: {error}") from None
    if limits.name_server:
        address, port = name_server_address(limits.name_server)
        resolver.nameservers, resolver.port = [address], port

    hosts = _Targets(f"dns:{name}")

    async def look_up() -> tuple[str, ...]:
        try:
            answer = await resolver.resolve(name, "SRV", search=True, lifetime=limits.dns_timeout_s)
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            raise NameNotFoundError("no SRV records") from None
        except (dns.exception.DNSException, OSError) as error:
            raise LookUpError(str(error) or type(error).__name__) from None
        targets = sorted({(record.target.to_text(omit_final_dot=True), record.port) for record in answer})
        return await hosts.look_up(targets)

    return look_up


class _Targets:
    """The hosts and ports that a name's SRV records have, each with its last endpoint."""

    def __init__(self, source: str) -> None:
        """``source``: how the log calls them."""
        self._endpoints: dict[tuple[str, int], str] = {}
        self._problem = SourceProblem(source)

    async def look_up(self, targets: Sequence[tuple[str, int]]) -> tuple[str, ...]:
        """One endpoint of each target; of one without an answer the last.

        Raises NameNotFoundError or LookUpError if there is none at all.
        """
        found = await asyncio.gather(*(look_up_addresses(*target) for target in targets), return_exceptions=True)
        known, failures = {}, []
        for target, result in zip(targets, found, strict=True):
            if isinstance(result, LookUpError):
                failures.append(f"{target[0]}: {result}")
                if target in self._endpoints:
                    known[target] = self._endpoints[target]
            elif not isinstance(result, BaseException):
                known[target] = min(result)  # one address of each host, and the same one each time
            elif not isinstance(result, NameNotFoundError):
                raise result
        self._endpoints = known
        problem = "; ".join(failures) or None
        if not known:
            raise LookUpError(problem) if problem else NameNotFoundError("its SRV records name hosts without addresses")
        self._problem.note(problem)
        return tuple(known.values())


def name_server_address(text: str) -> tuple[str, int]:
    """The parts of ``ADDRESS`` or ``ADDRESS:PORT``; an IPv6 address with a port is in brackets.  Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if is_numeric(text):
        return text, 53
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and is_numeric(host) and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ConfigError(f"name_server in [membership]: expected ADDRESS or ADDRESS:PORT, got {text!r}")
    return host, int(port)
