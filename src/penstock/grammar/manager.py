"""The compiled grammars of one worker: each is compiled once, on its own thread, so that no step waits for it.

A request holds the handle that ``GrammarManager`` returns while it runs: a grammar that is held is neither compiled
twice nor evicted.  Grammars without a holder stay as far as there is memory; a compilation without a waiting request
is not started.  Knows nothing about requests.
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLTokenizer

from penstock.errors import GrammarRefused, QueueFull
from penstock.grammar.matcher import CompiledGrammar, GrammarMatcher, GrammarVocabulary, compiled_bytes, token_trie
from penstock.types import Grammar

log = logging.getLogger(__name__)


class GrammarHandle:
    """One grammar of a worker, compiled or on its way; it lives as long as somebody has this."""

    __slots__ = ("__weakref__", "_future", "_keep", "grammar")

    def __init__(
        self, grammar: Grammar, future: Future[CompiledGrammar], keep: Callable[[GrammarHandle], None]
    ) -> None:
        """``keep`` hears when it is compiled."""
        self.grammar = grammar
        self._future = future
        self._keep = keep

    def ready(self) -> bool:
        """Whether ``matcher`` returns at once; if not, it is being compiled.  Raises GrammarRefused if it cannot be."""
        if not self._future.done():
            return False
        try:
            failure = self._future.result().failure
        except Exception as error:
            log.exception("a grammar could not be compiled")
            raise GrammarRefused(f"it could not be compiled: {error}") from error
        if failure is not None:
            raise GrammarRefused(failure)
        self._keep(self)
        return True

    def matcher(self) -> GrammarMatcher:
        """At the beginning of an answer.  Waits until the grammar is compiled; raises GrammarRefused."""
        return self._future.result().matcher()


class GrammarManager:
    """See above."""

    def __init__(
        self, load: Callable[[], GrammarVocabulary], *, max_bytes: int = 256 << 20, max_compiling: int = 256
    ) -> None:
        """``load`` is called once, on the thread, with the first grammar.

        ``max_bytes``: of all that are held or kept, by ``compiled_bytes``; ``max_compiling``: that wait for the thread.
        """
        self._load = load
        self._max_bytes = max_bytes
        self._max_compiling = max_compiling
        self._trie: LLTokenizer | None = None
        self._alive: weakref.WeakValueDictionary[Grammar, GrammarHandle] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[Grammar, GrammarHandle] = OrderedDict()  # used longest ago first
        self._freed: deque[int] = deque()  # bytes of handles that were dropped; appended to by any thread
        self._bytes = 0
        self._waiting: set[Future[CompiledGrammar]] = set()
        self._pool: ThreadPoolExecutor | None = None

    @property
    def bytes(self) -> int:
        """Bytes of all grammars, in use or cached."""
        while self._freed:
            self._bytes -= self._freed.popleft()
        return self._bytes

    @property
    def compiling(self) -> int:
        """Grammars that are not compiled yet."""
        self._waiting = {future for future in self._waiting if not future.done()}
        return len(self._waiting)

    def get_or_compile(self, grammar: Grammar) -> GrammarHandle:
        """This grammar, to be compiled if it is not.  Raises QueueFull where too many are."""
        handle = self._alive.get(grammar)
        return self._begin(grammar) if handle is None else handle

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """As ``GrammarHandle.matcher``."""
        return self.get_or_compile(grammar).matcher()

    def close(self) -> None:
        """Ends the thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self, grammar: Grammar) -> GrammarHandle:
        if len(self._waiting) >= self._max_compiling and self.compiling >= self._max_compiling:
            raise QueueFull(f"{self.compiling} grammars wait to be compiled.")
        size = compiled_bytes(grammar)
        self._make_room(size)
        if self.bytes + size > self._max_bytes:
            raise QueueFull(f"answers that are being written follow grammars of {self.bytes >> 20} MiB.")
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        future = self._pool.submit(self._compile, grammar)
        handle = self._alive[grammar] = GrammarHandle(grammar, future, self._keep)
        self._waiting.add(future)
        self._bytes += size
        weakref.finalize(handle, _release_bytes, future, self._freed, size).atexit = False
        return handle

    def _make_room(self, size: int) -> None:
        """Evicts grammars without holders, least recently used first, until there is room for ``size`` bytes."""
        for grammar in list(self._kept):
            if self.bytes + size <= self._max_bytes:
                return
            kept = weakref.ref(self._kept.pop(grammar))
            handle = kept()
            if handle is not None:
                self._kept[grammar] = handle  # somebody holds it

    def _keep(self, handle: GrammarHandle) -> None:
        self._kept[handle.grammar] = handle
        self._kept.move_to_end(handle.grammar)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        if self._trie is None:
            self._trie = token_trie(self._load())
        return CompiledGrammar(grammar, self._trie)


def _release_bytes(future: Future[CompiledGrammar], freed: deque[int], size: int) -> None:
    """Count the bytes of a grammar that is no longer in use as free.  May be called on any thread, at any moment."""
    future.cancel()
    freed.append(size)
