"""When to start, kill and restart processes, and when to give up: a pure state machine, (state, event, now) -> effects.

::

               Fork                  slot says ready                  Died
    waiting ----------> starting -----------------------> ready ---------------> waiting (after a backoff)
                           |                                |
                           | silent beyond its prediction   | or reported by the gateway
                           v                                v
                        ending (SIGKILL sent; forked again only when it is dead: its memory is reused)

Stopping goes running -> draining (the gateway finishes its streams) -> ending (SIGTERM, then SIGKILL) -> done.
Workers that gateways of other hosts use, too, have what is left of the time to drain for those.
A child that is stopped or sleeps beyond its prediction counts as hung after ``wedge_s``; one that computes, or is ready
to run without a processor, after ``busy_s``.  Its last ``wedge_s`` of silence decide: the CPU time that Linux counted,
or the number of readings at which it was runnable.  (Linux counts a wait for a processor when the wait ends, so a
process that has waited for seconds shows only the latter.)  Silence is summed over readings of the heartbeat table, and
each counts for two intervals at most, so time in which the supervisor itself did not run does not count.
An on-demand child (a model of a catalog) is forked once, when it is requested; when it has ended, the gateway is
notified and the child removed.
Knows no processes, clocks or sockets.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from penstock.config.limits import SuperviseConfig
from penstock.launch.heartbeat import Heartbeat
from penstock.types import WorkerId, WorkerState
from penstock.wire.supervisor_messages import ServiceDraining, SupervisorMessage, WorkerDown

EXIT_CANNOT_START = 78
"""Exit code (EX_CONFIG) of a child that can never start and is not restarted."""

CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP})
"""Signals that a process causes itself."""

# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """How a process ended: its exit code or the signal that killed it, and the reason that it left."""

    code: int | None = None
    signal: int | None = None
    reason: str = ""
    out_of_memory: bool = False  # killed by the kernel for lack of memory

    @property
    def is_fault(self) -> bool:
        """Whether it ended by its own fault; SIGKILL and SIGTERM come from outside, unless memory ran out."""
        if self.signal is not None:
            return self.out_of_memory or self.signal in CRASHES
        return self.code not in (0, None, EXIT_CANNOT_START)

    def __str__(self) -> str:
        if self.signal is not None:
            try:
                how = f"killed by {signal.Signals(self.signal).name}"
            except ValueError:
                how = f"killed by signal {self.signal}"
        else:
            how = f"exit code {self.code}"
        if self.out_of_memory:
            how += ", out of memory"
        return f"{self.reason} ({how})" if self.reason else how


@dataclass(frozen=True, slots=True)
class ProcessExited:
    """The process of this incarnation has ended and was reaped, or could not be forked."""

    child: str
    incarnation: int
    exit: ProcessExit


@dataclass(frozen=True, slots=True)
class ProcessStats:
    """What Linux knows about a process."""

    stopped: bool = False  # by SIGSTOP
    cpu_s: float = 0.0  # CPU time of all its threads since it started
    queued_s: float = (
        0.0  # that its first thread could have computed, and others had the processors; of waits that ended
    )
    runnable: bool = False  # at this moment one of its threads computes or waits for a processor


@dataclass(frozen=True, slots=True)
class HeartbeatsRead:
    """The heartbeat table was read, with the statistics of its processes."""

    heartbeats: dict[str, Heartbeat]
    stats: dict[str, ProcessStats] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerSuspected:
    """The gateway suspects that this worker hangs."""

    child: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class LoadRequested:
    """The front of a catalog requests this model's process."""

    child: str


@dataclass(frozen=True, slots=True)
class UnloadRequested:
    """The front of a catalog requests the end of this model's process."""

    child: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """SIGTERM or SIGINT arrived; the second one means now."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Only time has passed."""


RestartEvent = ProcessExited | HeartbeatsRead | WorkerSuspected | LoadRequested | UnloadRequested | StopRequested | Tick


# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ForkProcess:
    """Fork this incarnation; the gateways are notified of a worker."""

    child: str
    incarnation: int
    predecessor_fault: str = ""  # how the last incarnation that was ready crashed; empty: it did not


