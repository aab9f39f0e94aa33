"""The restart machine on a virtual clock: every decision about forking, killing and giving up, without a process."""

from __future__ import annotations

import signal

import pytest
from restart_bench import CONFIG, Bench, of_type, ready_bench

from penstock.launch.heartbeat import Heartbeat
from penstock.launch.restart_policy import (
    EXIT_CANNOT_START,
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
    RestartPolicy,
    SendSignal,
    StopRequested,
    SupervisorState,
    Tick,
    WorkerSuspected,
)
from penstock.types import WorkerState
from penstock.wire.supervisor_messages import ServiceDraining, WorkerDown


def test_everything_is_forked_at_the_first_tick() -> None:
    bench = Bench()
    assert bench.send(Tick()) == [ForkProcess(GATEWAY, 1), ForkProcess("prefill-0", 1), ForkProcess("decode-0", 1)]
    assert bench.run(10.0) == []


def test_the_first_restart_is_at_once_and_under_the_next_incarnation() -> None:
    bench = ready_bench()
    effects = bench.die("decode-0")
    (down,) = of_type(NotifyGateways, effects)
    assert down.message == WorkerDown(
        worker="decode-0", incarnation=1, state=WorkerState.DEAD, reason="killed by SIGSEGV", fault=True
    )
    assert of_type(ForkProcess, effects) == [ForkProcess("decode-0", 2, "killed by SIGSEGV")]


def test_the_gateway_is_restarted_without_a_word_to_itself() -> None:
    bench = ready_bench()
    effects = bench.die(GATEWAY)
    assert of_type(ForkProcess, effects) == [ForkProcess(GATEWAY, 2)]
    assert of_type(NotifyGateways, effects) == []


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
    assert of_type(ForkProcess, bench.die("decode-0")) == [ForkProcess("decode-0", 11, "killed by SIGSEGV")]


def test_a_worker_that_is_never_ready_ends_it_all_with_a_cause_and_a_command() -> None:
    bench = Bench()
    bench.send(Tick())
    for _ in range(CONFIG.rapid_deaths):
        while "prefill-0" not in bench.running:
            bench.now = bench.machine.next_deadline(bench.now)
            bench.send(Tick())  # no look: nobody is ever seen ready
        effects = bench.die("prefill-0", ProcessExit(signal=signal.SIGILL))
    assert {e.child for e in of_type(SendSignal, effects)} == {GATEWAY, "decode-0"}
    bench.obey(effects)
    (done,) = [e for _, e in bench.log if isinstance(e, AllExited)]
    assert done.code == 1
    assert done.complaint is not None
    assert "prefill-0 ended 10 times before it was ready" in done.complaint
    assert "SIGILL" in done.complaint
    assert "penstock serve --kernels portable" in done.complaint
    assert bench.machine.state is SupervisorState.DONE


def test_a_child_that_can_never_start_is_not_tried_again() -> None:
    bench = Bench()
    bench.send(Tick())
    bench.obey(bench.die(GATEWAY, ProcessExit(code=EXIT_CANNOT_START, reason="tokenizer.json is broken")))
    assert bench.log[-1][1] == AllExited(1, f"{GATEWAY} cannot start: tokenizer.json is broken")


def test_workers_that_were_ready_are_restarted_for_ever() -> None:
    bench = ready_bench()
    for _ in range(5 * CONFIG.rapid_deaths):
        bench.die("decode-0")
        bench.run(CONFIG.backoff_max_s + 0.2)
    assert bench.machine.state is SupervisorState.RUNNING
    assert bench.machine.state_of("decode-0") is ChildState.READY


def test_a_silent_worker_is_killed_after_the_limit_and_forked_only_when_dead() -> None:
    bench = ready_bench()
    bench.run(1.0)
    bench.silent.add("decode-0")
    silent_at = bench.now
    effects = bench.run(CONFIG.wedge_s + 0.5)
    (down,) = of_type(NotifyGateways, effects)
    assert isinstance(down.message, WorkerDown)
    assert down.message.state is WorkerState.WEDGED
    assert of_type(SendSignal, effects) == [SendSignal("decode-0", 1, signal.SIGKILL)]
    killed_at = next(t for t, e in bench.log if isinstance(e, SendSignal))
    assert CONFIG.wedge_s <= killed_at - silent_at <= CONFIG.wedge_s + 0.5
    assert of_type(ForkProcess, bench.run(5.0)) == []
    effects = bench.die("decode-0", ProcessExit(signal=signal.SIGKILL))
    assert of_type(ForkProcess, effects) == [ForkProcess("decode-0", 2, "no progress for 2.1 s")]
    assert of_type(NotifyGateways, effects)[0].message.state is WorkerState.DEAD


