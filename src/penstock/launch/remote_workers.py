"""A gateway's view of the workers on other hosts: which have joined, and in which incarnation.

No supervisor of this host knows them, so the gateway polls their endpoints, and this object sends the messages that a
supervisor would have sent (``WorkerUp``, ``WorkerDown``, ``WorkerRemoved``)::

    none known ----Hello(discovery) on its own link--> Report --> WorkerUp: the router opens its link, this one closes
         ^                                                                |
         +--- WorkerDown <--- no Report over the router's link in LOST_S -+
                              or its port refuses connections

A known worker is polled by the router alone, which passes its reports to ``on_report``.  Of two workers of one name the
first to join is used, and one of this host before any other.  Endpoints come and go with
``set_members``.  Of one that is gone nothing is kept here; its worker, if it lives, is the router's until its requests
have ended.  Knows nothing about requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.clock import Clock
from penstock.config.base import host_and_port
from penstock.errors import ConfigError
from penstock.launch.members.interface import Member
from penstock.router.turns import sleep_to_multiple
from penstock.types import WorkerId, WorkerState, is_older_incarnation, same_run
from penstock.wire.codec import version_reason
from penstock.wire.gateway_messages import Hello, WorkerReport
from penstock.wire.supervisor_messages import SupervisorMessage, WorkerDown, WorkerRemoved, WorkerUp
from penstock.wire.transport import AsyncLink

log = logging.getLogger(__name__)

PROBE_S = 3.0
"""To find out why an endpoint does not respond."""

REMEMBERED_RUNS = 8
"""Ended runs of a worker at one endpoint whose late messages are ignored."""

STRANGE_PAUSE_S = 1.0
"""Between two Hellos to a worker that responds and is not used."""

WAITING_NOTE_S = 10.0
"""Between two log lines about an endpoint that does not respond."""

FIRST_NOTE_S = 1.0
"""Before the first of them: workers may still be starting."""

PROBE_VERSION_S = 0.5
"""A worker that has not answered for so long may be of another version: it is asked for it, too."""

PROBED_AT_ONCE = 16
"""Endpoints that are probed, and logged, at a time."""

PROBE_PAUSE_S = 1.0
"""From one such round to the next."""

OPENED_PER_TICK = 64
"""Links that are opened for discovery in one turn of the event loop: some milliseconds."""

GREETINGS_PER_LINK = 256
"""Hellos that may wait in a link for somebody who never connects.  Then it is opened anew."""

QUIET_LOOK_S = 0.1
"""Between two looks at which workers with requests are quiet."""

QUIET_PAUSE_S = 0.5
"""Between two connections to the port of a worker that is quiet and does not refuse them: it may be in a long step."""

LOST_S = 5.0
"""A worker that is silent for this long counts as dead until it reports again.  (The router suspects a worker with work
much sooner.)"""


@dataclass(slots=True)
class _Mailbox:
    member: Member
    added_at: float
    up: WorkerUp | None = None  # as it was sent last
    greetings: int = 0  # sent over the link
    link: AsyncLink | None = None  # for discovery
    listener: asyncio.Task[None] | None = None  # of that link
    worker: WorkerId | None = None  # that reported last
    incarnation: int = 0
    last_report_at: float = 0.0
    lost: bool = True
    replaced: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED_RUNS))  # the latest ended runs
    strange: bool = False  # logged already
    same: bool = False  # its worker has joined at another endpoint, as a host with two addresses does
    probed_at: float = float("-inf")
    noted: float = 0.0  # time of the last log line about it
    reason: str = "no answer yet"  # why no worker has joined


async def why_unreachable(endpoint: str) -> str:
    """Why a connection to ``tcp://HOST:PORT`` fails; a hint about keys if it does not."""
    host, port = host_and_port(endpoint)
    try:
        async with asyncio.timeout(PROBE_S):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return f"no connection within {PROBE_S:g} s"
    except OSError as error:
        return os.strerror(error.errno).lower() if error.errno else str(error)
    writer.close()
    return "something listens there and does not respond: is it a penstock worker with the same keys and version?"


async def refuses_connections(endpoint: str) -> bool:
    """Whether nothing listens at ``tcp://HOST:PORT``, as its host says.

    False where that says nothing: the way there may be cut.
    """
    host, port = host_and_port(endpoint)
    try:
        async with asyncio.timeout(PROBE_S):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except OSError:  # and TimeoutError, which is one
        return False
    writer.close()
    return False


