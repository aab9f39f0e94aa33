"""Forking with real processes.  Each test has a fresh interpreter: test runners have threads, a fork server none."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PRELUDE = """
import os, select, signal, socket, sys, time
from penstock.launch.fork_server import ForkedProcess, fork, read_process_stats, thread_count
from penstock.errors import ModelError

def wait(process):
    select.select([process.pidfd], [], [], 20)
    return process.reap()
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=90,
        env={"PYTHONPATH": ":".join(p for p in sys.path if p), "PATH": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_exit_codes_signals_and_descriptors() -> None:
    run("""
        before = sorted(os.listdir("/proc/self/fd"))
        assert wait(fork("ok", lambda: 0)) == (0, None)
        assert wait(fork("seven", lambda: 7)) == (7, None)
        assert wait(fork("exits", lambda: sys.exit(3))) == (3, None)
        assert wait(fork("killed", lambda: os.kill(os.getpid(), signal.SIGKILL))) == (None, signal.SIGKILL)
        sleeper = fork("sleeper", lambda: time.sleep(60))
        assert sleeper.reap() is None
        assert not read_process_stats(sleeper.pid).stopped
        sleeper.kill(signal.SIGSTOP)
        os.waitid(os.P_PIDFD, sleeper.pidfd, os.WSTOPPED | os.WNOWAIT)
        assert read_process_stats(sleeper.pid).stopped
        sleeper.kill(signal.SIGCONT)
        sleeper.kill(signal.SIGTERM)
        assert wait(sleeper) == (None, signal.SIGTERM)
        assert not read_process_stats(sleeper.pid).stopped
        assert sorted(os.listdir("/proc/self/fd")) == before
    """)


def test_what_a_child_computes_is_counted() -> None:
    run("""
        def spin():
            while True:
                pass
        process = fork("spins", spin)
        deadline = time.monotonic() + 20
        while read_process_stats(process.pid).cpu_s < 0.1:
            assert time.monotonic() < deadline
        process.kill(signal.SIGKILL)
        wait(process)
        assert read_process_stats(process.pid) == read_process_stats(2**22 + 1)
    """)


def test_who_waits_for_a_processor_is_runnable_though_nothing_is_counted_yet() -> None:
    run("""
        import threading
        def spin(in_a_thread):
            def body():
                while True:
                    pass
            threading.Thread(target=body).start() if in_a_thread else body()
            threading.Event().wait()
        def until(condition):
            deadline = time.monotonic() + 60
            while not condition():
                assert time.monotonic() < deadline
                time.sleep(0.001)
        sleeper, spinner, beside = (
            fork(name, body) for name, body in (
                ("sleeps", lambda: time.sleep(60)), ("spins", lambda: spin(False)), ("beside", lambda: spin(True))
            )
        )
        until(lambda: not read_process_stats(sleeper.pid, every_thread=True).runnable)
        until(lambda: read_process_stats(beside.pid).cpu_s > 0.05)
        assert read_process_stats(spinner.pid).runnable
        until(lambda: not read_process_stats(beside.pid).runnable)  # its first thread sleeps
        assert read_process_stats(beside.pid, every_thread=True).runnable
        for process in (sleeper, spinner, beside):
            process.kill(signal.SIGSTOP)
            until(lambda: read_process_stats(process.pid).stopped)
            assert not read_process_stats(process.pid, every_thread=True).runnable
            process.kill(signal.SIGKILL)
            wait(process)
    """)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not count who queues")
def test_how_long_a_child_queues_for_a_processor_is_counted() -> None:
    run("""
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        def spin():
            while True:
                pass
        processes = [fork(f"spins {i}", spin) for i in range(2)]
        deadline = time.monotonic() + 60
        while not all(read_process_stats(process.pid).queued_s > 0.02 for process in processes):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        for process in processes:
            process.kill(signal.SIGKILL)
            wait(process)
    """)


def test_a_crash_leaves_a_trace_and_last_words_and_does_not_unwind_into_the_parent() -> None:
    done = run("""
        import atexit, mmap
        note = mmap.mmap(-1, 4096)
        atexit.register(lambda: print("parent's atexit"))
        def last_words(text):
            note[: len(text)] = text.encode()
        def broken():
            raise ValueError("no such page\\nsecond line")
        try:
            process = fork("broken", broken, last_words=last_words)
        finally:
            print("parent's finally")
        assert wait(process) == (70, None)
        assert note[:32].rstrip(b"\\0").decode() == "ValueError: no such page"
    """)
    assert done.stdout.split("\n") == ["parent's finally", "parent's atexit", ""]
    assert "ValueError: no such page" in done.stderr
    assert "Traceback" in done.stderr


def test_an_expected_error_is_one_line() -> None:
    done = run("""
        def refuse():
            raise ModelError("this is no model")
        assert wait(fork("decode-0", refuse)) == (78, None)
    """)
    assert done.stderr == "decode-0: this is no model\n"


def test_a_child_keeps_what_it_was_given_and_nothing_else() -> None:
    run("""
        ours, theirs = socket.socketpair()
        other = open("/dev/zero")
        def child():
            fds = {int(f) for f in os.listdir("/proc/self/fd")}
            alive = set()
            for fd in fds:
                try:
                    os.fstat(fd); alive.add(fd)
                except OSError:
                    pass
            assert alive == {0, 1, 2, theirs.fileno()}, alive
            assert os.read(0, 1) == b""
            theirs.send(b"kept")
            return 0
        process = fork("child", child, keep=[theirs.fileno()])
        assert ours.recv(10) == b"kept"
        assert wait(process) == (0, None)
    """)


def test_children_ignore_the_terminal_and_have_a_name() -> None:
    run("""
        signal.signal(signal.SIGTERM, lambda *_: None)
        def child():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            for signum in (signal.SIGINT, signal.SIGHUP):
                os.kill(os.getpid(), signum)
            assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
            assert open("/proc/self/comm").read() == "decode-0\\n"
            return 0
        assert wait(fork("decode-0", child)) == (0, None)
    """)


def test_a_child_ends_with_its_parent_even_when_it_is_stopped() -> None:
    run("""
        reader, writer = os.pipe()
        def parent():
            def child():
                os.write(writer, b"%d " % os.getpid())
                time.sleep(60)
                return 0
            fork("stopped", child, keep=[writer])
            fork("sleeping", child, keep=[writer])
            time.sleep(60)
            return 0
        process = fork("parent", parent, keep=[writer])
        os.close(writer)
        said = b""
        while said.count(b" ") < 2:
            said += os.read(reader, 100)
        children = [int(p) for p in said.split()]
        fds = [os.pidfd_open(pid) for pid in children]
        os.kill(children[0], signal.SIGSTOP)
        process.kill(signal.SIGKILL)
        assert wait(process) == (None, signal.SIGKILL)
        for fd in fds:
            assert select.select([fd], [], [], 30)[0], "outlived its parent"
    """)


def test_no_fork_while_there_are_threads() -> None:
    run("""
        import threading
        gate = threading.Event()
        thread = threading.Thread(target=gate.wait)
        thread.start()
        assert thread_count() == 2
        try:
            fork("child", lambda: 0)
        except RuntimeError as error:
            assert "2 threads" in str(error)
        else:
            raise AssertionError("forked with threads")
        gate.set()
        thread.join()
        assert wait(fork("child", lambda: 0)) == (0, None)
    """)


def test_out_of_descriptors_leaves_no_child_behind() -> None:
    run("""
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12))
        import penstock.launch.fork_server as zygote
        zygote.thread_count = lambda: 1  # reading it would need a descriptor itself
        try:
            while True:
                os.open("/dev/null", os.O_RDONLY)
        except OSError:
            pass
        try:
            fork("child", lambda: 0)
        except OSError:
            pass
        else:
            raise AssertionError("forked a child that cannot be watched")
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            pass
        else:
            raise AssertionError("a child was left behind")
    """)
