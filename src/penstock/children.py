"""Processes that run a module of this package: what starts one, and how it ends with whoever started it.

Knows nothing of what they do.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import penstock

_PR_SET_PDEATHSIG = 1  # prctl(2)


def command(module: str, *words: str) -> list[str]:
    """That runs ``module``, and nothing of the current folder."""
    return [sys.executable, "-P", "-m", module, *words]


def environment() -> dict[str, str]:
    """This process's own, in which the child's package is this one."""
    root = str(Path(penstock.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def started(module: str, word: str, descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    """A process that runs ``module`` and has nothing of this one but these.  Raises OSError.

    Where it calls ``end_with_parent``: to be called by a thread that is there as long as it.
    """
    return subprocess.Popen(
        command(module, word),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
        pass_fds=descriptors,
    )


def end_with_parent() -> None:
    """For the child: the kernel kills it when the thread that started it has ended.  Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
