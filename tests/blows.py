"""Signals to processes that tests started."""

from __future__ import annotations

import os
import signal


def strike(pid: int, how: signal.Signals) -> None:
    """A child of this process.  One that is stopped has stopped, with all its threads: a signal alone does not wait."""
    os.kill(pid, how)
    if how is signal.SIGSTOP:
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
