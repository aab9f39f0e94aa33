"""The restart machine on a virtual clock, with processes that obey at once: for the tests of it."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import TypeVar

from penstock.config.limits import SuperviseConfig
from penstock.launch.heartbeat import Heartbeat
from penstock.launch.restart_policy import (
    ForkProcess,
    HeartbeatsRead,
    ProcessExit,
    ProcessExited,
    RestartEffect,
    RestartEvent,
    RestartPolicy,
    SendSignal,
    Tick,
)
from penstock.types import WorkerState

T = TypeVar("T")
CRASH = ProcessExit(signal=signal.SIGSEGV)
CONFIG = SuperviseConfig()


@dataclass
class Bench:
    """The machine, a clock, and processes that obey at once unless told otherwise."""

    config: SuperviseConfig = CONFIG
    serves_others: bool = False
    now: float = 100.0
    machine: RestartPolicy = field(init=False)
    running: dict[str, int] = field(default_factory=dict)  # child -> incarnation
    silent: set[str] = field(default_factory=set)
    log: list[tuple[float, RestartEffect]] = field(default_factory=list)
    _silent_since: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.machine = RestartPolicy.of(self.config, serves_others=self.serves_others)
        self.machine.add_workers(["prefill-0", "decode-0"])

    def send(self, event: RestartEvent) -> list[RestartEffect]:
        effects = self.machine.handle(event, self.now)
        for effect in effects:
            self.log.append((self.now, effect))
            if isinstance(effect, ForkProcess):
                assert effect.child not in self.running, "forked while the last incarnation still runs"
                self.running[effect.child] = effect.incarnation
                self.silent.discard(effect.child)
        return effects

    def die(self, child: str, how: ProcessExit = CRASH) -> list[RestartEffect]:
        return self.send(ProcessExited(child, self.running.pop(child), how))

    def look(self) -> list[RestartEffect]:
        beats = {}
        for child, incarnation in self.running.items():
            if child in self.silent:
                beat = self._silent_since.setdefault(child, self.now)
            else:
                self._silent_since.pop(child, None)
                beat = self.now
            beats[child] = Heartbeat(incarnation, WorkerState.READY, beat, beat + 0.1, 1)
        return self.send(HeartbeatsRead(beats))

    def run(self, seconds: float) -> list[RestartEffect]:
        """Let time pass as the supervisor does: looking at every interval, waking when it is due."""
        end, effects = self.now + seconds, []
        while self.now < end:
            self.now = min(end, max(self.now + 1e-3, self.machine.next_deadline(self.now)))
            effects += self.look()
        return effects

    def wait_for(self, child: str) -> None:
        """Let time pass until this child runs."""
        while child not in self.running:
            self.run(1e-3)

    def obey(self, effects: list[RestartEffect]) -> None:
        for effect in effects:
            if isinstance(effect, SendSignal) and effect.child in self.running:
                self.die(effect.child, ProcessExit(signal=effect.signal))


def ready_bench(config: SuperviseConfig = CONFIG, *, serves_others: bool = False) -> Bench:
    bench = Bench(config, serves_others)
    bench.send(Tick())
    bench.look()
    return bench


def of_type(kind: type[T], effects: list[RestartEffect]) -> list[T]:
    return [e for e in effects if isinstance(e, kind)]
