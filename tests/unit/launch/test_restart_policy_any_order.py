"""The restart machine under any order of deaths, silences, suspicions and signals."""

from __future__ import annotations

import signal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from restart_bench import CONFIG, CRASH, Bench

from penstock.launch.restart_policy import (
    GATEWAY,
    AllExited,
    ForkProcess,
    ProcessExit,
    ProcessExited,
    StopRequested,
    SupervisorState,
    Tick,
    WorkerSuspected,
)


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order: at most one process a child, and stopping always comes to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()

    @rule()
    def tick(self) -> None:
        self.bench.send(Tick())

    @rule(seconds=st.floats(0.001, 8.0))
    def time_passes(self, seconds: float) -> None:
        self.bench.run(seconds)

    @precondition(lambda self: self.bench.running)
    @rule(data=st.data(), code=st.sampled_from([ProcessExit(code=0), ProcessExit(code=1), CRASH]))
    def somebody_dies(self, data: st.DataObject, code: ProcessExit) -> None:
        self.bench.die(data.draw(st.sampled_from(sorted(self.bench.running))), code)

    @precondition(lambda self: self.bench.running)
    @rule(data=st.data())
    def somebody_falls_silent(self, data: st.DataObject) -> None:
        self.bench.silent.add(data.draw(st.sampled_from(sorted(self.bench.running))))

    @rule(child=st.sampled_from(["prefill-0", "decode-0"]), incarnation=st.integers(0, 4))
    def suspect(self, child: str, incarnation: int) -> None:
        self.bench.send(WorkerSuspected(child, incarnation, "no tokens"))

    @rule(child=st.sampled_from(["prefill-0", GATEWAY]), incarnation=st.integers(0, 2))
    def an_old_death_is_told_again(self, child: str, incarnation: int) -> None:
        if self.bench.running.get(child) != incarnation:
            self.bench.send(ProcessExited(child, incarnation, CRASH))

    @rule()
    def stop(self) -> None:
        self.bench.send(StopRequested())

    @invariant()
    def nothing_is_forked_after_the_end_began(self) -> None:
        ended = [i for i, (_, e) in enumerate(self.bench.log) if isinstance(e, AllExited)]
        assert len(ended) <= 1
        if ended:
            assert not [e for _, e in self.bench.log[ended[0] :] if isinstance(e, ForkProcess)]
            assert not self.bench.running

    def teardown(self) -> None:
        self.bench.send(StopRequested())
        self.bench.send(StopRequested())
        effects = self.bench.run(CONFIG.grace_s + 1.0)
        for child in sorted(self.bench.running):
            self.bench.die(child, ProcessExit(signal=signal.SIGKILL))
        assert self.bench.machine.state is SupervisorState.DONE
        assert not [e for e in effects if isinstance(e, ForkProcess)]


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
