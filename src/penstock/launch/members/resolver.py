"""Names to numeric endpoints, beside the event loop and libzmq's I/O thread.

ZeroMQ would resolve names in the thread that moves all messages of a process, so it is given numbers only.  A and AAAA
records come from the system's resolver (getaddrinfo: /etc/hosts, search domains, the order of nsswitch.conf), each
look-up in a thread of its own.  SRV records, which it does not know, are the business of ``dns``.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import msgspec

from penstock.clock import Clock
from penstock.config.base import host_and_port
from penstock.config.limits import MembershipConfig
from penstock.launch.members.daemon_thread import call_in_daemon_thread
from penstock.launch.members.interface import Member, Members, MembersHandler, MembersProblem

log = logging.getLogger(__name__)

LookUp: TypeAlias = Callable[[], Awaitable[tuple[str, ...]]]
"""Returns numeric endpoints, at least one.  Raises NameNotFoundError or LookUpError."""

_NO_SUCH_NAME = frozenset({socket.EAI_NONAME, socket.EAI_NODATA})


class NameNotFoundError(Exception):
    """The name does not exist or has no addresses: an answer, which may be true."""


class LookUpError(Exception):
    """There was no answer."""


async def look_up_addresses(host: str, port: int) -> tuple[str, ...]:
    """Endpoints of all addresses of ``host``, in the resolver's order."""

    def ask() -> list[str]:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return [str(address[0]) for *_, address in found]

    try:
        addresses = await call_in_daemon_thread(ask, name=f"look up {host}")
    except socket.gaierror as error:
        kind = NameNotFoundError if error.errno in _NO_SUCH_NAME else LookUpError
        raise kind((error.strerror or str(error)).lower()) from None
    except (OSError, UnicodeError) as error:  # UnicodeError: no host name can be so
        raise LookUpError(str(error)) from None
    return tuple(dict.fromkeys(numeric_endpoint(address, port) for address in addresses))


def numeric_endpoint(address: str, port: int) -> str:
    """``tcp://ADDRESS:PORT``."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def is_numeric(host: str) -> bool:
    """Whether this is an IP address, not a name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


class LastAnswer:
    """The endpoints of one name: the last good answer.  Pure: time is a parameter.

    It stays while there is no answer at all, and for ``empty_s`` while the answer is that there is no such name, which
    a resolver also says when it is misconfigured for a moment.
    """

    def __init__(self, empty_s: float) -> None:
        self._empty_s = empty_s
        self._empty_since: float | None = None
        self.endpoints: tuple[str, ...] = ()
        self.problem: str | None = None

    def on_answer(self, endpoints: tuple[str, ...]) -> None:
        """The name has these endpoints."""
        self.endpoints, self.problem, self._empty_since = endpoints, None, None

    def on_empty(self, problem: str, now: float) -> None:
        """The name has none."""
        self.problem = problem
        if self._empty_since is None:
            self._empty_since = now
        if now - self._empty_since >= self._empty_s:
            self.endpoints = ()

    def on_failure(self, problem: str) -> None:
        """There was no answer."""
        self.problem = problem


