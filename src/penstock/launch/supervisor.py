"""The supervisor's loop: one thread, one poll(), no asyncio, no ZeroMQ; it forks, watches, kills and reaps.

    pidfd readable      a child has ended          -> ProcessExited
    channel readable    the gateway says something -> WorkerSuspected
    wake-up pipe        SIGTERM, SIGINT, SIGHUP    -> StopRequested
    time                read the heartbeat table   -> HeartbeatsRead

``restart_policy.RestartPolicy`` decides, a ``ChildSpec`` says what a child runs.  However this loop ends, by an
exception too, no child outlives it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, assert_never

from penstock.config.limits import SuperviseConfig
from penstock.errors import ConfigError, ProtocolError, RestartLimitReached
from penstock.launch.channel import Channel
from penstock.launch.fork_server import ForkedProcess, OomKillLog, ProcessHasThreads, fork, read_process_stats
from penstock.launch.heartbeat import HeartbeatSlot
from penstock.launch.node_lease import LeaseWatch
from penstock.launch.restart_policy import (
    GATEWAY,
    AllExited,
    ChildState,
    ForkProcess,
    HeartbeatsRead,
    LoadRequested,
    LogLine,
    NotifyGateways,
    ProcessExit,
    ProcessExited,
    ProcessStats,
    RestartEffect,
    RestartEvent,
    RestartPolicy,
    SendSignal,
    StopRequested,
    SupervisorState,
    Tick,
    UnloadRequested,
    WorkerSuspected,
)
from penstock.launch.service_notify import READY, notify_service_manager
from penstock.types import Role, WorkerId
from penstock.wire.supervisor_messages import LoadModel, ServiceDraining, SuspectWorker, UnloadModel, WorkerUp

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

READY_AGAIN_S = 1.0
"""Between two messages to the holder of a lease that the node is ready."""


class StoppedEarly(Exception):  # noqa: N818 - not an error: somebody asked for it
    """The service was stopped before everything had started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What a forked child runs: ``main`` returns its exit code; ``inherited_fds`` are the descriptors that it needs.

    ``followers``: the other ranks of a worker that is a group of processes, by number; ``rank``: that of ``main``.
    """

    main: Callable[[], int]
    rank: int = 0
    followers: Mapping[int, Callable[[], int]] = field(default_factory=dict[int, Callable[[], int]])
    inherited_fds: tuple[int, ...] = ()
    endpoint: str = ""  # a worker's mailbox; empty: gateways do not hear of it
    on_forked: Callable[[], None] = lambda: None  # closes what only the child keeps; called in the parent


class ChildSpecs(Protocol):
    """Makes the specification of each child."""

    def gateway_spec(self, name: str, incarnation: int, channel: Channel) -> ChildSpec:
        """A gateway; ``channel`` is its end of the channel to the supervisor."""
        ...

    def worker_spec(self, worker: WorkerId, incarnation: int, predecessor_fault: str) -> ChildSpec:
        """One worker.  ``predecessor_fault``: how the incarnation before it crashed; empty: it did not."""
        ...


@dataclass(slots=True)
class _Running:
    """A child that runs: a process, or those of a worker's ranks, by number; ``leader`` answers for all."""

    incarnation: int
    endpoint: str
    leader: ForkedProcess
    processes: dict[int, ForkedProcess]  # that have not been reaped
    exit: ProcessExit | None = None  # of the first that ended; the others are then killed

    def kill(self, signum: int) -> None:
        """Send a signal to the leader; SIGKILL goes to all."""
        for process in self.processes.values():
            if process is self.leader or signum == signal.SIGKILL:
                process.kill(signum)

    def stats(self, *, every_thread: bool) -> ProcessStats:
        """The statistics of all processes: stopped or runnable if one is; their times together."""
        own = [read_process_stats(process.pid, every_thread=every_thread) for process in self.processes.values()]
        return ProcessStats(
            stopped=any(one.stopped for one in own),
            cpu_s=sum(one.cpu_s for one in own),
            queued_s=sum(one.queued_s for one in own),
            runnable=any(one.runnable for one in own),
        )


