"""The restart machine on a virtual clock: every decision about forking, killing and giving up, without a process."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.config.schema import SuperviseConfig
from penstock.launch.board import Heartbeat
from penstock.launch.events import (
    HOPELESS,
    Died,
    Done,
    Effect,
    Event,
    Exit,
    Fork,
    Kill,
    Looked,
    Note,
    StopAsked,
    Suspected,
    Tell,
    Tick,
    Vitals,
)
from penstock.launch.restart import GATEWAY, Phase, Restarts, Stage
from penstock.types import WorkerState
from penstock.wire.messages import Draining, WorkerDown

T = TypeVar("T")
CRASH = Exit(signal=signal.SIGSEGV)
CONFIG = SuperviseConfig()


@dataclass
class Bench:
    """The machine, a clock, and processes that obey at once unless told otherwise."""

    config: SuperviseConfig = CONFIG
    now: float = 100.0
    machine: Restarts = field(init=False)
    running: dict[str, int] = field(default_factory=dict)  # child -> incarnation
    silent: set[str] = field(default_factory=set)
    log: list[tuple[float, Effect]] = field(default_factory=list)
    _silent_since: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.machine = Restarts.of(self.config)
        self.machine.admit(["prefill-0", "decode-0"])

    def send(self, event: Event) -> list[Effect]:
        effects = self.machine.handle(event, self.now)
        for effect in effects:
            self.log.append((self.now, effect))
            if isinstance(effect, Fork):
                assert effect.child not in self.running, "forked while the last incarnation still runs"
                self.running[effect.child] = effect.incarnation
                self.silent.discard(effect.child)
        return effects

    def die(self, child: str, how: Exit = CRASH) -> list[Effect]:
        return self.send(Died(child, self.running.pop(child), how))

    def look(self) -> list[Effect]:
        beats = {}
        for child, incarnation in self.running.items():
            if child in self.silent:
                beat = self._silent_since.setdefault(child, self.now)
            else:
                self._silent_since.pop(child, None)
                beat = self.now
            beats[child] = Heartbeat(incarnation, WorkerState.READY, beat, beat + 0.1, 1)
        return self.send(Looked(beats))

    def run(self, seconds: float) -> list[Effect]:
        """Let time pass as the supervisor does: looking at every interval, waking when it is due."""
        end, effects = self.now + seconds, []
        while self.now < end:
            self.now = min(end, max(self.now + 1e-3, self.machine.wake_at(self.now)))
            effects += self.look()
        return effects

    def wait_for(self, child: str) -> None:
        """Let time pass until this child runs."""
        while child not in self.running:
            self.run(1e-3)

    def obey(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Kill) and effect.child in self.running:
                self.die(effect.child, Exit(signal=effect.signal))


def ready_bench(config: SuperviseConfig = CONFIG) -> Bench:
    bench = Bench(config)
    bench.send(Tick())
    bench.look()
    return bench


def of_type(kind: type[T], effects: list[Effect]) -> list[T]:
    return [e for e in effects if isinstance(e, kind)]


def test_everything_is_forked_at_the_first_tick() -> None:
    bench = Bench()
    assert bench.send(Tick()) == [Fork(GATEWAY, 1), Fork("prefill-0", 1), Fork("decode-0", 1)]
    assert bench.run(10.0) == []


def test_the_first_restart_is_at_once_and_under_the_next_incarnation() -> None:
    bench = ready_bench()
    effects = bench.die("decode-0")
    (down,) = of_type(Tell, effects)
    assert down.message == WorkerDown(
        worker="decode-0", incarnation=1, state=WorkerState.DEAD, reason="killed by SIGSEGV"
    )
    assert of_type(Fork, effects) == [Fork("decode-0", 2)]


def test_the_gateway_is_restarted_without_a_word_to_itself() -> None:
    bench = ready_bench()
    effects = bench.die(GATEWAY)
    assert of_type(Fork, effects) == [Fork(GATEWAY, 2)]
    assert of_type(Tell, effects) == []


def test_backoff_doubles_and_is_forgiven_after_a_stable_life() -> None:
    bench = ready_bench()
    delays = []
    for _ in range(9):
        died_at = bench.now
        bench.die("decode-0")
        bench.wait_for("decode-0")
        delays.append(bench.now - died_at)
        bench.look()  # ready
    assert delays == pytest.approx([0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0], abs=0.01)
    bench.run(CONFIG.stable_s + 0.2)
    assert of_type(Fork, bench.die("decode-0")) == [Fork("decode-0", 11)]


def test_a_worker_that_is_never_ready_ends_it_all_with_a_cause_and_a_command() -> None:
    bench = Bench()
    bench.send(Tick())
    for _ in range(CONFIG.rapid_deaths):
        while "prefill-0" not in bench.running:
            bench.now = bench.machine.wake_at(bench.now)
            bench.send(Tick())  # no look: nobody is ever seen ready
        effects = bench.die("prefill-0", Exit(signal=signal.SIGILL))
    assert {e.child for e in of_type(Kill, effects)} == {GATEWAY, "decode-0"}
    bench.obey(effects)
    (done,) = [e for _, e in bench.log if isinstance(e, Done)]
    assert done.code == 1
    assert done.complaint is not None
    assert "prefill-0 ended 10 times before it was ready" in done.complaint
    assert "SIGILL" in done.complaint
    assert "penstock serve --kernels portable" in done.complaint
    assert bench.machine.stage is Stage.DONE


def test_a_child_that_can_never_start_is_not_tried_again() -> None:
    bench = Bench()
    bench.send(Tick())
    bench.obey(bench.die(GATEWAY, Exit(code=HOPELESS, last_words="tokenizer.json is broken")))
    assert bench.log[-1][1] == Done(1, f"{GATEWAY} cannot start: tokenizer.json is broken")


def test_workers_that_were_ready_are_restarted_for_ever() -> None:
    bench = ready_bench()
    for _ in range(5 * CONFIG.rapid_deaths):
        bench.die("decode-0")
        bench.run(CONFIG.backoff_max_s + 0.2)
    assert bench.machine.stage is Stage.RUNNING
    assert bench.machine.phase("decode-0") is Phase.READY


def test_a_silent_worker_is_killed_after_the_limit_and_forked_only_when_dead() -> None:
    bench = ready_bench()
    bench.run(1.0)
    bench.silent.add("decode-0")
    silent_at = bench.now
    effects = bench.run(CONFIG.wedge_s + 0.5)
    (down,) = of_type(Tell, effects)
    assert isinstance(down.message, WorkerDown)
    assert down.message.state is WorkerState.WEDGED
    assert of_type(Kill, effects) == [Kill("decode-0", 1, signal.SIGKILL)]
    killed_at = next(t for t, e in bench.log if isinstance(e, Kill))
    assert CONFIG.wedge_s <= killed_at - silent_at <= CONFIG.wedge_s + 0.5
    assert of_type(Fork, bench.run(5.0)) == []
    effects = bench.die("decode-0", Exit(signal=signal.SIGKILL))
    assert of_type(Fork, effects) == [Fork("decode-0", 2)]
    assert of_type(Tell, effects)[0].message.state is WorkerState.DEAD


def test_a_long_step_that_was_predicted_is_not_silence() -> None:
    bench = ready_bench()
    beat = Heartbeat(1, WorkerState.READY, bench.now, bench.now + 30.0, 1)
    killed: list[Kill] = []
    for _ in range(290):
        bench.now += 0.1
        killed += of_type(Kill, bench.send(Looked({"decode-0": beat})))
    assert killed == []
    for _ in range(40):
        bench.now += 0.1
        killed += of_type(Kill, bench.send(Looked({"decode-0": beat})))
    assert [k.child for k in killed] == ["decode-0"]


def test_a_stopped_process_gets_no_credit_for_its_prediction() -> None:
    bench = ready_bench()
    beat = Heartbeat(1, WorkerState.READY, bench.now, bench.now + 30.0, 1)
    killed: list[Kill] = []
    for _ in range(25):
        bench.now += 0.1
        killed += of_type(Kill, bench.send(Looked({GATEWAY: beat, "decode-0": beat}, {GATEWAY: Vitals(stopped=True)})))
    assert killed == [Kill(GATEWAY, 1, signal.SIGKILL)]


def silent_for(bench: Bench, seconds: float, cpu_share: float) -> list[Effect]:
    """decode-0 says nothing, and has ``cpu_share`` of a processor all the while."""
    beat = Heartbeat(1, WorkerState.READY, 99.0, 99.0, 1)
    effects, began = [], bench.now
    while bench.now < began + seconds:
        bench.now += 0.1
        vitals = Vitals(cpu_s=7.0 + cpu_share * (bench.now - began))
        effects += bench.send(Looked({"decode-0": beat}, {"decode-0": vitals}))
    return effects


def test_a_step_far_longer_than_predicted_is_not_a_wedge_while_it_computes() -> None:
    bench = ready_bench()
    assert of_type(Kill, silent_for(bench, CONFIG.busy_s - 1, cpu_share=0.9)) == []
    assert of_type(Kill, bench.send(Suspected("decode-0", 1, "no tokens"))) == []
    assert len(of_type(Kill, silent_for(bench, 2.0, cpu_share=0.9))) == 1
    bench = ready_bench()
    assert len(of_type(Kill, silent_for(bench, CONFIG.wedge_s + 0.5, cpu_share=0.02))) == 1


def test_time_in_which_the_supervisor_did_not_look_counts_for_nobody() -> None:
    bench = ready_bench()
    bench.silent |= {"decode-0", "prefill-0"}
    bench.run(0.5)
    bench.now += 3600.0  # suspended, all together
    assert of_type(Kill, bench.look()) == []
    bench.silent.clear()
    assert of_type(Kill, bench.run(5.0)) == []


def test_a_slow_start_is_not_a_wedge_until_its_own_limit() -> None:
    bench = Bench()
    bench.send(Tick())
    beat = Heartbeat(1, WorkerState.STARTING, bench.now, bench.now, 0)
    killed_at = None
    while killed_at is None:
        bench.now += 0.1
        if of_type(Kill, bench.send(Looked({"decode-0": beat}))):
            killed_at = bench.now
    assert CONFIG.start_s <= killed_at - 100.0 <= CONFIG.start_s + 1


def test_a_suspicion_alone_kills_nobody_but_an_insistent_one_does() -> None:
    bench = ready_bench()
    assert of_type(Kill, bench.send(Suspected("decode-0", 1, "no tokens"))) == []
    bench.run(0.5)
    assert of_type(Kill, bench.send(Suspected("decode-0", 1, "no tokens"))) == []
    bench.run(CONFIG.wedge_s)
    assert of_type(Kill, bench.send(Suspected("decode-0", 1, "no tokens"))) == [Kill("decode-0", 1, signal.SIGKILL)]


def test_a_suspicion_that_the_board_shares_kills_sooner() -> None:
    bench = ready_bench()
    bench.silent.add("decode-0")
    bench.run(0.2)
    assert of_type(Kill, bench.send(Suspected("decode-0", 1, "silent"))) == []
    bench.run(CONFIG.wedge_s / 2 + 0.2)
    assert of_type(Kill, bench.send(Suspected("decode-0", 1, "silent"))) == [Kill("decode-0", 1, signal.SIGKILL)]


@pytest.mark.parametrize(("child", "incarnation"), [("decode-0", 7), ("decode-9", 1), (GATEWAY + "x", 1)])
def test_suspicions_of_others_are_ignored(child: str, incarnation: int) -> None:
    bench = ready_bench()
    for _ in range(10):
        bench.run(1.0)
        assert of_type(Kill, bench.send(Suspected(child, incarnation, "?"))) == []


def test_stopping_waits_for_the_gateway_and_then_ends_the_workers() -> None:
    bench = ready_bench()
    assert bench.send(StopAsked()) == [Tell(Draining())]
    assert of_type(Kill, bench.run(5.0)) == []
    effects = bench.die(GATEWAY, Exit(code=0))
    assert {(k.child, k.signal) for k in of_type(Kill, effects)} == {
        ("prefill-0", signal.SIGTERM),
        ("decode-0", signal.SIGTERM),
    }
    bench.obey(effects)
    assert bench.log[-1][1] == Done(0)


def test_a_worker_that_dies_while_draining_is_still_replaced() -> None:
    bench = ready_bench()
    bench.send(StopAsked())
    assert of_type(Fork, bench.die("decode-0")) == [Fork("decode-0", 2)]


def test_draining_has_a_deadline_and_ending_another() -> None:
    bench = ready_bench()
    bench.send(StopAsked())
    effects = bench.run(CONFIG.drain_s + 0.2)
    assert {(k.child, k.signal) for k in of_type(Kill, effects)} == {(c, signal.SIGTERM) for c in bench.running}
    effects = bench.run(CONFIG.grace_s + 0.2)
    assert {(k.child, k.signal) for k in of_type(Kill, effects)} == {(c, signal.SIGKILL) for c in bench.running}
    assert bench.run(10.0) == []  # once is enough
    bench.obey(effects)
    assert bench.log[-1][1] == Done(0)


def test_the_second_signal_means_now() -> None:
    bench = ready_bench()
    bench.send(StopAsked())
    effects = bench.send(StopAsked())
    assert {k.signal for k in of_type(Kill, effects)} == {signal.SIGTERM}
    assert len(of_type(Kill, effects)) == 3


def test_stopping_while_the_gateway_is_down_does_not_wait() -> None:
    bench = ready_bench()
    bench.die(GATEWAY)
    bench.die(GATEWAY)  # the second death waits for its backoff
    effects = bench.send(StopAsked())
    assert {k.child for k in of_type(Kill, effects)} == {"prefill-0", "decode-0"}


def test_stopping_before_anything_runs_is_done_at_once() -> None:
    machine = Restarts.of(CONFIG)
    assert machine.handle(StopAsked(), 0.0) == [Done(0)]


def test_how_a_process_ended_in_words() -> None:
    assert str(Exit(code=3)) == "exit code 3"
    assert str(Exit(signal=9, last_words="out of pages")) == "out of pages (killed by SIGKILL)"
    assert str(Exit(signal=64 + 1)) == "killed by signal 65"


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
    @rule(data=st.data(), code=st.sampled_from([Exit(code=0), Exit(code=1), CRASH]))
    def somebody_dies(self, data: st.DataObject, code: Exit) -> None:
        self.bench.die(data.draw(st.sampled_from(sorted(self.bench.running))), code)

    @precondition(lambda self: self.bench.running)
    @rule(data=st.data())
    def somebody_falls_silent(self, data: st.DataObject) -> None:
        self.bench.silent.add(data.draw(st.sampled_from(sorted(self.bench.running))))

    @rule(child=st.sampled_from(["prefill-0", "decode-0"]), incarnation=st.integers(0, 4))
    def suspect(self, child: str, incarnation: int) -> None:
        self.bench.send(Suspected(child, incarnation, "no tokens"))

    @rule(child=st.sampled_from(["prefill-0", GATEWAY]), incarnation=st.integers(0, 2))
    def an_old_death_is_told_again(self, child: str, incarnation: int) -> None:
        if self.bench.running.get(child) != incarnation:
            self.bench.send(Died(child, incarnation, CRASH))

    @rule()
    def stop(self) -> None:
        self.bench.send(StopAsked())

    @invariant()
    def nothing_is_forked_after_the_end_began(self) -> None:
        ended = [i for i, (_, e) in enumerate(self.bench.log) if isinstance(e, Done)]
        assert len(ended) <= 1
        if ended:
            assert not [e for _, e in self.bench.log[ended[0] :] if isinstance(e, Fork)]
            assert not self.bench.running

    def teardown(self) -> None:
        self.bench.send(StopAsked())
        self.bench.send(StopAsked())
        effects = self.bench.run(CONFIG.grace_s + 1.0)
        for child in sorted(self.bench.running):
            self.bench.die(child, Exit(signal=signal.SIGKILL))
        assert self.bench.machine.stage is Stage.DONE
        assert not [e for e in effects if isinstance(e, Fork)]


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_notes_tell_what_is_done() -> None:
    bench = ready_bench()
    (note,) = of_type(Note, bench.die("decode-0"))
    assert note.text == "decode-0 ended: killed by SIGSEGV; restarting now"