class WatchedName:
    """One name that is looked up every ``dns_poll_s``, one look-up at a time."""

    def __init__(self, shown: str, look_up: LookUp, limits: MembershipConfig, clock: Clock) -> None:
        self.shown = shown
        self.last = LastAnswer(limits.dns_empty_s)
        self._look_up = look_up
        self._limits = limits
        self._clock = clock
        self._logged: str | None = None

    async def follow(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` after each other answer, until cancelled."""
        known: tuple[str, ...] = ()
        while True:
            await self._ask()
            if self.last.endpoints != known:
                known = self.last.endpoints
                changed()
            await asyncio.sleep(self._limits.dns_poll_s)

    async def _ask(self) -> None:
        asking = asyncio.ensure_future(self._look_up())
        try:
            done, _ = await asyncio.wait({asking}, timeout=self._limits.dns_timeout_s)
            if not done:
                self.last.on_failure(f"no answer within {self._limits.dns_timeout_s:g} s")
                self._log_problem()
            self.last.on_answer(await asking)
        except NameNotFoundError as error:
            self.last.on_empty(str(error), self._clock.now())
        except LookUpError as error:
            self.last.on_failure(str(error))
        except Exception as error:
            log.exception("%s could not be looked up", self.shown)
            self.last.on_failure(str(error) or type(error).__name__)
        finally:
            asking.cancel()
        self._log_problem()

    def _log_problem(self) -> None:
        """Once, until it is another."""
        problem = self.last.problem
        if problem == self._logged:
            return
        self._logged = problem
        if problem is None:
            log.info("%s is resolved again", self.shown)
        else:
            log.warning("%s cannot be resolved, its last good answer stays: %s", self.shown, problem)


MakeLookUp = Callable[[str, int], LookUp]
"""Called with host and port."""


def system_look_up(host: str, port: int) -> LookUp:
    """By the system's resolver."""
    return lambda: look_up_addresses(host, port)


class ResolvedMembers:
    """The members of another source, with numeric endpoints in the place of names.

    A name that is not resolved yet holds up no other member.  While there are only such, nothing is said: an empty set
    would say that there are no members.
    """

    def __init__(
        self, source: Members, limits: MembershipConfig, clock: Clock, look_up: MakeLookUp = system_look_up
    ) -> None:
        self._source = source
        self._limits = limits
        self._clock = clock
        self._look_up = look_up
        self._members: Sequence[Member] = ()
        self._names: dict[str, WatchedName] = {}  # by endpoint with a name; they stay when a watch begins anew
        self._following: dict[str, asyncio.Task[None]] = {}
        self._addresses: dict[str, str] = {}  # the numeric endpoint in use, by endpoint with a name

    async def watch(self, tell: MembersHandler) -> None:
        has_told = False

        def changed() -> None:
            nonlocal has_told
            resolved = self._resolved()
            if resolved or has_told or not self._names:
                has_told = True
                tell(resolved)

        def on_members(members: Sequence[Member]) -> None:
            self._members = members
            self._follow({m.endpoint for m in members if not is_numeric(host_and_port(m.endpoint)[0])}, changed)
            changed()

        try:
            await self._source.watch(on_members)
        finally:
            following = list(self._following.values())
            self._following.clear()
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)

    def problems(self) -> Sequence[MembersProblem]:
        unresolved = [(name.shown, name.last.problem) for name in self._names.values() if name.last.problem is not None]
        return (*self._source.problems(), *unresolved)

    def _follow(self, endpoints: set[str], changed: Callable[[], None]) -> None:
        for endpoint in self._names.keys() - endpoints:
            del self._names[endpoint]
            self._addresses.pop(endpoint, None)
            if endpoint in self._following:
                self._following.pop(endpoint).cancel()
        for endpoint in sorted(endpoints - self._following.keys()):
            name = self._names.get(endpoint)
            if name is None:
                look_up = self._look_up(*host_and_port(endpoint))
                name = self._names[endpoint] = WatchedName(endpoint, look_up, self._limits, self._clock)
            self._following[endpoint] = asyncio.get_running_loop().create_task(name.follow(changed))

    def _resolved(self) -> list[Member]:
        """All members that have an address; of two at the same one, the first."""
        found: dict[str, Member] = {}
        for member in self._members:
            endpoint = self._numeric(member.endpoint)
            if endpoint is not None and endpoint not in found:
                found[endpoint] = msgspec.structs.replace(member, endpoint=endpoint)
        return list(found.values())

    def _numeric(self, endpoint: str) -> str | None:
        """The numeric endpoint, the same one as long as the name has it: resolvers turn the order of several."""
        name = self._names.get(endpoint)
        if name is None:
            return endpoint
        known, found = self._addresses.get(endpoint), name.last.endpoints
        if known is None or known not in found:
            known = found[0] if found else None
        if known is None:
            self._addresses.pop(endpoint, None)
        else:
            self._addresses[endpoint] = known
        return known
