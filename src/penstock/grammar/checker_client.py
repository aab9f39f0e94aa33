"""Checks grammars outside the event loop: one at a time, in a process of their own, each text once, tenants in turn.

The process starts with the first grammar, and is killed when it does not respond.  Each kind of exit is distinguished,
because one is the client's fault and another is not.  Knows nothing about requests or fields.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import subprocess
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

import msgspec

from penstock import sidecar
from penstock.errors import GrammarRefused, QueueFull
from penstock.grammar.checker_process import OUT_OF_MEMORY, CheckLimits, GrammarVerdict, encode_frame, read_frame
from penstock.grammar.matcher import GrammarVocabulary
from penstock.types import Grammar

WALL_PER_CPU_SECOND = 8.0
"""Seconds of waiting for each second of CPU time allowed: others may be using the processors."""

START_S = 30.0
"""For the process to come up and read the vocabulary."""

log = logging.getLogger(__name__)


class CheckTimeoutError(Exception):
    """No answer in time, though the CPU time was not used up: the machine is busy."""


class CheckerProcess:
    """One process."""

    def __init__(self, vocabulary: GrammarVocabulary, limits: CheckLimits) -> None:
        """Starts it; it gets ready while the first question is on its way."""
        self._limits = limits
        self._process = subprocess.Popen(
            sidecar.python_command("penstock.grammar.checker_process"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=sidecar.child_environment(),
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self._patience_s = START_S + limits.cpu_s * WALL_PER_CPU_SECOND
        self._send(msgspec.msgpack.encode(limits))
        self._send(msgspec.msgpack.encode(vocabulary))

    def ask(self, grammar: Grammar) -> GrammarVerdict:
        """Its verdict, or the kernel's that ended it.  Raises CheckTimeoutError, after which the process is gone."""
        deadline = time.monotonic() + self._patience_s
        self._patience_s = self._limits.cpu_s * WALL_PER_CPU_SECOND
        self._send(msgspec.msgpack.encode(grammar))
        answer = read_frame(lambda count: self._read(count, deadline))
        if answer is not None:
            return msgspec.msgpack.decode(answer, type=GrammarVerdict)
        self.kill()
        return GrammarVerdict(refused=self._cause_of_death(self._process.returncode))

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
        """Whether the checker runs."""
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
        rest = memoryview(encode_frame(content))
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


MAX_VERDICTS = 1024
"""Verdicts kept, those asked for longest ago forgotten first."""


class _PendingCheck:
    """One grammar that waits to be checked, or is, for one tenant."""

    def __init__(self, tenant: str, grammar: Grammar) -> None:
        self.tenant = tenant
        self.grammar = grammar
        self.verdict: asyncio.Future[GrammarVerdict] = asyncio.get_running_loop().create_future()
        self.waiting = 0  # requests


