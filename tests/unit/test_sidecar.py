"""What processes have of whoever starts them: no secrets in the environment, and nobody looks into their memory."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from penstock import sidecar

SECRETS = (
    "PENSTOCK_API_KEY",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "PENSTOCK_KV_REDIS",
    "AWS_SECRET_ACCESS_KEY",
    "DB_PASSWORD",
)
PLAIN = ("HOME", "PATH", "TOKENIZERS_PARALLELISM", "XDG_CACHE_HOME", "KEYBOARD", "OMP_NUM_THREADS")


def test_children_are_given_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SECRETS, *PLAIN):
        monkeypatch.setenv(name, "x")
    given = sidecar.child_environment()
    assert not given.keys() & set(SECRETS)
    assert given.keys() >= set(PLAIN)
    assert os.environ["PENSTOCK_API_KEY"] == "x"
    sidecar.drop_secrets()
    assert not os.environ.keys() & set(SECRETS)
    assert os.environ.keys() >= set(PLAIN)


def test_a_process_that_keeps_its_memory_to_itself_dumps_no_core_and_still_finds_its_descriptors() -> None:
    script = """
import ctypes, os, resource
from penstock import sidecar
sidecar.protect_memory()
assert resource.getrlimit(resource.RLIMIT_CORE)[0] == 0
assert ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 0, "PR_GET_DUMPABLE"
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
    sidecar.protect_memory()
memory = os.memfd_create("m")
os.close(os.open(f"/proc/self/fd/{memory}", os.O_RDONLY))
assert os.listdir("/proc/self/fd")
assert os.listdir("/proc/self/task")
"""
    environment = {"PYTHONPATH": ":".join(part for part in sys.path if part), "PATH": ""}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=60)


def test_a_child_inherits_its_socket_and_is_gone_after_a_kill() -> None:
    ours, theirs = socket.socketpair()
    child = sidecar.ChildProcess("http.server", str(0), [theirs.fileno()], name="child", handed_over=theirs)
    child.wait_started()
    pid = child.pid
    assert pid is not None
    assert theirs.fileno() == -1
    child.kill()
    child.kill()
    assert ours.recv(1) == b"", "the child had the only other end"
    assert not os.path.exists(f"/proc/{pid}")
    ours.close()


def test_a_child_that_cannot_be_started_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    child = sidecar.ChildProcess("http.server", "0", [], name="child")
    with pytest.raises(FileNotFoundError):
        child.wait_started()
    assert child.pid is None
    child.kill()
