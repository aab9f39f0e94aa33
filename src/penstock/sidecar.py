"""Child processes that run a module of this package: how they are started, and that they end with their parent."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence, Set
from pathlib import Path

import penstock

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4  # prctl(2)

_SECRETS = frozenset(
    {
        "PENSTOCK_API_KEY",
        "PENSTOCK_KV_KEY",
        "PENSTOCK_KV_REDIS",
        "PENSTOCK_LIMITS_REDIS",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
    }
)
RAY_CREDENTIALS = frozenset({"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_TLS_SERVER_KEY"})
"""Secrets for the process that asks Ray alone."""

_NONE: Set[str] = frozenset()
_SECRET_NAME = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)($|_)|REDIS_URL")


def python_command(module: str, *words: str) -> list[str]:
    """The command that runs ``module``, and imports nothing from the current folder."""
    return [sys.executable, "-P", "-m", module, *words]


def child_environment(secrets: Set[str] = _NONE) -> dict[str, str]:
    """This process's environment without secrets other than these; the child imports this same package."""
    root = str(Path(penstock.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    given = {name: value for name, value in os.environ.items() if name in secrets or not is_secret(name)}
    return given | {"PYTHONPATH": path}


def is_secret(name: str) -> bool:
    """Whether this variable grants access: a key, a password, a URL that may hold one."""
    return name.upper() in _SECRETS or bool(_SECRET_NAME.search(name.upper()))


def gateway_secrets(members: str | None) -> Set[str]:
    """What a gateway keeps for a child of its own.  Ray's token lets code run on all hosts of a cluster."""
    return RAY_CREDENTIALS if members is not None and members.startswith("ray:") else _NONE


def drop_secrets(keep: Set[str] = _NONE) -> None:
    """Remove secrets from the environment of this forked process and of the children that it starts.  ``keep``: those
    that it hands to a child of its own (``ChildProcess``)."""
    for name in [name for name in os.environ if is_secret(name) and name not in keep]:
        del os.environ[name]


def protect_memory() -> None:
    """Disable core dumps, and keep other processes of the same user from reading this one's memory: prompts and keys
    are in it.  Such a process can no longer open its own files below /proc for writing."""
    disable_core_dumps()
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def disable_core_dumps() -> None:
    """For this process and its children."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def start_child(
    module: str, word: str, descriptors: Sequence[int], secrets: Set[str] = _NONE
) -> subprocess.Popen[bytes]:
    """Start a process that runs ``module`` and inherits only these descriptors and secrets.  Raises OSError.

    If the module calls ``end_with_parent``, call this from a thread that lives as long as the child.
    """
    return subprocess.Popen(
        python_command(module, word),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=child_environment(secrets),
        pass_fds=descriptors,
    )


def end_with_parent(signum: int = signal.SIGKILL) -> None:
    """Called by a child: the kernel sends it this signal when the thread that started it ends.  Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


class ChildProcess:
    """A child that runs a module of this package and ends with this process, even while it is stopped.

    The kernel kills it when the thread that started it ends (``end_with_parent``), so a thread of its own starts it and
    lives as long as it.  Thread-safe.
    """

    def __init__(
        self,
        module: str,
        word: str,
        descriptors: Sequence[int],
        *,
        name: str,
        handed_over: socket.socket | None = None,
        secrets: Set[str] = _NONE,
    ) -> None:
        """Does not wait for the start.  ``handed_over`` is closed here once the child has inherited it.  ``secrets``:
        the variables with secrets that it is given.

        Raises RuntimeError when no thread can be had.
        """
        self._module = module
        self._word = word
        self._descriptors = descriptors
        self._secrets = secrets
        self._handed_over = handed_over
        self._lock = threading.Lock()  # of the two below
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False
        self._error: OSError | None = None
        self._settled = threading.Event()  # it has started, or could not
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """None before it has started, and if it could not."""
        with self._lock:
            return None if self._process is None else self._process.pid

    def wait_started(self) -> None:
        """Raises OSError when it could not be started."""
        self._settled.wait()
        if self._error is not None:
            raise self._error

    def wait(self, timeout_s: float) -> None:
        """Wait for its end, at most so long."""
        self._thread.join(timeout_s)

    def kill(self) -> None:
        """Kill it, or keep it from starting; it has ended on return.  Idempotent."""
        with self._lock:
            self._killed = True
            if self._process is not None:
                self._process.kill()
        self._thread.join()

    def _run(self) -> None:
        process = None
        try:
            with self._lock:
                if not self._killed:
                    process = self._process = start_child(self._module, self._word, self._descriptors, self._secrets)
        except OSError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - ``wait_started`` must return whatever happens
            self._error = OSError(f"{type(error).__name__}: {error}")
        finally:
            if self._handed_over is not None:
                self._handed_over.close()
            self._settled.set()
        if process is not None:
            process.wait()
