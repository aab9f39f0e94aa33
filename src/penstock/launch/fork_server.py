"""Forks the processes of a service.  A forked child

- dies with its parent (PR_SET_PDEATHSIG, and a check of the parent afterwards, for it may have ended before),
- keeps the descriptors that it is given and closes all others; stdin is /dev/null,
- ignores SIGINT and SIGHUP, which a terminal sends to the whole process group,
- never returns into its parent's stack: no ``finally`` or ``atexit`` of the parent runs in it,
- leaves the reason of its end where the parent can read it.

A process with threads must not fork: locks would be copied in whatever state they are.  ``OomKillLog`` tells which
child the kernel killed for lack of memory.  Knows nothing about what the children do.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from penstock import sidecar
from penstock.errors import ConfigError, KernelError, ModelError, PenstockError
from penstock.launch.restart_policy import EXIT_CANNOT_START, ProcessStats

_PR_SET_NAME = 15
CRASHED = 70  # EX_SOFTWARE of sysexits.h
_TICKS = os.sysconf("SC_CLK_TCK")
JOINED_GONE_S = 0.2
"""How long a thread that was joined may still be counted."""

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)

log = logging.getLogger(__name__)


class ProcessHasThreads(RuntimeError):  # noqa: N818 - says what is the matter
    """This process has threads besides the one that forks."""


@dataclass(frozen=True, slots=True)
class ForkedProcess:
    """A child of ours.  ``pidfd`` becomes readable when it has ended; who reaps it closes the descriptor."""

    pid: int
    pidfd: int

    def kill(self, signum: int) -> None:
        """Send a signal; one that has ended already is left in peace."""
        try:
            signal.pidfd_send_signal(self.pidfd, signum)
        except ProcessLookupError:
            return

    def reap(self) -> tuple[int | None, int | None] | None:
        """(exit code, signal) of a process that has ended, one of them None; or None while it runs."""
        status = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
        if status is None:
            return None
        os.close(self.pidfd)
        if status.si_code == os.CLD_EXITED:
            return status.si_status, None
        return None, status.si_status


def thread_count() -> int:
    """Threads of this process, as the kernel counts them: native ones, too."""
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("Threads:"):
            return int(line.split()[1])
    raise OSError("/proc/self/status has no line for threads")


def _settled_thread_count() -> int:
    """Threads, when those that have just been joined have gone: the system counts them for some moments longer."""
    until = time.monotonic() + JOINED_GONE_S
    while (threads := thread_count()) != 1 and time.monotonic() < until:
        time.sleep(0.0005)
    return threads


def read_process_stats(pid: int, *, every_thread: bool = False) -> ProcessStats:
    """What the system knows of a child (proc_pid_stat(5)); one that has gone is neither stopped nor busy.

    ``every_thread``: it is runnable when any of its threads is, not only the first.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        queued_s = _queued_s(pid)
    except OSError:
        return ProcessStats()
    state, *numbers = stat.rpartition(")")[2].split()
    user, system = int(numbers[10]), int(numbers[11])
    runnable = state == "R" or (every_thread and state != "T" and _any_thread_runnable(pid))
    return ProcessStats(stopped=state == "T", cpu_s=(user + system) / _TICKS, queued_s=queued_s, runnable=runnable)


def _any_thread_runnable(pid: int) -> bool:
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # a thread may just have ended
                stat = Path(f"/proc/{pid}/task/{thread}/stat").read_text(encoding="ascii", errors="replace")
                if stat.rpartition(")")[2].split()[0] == "R":
                    return True
    return False


def _queued_s(pid: int) -> float:
    """Seconds that its first thread waited for a processor (run_delay, sched-stats.rst); 0 where that is not counted.

    The kernel adds a wait when it ends: while a thread has waited for seconds, nothing is added.
    """
    try:
        words = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()
    except FileNotFoundError:
        return 0.0
    return int(words[1]) / 1e9


def oom_kills() -> int:
    """How many processes the system has ended for want of memory since it was started (proc_vmstat(5))."""
    try:
        text = Path("/proc/vmstat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), 0)


def fork(
    name: str,
    body: Callable[[], int],
    *,
    keep: Iterable[int] = (),
    last_words: Callable[[str], None] | None = None,
) -> ForkedProcess:
    """Run ``body`` in a child and return at once.

    ``keep`` are the descriptors that the child needs besides stdout and stderr; ``last_words`` is called in the child
    with one line when ``body`` raises.  Raises OSError when the host refuses another process, HasThreads when this
    process has threads.
    """
    threads = _settled_thread_count()
    if threads != 1:
        raise ProcessHasThreads(f"cannot fork {name}: this process has {threads} threads")
    parent = os.getpid()
    kept = frozenset(keep) | {1, 2}
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # what stands now is never traversed in the child, so its pages stay shared
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    try:
        pid = os.fork()
        if pid == 0:
            _child(name, body, kept, parent, last_words)
        return _adopt(pid)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _adopt(pid: int) -> ForkedProcess:
    try:
        return ForkedProcess(pid, os.pidfd_open(pid))
    except OSError:  # out of descriptors: a child that cannot be watched must not run
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _child(
    name: str, body: Callable[[], int], kept: frozenset[int], parent: int, last_words: Callable[[str], None] | None
) -> NoReturn:
    code = CRASHED
    try:
        _settle(name, kept, parent)
        code = body()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else CRASHED
    except BaseException as error:
        expected = isinstance(error, PenstockError)
        if isinstance(error, (ModelError, ConfigError, KernelError)):
            code = EXIT_CANNOT_START
        log.error("%s: %s", name, error, exc_info=None if expected else error)
        if last_words is not None:
            text = str(error) if expected else f"{type(error).__name__}: {error}"
            last_words(text.splitlines()[0] if text else type(error).__name__)
    finally:
        try:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _settle(name: str, kept: frozenset[int], parent: int) -> None:
    sidecar.end_with_parent()
    if os.getppid() != parent:
        os._exit(0)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    for signum in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
    close_all_but(kept)
    null = os.open(os.devnull, os.O_RDONLY)
    if null != 0:
        os.dup2(null, 0)
        os.close(null)


def close_all_but(kept: frozenset[int]) -> None:
    """Close every descriptor of this process that is not in ``kept``."""
    for entry in os.listdir("/proc/self/fd"):
        fd = int(entry)
        if fd not in kept:
            try:
                os.close(fd)
            except OSError:
                continue  # the directory's own descriptor, closed already


def prefer_for_oom_kill() -> None:
    """If memory runs out, end this process rather than its parent, which can start it anew."""
    try:
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")
    except OSError as error:
        log.debug("cannot set oom_score_adj: %s", error)


OOM_KILL_WINDOW_S = 5.0
"""For so long at most a victim's memory is being freed."""


class OomKillLog:
    """What was seen of the count lately."""

    def __init__(self, now: float, count: Callable[[], int] = oom_kills) -> None:
        self._count = count
        # When, and how many by then; those that explained a death since are among them.
        self._readings = deque([(now, count())])

    def sample(self, now: float) -> None:
        """To be called every now and then."""
        self._readings.append((now, self._count()))
        while self._readings[0][0] < now - OOM_KILL_WINDOW_S:
            self._readings.popleft()

    def claim_kill(self) -> bool:
        """Whether an out-of-memory kill explains a process that was killed; each kill explains one."""
        kills = self._count()
        if kills <= self._readings[0][1]:
            return False
        self._readings = deque((at, min(before + 1, kills)) for at, before in self._readings)
        return True
