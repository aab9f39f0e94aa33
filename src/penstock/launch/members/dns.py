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

TARGETS_PART = 0.5
"""Of ``dns_timeout_s``: for the hosts that SRV records name, so that what has answered is in use within the whole."""


class DnsMembers:
    """``interface.Members`` of one name."""

    def __init__(self, name: WatchedName, max_members: int, targets: SrvTargets | None = None) -> None:
        """``targets``: those that its SRV records name."""
        self._name = name
        self._max_members = max_members
        self._targets = targets

    async def watch(self, tell: MembersHandler) -> None:
        def changed() -> None:
            found = sorted(self._name.last.endpoints)[: self._max_members]
            tell([Member(name=endpoint, endpoint=endpoint) for endpoint in found])

        await self._name.follow(changed)

    def problems(self) -> Sequence[MembersProblem]:
        problem = self._name.last.problem
        if problem is None and self._targets is not None:
            problem = self._targets.problem.text
        return () if problem is None else ((self._name.shown, problem),)


def srv_look_up(name: str, limits: MembershipConfig, hosts: SrvTargets) -> LookUp:
    """A look-up of all SRV records (RFC 2782) of ``name``, by dnspython, and of the ``hosts`` that they name.

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


class SrvTargets:
    """The hosts and ports that a name's SRV records have, each with its last endpoint.  One look-up of each at a time:
    a thread that asks the system's resolver cannot be ended."""

    def __init__(self, name: str, limits: MembershipConfig) -> None:
        self._endpoints: dict[tuple[str, int], str] = {}
        self._asking: dict[tuple[str, int], asyncio.Task[tuple[str, ...]]] = {}
        self._wait_s = limits.dns_timeout_s * TARGETS_PART
        self.problem = SourceProblem(f"some SRV targets of dns:{name}")

    async def look_up(self, targets: Sequence[tuple[str, int]]) -> tuple[str, ...]:
        """One endpoint of each target; of one without an answer the last.

        Raises NameNotFoundError or LookUpError if there is none at all.
        """
        await self._ask(targets)
        known, failures = {}, []
        for target in targets:
            try:
                known[target] = self._answer(target)
            except LookUpError as error:
                failures.append(f"{target[0]}: {error}")
                if target in self._endpoints:
                    known[target] = self._endpoints[target]
            except NameNotFoundError:
                continue
        self._endpoints = known
        problem = "; ".join(failures) or None
        if not known:
            raise LookUpError(problem) if problem else NameNotFoundError("its SRV records name hosts without addresses")
        self.problem.note(problem)
        return tuple(known.values())

    async def _ask(self, targets: Sequence[tuple[str, int]]) -> None:
        """Until all have answered, or for so long.  What did not answer the last time is not waited for again."""
        for gone in self._asking.keys() - set(targets):
            self._asking.pop(gone).cancel()
        asked = {
            target: asyncio.ensure_future(look_up_addresses(*target))
            for target in targets
            if target not in self._asking
        }
        for task in asked.values():
            task.add_done_callback(_seen)
        self._asking |= asked
        try:
            if asked:
                await asyncio.wait(asked.values(), timeout=self._wait_s)
        except asyncio.CancelledError:
            for task in self._asking.values():
                task.cancel()
            self._asking.clear()
            raise

    def _answer(self, target: tuple[str, int]) -> str:
        """One address of each host, and the same one each time.  Raises as ``look_up_addresses``."""
        if not self._asking[target].done():
            raise LookUpError(f"no answer within {self._wait_s:g} s")
        return min(self._asking.pop(target).result())


def _seen(task: asyncio.Task[tuple[str, ...]]) -> None:
    """Otherwise asyncio logs the error of a host that is no target any more."""
    if not task.cancelled():
        task.exception()


def name_server_address(text: str) -> tuple[str, int]:
    """The parts of ``ADDRESS`` or ``ADDRESS:PORT``; an IPv6 address with a port is in brackets.  Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if is_numeric(text):
        return text, 53
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and is_numeric(host) and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ConfigError(f"name_server in [membership]: expected ADDRESS or ADDRESS:PORT, got {text!r}")
    return host, int(port)