class RemoteWorkers:
    """Use: ``start()`` on the running loop, ``await close()``."""

    def __init__(
        self,
        connect: Callable[[str], AsyncLink],
        tell: Callable[[SupervisorMessage], None],
        hello: Hello,
        *,
        clock: Clock,
        beat_s: float,
        uses_mixed: bool = False,
        probe: Callable[[str], Awaitable[str]] = why_unreachable,
        quiet: Callable[[], Sequence[str]] = tuple,
        refuses: Callable[[str], Awaitable[bool]] = refuses_connections,
    ) -> None:
        """``hello`` requests discovery; ``uses_mixed``: also workers of fleets with mixed numerics are used; ``probe``
        finds out why an endpoint does not respond; ``quiet`` are endpoints of workers that have requests and say
        nothing, ``refuses`` finds out whether the process there is gone."""
        self._send = tell
        self._connect = connect
        self._uses_mixed = uses_mixed
        self._hello = hello
        self._clock = clock
        self._beat_s = beat_s
        self._mailboxes: dict[str, _Mailbox] = {}  # by endpoint
        self._lost: set[str] = set()
        self._found: dict[WorkerId, str] = {}  # workers that are not lost, and where
        self._local: set[WorkerId] = set()  # of this host, which the supervisor knows
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asking: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._ticked = clock.now()
        self._probe = probe
        self._probing: asyncio.Task[None] | None = None
        self._next_probes = float("-inf")
        self._quiet = quiet
        self._refuses = refuses
        self._quiet_probes: dict[str, tuple[float, asyncio.Task[None]]] = {}  # the last: when it began

    def set_members(self, members: Sequence[Member]) -> None:
        """From now on workers are looked for at the endpoints of these, and nowhere else."""
        wanted = {member.endpoint: member for member in members}
        for endpoint in [endpoint for endpoint in self._mailboxes if endpoint not in wanted]:
            self._remove(endpoint)
        now = self._clock.now()
        for endpoint, member in wanted.items():
            mailbox = self._mailboxes.get(endpoint)
            if mailbox is None:
                noted = now - WAITING_NOTE_S + FIRST_NOTE_S
                self._mailboxes[endpoint] = _Mailbox(member, added_at=now, noted=noted)
                self._lost.add(endpoint)
            elif mailbox.member != member:
                mailbox.member = member
                if mailbox.up is not None and not mailbox.lost and mailbox.up.labels != member.labels:
                    mailbox.up = msgspec.structs.replace(mailbox.up, labels=member.labels)
                    self._send(mailbox.up)

    def add_local(self, worker: WorkerId) -> None:
        """A worker of this host has this name: another host's of the same name is not used, nor is it any more."""
        self._local.add(worker)
        endpoint = self._found.get(worker)
        if endpoint is not None:
            self._leave(endpoint, self._mailboxes[endpoint], "a worker of this host has its name")
        for mailbox in self._mailboxes.values():
            if mailbox.worker == worker:  # now, or before it was lost
                mailbox.worker = None  # whatever becomes of this member, the name is not its own

    def leave_unaccepted(self, accepts: Callable[[WorkerId], bool]) -> None:
        """Give up workers at once whose keys are not accepted any more."""
        for worker, endpoint in list(self._found.items()):
            if not accepts(worker):
                self._leave(endpoint, self._mailboxes[endpoint], "its node's key is not accepted")

    def _remove(self, endpoint: str) -> None:
        mailbox = self._mailboxes.pop(endpoint)
        self._lost.discard(endpoint)
        self._hang_up(mailbox)
        worker = mailbox.worker
        if worker is not None and self._found.get(worker, endpoint) == endpoint:
            self._found.pop(worker, None)
            log.info("%s at %s is no longer a member", worker, mailbox.member.shown)
            self._send(WorkerRemoved(worker=worker))

    def unjoined(self) -> list[tuple[str, str]]:
        """Endpoints where no worker has joined, each with the reason."""
        lost = [self._mailboxes[endpoint] for endpoint in sorted(self._lost)]
        return [(mailbox.member.shown, mailbox.reason) for mailbox in lost if not mailbox.same]

    @property
    def expected(self) -> int:
        """Number of endpoints where a worker has joined or is waited for."""
        return len(self._found) + len(self.unjoined())

    @property
    def count(self) -> int:
        """Number of workers that have joined."""
        return len(self._found)

    def start(self) -> None:
        """Begin to poll.  Needs a running event loop."""
        self._loop = asyncio.get_running_loop()
        self._asking = self._loop.create_task(self._poll())
        self._watching = self._loop.create_task(self._watch_quiet())

    async def close(self) -> None:
        """Close all links."""
        tasks = [self._hang_up(mailbox) for mailbox in self._mailboxes.values()]
        for task in (self._asking, self._watching, self._probing, *(task for _, task in self._quiet_probes.values())):
            if task is not None:
                task.cancel()
                tasks.append(task)
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)

    async def _listen(self, endpoint: str, link: AsyncLink) -> None:
        async for received in link:
            if isinstance(received.message, WorkerReport):
                try:
                    self.on_report(endpoint, received.message)
                except Exception:
                    log.exception("a report from %s could not be handled", endpoint)

    async def _poll(self) -> None:
        while True:
            try:
                self.tick()
            except Exception:
                log.exception("joined workers could not be asked")
            await sleep_to_multiple(self._beat_s)

    async def _watch_quiet(self) -> None:
        while True:
            await sleep_to_multiple(QUIET_LOOK_S)
            try:
                self._look_at_quiet()
            except Exception:
                log.exception("quiet workers could not be looked at")

    def _look_at_quiet(self) -> None:
        """Connect to the ports of workers that have requests and say nothing."""
        quiet = self._quiet()
        if not quiet and not self._quiet_probes:
            return
        now, loop = self._clock.now(), asyncio.get_running_loop()
        self._quiet_probes = {
            endpoint: last
            for endpoint, last in self._quiet_probes.items()
            if not last[1].done() or now - last[0] < QUIET_PAUSE_S
        }
        found = set(self._found.values())
        for endpoint in quiet:
            if endpoint in found and endpoint not in self._quiet_probes:
                self._quiet_probes[endpoint] = now, loop.create_task(self._probe_port(endpoint))

    def on_disconnected(self, endpoint: str) -> None:
        """The router's connection to the worker at ``endpoint`` has ended: find out at once whether the process has."""
        mailbox = self._mailboxes.get(endpoint)
        if self._loop is None or mailbox is None or mailbox.lost:
            return
        if endpoint in self._quiet_probes:  # it was begun before
            self._quiet_probes[endpoint][1].cancel()
        probe = self._loop.create_task(self._probe_port(endpoint, disconnected=True))
        self._quiet_probes[endpoint] = self._clock.now(), probe

    async def _probe_port(self, endpoint: str, *, disconnected: bool = False) -> None:
        mailbox = self._mailboxes.get(endpoint)
        if mailbox is None:
            return
        incarnation = mailbox.incarnation
        gone = await self._refuses(endpoint)
        if gone and mailbox.incarnation == incarnation and (disconnected or endpoint in self._quiet()):
            self._leave(endpoint, mailbox, "its port refuses connections")

    def on_report(self, endpoint: str, report: WorkerReport) -> None:
        """Handle the report of a worker at ``endpoint``.  Endpoints of no members are ignored."""
        mailbox = self._mailboxes.get(endpoint)
        if mailbox is None:
            return
        if report.identity.mixed and not self._uses_mixed:
            if not mailbox.strange:
                log.warning(
                    "%s is not used: its fleet has two numerics classes for prefill and decode, %s; "
                    "to use it add --allow-mixed-numerics",
                    endpoint,
                    report.identity.numerics,
                )
            mailbox.strange = True
            return
        other = self._found.get(report.worker, endpoint)
        if report.worker in self._local or other != endpoint:
            self._note_second(mailbox, report, None if report.worker in self._local else self._mailboxes[other])
            return
        if self._is_late(mailbox, report):
            return
        mailbox.last_report_at = self._clock.now()
        if mailbox.lost or (report.worker, report.incarnation) != (mailbox.worker, mailbox.incarnation):
            self._leave(endpoint, mailbox, "replaced")
            if mailbox.worker is not None and not same_run(report.incarnation, mailbox.incarnation):
                mailbox.replaced.append(mailbox.incarnation)
            if mailbox.worker not in (None, report.worker) and mailbox.worker not in self._found:
                self._send(WorkerRemoved(worker=mailbox.worker))  # its name is free now
                mailbox.worker = None
            mailbox.up = WorkerUp(
                worker=report.worker,
                incarnation=report.incarnation,
                role=report.role,
                pid=report.pid,
                endpoint=endpoint,
                labels=mailbox.member.labels,
            )
            self._send(mailbox.up)
            # Only now: if the message could not be handled, the next report tries again.
            mailbox.worker, mailbox.incarnation = report.worker, report.incarnation
            mailbox.lost = mailbox.strange = mailbox.same = False
            member = mailbox.member
            log.info("joined %s at %s", report.worker, endpoint if member.name == report.worker else member.shown)
            self._found[report.worker] = endpoint
            self._lost.discard(endpoint)
            self._hang_up(mailbox)

    def _note_second(self, mailbox: _Mailbox, report: WorkerReport, other: _Mailbox | None) -> None:
        """A worker that has joined at ``other`` reports here, or one of its name; ``other`` is None for this host's."""
        mailbox.same = other is not None and report.incarnation == other.incarnation
        place = "of this host" if other is None else f"at {other.member.shown}"
        mailbox.reason = f"calls itself {report.worker}, as the worker {place} does: give it another --name"
        if not (mailbox.strange or mailbox.same):
            log.warning("%s %s", mailbox.member.shown, mailbox.reason)
        mailbox.strange = True

    def _is_late(self, mailbox: _Mailbox, report: WorkerReport) -> bool:
        """Whether the report is of a process that has been replaced: it can have waited on an old connection."""
        if report.worker != mailbox.worker:
            return False
        ended = any(same_run(report.incarnation, run) for run in mailbox.replaced)
        return ended or is_older_incarnation(report.incarnation, mailbox.incarnation)

    def tick(self) -> None:
        """Poll the endpoints without a worker, and give up workers that have been silent for too long."""
        now = self._clock.now()
        late = max(0.0, now - self._ticked - 2 * self._beat_s)  # this process did not run, so silence proves nothing
        self._ticked = now
        if late:
            for endpoint in self._found.values():
                self._mailboxes[endpoint].last_report_at += late
        silent = [
            endpoint for endpoint in self._found.values() if now - self._mailboxes[endpoint].last_report_at > LOST_S
        ]
        for endpoint in silent:
            mailbox = self._mailboxes[endpoint]
            self._leave(endpoint, mailbox, f"silent for {now - mailbox.last_report_at:.1f} s")
        opened = 0
        for endpoint in self._lost:
            opened += self._discover(endpoint, now, may_open=opened < OPENED_PER_TICK)
        due = [endpoint for endpoint in self._lost if now - self._mailboxes[endpoint].noted >= WAITING_NOTE_S]
        idle = self._probing is None or self._probing.done()
        if due and self._loop is not None and idle and now >= self._next_probes:
            self._next_probes = now + PROBE_PAUSE_S
            due.sort(key=lambda endpoint: (self._mailboxes[endpoint].noted, endpoint))
            self._probing = self._loop.create_task(self._note_waiting(due[:PROBED_AT_ONCE]))

    async def _note_waiting(self, endpoints: list[str]) -> None:
        """Log why no worker has joined at these endpoints, which are probed at the same time."""
        reasons = await asyncio.gather(*(self._probe(endpoint) for endpoint in endpoints))
        for endpoint, reason in zip(endpoints, reasons, strict=True):
            mailbox = self._mailboxes.get(endpoint)
            if mailbox is None:
                continue
            mailbox.noted = self._clock.now()
            if endpoint in self._lost and not mailbox.strange:
                version = mailbox.link.counters.other_version if mailbox.link is not None else 0
                mailbox.reason = version_reason(version) if version else reason
                log.warning("waiting for %s: %s", mailbox.member.shown, mailbox.reason)

    def _discover(self, endpoint: str, now: float, *, may_open: bool) -> bool:
        """Greet the worker that is there.  Returns whether a link was opened for that."""
        mailbox = self._mailboxes[endpoint]
        if now - mailbox.probed_at < (STRANGE_PAUSE_S if mailbox.strange else 0.0):
            return False
        if mailbox.greetings >= GREETINGS_PER_LINK:
            self._hang_up(mailbox)
        opens = mailbox.link is None
        if mailbox.link is None:
            if not may_open:
                return False
            try:
                mailbox.link = self._connect(endpoint)
            except ConfigError as error:  # this process may be out of sockets or descriptors for a while
                mailbox.reason = str(error)
                return False
            mailbox.greetings = 0
            if self._loop is not None:
                mailbox.listener = self._loop.create_task(self._listen(endpoint, mailbox.link))
        mailbox.probed_at = now
        mailbox.greetings += 1
        mailbox.link.send(self._hello)
        if now - mailbox.added_at > PROBE_VERSION_S:
            mailbox.link.probe_version()
        return opens

    def _hang_up(self, mailbox: _Mailbox) -> asyncio.Task[None] | None:
        """Close the discovery link; the task that listens to it ends by itself."""
        link, mailbox.link = mailbox.link, None
        if link is not None:
            link.close()
        return mailbox.listener

    def _leave(self, endpoint: str, mailbox: _Mailbox, reason: str) -> None:
        if mailbox.worker is None or mailbox.lost or self._mailboxes.get(endpoint) is not mailbox:
            return
        mailbox.lost = True
        self._found.pop(mailbox.worker, None)
        self._lost.add(endpoint)
        self._send(
            WorkerDown(worker=mailbox.worker, incarnation=mailbox.incarnation, state=WorkerState.DEAD, reason=reason)
        )