@dataclass(frozen=True, slots=True)
class SendSignal:
    """Send this signal to the process of this incarnation."""

    child: str
    incarnation: int
    signal: int


@dataclass(frozen=True, slots=True)
class NotifyGateways:
    """Send this message to the gateways."""

    message: SupervisorMessage


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line for the log."""

    text: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class AllExited:
    """Every child has ended.  ``complaint``: why the service gave up, if it did."""

    code: int
    complaint: str | None = None


RestartEffect = ForkProcess | SendSignal | NotifyGateways | LogLine | AllExited


GATEWAY = "gateway-0"
"""The name of the first gateway."""

INSIST_COUNT = 3
"""An incarnation is killed when the gateway has suspected it this often, over at least ``wedge_s``."""


COMPUTES_SHARE = 0.25
"""A silent process that has recently used, or queued for, this share of one processor is busy, not hung."""


# --- state -----------------------------------------------------------------------------------------------------------


class ChildState(Enum):
    """The state of one child."""

    WAITING = auto()  # not running; forked at ``due``
    STARTING = auto()
    READY = auto()
    ENDING = auto()  # a signal was sent; it has not ended yet


class SupervisorState(Enum):
    """The state of the whole service."""

    RUNNING = auto()
    DRAINING = auto()
    ENDING = auto()
    DONE = auto()


_RUNS = (ChildState.STARTING, ChildState.READY)


@dataclass(slots=True)
class _Child:
    name: str
    phase: ChildState = ChildState.WAITING
    incarnation: int = 0
    due: float = 0.0  # when to fork, while waiting
    ready_since: float = 0.0
    quick_deaths: int = 0  # in a row, without a stable life in between
    unready_deaths: int = 0  # in a row, without ever having been ready
    silence: float = 0.0  # observed seconds without a heartbeat, beyond the prediction
    judged_silence: float = 0.0  # its silence when it was last judged, every ``wedge_s``
    judged_busy_s: float = 0.0  # CPU and queueing time at that moment
    runnable_s: float = 0.0  # of its silence since then: readings at which it was runnable
    computes: bool = False  # silent but busy
    stopped: bool = False  # by SIGSTOP
    last_beat: float = 0.0
    fault: str = ""  # how the last incarnation that was ready crashed
    suspicions: int = 0
    suspected_since: float = 0.0
    on_demand: bool = False
    deadline: float | None = None  # of an on-demand child that was asked to end
    is_worker: bool = True


@dataclass(slots=True)
class RestartPolicy:
    """The state machine.  ``handle`` takes an event; the caller carries out the returned effects in order."""

    config: SuperviseConfig
    serves_others: bool = False  # gateways of other hosts use the workers
    _children: dict[str, _Child] = field(default_factory=dict)
    _stage: SupervisorState = SupervisorState.RUNNING
    _deadline: float = 0.0  # of the stage
    _hurry_at: float = math.inf  # when workers that drain are to return what they have
    _last_reading: float | None = None
    _killed_all: bool = False
    _complaint: str | None = None
    _passed: int = 0  # the highest incarnation of an on-demand child so far
    _run: int = 0  # the incarnation that workers' first ones follow

    @classmethod
    def of(
        cls,
        config: SuperviseConfig,
        gateways: Iterable[str] = (GATEWAY,),
        *,
        run: int = 0,
        serves_others: bool = False,
    ) -> RestartPolicy:
        """A machine with the gateways, which do not run yet, and no workers; their incarnations follow ``run``."""
        children = {name: _Child(name, is_worker=False) for name in gateways}
        return cls(config, serves_others or not children, children, _run=run)

    def add_workers(self, workers: Iterable[str]) -> None:
        """Run these workers from now on: their weights are loaded."""
        for name in workers:
            self._children.setdefault(name, _Child(name, incarnation=self._run))

    @property
    def state(self) -> SupervisorState:
        return self._stage

    def state_of(self, child: str) -> ChildState:
        known = self._children.get(child)
        return known.phase if known is not None else ChildState.WAITING

    def is_silent(self, child: str) -> bool:
        """Whether the child missed its heartbeat at the last reading."""
        known = self._children.get(child)
        return known is not None and known.silence > 0.0

    def all_ready(self) -> bool:
        return all(child.phase is ChildState.READY for child in self._children.values())

    def next_deadline(self, now: float) -> float:
        """When to call ``handle`` again at the latest, with ``Tick`` or ``HeartbeatsRead``."""
        times = [now + self.config.look_s]
        if self._stage is SupervisorState.DRAINING or (self._stage is SupervisorState.ENDING and not self._killed_all):
            times.append(min(self._deadline, self._hurry_at))
        times += [c.due for c in self._children.values() if c.phase is ChildState.WAITING and self._forks]
        return max(now, min(times))

    def handle(self, event: RestartEvent, now: float) -> list[RestartEffect]:
        """Apply one event; returns the effects to carry out, in order."""
        effects: list[RestartEffect] = []
        match event:
            case ProcessExited():
                self._on_death(event, now, effects)
            case HeartbeatsRead():
                self._on_heartbeats(event, now, effects)
            case WorkerSuspected():
                self._on_suspicion(event, now, effects)
            case LoadRequested():
                if self._stage is SupervisorState.RUNNING:
                    self._children.setdefault(
                        event.child, _Child(event.child, on_demand=True, incarnation=self._passed)
                    )
            case UnloadRequested():
                self._on_dismissal(event.child, now, effects)
            case StopRequested():
                self._on_stop(now, effects)
            case Tick():
                pass
        self._on_time(now, effects)
        return effects

    # --- one child ---------------------------------------------------------------------------------------------------

    def _on_death(self, event: ProcessExited, now: float, effects: list[RestartEffect]) -> None:
        child = self._children[event.child]
        if child.phase is ChildState.WAITING or child.incarnation != event.incarnation:
            return
        was_ready = child.ready_since > 0.0
        child.phase = ChildState.WAITING
        if event.exit.is_fault and was_ready:  # the one before it had requests, if this one was not
            child.fault = str(event.exit)
        if child.is_worker:
            effects.append(
                NotifyGateways(
                    _down(
                        child,
                        WorkerState.DEAD,
                        event.exit.reason or str(event.exit) if child.on_demand else str(event.exit),
                        fault=event.exit.is_fault,
                    )
                )
            )
        if child.on_demand:
            del self._children[child.name]
            return
        if self._stage is SupervisorState.ENDING:
            return
        if not child.is_worker and self._stage is SupervisorState.DRAINING:
            child.due = math.inf
            if not any(one.phase in _RUNS for one in self._children.values() if not one.is_worker):
                self._end_workers(now, effects)
            return
        if was_ready and (now - child.ready_since >= self.config.stable_s or not event.exit.is_fault):
            child.quick_deaths = 0
        child.quick_deaths += 1
        child.unready_deaths = 0 if was_ready else child.unready_deaths + 1
        if child.unready_deaths and event.exit.code == EXIT_CANNOT_START:
            self._complaint = f"{child.name} cannot start: {event.exit.reason}"
            self._end(now, effects)
            return
        if child.unready_deaths >= self.config.rapid_deaths:
            self._complaint = gave_up_message(child.name, child.unready_deaths, event.exit)
            self._end(now, effects)
            return
        delay = self._backoff(child.quick_deaths)
        child.due = now + delay
        when = f"in {delay:.2f} s" if delay else "now"
        if event.exit.code == 0 and was_ready:  # an operator or a SIGTERM requested it, or another machine has gone
            effects.append(LogLine(f"{child.name} {event.exit.reason or 'has drained and ended'}; restarting {when}"))
        else:
            effects.append(LogLine(f"{child.name} ended: {event.exit}; restarting {when}", warning=True))

    def _backoff(self, deaths: int) -> float:
        """Seconds before the restart after the ``deaths``-th quick death in a row; 0 after the first."""
        if deaths <= 1:
            return 0.0
        return min(self.config.backoff_max_s, self.config.backoff_first_s * 2.0 ** min(deaths - 2, 32))

    def _on_heartbeats(self, event: HeartbeatsRead, now: float, effects: list[RestartEffect]) -> None:
        look = 0.0 if self._last_reading is None else min(now - self._last_reading, 2 * self.config.look_s)
        self._last_reading = now
        for name, heartbeat in event.heartbeats.items():
            child = self._children[name]
            if child.phase not in _RUNS or heartbeat.incarnation != child.incarnation:
                continue
            vitals = event.stats.get(name, ProcessStats())
            child.stopped = vitals.stopped
            self._record_heartbeat(child, heartbeat, now)
            if self._silent_beyond_limit(child, heartbeat, vitals, look, now):
                self._kill_wedged(child, f"no progress for {child.silence:.1f} s", effects)

    def _record_heartbeat(self, child: _Child, heartbeat: Heartbeat, now: float) -> None:
        if child.phase is ChildState.STARTING and heartbeat.state in (WorkerState.READY, WorkerState.DRAINING):
            child.phase = ChildState.READY
            child.ready_since = now
            child.fault = ""
        if heartbeat.beat_s != child.last_beat:
            child.last_beat = heartbeat.beat_s
            if not child.stopped:  # another rank of the worker may beat
                child.silence = 0.0

    def _silent_beyond_limit(
        self, child: _Child, heartbeat: Heartbeat, vitals: ProcessStats, look: float, now: float
    ) -> bool:
        busy = vitals.cpu_s + vitals.queued_s
        if not vitals.stopped and now <= heartbeat.predicted_end_s:
            child.silence = 0.0
        if child.silence == 0.0:
            child.judged_silence, child.judged_busy_s, child.computes, child.runnable_s = 0.0, busy, False, 0.0
        if vitals.stopped or now > heartbeat.predicted_end_s:
            child.silence += look
            child.runnable_s += look if vitals.runnable else 0.0
        past = child.silence - child.judged_silence
        if child.judged_silence == 0.0 or past >= self.config.wedge_s:
            child.computes = max(busy - child.judged_busy_s, child.runnable_s) > COMPUTES_SHARE * past
        if past >= self.config.wedge_s:
            child.judged_silence, child.judged_busy_s, child.runnable_s = child.silence, busy, 0.0
        child.computes = child.computes and not vitals.stopped
        if child.phase is ChildState.STARTING and not vitals.stopped:
            return child.silence > self.config.start_s
        return child.silence > (self.config.busy_s if child.computes else self.config.wedge_s)

    def _on_suspicion(self, event: WorkerSuspected, now: float, effects: list[RestartEffect]) -> None:
        child = self._children.get(event.child)
        if child is None or child.phase is not ChildState.READY or child.incarnation != event.incarnation:
            return
        if child.silence > 0.0:
            if not child.computes and child.silence > self.config.wedge_s / 2:
                self._kill_wedged(child, event.reason, effects)
            return
        if child.suspicions == 0 or now - child.suspected_since > 10 * self.config.wedge_s:
            child.suspicions, child.suspected_since = 0, now
        child.suspicions += 1
        if child.suspicions >= INSIST_COUNT and now - child.suspected_since >= self.config.wedge_s:
            self._kill_wedged(child, event.reason, effects)

    def _kill_wedged(self, child: _Child, reason: str, effects: list[RestartEffect]) -> None:
        if child.phase is ChildState.READY and not child.stopped:
            child.fault = reason
        child.phase = ChildState.ENDING
        effects.append(LogLine(f"{child.name} is wedged: {reason}; killing it", warning=True))
        if child.is_worker:
            effects.append(NotifyGateways(_down(child, WorkerState.WEDGED, reason, fault=not child.stopped)))
        effects.append(SendSignal(child.name, child.incarnation, signal.SIGKILL))

    def _on_dismissal(self, name: str, now: float, effects: list[RestartEffect]) -> None:
        child = self._children.get(name)
        if child is None or not child.on_demand or child.phase not in _RUNS:
            return
        child.phase = ChildState.ENDING
        child.deadline = now + self.config.drain_s + 2 * self.config.grace_s
        effects.append(SendSignal(child.name, child.incarnation, signal.SIGTERM))

    # --- the whole ---------------------------------------------------------------------------------------------------

    @property
    def _forks(self) -> bool:
        return self._stage in (SupervisorState.RUNNING, SupervisorState.DRAINING)

    def _on_stop(self, now: float, effects: list[RestartEffect]) -> None:
        if self._stage is SupervisorState.DRAINING:
            effects.append(LogLine("second request: stopping now"))
            self._end(now, effects)
        elif self._stage is SupervisorState.ENDING and now + self.config.grace_s < self._deadline:
            effects.append(LogLine("second request: stopping now"))
            self._end(now, effects, again=True)
        elif self._stage is SupervisorState.RUNNING:
            self._deadline = now + self.config.drain_s
            if not any(child.phase in _RUNS for child in self._children.values() if not child.is_worker):
                self._end_workers(now, effects)
                return
            self._stage = SupervisorState.DRAINING
            effects.append(NotifyGateways(ServiceDraining()))

    def _end_workers(self, now: float, effects: list[RestartEffect]) -> None:
        """No gateway of this host runs any more: workers finish or migrate the requests of others, if there are."""
        self._end(now, effects, max(self.config.grace_s, self._deadline - now) if self.serves_others else None)

    def _end(
        self, now: float, effects: list[RestartEffect], within: float | None = None, *, again: bool = False
    ) -> None:
        self._stage = SupervisorState.ENDING
        self._deadline = now + (self.config.grace_s if within is None else within)
        latest = self._deadline - self.config.grace_s
        self._hurry_at = latest if latest > now else math.inf
        for child in self._children.values():
            if child.phase in _RUNS or (again and child.phase is ChildState.ENDING):
                child.phase = ChildState.ENDING
                effects.append(SendSignal(child.name, child.incarnation, signal.SIGTERM))

    def _on_time(self, now: float, effects: list[RestartEffect]) -> None:
        if self._stage is SupervisorState.DRAINING and now >= self._deadline:
            effects.append(LogLine(f"still busy after {self.config.drain_s:g} s: stopping now", warning=True))
            self._end(now, effects)
        if self._stage is SupervisorState.ENDING:
            running = [c for c in self._children.values() if c.phase is not ChildState.WAITING]
            if not running:
                self._stage = SupervisorState.DONE
                effects.append(AllExited(0 if self._complaint is None else 1, self._complaint))
            elif now >= self._deadline and not self._killed_all:
                self._killed_all = True
                effects += [SendSignal(c.name, c.incarnation, signal.SIGKILL) for c in running]
            elif now >= self._hurry_at:
                self._hurry_at = math.inf
                effects += [SendSignal(c.name, c.incarnation, signal.SIGTERM) for c in running]
        for child in self._children.values():
            if child.phase is ChildState.ENDING and child.deadline is not None and now >= child.deadline:
                child.deadline = None
                effects.append(SendSignal(child.name, child.incarnation, signal.SIGKILL))
        if self._forks:
            for child in self._children.values():
                if child.phase is ChildState.WAITING and now >= child.due:
                    self._fork(child, effects)

    def _fork(self, child: _Child, effects: list[RestartEffect]) -> None:
        child.phase = ChildState.STARTING
        child.incarnation += 1
        if child.on_demand:
            self._passed = max(self._passed, child.incarnation)
        child.ready_since = child.silence = child.last_beat = 0.0
        child.computes = False
        child.suspicions = 0
        effects.append(ForkProcess(child.name, child.incarnation, child.fault if child.is_worker else ""))


def _down(child: _Child, state: WorkerState, reason: str, *, fault: bool) -> WorkerDown:
    return WorkerDown(
        worker=WorkerId(child.name), incarnation=child.incarnation, state=state, reason=reason, fault=fault
    )


def gave_up_message(child: str, deaths: int, last: ProcessExit) -> str:
    """One line: why the child kept ending, and a command that is likely to work."""
    head = f"{child} ended {deaths} times before it was ready, giving up: {last}"
    match last.signal:
        case signal.SIGILL:
            return f"{head}; the kernels do not fit this processor: try `penstock serve --kernels portable`"
        case signal.SIGKILL | signal.SIGBUS:
            return f"{head}; most likely out of memory: try `penstock serve --kv-memory 128MiB`"
        case None:
            return f"{head}; `penstock doctor` shows what this machine has"
        case _:
            return f"{head}; the kernels crashed: try `penstock serve --kernels portable`"
