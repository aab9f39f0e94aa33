"""A checker process as its parent sees it: asked one grammar at a time, killed when it does not answer.

Blocking: for a thread.  Every end of the process is told from every other, because one is the client's fault and
another is not.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import time

import msgspec

from penstock import sidecar
from penstock.grammar.frames import OUT_OF_MEMORY, CheckLimits, Verdict, framed, read_frame
from penstock.grammar.vocabulary import Vocabulary
from penstock.types import Grammar

PATIENCE = 8.0
"""Seconds of waiting for each second of CPU time allowed: others may be using the processors."""

START_S = 30.0
"""For the process to come up and read the vocabulary."""

log = logging.getLogger(__name__)


class CheckTimeoutError(Exception):
    """No answer in time, though the CPU time was not used up: the machine is busy."""


class Checker:
    """One process."""

    def __init__(self, vocabulary: Vocabulary, limits: CheckLimits) -> None:
        """Starts it; it gets ready while the first question is on its way."""
        self._limits = limits
        self._process = subprocess.Popen(
            sidecar.python_command("penstock.grammar.checker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=sidecar.child_environment(),
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self._patience_s = START_S + limits.cpu_s * PATIENCE
        self._send(msgspec.msgpack.encode(limits))
        self._send(msgspec.msgpack.encode(vocabulary))

    def ask(self, grammar: Grammar) -> Verdict:
        """Its verdict, or the kernel's that ended it.  Raises CheckTimeoutError, after which the process is gone."""
        deadline = time.monotonic() + self._patience_s
        self._patience_s = self._limits.cpu_s * PATIENCE
        self._send(msgspec.msgpack.encode(grammar))
        answer = read_frame(lambda count: self._read(count, deadline))
        if answer is not None:
            return msgspec.msgpack.decode(answer, type=Verdict)
        self.kill()
        return Verdict(refused=self._cause_of_death(self._process.returncode))

    def _cause_of_death(self, status: int) -> str:
        """Why a grammar is refused whose check ended the process.  An allocation that fails ends the library by
        SIGABRT, or by SIGSEGV where it is the stack's."""
        if status == -signal.SIGPROF:
            return f"it takes more than {self._limits.cpu_s:g} s to compile"
        if status in (OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGKILL):
            return f"it needs more than {self._limits.memory_bytes >> 20} MiB to compile"
        log.warning("the checker of grammars ended with status %d over one of them", status)
        return "the process that checks grammars failed on it"

    @property
    def running(self) -> bool:
        """Can it be asked?"""
        return self._process.poll() is None

    def kill(self) -> None:
        """At once.  May be called from another thread, and twice."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Kills it and gives the pipes back."""
        self.kill()
        self._in.close()
        self._out.close()

    def _send(self, content: bytes) -> None:
        rest = memoryview(framed(content))
        try:
            while rest:
                rest = rest[os.write(self._in.fileno(), rest) :]
        except BrokenPipeError:
            pass  # it has ended; reading will tell

    def _read(self, count: int, deadline: float) -> bytes:
        pieces: list[bytes] = []
        while count > 0:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._out], [], [], max(0.0, left))
            if not ready:
                self.kill()
                raise CheckTimeoutError
            piece = os.read(self._out.fileno(), count)
            if not piece:
                # Its output ends a moment before it has.
                self._process.wait()
                break
            pieces.append(piece)
            count -= len(piece)
        return b"".join(pieces)
