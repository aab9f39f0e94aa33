"""Members by DNS: every address of a name, as of a headless Service of Kubernetes, or every SRV record of one."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.launch.members.interface import Member, MembersHandler, MembersProblem
from penstock.launch.members.resolver import WatchedName


class DnsMembers:
    """``interface.Members`` of one name."""

    def __init__(self, name: WatchedName, max_members: int) -> None:
        self._name = name
        self._max_members = max_members

    async def watch(self, tell: MembersHandler) -> None:
        def changed() -> None:
            found = sorted(self._name.kept.endpoints)[: self._max_members]
            tell([Member(name=endpoint, endpoint=endpoint) for endpoint in found])

        await self._name.follow(changed)

    def problems(self) -> Sequence[MembersProblem]:
        problem = self._name.kept.problem
        return () if problem is None else ((self._name.shown, problem),)