class GrammarChecker:
    """All checks of one gateway.  Tenants have fair turns: none waits for more than one check of each other tenant."""

    def __init__(
        self,
        load: Callable[[], GrammarVocabulary],
        limits: CheckLimits,
        *,
        max_waiting: int,
        max_remembered_bytes: int = 16 << 20,
    ) -> None:
        """``load`` is called once, on a thread, with the first grammar.  ``max_remembered_bytes``: of the texts of
        grammars whose verdicts are kept."""
        self._load = load
        self._limits = limits
        self._max_waiting = max_waiting
        self._max_remembered = max_remembered_bytes
        self._known: OrderedDict[bytes, GrammarVerdict] = OrderedDict()
        self._known_bytes = 0
        self._open: dict[tuple[str, bytes], _PendingCheck] = {}  # that wait or are under way
        self._lines: OrderedDict[str, OrderedDict[bytes, _PendingCheck]] = (
            OrderedDict()
        )  # by tenant; whose turn is next first
        self._pumping: asyncio.Task[None] | None = None
        self._vocabulary: GrammarVocabulary | None = None
        self._checker: CheckerProcess | None = None
        self._closed = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    @property
    def waiting(self) -> int:
        """Grammars that are not checked yet."""
        return len(self._open)

    async def check(self, grammar: Grammar, tenant: str = "") -> Grammar:
        """The grammar as workers are to have it.

        Raises GrammarRefused with the reason, QueueFull when too many wait or the machine is too busy.
        """
        key = _key(grammar)
        verdict = self._known.get(key)
        if verdict is None:
            verdict = await self._checked(key, grammar, tenant)
        else:
            self._known.move_to_end(key)
        if verdict.grammar is None:
            raise GrammarRefused(verdict.refused or "")
        return verdict.grammar

    async def _checked(self, key: bytes, grammar: Grammar, tenant: str) -> GrammarVerdict:
        check = self._open.get((tenant, key)) or self._begin(key, grammar, tenant)
        check.waiting += 1
        try:
            return await asyncio.shield(check.verdict)
        except CheckTimeoutError:
            raise QueueFull("The server is too busy to check the grammar. Try again soon.") from None
        finally:
            check.waiting -= 1
            if not check.waiting and key in self._lines.get(tenant, ()):
                self._leave(check, key)

    def _begin(self, key: bytes, grammar: Grammar, tenant: str) -> _PendingCheck:
        if len(self._open) >= self._max_waiting:
            self._make_room(tenant)
        check = self._open[tenant, key] = _PendingCheck(tenant, grammar)
        self._lines.setdefault(tenant, OrderedDict())[key] = check
        if self._pumping is None:
            self._pumping = asyncio.get_running_loop().create_task(self._pump())
        return check

    def _make_room(self, tenant: str) -> None:
        """Evicts the last check of the tenant with most waiting, for a tenant with fewer.  Raises QueueFull."""
        longest = max(self._lines, key=lambda other: len(self._lines[other]), default=tenant)
        full = f"{len(self._open)} grammars wait to be checked already. Try again soon."
        if len(self._lines.get(longest, ())) <= len(self._lines.get(tenant, ())) + 1:
            raise QueueFull(full)
        key, check = next(reversed(self._lines[longest].items()))
        self._leave(check, key)
        if not check.verdict.done():
            check.verdict.set_exception(QueueFull(full))

    def _leave(self, check: _PendingCheck, key: bytes) -> None:
        line = self._lines[check.tenant]
        del line[key]
        if not line:
            del self._lines[check.tenant]
        self._open.pop((check.tenant, key), None)

    async def _pump(self) -> None:
        """One check after the other, as long as any waits."""
        loop = asyncio.get_running_loop()
        while self._lines:
            tenant = next(iter(self._lines))
            line = self._lines[tenant]
            key, check = line.popitem(last=False)
            if not line:
                del self._lines[tenant]
            verdict = self._known.get(key)
            try:
                if self._closed:
                    raise CheckTimeoutError
                if verdict is None:
                    verdict = await loop.run_in_executor(self._pool, self._ask, check.grammar)
                    self._remember(key, verdict)
                if not check.verdict.done():
                    check.verdict.set_result(verdict)
            except Exception as error:  # noqa: BLE001 - raised where it is awaited
                if not check.verdict.done():
                    check.verdict.set_exception(error)
                    check.verdict.exception()  # retrieved: no request may be left to await it
            finally:
                self._open.pop((tenant, key), None)
                if tenant in self._lines:
                    self._lines.move_to_end(tenant)  # behind those who came meanwhile
        self._pumping = None

    def close(self) -> None:
        """Ends thread and process, whatever they are doing."""
        self._closed = True
        if self._checker is not None:
            self._checker.kill()
        self._pool.submit(self._end_checker)
        self._pool.shutdown(wait=True)

    # --- on the thread -----------------------------------------------------------------------------------------------

    def _ask(self, grammar: Grammar) -> GrammarVerdict:
        if self._vocabulary is None:
            self._vocabulary = self._load()
        if self._checker is not None and not self._checker.running:
            self._end_checker()
        if self._closed:
            raise CheckTimeoutError
        if self._checker is None:
            self._checker = CheckerProcess(self._vocabulary, self._limits)
        return self._checker.ask(grammar)

    def _end_checker(self) -> None:
        if self._checker is not None:
            self._checker.close()
            self._checker = None

    def _remember(self, key: bytes, verdict: GrammarVerdict) -> None:
        self._known[key] = verdict
        self._known_bytes += _size(verdict)
        while len(self._known) > 1 and (len(self._known) > MAX_VERDICTS or self._known_bytes > self._max_remembered):
            _, forgotten = self._known.popitem(last=False)
            self._known_bytes -= _size(forgotten)


def _size(verdict: GrammarVerdict) -> int:
    """Bytes of its texts, at most four a character."""
    return 4 * len(verdict.grammar.text if verdict.grammar is not None else verdict.refused or "")


def _key(grammar: Grammar) -> bytes:
    head = f"{grammar.kind}/{grammar.compact}/{grammar.closed}/{grammar.of_tools}/"
    return blake2b(head.encode() + grammar.text.encode("utf-8", "surrogatepass"), digest_size=32).digest()