def test_a_long_step_that_was_predicted_is_not_silence() -> None:
    bench = ready_bench()
    beat = Heartbeat(1, WorkerState.READY, bench.now, bench.now + 30.0, 1)
    killed: list[SendSignal] = []
    for _ in range(290):
        bench.now += 0.1
        killed += of_type(SendSignal, bench.send(HeartbeatsRead({"decode-0": beat})))
    assert killed == []
    for _ in range(40):
        bench.now += 0.1
        killed += of_type(SendSignal, bench.send(HeartbeatsRead({"decode-0": beat})))
    assert [k.child for k in killed] == ["decode-0"]


def test_a_stopped_process_gets_no_credit_for_its_prediction() -> None:
    bench = ready_bench()
    beat = Heartbeat(1, WorkerState.READY, bench.now, bench.now + 30.0, 1)
    killed: list[SendSignal] = []
    for _ in range(25):
        bench.now += 0.1
        killed += of_type(
            SendSignal,
            bench.send(HeartbeatsRead({GATEWAY: beat, "decode-0": beat}, {GATEWAY: ProcessStats(stopped=True)})),
        )
    assert killed == [SendSignal(GATEWAY, 1, signal.SIGKILL)]


def silent_for(bench: Bench, seconds: float, cpu_share: float, queued_share: float = 0.0) -> list[RestartEffect]:
    """decode-0 says nothing, has ``cpu_share`` of a processor all the while, and queues for ``queued_share``."""
    beat = Heartbeat(1, WorkerState.READY, 99.0, 99.0, 1)
    effects, began = [], bench.now
    while bench.now < began + seconds:
        bench.now += 0.1
        past = bench.now - began
        vitals = ProcessStats(cpu_s=7.0 + cpu_share * past, queued_s=3.0 + queued_share * past)
        effects += bench.send(HeartbeatsRead({"decode-0": beat}, {"decode-0": vitals}))
    return effects


def test_a_step_far_longer_than_predicted_is_not_a_wedge_while_it_computes() -> None:
    bench = ready_bench()
    assert of_type(SendSignal, silent_for(bench, CONFIG.busy_s - 1, cpu_share=0.9)) == []
    assert of_type(SendSignal, bench.send(WorkerSuspected("decode-0", 1, "no tokens"))) == []
    assert len(of_type(SendSignal, silent_for(bench, 2.0, cpu_share=0.9))) == 1
    bench = ready_bench()
    assert len(of_type(SendSignal, silent_for(bench, CONFIG.wedge_s + 0.5, cpu_share=0.02))) == 1


def test_a_worker_that_others_leave_no_processor_is_slow_and_not_stuck() -> None:
    """With a niceness of 10 beside three busy processes at each processor it gets a thirtieth of one."""
    bench = ready_bench()
    assert of_type(SendSignal, silent_for(bench, CONFIG.busy_s - 1, cpu_share=0.03, queued_share=0.9)) == []
    assert of_type(SendSignal, bench.send(WorkerSuspected("decode-0", 1, "no tokens"))) == []
    assert len(of_type(SendSignal, silent_for(bench, 2.0, cpu_share=0.03, queued_share=0.9))) == 1


def test_one_wait_of_many_seconds_for_a_processor_is_not_a_wedge() -> None:
    """The system counts such a wait when it is over; until then all that is known is that the process is runnable."""
    bench = ready_bench()
    beat = Heartbeat(1, WorkerState.READY, 99.0, 99.0, 1)
    waits = ProcessStats(cpu_s=7.0, queued_s=3.0, runnable=True)
    began = bench.now
    while bench.now < began + 30.0:
        bench.now += 0.1
        assert of_type(SendSignal, bench.send(HeartbeatsRead({"decode-0": beat}, {"decode-0": waits}))) == []
        assert of_type(SendSignal, bench.send(WorkerSuspected("decode-0", 1, "no tokens"))) == []
    sleeps = ProcessStats(cpu_s=7.0, queued_s=3.0)
    killed: list[SendSignal] = []
    while not killed and bench.now < began + 30.0 + 2 * CONFIG.wedge_s:
        bench.now += 0.1
        killed = of_type(SendSignal, bench.send(HeartbeatsRead({"decode-0": beat}, {"decode-0": sleeps})))
    assert killed == [SendSignal("decode-0", 1, signal.SIGKILL)]


