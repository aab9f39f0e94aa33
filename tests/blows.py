"""Signals to processes that tests started."""

from __future__ import annotations

import os
import signal
from contextlib import suppress


def strike(pid: int, how: signal.Signals) -> None:
    """A child of this process: it has stopped, or ended, with all its threads.  A signal alone does not wait."""
    os.kill(pid, how)
    what = os.WSTOPPED if how is signal.SIGSTOP else os.WEXITED
    with suppress(ChildProcessError):  # who started it has heard of its end before
        os.waitid(os.P_PID, pid, what | os.WNOWAIT)
