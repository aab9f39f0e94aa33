"""Grammars checked beside an event loop: one at a time, in a process of their own, each text once, tenants in turn.

The process is started with the first grammar.  Knows nothing about requests or fields.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

from penstock.errors import GrammarRefused, QueueFull
from penstock.grammar.child import Checker, CheckTimeoutError
from penstock.grammar.frames import CheckLimits, Verdict
from penstock.grammar.vocabulary import Vocabulary
from penstock.types import Grammar

REMEMBERED = 1024
"""Verdicts kept, those asked for longest ago forgotten first."""


class _Check:
    """One grammar that waits to be checked, or is, for one tenant."""

    def __init__(self, tenant: str, grammar: Grammar) -> None:
        self.tenant = tenant
        self.grammar = grammar
        self.verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self.waiting = 0  # requests


class GrammarChecks:
    """All checks of one gateway.  Tenants have fair turns: none waits for more than one check of each other tenant."""

    def __init__(
        self,
        load: Callable[[], Vocabulary],
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
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()
        self._known_bytes = 0
        self._open: dict[tuple[str, bytes], _Check] = {}  # that wait or are under way
        self._lines: OrderedDict[str, OrderedDict[bytes, _Check]] = OrderedDict()  # by tenant; whose turn is next first
        self._pumping: asyncio.Task[None] | None = None
        self._vocabulary: Vocabulary | None = None
        self._checker: Checker | None = None
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

    async def _checked(self, key: bytes, grammar: Grammar, tenant: str) -> Verdict:
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

    def _begin(self, key: bytes, grammar: Grammar, tenant: str) -> _Check:
        if len(self._open) >= self._max_waiting:
            self._make_room(tenant)
        check = self._open[tenant, key] = _Check(tenant, grammar)
        self._lines.setdefault(tenant, OrderedDict())[key] = check
        if self._pumping is None:
            self._pumping = asyncio.get_running_loop().create_task(self._pump())
        return check

    def _make_room(self, tenant: str) -> None:
        """The last of whoever has most waiting gives way to a tenant that has fewer.  Raises QueueFull."""
        longest = max(self._lines, key=lambda other: len(self._lines[other]), default=tenant)
        full = f"{len(self._open)} grammars wait to be checked already. Try again soon."
        if len(self._lines.get(longest, ())) <= len(self._lines.get(tenant, ())) + 1:
            raise QueueFull(full)
        key, check = next(reversed(self._lines[longest].items()))
        self._leave(check, key)
        if not check.verdict.done():
            check.verdict.set_exception(QueueFull(full))

    def _leave(self, check: _Check, key: bytes) -> None:
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
            except Exception as error:  # noqa: BLE001 - told to whoever waits
                if not check.verdict.done():
                    check.verdict.set_exception(error)
                    check.verdict.exception()  # nobody may be left to hear it
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

    def _ask(self, grammar: Grammar) -> Verdict:
        if self._vocabulary is None:
            self._vocabulary = self._load()
        if self._checker is not None and not self._checker.running:
            self._end_checker()
        if self._closed:
            raise CheckTimeoutError
        if self._checker is None:
            self._checker = Checker(self._vocabulary, self._limits)
        return self._checker.ask(grammar)

    def _end_checker(self) -> None:
        if self._checker is not None:
            self._checker.close()
            self._checker = None

    def _remember(self, key: bytes, verdict: Verdict) -> None:
        self._known[key] = verdict
        self._known_bytes += _size(verdict)
        while len(self._known) > 1 and (len(self._known) > REMEMBERED or self._known_bytes > self._max_remembered):
            _, forgotten = self._known.popitem(last=False)
            self._known_bytes -= _size(forgotten)


def _size(verdict: Verdict) -> int:
    """Bytes of its texts, at most four a character."""
    return 4 * len(verdict.grammar.text if verdict.grammar is not None else verdict.refused or "")


def _key(grammar: Grammar) -> bytes:
    head = f"{grammar.kind}/{grammar.compact}/{grammar.closed}/{grammar.of_tools}/"
    return blake2b(head.encode() + grammar.text.encode("utf-8", "surrogatepass"), digest_size=32).digest()