def test_one_that_was_runnable_at_a_single_look_is_stuck_all_the_same() -> None:
    bench = ready_bench()
    beat = Heartbeat(1, WorkerState.READY, 99.0, 99.0, 1)
    killed: list[SendSignal] = []
    for look in range(25):
        bench.now += 0.1
        killed += of_type(
            SendSignal, bench.send(HeartbeatsRead({"decode-0": beat}, {"decode-0": ProcessStats(runnable=look == 3)}))
        )
    assert killed == [SendSignal("decode-0", 1, signal.SIGKILL)]


def test_one_that_queued_and_then_hung_is_not_busy_for_having_queued() -> None:
    bench = ready_bench()
    beat = Heartbeat(1, WorkerState.READY, 99.0, 99.0, 1)
    began, killed = bench.now, 0.0
    while not killed and bench.now < began + CONFIG.busy_s:
        bench.now += 0.1
        vitals = ProcessStats(cpu_s=7.0, queued_s=3.0 + 0.9 * min(10.0, bench.now - began))
        if of_type(SendSignal, bench.send(HeartbeatsRead({"decode-0": beat}, {"decode-0": vitals}))):
            killed = bench.now - began
    assert 10.0 < killed <= 10.5 + 2 * CONFIG.wedge_s


def test_one_that_computes_again_and_again_is_not_taken_for_stuck() -> None:
    """A second of each two, which no look at the last tenth of a second would tell."""
    bench = ready_bench()
    beat = Heartbeat(1, WorkerState.READY, 99.0, 99.0, 1)
    began = bench.now
    while bench.now < began + CONFIG.busy_s - 1:
        bench.now += 0.1
        past = bench.now - began
        vitals = ProcessStats(cpu_s=7.0 + past // 2 + min(1.0, past % 2))
        assert of_type(SendSignal, bench.send(HeartbeatsRead({"decode-0": beat}, {"decode-0": vitals}))) == []


def test_time_in_which_the_supervisor_did_not_look_counts_for_nobody() -> None:
    bench = ready_bench()
    bench.silent |= {"decode-0", "prefill-0"}
    bench.run(0.5)
    bench.now += 3600.0  # suspended, all together
    assert of_type(SendSignal, bench.look()) == []
    bench.silent.clear()
    assert of_type(SendSignal, bench.run(5.0)) == []


def test_a_slow_start_is_not_a_wedge_until_its_own_limit() -> None:
    bench = Bench()
    bench.send(Tick())
    beat = Heartbeat(1, WorkerState.STARTING, bench.now, bench.now, 0)
    killed_at = None
    while killed_at is None:
        bench.now += 0.1
        if of_type(SendSignal, bench.send(HeartbeatsRead({"decode-0": beat}))):
            killed_at = bench.now
    assert CONFIG.start_s <= killed_at - 100.0 <= CONFIG.start_s + 1


def test_a_suspicion_alone_kills_nobody_but_an_insistent_one_does() -> None:
    bench = ready_bench()
    assert of_type(SendSignal, bench.send(WorkerSuspected("decode-0", 1, "no tokens"))) == []
    bench.run(0.5)
    assert of_type(SendSignal, bench.send(WorkerSuspected("decode-0", 1, "no tokens"))) == []
    bench.run(CONFIG.wedge_s)
    assert of_type(SendSignal, bench.send(WorkerSuspected("decode-0", 1, "no tokens"))) == [
        SendSignal("decode-0", 1, signal.SIGKILL)
    ]


@pytest.mark.parametrize(
    ("pauses", "killed"), [((3.0,), False), ((0.5, 0.5), False), ((3.0, 0.1), True), ((0.1, 3.0), True)]
)
def test_three_suspicions_over_the_limit_are_insistence(pauses: tuple[float, ...], killed: bool) -> None:
    bench = ready_bench()
    effects = bench.send(WorkerSuspected("decode-0", 1, "no tokens"))
    for pause in pauses:
        bench.run(pause)
        effects += bench.send(WorkerSuspected("decode-0", 1, "no tokens"))
    assert bool(of_type(SendSignal, effects)) == killed


def test_suspicions_end_with_the_process_that_they_were_of() -> None:
    bench = ready_bench()
    for _ in range(2):
        bench.send(WorkerSuspected("decode-0", 1, "no tokens"))
        bench.run(CONFIG.wedge_s)
    bench.die("decode-0")
    bench.look()
    assert bench.running["decode-0"] == 2
    assert of_type(SendSignal, bench.send(WorkerSuspected("decode-0", 2, "no tokens"))) == []


def test_deaths_from_outside_are_forgiven_at_once() -> None:
    bench = ready_bench()
    for incarnation in range(2, 6):
        assert of_type(ForkProcess, bench.die("decode-0", ProcessExit(signal=signal.SIGKILL))) == [
            ForkProcess("decode-0", incarnation)
        ]
        bench.look()


def test_a_model_that_is_wanted_again_gets_a_later_incarnation() -> None:
    """Or what its last process said would be taken for the word of the new one."""
    bench = ready_bench()
    seen: list[int] = []
    for _ in range(3):
        bench.send(LoadRequested("model-a"))
        seen.append(bench.running["model-a"])
        bench.die("model-a")
    bench.send(LoadRequested("model-b"))
    assert seen == sorted(set(seen))
    assert bench.running["model-b"] > 0


def test_a_suspicion_that_the_board_shares_kills_sooner() -> None:
    bench = ready_bench()
    bench.silent.add("decode-0")
    bench.run(0.2)
    assert of_type(SendSignal, bench.send(WorkerSuspected("decode-0", 1, "silent"))) == []
    bench.run(CONFIG.wedge_s / 2 + 0.2)
    assert of_type(SendSignal, bench.send(WorkerSuspected("decode-0", 1, "silent"))) == [
        SendSignal("decode-0", 1, signal.SIGKILL)
    ]


@pytest.mark.parametrize(("child", "incarnation"), [("decode-0", 7), ("decode-9", 1), (GATEWAY + "x", 1)])
def test_suspicions_of_others_are_ignored(child: str, incarnation: int) -> None:
    bench = ready_bench()
    for _ in range(10):
        bench.run(1.0)
        assert of_type(SendSignal, bench.send(WorkerSuspected(child, incarnation, "?"))) == []


def test_stopping_waits_for_the_gateway_and_then_ends_the_workers() -> None:
    bench = ready_bench()
    assert bench.send(StopRequested()) == [NotifyGateways(ServiceDraining())]
    assert of_type(SendSignal, bench.run(5.0)) == []
    effects = bench.die(GATEWAY, ProcessExit(code=0))
    assert {(k.child, k.signal) for k in of_type(SendSignal, effects)} == {
        ("prefill-0", signal.SIGTERM),
        ("decode-0", signal.SIGTERM),
    }
    bench.obey(effects)
    assert bench.log[-1][1] == AllExited(0)


def test_a_worker_that_dies_while_draining_is_still_replaced() -> None:
    bench = ready_bench()
    bench.send(StopRequested())
    assert of_type(ForkProcess, bench.die("decode-0")) == [ForkProcess("decode-0", 2, "killed by SIGSEGV")]


def test_draining_has_a_deadline_and_ending_another() -> None:
    bench = ready_bench()
    bench.send(StopRequested())
    effects = bench.run(CONFIG.drain_s + 0.2)
    assert {(k.child, k.signal) for k in of_type(SendSignal, effects)} == {(c, signal.SIGTERM) for c in bench.running}
    effects = bench.run(CONFIG.grace_s + 0.2)
    assert {(k.child, k.signal) for k in of_type(SendSignal, effects)} == {(c, signal.SIGKILL) for c in bench.running}
    assert bench.run(10.0) == []  # once is enough
    bench.obey(effects)
    assert bench.log[-1][1] == AllExited(0)


def test_the_second_signal_means_now() -> None:
    bench = ready_bench()
    bench.send(StopRequested())
    effects = bench.send(StopRequested())
    assert {k.signal for k in of_type(SendSignal, effects)} == {signal.SIGTERM}
    assert len(of_type(SendSignal, effects)) == 3


def test_stopping_while_the_gateway_is_down_does_not_wait() -> None:
    bench = ready_bench()
    bench.die(GATEWAY)
    bench.die(GATEWAY)  # the second death waits for its backoff
    effects = bench.send(StopRequested())
    assert {k.child for k in of_type(SendSignal, effects)} == {"prefill-0", "decode-0"}


def test_stopping_before_anything_runs_is_done_at_once() -> None:
    machine = RestartPolicy.of(CONFIG)
    assert machine.handle(StopRequested(), 0.0) == [AllExited(0)]


def test_workers_alone_have_time_to_hand_over_and_a_second_signal_means_now() -> None:
    def told() -> tuple[RestartPolicy, list[RestartEffect]]:
        machine = RestartPolicy.of(CONFIG, ())
        machine.add_workers(["decode-0"])
        machine.handle(Tick(), 0.0)
        machine.handle(HeartbeatsRead({"decode-0": Heartbeat(1, WorkerState.READY, 0.1, 0.2, 1)}), 0.1)
        return machine, machine.handle(StopRequested(), 1.0)

    term, kill = (SendSignal("decode-0", 1, signum) for signum in (signal.SIGTERM, signal.SIGKILL))
    machine, effects = told()
    assert effects == [term]
    assert machine.handle(Tick(), 0.9 + CONFIG.drain_s - CONFIG.grace_s) == []
    assert machine.handle(Tick(), 1.0 + CONFIG.drain_s - CONFIG.grace_s) == [term]
    assert machine.handle(Tick(), 0.9 + CONFIG.drain_s) == []
    assert machine.handle(Tick(), 1.0 + CONFIG.drain_s) == [kill]
    machine, _ = told()
    assert of_type(SendSignal, machine.handle(StopRequested(), 2.0)) == [term]
    assert machine.handle(Tick(), 2.0 + CONFIG.grace_s) == [kill]
    machine, _ = told()
    assert machine.handle(ProcessExited("decode-0", 1, ProcessExit(code=0)), 3.0)[-1] == AllExited(0)


def test_workers_have_what_is_left_of_the_drain_for_gateways_of_other_hosts() -> None:
    bench = ready_bench(serves_others=True)
    begun = bench.now
    bench.send(StopRequested())
    bench.run(1.0)
    effects = bench.die(GATEWAY, ProcessExit(code=0))
    assert {(k.child, k.signal) for k in of_type(SendSignal, effects)} == {
        ("prefill-0", signal.SIGTERM),
        ("decode-0", signal.SIGTERM),
    }
    until = begun + CONFIG.drain_s
    assert of_type(SendSignal, bench.run(until - CONFIG.grace_s - bench.now - 0.1)) == []
    returning = of_type(SendSignal, bench.run(0.2))  # the second signal has workers return what they have
    assert [k.signal for k in returning] == [signal.SIGTERM] * 2
    assert of_type(SendSignal, bench.run(until - bench.now - 0.1)) == []
    assert [k.signal for k in of_type(SendSignal, bench.run(0.2))] == [signal.SIGKILL] * 2


def test_what_the_next_one_reports_is_how_the_last_that_was_ready_crashed() -> None:
    bench = ready_bench()
    assert of_type(ForkProcess, bench.die("decode-0")) == [ForkProcess("decode-0", 2, "killed by SIGSEGV")]
    bench.die("decode-0", ProcessExit(code=70))  # it had no requests yet
    bench.wait_for("decode-0")
    assert of_type(ForkProcess, [effect for _, effect in bench.log])[-1] == ForkProcess(
        "decode-0", 3, "killed by SIGSEGV"
    )
    bench.look()
    assert of_type(ForkProcess, bench.die("decode-0", ProcessExit(signal=signal.SIGKILL))) == [
        ForkProcess("decode-0", 4)
    ]


def test_how_a_process_ended_in_words() -> None:
    assert str(ProcessExit(code=3)) == "exit code 3"
    assert str(ProcessExit(signal=9, reason="out of pages")) == "out of pages (killed by SIGKILL)"
    assert str(ProcessExit(signal=64 + 1)) == "killed by signal 65"


def test_notes_tell_what_is_done() -> None:
    bench = ready_bench()
    (note,) = of_type(LogLine, bench.die("decode-0"))
    assert note.text == "decode-0 ended: killed by SIGSEGV; restarting now"
    assert note.warning


def test_a_restart_that_was_asked_for_is_no_warning() -> None:
    bench = ready_bench()
    (note,) = of_type(LogLine, bench.die("decode-0", ProcessExit(code=0)))
    assert note == LogLine("decode-0 has drained and ended; restarting now")