class Supervisor:
    """Supervises child processes: ``slots`` names all of them, ``gateways`` those that are gateways.

    Use as a context manager: ``start`` the gateways, ``poll`` while weights are loaded, then ``run``.
    """

    def __init__(
        self,
        config: SuperviseConfig,
        jobs: ChildSpecs,
        slots: Mapping[str, HeartbeatSlot],
        pulse: Callable[[], None] | None = None,
        *,
        gateways: Sequence[str] = (GATEWAY,),
        run: int = 0,
        lease: LeaseWatch | None = None,
        serves_others: bool = False,
    ) -> None:
        """``pulse``: called at every reading of heartbeats, and while weights are loaded; ``run``: the incarnation that
        workers' first ones follow (``processes.incarnations_of_a_run``).  ``lease``: stop in order when it is over, and
        repeat to its holder that all are ready.  ``serves_others``: gateways of other hosts use the workers, as they
        always do where there is none here."""
        self._lease = lease
        self._was_ready = False
        self._next_ready = 0.0
        self._pulse = pulse
        self._config = config
        self._jobs = jobs
        self._slots = slots
        self._gateways = tuple(name for name in gateways if name in slots)
        self._machine = RestartPolicy.of(config, self._gateways, run=run, serves_others=serves_others)
        self._roles: dict[WorkerId, Role] = {}
        self._running: dict[str, _Running] = {}
        self._channels: dict[str, Channel] = {}  # to each gateway that listens
        self._memory_kills = OomKillLog(time.monotonic())
        self._next_reading = 0.0
        self._done: AllExited | None = None
        self._stoppers: list[Callable[[], None]] = []
        self._handlers: dict[int, object] = {}

    # --- life --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Supervisor:
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        os.set_blocking(self._wake_w, False)
        # A service of a catalog is stopped by its parent, which also handles the terminal's signals.
        asked = STOP_SIGNALS if self._pulse is None else (signal.SIGTERM,)
        caught = [s for s in asked if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]  # nohup
        self._handlers = {signum: signal.signal(signum, lambda *_: None) for signum in caught}
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._running.values():
            child.kill(signal.SIGKILL)
        for process in (process for child in self._running.values() for process in child.processes.values()):
            os.waitid(os.P_PIDFD, process.pidfd, os.WEXITED)
            os.close(process.pidfd)
        self._running.clear()
        for channel in self._channels.values():
            channel.close()
        signal.set_wakeup_fd(-1)
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]
        os.close(self._wake_r)
        os.close(self._wake_w)

    def on_stopping(self, action: Callable[[], None]) -> None:
        """Call ``action`` once, as soon as stopping begins."""
        self._stoppers.append(action)

    def start(self) -> None:
        """Fork the gateways."""
        self._read_heartbeats()

    def poll(self) -> None:
        """Check for a stop request; to be called often while weights are loaded.

        Loading uses threads, so nothing is forked meanwhile: the death of a child is handled when ``run`` starts.
        Raises StoppedEarly; once the threads have ended, call ``wait_until_stopped``.
        """
        if self._pulse is not None:
            self._pulse()
        self._on_signals()
        if self._machine.state is not SupervisorState.RUNNING:
            raise StoppedEarly

    def wait_until_stopped(self) -> None:
        """After StoppedEarly: wait until all children have ended."""
        while self._done is None:
            self._turn(None)

    def run(self, roles: Mapping[WorkerId, Role], ready: Callable[[], None]) -> int:
        """Fork the workers and supervise until all children have ended; returns the exit code.

        ``ready`` is called once, when all children are ready.  Raises RestartLimitReached.
        """
        self._roles.update(roles)
        self._machine.add_workers(roles)
        self._next_reading = 0.0
        while self._done is None:
            self._turn(None)
            if not self._was_ready and self._machine.all_ready():
                self._was_ready = True
                ready()
        self._raise_complaint()
        return self._done.code

    @property
    def has_gateways(self) -> bool:
        """Whether this host has gateways."""
        return bool(self._gateways)

    def pid(self, child: str) -> int | None:
        """Process id of the running incarnation; None: it does not run."""
        running = self._running.get(child)
        return running.leader.pid if running else None

    def _raise_complaint(self) -> None:
        if self._done is not None and self._done.complaint is not None:
            raise RestartLimitReached(self._done.complaint)

    # --- one turn ----------------------------------------------------------------------------------------------------

    def _turn(self, timeout_s: float | None) -> None:
        """Wait until something happens or is due (at most ``timeout_s``), and handle it."""
        now = time.monotonic()
        if timeout_s is None:
            timeout_s = max(0.0, min(self._machine.next_deadline(now), self._next_reading) - now)
        poller = select.poll()
        poller.register(self._wake_r, select.POLLIN)
        by_fd = {
            process.pidfd: (name, rank)
            for name, child in self._running.items()
            for rank, process in child.processes.items()
        }
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
        for channel in self._channels.values():
            poller.register(channel, select.POLLIN | (select.POLLOUT if channel.wants_write else 0))
        ready = {fd for fd, _ in poller.poll(timeout_s * 1000)}
        if self._wake_r in ready:
            self._on_signals()
        for name, channel in list(self._channels.items()):
            if channel.fileno() in ready:
                self._on_channel(name, channel)
        for fd in ready & by_fd.keys():
            self._on_death(*by_fd[fd])
        self._read_heartbeats()

    def _on_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for signum in os.read(self._wake_r, 512):
                if signum in STOP_SIGNALS:
                    self._stop(signum)

    def _stop(self, signum: int) -> None:
        if self._machine.state is SupervisorState.RUNNING:
            log.info("%s: finishing what runs; once more to stop now", signal.Signals(signum).name)
            for action in self._stoppers:
                action()
            self._stoppers.clear()
        self._handle(StopRequested())

    def _on_channel(self, name: str, channel: Channel) -> None:
        try:
            channel.flush()
            while (message := channel.receive()) is not None:
                if isinstance(message, SuspectWorker):
                    self._handle(WorkerSuspected(message.worker, message.incarnation, message.reason))
                elif isinstance(message, LoadModel):
                    self._want(message.worker)
                elif isinstance(message, UnloadModel):
                    self._handle(UnloadRequested(message.worker))
        except EOFError:  # closed by the gateway; if it is not dead, it will be found hung
            channel.close()
            self._channels.pop(name, None)
        except ProtocolError as error:
            log.warning("from %s: %s", name, error)

    def _want(self, name: str) -> None:
        """Request a model; only those with a heartbeat slot are known."""
        if name in self._slots and name not in self._gateways:
            self._handle(LoadRequested(name))

    def _on_death(self, name: str, rank: int) -> None:
        child = self._running[name]
        ended = child.processes[rank].reap()
        if ended is None:
            return
        process = child.processes.pop(rank)
        if child.exit is None:
            code, signum = ended
            words = self._slots[name].exit_reason()
            if process is not child.leader:
                words = ": ".join(filter(None, (f"rank {rank}", words)))
            killed = signum == signal.SIGKILL and self._memory_kills.claim_kill()
            child.exit = ProcessExit(code, signum, words, out_of_memory=killed)
            child.kill(signal.SIGKILL)
        if not child.processes:  # nobody writes to the memory of this incarnation any more
            del self._running[name]
            self._handle(ProcessExited(name, child.incarnation, child.exit))

    def _read_heartbeats(self) -> None:
        now = time.monotonic()
        if now >= self._next_reading:
            self._next_reading = now + self._config.look_s
            if self._pulse is not None:
                self._pulse()
            if self._lease is not None:
                self._look_at_lease(self._lease, now)
            self._memory_kills.sample(now)
            vitals = {
                name: child.stats(every_thread=self._machine.is_silent(name)) for name, child in self._running.items()
            }
            self._handle(HeartbeatsRead({name: self._slots[name].read() for name in self._running}, vitals))
        elif now >= self._machine.next_deadline(now):
            self._handle(Tick())

    def _look_at_lease(self, lease: LeaseWatch, now: float) -> None:
        if self._was_ready and now >= self._next_ready:  # the one that holds it now may not have listened before
            self._next_ready = now + READY_AGAIN_S
            notify_service_manager(READY, wait=False)
        if self._machine.state is SupervisorState.RUNNING and lease.is_over(now):  # a second stop would mean now
            log.warning("what had started this node is gone, and nothing has taken it over")
            self._lease = None
            self._stop(signal.SIGTERM)

    # --- effects -----------------------------------------------------------------------------------------------------

    def _handle(self, event: RestartEvent) -> None:
        for effect in self._machine.handle(event, time.monotonic()):
            self._carry_out(effect)

    def _carry_out(self, effect: RestartEffect) -> None:
        match effect:
            case ForkProcess():
                self._fork(effect)
            case SendSignal():
                child = self._running.get(effect.child)
                if child is not None and child.incarnation == effect.incarnation:
                    child.kill(effect.signal)
            case NotifyGateways():
                for channel in self._channels.values():
                    channel.send(effect.message)
            case LogLine():
                log.log(logging.WARNING if effect.warning else logging.INFO, "%s", effect.text)
            case AllExited():
                self._done = effect
            case _:
                assert_never(effect)

    def _fork(self, effect: ForkProcess) -> None:
        name, incarnation = effect.child, effect.incarnation
        slot = self._slots[name]
        slot.reset(incarnation, time.monotonic_ns())
        try:
            if name in self._gateways:
                self._fork_gateway(name, incarnation, slot)
            else:
                self._fork_worker(WorkerId(name), effect, slot)
        except (
            OSError,
            ConfigError,
            ProcessHasThreads,
        ) as error:  # no process, descriptor, port or memory, or a thread: treated as an immediate death
            self._handle(ProcessExited(name, incarnation, ProcessExit(code=1, reason=f"cannot start it: {error}")))

    def _fork_gateway(self, name: str, incarnation: int, slot: HeartbeatSlot) -> None:
        earlier = self._channels.pop(name, None)
        if earlier is not None:
            earlier.close()
        ours, theirs = Channel.pair()
        try:
            job = self._jobs.gateway_spec(name, incarnation, theirs)
            process = fork(name, job.main, keep=(*job.inherited_fds, theirs.fileno()), last_words=slot.set_exit_reason)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._channels[name] = ours
        self._running[name] = _Running(incarnation, "", process, {0: process})
        for worker in self._running:
            if worker not in self._gateways and self._machine.state_of(worker) in (
                ChildState.STARTING,
                ChildState.READY,
            ):
                self._announce(WorkerId(worker), (ours,))
        if self._machine.state is SupervisorState.DRAINING:
            ours.send(ServiceDraining())

    def _fork_worker(self, name: WorkerId, effect: ForkProcess, slot: HeartbeatSlot) -> None:
        job = self._jobs.worker_spec(name, effect.incarnation, effect.predecessor_fault)
        processes: dict[int, ForkedProcess] = {}
        try:
            for rank, main in {job.rank: job.main, **job.followers}.items():
                label = f"{name}/{rank}" if job.followers else name
                processes[rank] = fork(label, main, keep=job.inherited_fds, last_words=slot.set_exit_reason)
        except BaseException:
            for process in processes.values():
                process.kill(signal.SIGKILL)
                os.waitid(os.P_PIDFD, process.pidfd, os.WEXITED)
                os.close(process.pidfd)
            raise
        finally:
            job.on_forked()
        self._running[name] = _Running(effect.incarnation, job.endpoint, processes[job.rank], processes)
        self._announce(name, self._channels.values())

    def _announce(self, name: WorkerId, channels: Iterable[Channel]) -> None:
        running = self._running.get(name)
        if running is None or not running.endpoint:  # part of a worker that gateways reach at another node
            return
        message = WorkerUp(
            worker=name,
            incarnation=running.incarnation,
            role=self._slots[name].assigned_role or self._roles.get(name, Role.BOTH),
            pid=running.leader.pid,
            endpoint=running.endpoint,
        )
        for channel in channels:
            channel.send(message)
