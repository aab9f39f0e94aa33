"""Members whose endpoints have host names, with numeric endpoints in their place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from penstock.clock import Clock
from penstock.config.base import host_and_port
from penstock.config.limits import MembershipConfig
from penstock.launch.members.interface import Member, Members, MembersHandler, MembersProblem
from penstock.launch.members.resolver import LookUp, WatchedName, is_numeric, look_up_addresses

MakeLookUp = Callable[[str, int], LookUp]
"""Called with host and port."""


def system_look_up(host: str, port: int) -> LookUp:
    """By the system's resolver."""
    return lambda: look_up_addresses(host, port)


class ResolvedMembers:
    """``interface.Members`` of another one.  A name that is not resolved yet holds up no other member."""

    def __init__(
        self, source: Members, limits: MembershipConfig, clock: Clock, look_up: MakeLookUp = system_look_up
    ) -> None:
        self._source = source
        self._limits = limits
        self._clock = clock
        self._look_up = look_up
        self._members: Sequence[Member] = ()
        self._names: dict[str, WatchedName] = {}  # by endpoint with a name
        self._following: dict[str, asyncio.Task[None]] = {}
        self._addresses: dict[str, str] = {}  # the numeric endpoint in use, by endpoint with a name

    async def watch(self, tell: MembersHandler) -> None:
        def changed() -> None:
            tell(self._resolved())

        def on_members(members: Sequence[Member]) -> None:
            self._members = members
            self._follow({m.endpoint for m in members if not is_numeric(host_and_port(m.endpoint)[0])}, changed)
            changed()

        try:
            await self._source.watch(on_members)
        finally:
            following = list(self._following.values())
            self._follow(set(), changed)
            await asyncio.gather(*following, return_exceptions=True)

    def problems(self) -> Sequence[MembersProblem]:
        unresolved = [(name.shown, name.kept.problem) for name in self._names.values() if name.kept.problem is not None]
        return (*self._source.problems(), *unresolved)

    def _follow(self, endpoints: set[str], changed: Callable[[], None]) -> None:
        for endpoint in self._names.keys() - endpoints:
            del self._names[endpoint]
            self._addresses.pop(endpoint, None)
            self._following.pop(endpoint).cancel()
        for endpoint in sorted(endpoints - self._names.keys()):
            look_up = self._look_up(*host_and_port(endpoint))
            name = self._names[endpoint] = WatchedName(endpoint, look_up, self._limits, self._clock)
            self._following[endpoint] = asyncio.get_running_loop().create_task(name.follow(changed))

    def _resolved(self) -> list[Member]:
        """Of two members at one address, the first."""
        found: dict[str, Member] = {}
        for member in self._members:
            endpoint = self._numeric(member.endpoint)
            if endpoint is not None and endpoint not in found:
                found[endpoint] = msgspec.structs.replace(member, endpoint=endpoint)
        return list(found.values())

    def _numeric(self, endpoint: str) -> str | None:
        """One address, and the same as long as the name has it: resolvers turn the order of several."""
        name = self._names.get(endpoint)
        if name is None:
            return endpoint
        known, found = self._addresses.get(endpoint), name.kept.endpoints
        if known is None or known not in found:
            known = found[0] if found else None
        if known is None:
            self._addresses.pop(endpoint, None)
        else:
            self._addresses[endpoint] = known
        return known
