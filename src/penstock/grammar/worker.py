"""The grammars of one worker: compiled once each on a thread of their own, so that no step waits for it.

Knows nothing about requests.  Whoever has a request asks ``ready`` before it lets it in.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLTokenizer

from penstock.errors import GrammarRefused
from penstock.grammar.matcher import CompiledGrammar, Matcher
from penstock.grammar.vocabulary import Vocabulary, token_trie
from penstock.types import Grammar

KEPT = 64
"""Compiled grammars kept, those used longest ago forgotten first; answers that follow one keep it alive."""

log = logging.getLogger(__name__)


class Grammars:
    """See above."""

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        """``load`` is called once, on the thread, with the first grammar."""
        self._load = load
        self._trie: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None

    def ready(self, grammar: Grammar) -> bool:
        """Can ``matcher`` answer at once?  Otherwise it is being compiled.  Raises GrammarRefused if it cannot be."""
        future = self._future(grammar)
        if not future.done():
            return False
        try:
            failure = future.result().failure
        except Exception as error:
            log.exception("a grammar could not be compiled")
            del self._compiled[grammar]
            raise GrammarRefused(f"it could not be compiled: {error}") from error
        if failure is not None:
            raise GrammarRefused(failure)
        return True

    def matcher(self, grammar: Grammar) -> Matcher:
        """At the beginning of an answer.  Waits until the grammar is compiled; raises GrammarRefused."""
        return self._future(grammar).result().matcher()

    def close(self) -> None:
        """Ends the thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _future(self, grammar: Grammar) -> Future[CompiledGrammar]:
        future = self._compiled.get(grammar)
        if future is None:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
            future = self._compiled[grammar] = self._pool.submit(self._compile, grammar)
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        else:
            self._compiled.move_to_end(grammar)
        return future

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        if self._trie is None:
            self._trie = token_trie(self._load())
        return CompiledGrammar(grammar, self._trie)
