"""Names to numeric endpoints, beside the event loop and libzmq's I/O thread.

ZeroMQ would resolve names in the thread that moves all messages of a process, so it is given numbers only.  A and AAAA
records come from the system's resolver (getaddrinfo: /etc/hosts, search domains, the order of nsswitch.conf), each
look-up in a thread of its own.  SRV records, which it does not know, come from dnspython.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from penstock.clock import Clock
from penstock.config.limits import MembershipConfig
from penstock.launch.members.daemon_thread import call_in_daemon_thread

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


class KeptAnswer:
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
        self.kept = KeptAnswer(limits.dns_empty_s)
        self._look_up = look_up
        self._limits = limits
        self._clock = clock
        self._logged: str | None = None

    async def follow(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` after each other answer, until cancelled."""
        while True:
            before = self.kept.endpoints
            await self._ask()
            if self.kept.endpoints != before:
                changed()
            await asyncio.sleep(self._limits.dns_poll_s)

    async def _ask(self) -> None:
        asking = asyncio.ensure_future(self._look_up())
        try:
            done, _ = await asyncio.wait({asking}, timeout=self._limits.dns_timeout_s)
            if not done:
                self.kept.on_failure(f"no answer within {self._limits.dns_timeout_s:g} s")
                self._log_problem()
            self.kept.on_answer(await asking)
        except NameNotFoundError as error:
            self.kept.on_empty(str(error), self._clock.now())
        except LookUpError as error:
            self.kept.on_failure(str(error))
        except Exception as error:
            log.exception("%s could not be looked up", self.shown)
            self.kept.on_failure(str(error) or type(error).__name__)
        finally:
            asking.cancel()
        self._log_problem()

    def _log_problem(self) -> None:
        """Once, until it is another."""
        problem = self.kept.problem
        if problem == self._logged:
            return
        self._logged = problem
        if problem is None:
            log.info("%s is resolved again", self.shown)
        else:
            log.warning("%s cannot be resolved, its last good answer stays: %s", self.shown, problem)
