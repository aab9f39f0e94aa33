"""Workers on other hosts, seen from a gateway: who is there, and under which incarnation.

No supervisor of this host tells of them, so they are asked: a Hello on a line of its own to each mailbox, answered by
Reports.  What the supervisor would have said (``WorkerUp``, ``WorkerDown``) is said by this object.  Knows nothing
about requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.clock import Clock
from penstock.types import WorkerId, WorkerState, is_older, same_run
from penstock.wire.messages import Hello, Report, SupervisorMessage, WorkerDown, WorkerUp
from penstock.wire.transport import AsyncLink

log = logging.getLogger(__name__)

REMEMBERED_RUNS = 8
"""Earlier runs of a worker at one address that are not taken back when a word of theirs comes late."""

LOST_S = 5.0
"""A worker that says nothing for so long is taken for dead, until it speaks again.  (One with work is suspected much
sooner, by the router.)"""


@dataclass(slots=True)
class _Mailbox:
    link: AsyncLink
    worker: WorkerId | None = None  # who answered last
    incarnation: int = 0
    heard: float = 0.0
    lost: bool = True
    replaced: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED_RUNS))  # the last of ended runs
    strange: bool = False  # complained about already


class JoinedWorkers:
    """Use: ``start()`` on the running loop, ``await close()``."""

    def __init__(
        self,
        endpoints: Sequence[str],
        connect: Callable[[str], AsyncLink],
        tell: Callable[[SupervisorMessage], None],
        hello: Hello,
        *,
        clock: Clock,
        beat_s: float,
    ) -> None:
        """``hello`` must bear another name than the router's: a worker answers a gateway on one line only."""
        self._tell = tell
        self.uses_mixed = False  # workers of fleets that read and write in two numerics classes
        self._hello = hello
        self._clock = clock
        self._beat_s = beat_s
        self._mailboxes = {endpoint: _Mailbox(connect(endpoint)) for endpoint in endpoints}
        self._tasks: list[asyncio.Task[None]] = []
        self._ticked = clock.now()

    def start(self) -> None:
        """Begin to ask.  Needs a running event loop."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._listen(endpoint)) for endpoint in self._mailboxes]
        self._tasks.append(loop.create_task(self._ask()))

    async def close(self) -> None:
        """Close all lines."""
        for mailbox in self._mailboxes.values():
            mailbox.link.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen(self, endpoint: str) -> None:
        async for received in self._mailboxes[endpoint].link:
            if isinstance(received.message, Report):
                try:
                    self.on_report(endpoint, received.message)
                except Exception:
                    log.exception("a report from %s could not be handled", endpoint)

    async def _ask(self) -> None:
        while True:
            try:
                self.tick()
            except Exception:
                log.exception("joined workers could not be asked")
            await asyncio.sleep(self._beat_s)

    def on_report(self, endpoint: str, report: Report) -> None:
        """A worker at ``endpoint`` tells how it is."""
        mailbox = self._mailboxes[endpoint]
        if report.identity.mixed and not self.uses_mixed:
            if not mailbox.strange:
                log.warning(
                    "%s is not used: its fleet reads prompts and writes answers in two numerics classes, %s; "
                    "--allow-mixed-numerics would have it used",
                    endpoint,
                    report.identity.numerics,
                )
            mailbox.strange = True
            return
        others = [m.worker for e, m in self._mailboxes.items() if e != endpoint and not m.lost]
        if report.worker in others:
            if not mailbox.strange:
                log.warning("%s calls itself %s, as another does: give it another --name", endpoint, report.worker)
            mailbox.strange = True
            return
        if self._is_late(mailbox, report):
            return
        mailbox.heard = self._clock.now()
        if mailbox.lost or (report.worker, report.incarnation) != (mailbox.worker, mailbox.incarnation):
            self._leave(mailbox, "replaced")
            if mailbox.worker is not None and not same_run(report.incarnation, mailbox.incarnation):
                mailbox.replaced.append(mailbox.incarnation)
            self._tell(
                WorkerUp(
                    worker=report.worker,
                    incarnation=report.incarnation,
                    role=report.role,
                    pid=report.pid,
                    endpoint=endpoint,
                )
            )
            # Only now: where telling failed, the next report tries it again.
            mailbox.worker, mailbox.incarnation = report.worker, report.incarnation
            mailbox.lost = mailbox.strange = False

    def _is_late(self, mailbox: _Mailbox, report: Report) -> bool:
        """Is this of a process whose place has been taken by now?  A message can have waited on an old connection."""
        if report.worker != mailbox.worker:
            return False
        ended = any(same_run(report.incarnation, run) for run in mailbox.replaced)
        return ended or is_older(report.incarnation, mailbox.incarnation)

    def tick(self) -> None:
        """Greet all, and give up those that have been silent for too long."""
        now = self._clock.now()
        late = max(0.0, now - self._ticked - 2 * self._beat_s)  # we did not listen, so silence proves nothing
        self._ticked = now
        for mailbox in self._mailboxes.values():
            mailbox.link.send(self._hello)
            mailbox.heard += late
            if now - mailbox.heard > LOST_S:
                self._leave(mailbox, f"silent for {now - mailbox.heard:.1f} s")

    def _leave(self, mailbox: _Mailbox, reason: str) -> None:
        if mailbox.worker is None or mailbox.lost:
            return
        mailbox.lost = True
        self._tell(
            WorkerDown(worker=mailbox.worker, incarnation=mailbox.incarnation, state=WorkerState.DEAD, reason=reason)
        )
