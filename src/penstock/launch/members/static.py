"""Members that never change: ``penstock serve --join``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.launch.members.interface import Member, MembersHandler, MembersProblem


class StaticMembers:
    """``interface.Members`` of a list of endpoints."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._members = tuple(Member(name=endpoint, endpoint=endpoint) for endpoint in dict.fromkeys(endpoints))

    async def watch(self, tell: MembersHandler) -> None:
        tell(self._members)
        await asyncio.get_running_loop().create_future()

    def problems(self) -> Sequence[MembersProblem]:
        return ()
