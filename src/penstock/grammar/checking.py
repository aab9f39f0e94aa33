"""Grammars checked beside an event loop: one at a time, in a process of their own, each text once.

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
from penstock.grammar.frames import Limits, Verdict
from penstock.grammar.vocabulary import Vocabulary
from penstock.types import Grammar

REMEMBERED = 1024
"""Verdicts kept, those asked for longest ago forgotten first."""


class GrammarChecks:
    """All checks of one gateway."""

    def __init__(self, load: Callable[[], Vocabulary], limits: Limits, *, max_waiting: int) -> None:
        """``load`` is called once, on a thread, with the first grammar."""
        self._load = load
        self._limits = limits
        self._max_waiting = max_waiting
        self._waiting = 0
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()
        self._vocabulary: Vocabulary | None = None
        self._checker: Checker | None = None
        self._closed = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    async def check(self, grammar: Grammar) -> Grammar:
        """The grammar as workers are to have it.

        Raises GrammarRefused with the reason, QueueFull when too many wait or the machine is too busy.
        """
        key = _key(grammar)
        verdict = self._known.get(key)
        if verdict is None:
            if self._waiting >= self._max_waiting:
                raise QueueFull(f"{self._waiting} grammars wait to be checked already. Try again soon.")
            self._waiting += 1
            try:
                verdict = await asyncio.get_running_loop().run_in_executor(self._pool, self._ask, grammar)
            except CheckTimeoutError:
                raise QueueFull("The server is too busy to check the grammar. Try again soon.") from None
            finally:
                self._waiting -= 1
            self._remember(key, verdict)
        else:
            self._known.move_to_end(key)
        if verdict.grammar is None:
            raise GrammarRefused(verdict.refused or "")
        return verdict.grammar

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
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)


def _key(grammar: Grammar) -> bytes:
    head = f"{grammar.kind}/{grammar.compact}/{grammar.closed}/"
    return blake2b(head.encode() + grammar.text.encode("utf-8", "surrogatepass"), digest_size=32).digest()
