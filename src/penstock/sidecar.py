"""Processes that run a module of this package: what starts one, and how it ends with whoever started it.

Knows nothing of what they do.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import penstock

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4  # prctl(2)

_SECRETS = frozenset({"PENSTOCK_API_KEY", "PENSTOCK_KV_KEY", "PENSTOCK_KV_REDIS", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})
_SECRET_NAME = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)($|_)|REDIS_URL")


def python_command(module: str, *words: str) -> list[str]:
    """That runs ``module``, and nothing of the current folder."""
    return [sys.executable, "-P", "-m", module, *words]


def child_environment() -> dict[str, str]:
    """This process's own without secrets, in which the child's package is this one."""
    root = str(Path(penstock.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {name: value for name, value in os.environ.items() if not is_secret(name)} | {"PYTHONPATH": path}


def is_secret(name: str) -> bool:
    """Is this a variable that opens something: a key, a password, a URL that may hold one?"""
    return name.upper() in _SECRETS or bool(_SECRET_NAME.search(name.upper()))


def drop_secrets() -> None:
    """For a process that was forked and needs none: it, and what it starts, has them in its environment no more."""
    for name in [name for name in os.environ if is_secret(name)]:
        del os.environ[name]


def protect_memory() -> None:
    """No core dump of this process, and no other one of its user may look into it: prompts and keys are there.

    To be called by a process that needs to open no file of its own below /proc for writing any more.
    """
    disable_core_dumps()
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def disable_core_dumps() -> None:
    """Of this process and of what it starts."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def start_child(module: str, word: str, descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    """A process that runs ``module`` and has nothing of this one but these.  Raises OSError.

    Where it calls ``end_with_parent``: to be called by a thread that is there as long as it.
    """
    return subprocess.Popen(
        python_command(module, word),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=child_environment(),
        pass_fds=descriptors,
    )


def end_with_parent() -> None:
    """For the child: the kernel kills it when the thread that started it has ended.  Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
