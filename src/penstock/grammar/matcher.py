"""One compiled grammar over a model's tokens, and the state of one request in it.

A thin layer over llguidance (Earley parser over a lexer of derivatives).  Everything is bounded by counts of work,
never by time: a grammar that turns out too expensive fails at the same token on every worker.  ``GrammarVocabulary``
is plain data, so that it can be sent to another process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from penstock.errors import GrammarRefused
from penstock.grammar.sources import lark_source
from penstock.types import Grammar, GrammarKind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

import msgspec

MAX_ITEMS_IN_ROW = 1000
"""Ambiguity: ways in which what was written so far can be understood.  What a mask or a token costs grows with its
square.  A schema of 250 properties that may all come next has that many."""

MAX_ITEMS_IN_ROW_OF_RULES = 500
"""The same of rules that a client wrote: a schema's cannot be ambiguous without end, those can.  A mask of such rules
takes 60 ms and a token 20 ms at the very most."""

STEP_MAX_ITEMS = 20_000
"""Parser items made for one mask."""

STEP_LEXER_FUEL = 100_000
"""Lexer work for one mask: about 7 ms."""

FIRST_LEXER_FUEL = 1_000_000
"""Lexer work of compiling."""

MAX_LEXER_STATES = 20_000
"""Of one grammar, shared by all answers that follow it; 1 to 2 KiB each."""

MAX_GRAMMAR_SIZE = 200_000
"""Symbols in the rules of one grammar."""

_WORD_BITS = 32


def mask_words(vocabulary: int) -> int:
    """Words of 32 bits in a mask over ``vocabulary`` tokens."""
    return -(-vocabulary // _WORD_BITS)


class GrammarMatcher:
    """One answer's state: the tokens taken so far, and what may follow them."""

    __slots__ = ("_beginning", "_bytes", "_matcher", "_taken", "end_tokens", "vocabulary")

    def __init__(self, trie: LLTokenizer, matcher: LLMatcher, beginning: bytes | None = None) -> None:
        """``beginning``: the mask at the beginning of every answer, if it is known."""
        self.vocabulary: int = trie.vocab_size
        self.end_tokens: tuple[int, ...] = tuple(trie.eos_tokens)
        self._bytes = mask_words(self.vocabulary) * 4
        self._matcher = matcher
        self._beginning = beginning
        self._taken = 0

    @property
    def failure(self) -> str | None:
        """Why there is no going on: the grammar is contradictory, a bound was reached, a token was not allowed."""
        error = self._matcher.get_error()
        return short_error(error) if error else None

    def accept_tokens(self, tokens: Sequence[int]) -> bool:
        """These tokens were drawn.  False when there is no going on (see ``failure``)."""
        self._taken += len(tokens)
        return self._matcher.consume_tokens(list(tokens))

    def rollback(self, count: int) -> None:
        """The last ``count`` tokens were not drawn after all."""
        self._taken -= count
        self._matcher.rollback(count)

    def write_mask(self, words: NDArray[np.uint32]) -> bool:
        """What may come next, into ``words`` [ceil(V / 32)]; lets other threads run.

        False, with ``words`` undefined, when there is no going on (see ``failure``).
        """
        if words.nbytes != self._bytes or not words.flags.c_contiguous:
            raise ValueError(f"the mask must be {self._bytes // 4} words")
        if self._taken == 0 and self._beginning is not None:
            words.view("u1")[:] = memoryview(self._beginning)[: self._bytes]  # it may have a word more
            return True
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, self._bytes)
        return not self._matcher.is_error()

    def mask(self) -> bytes:
        """The same as bytes; for those who have no arrays."""
        return self._matcher.compute_bitmask()


GRAMMAR_BYTES = 256 << 10
_CHAR_BYTES = {GrammarKind.CHOICE: 32, GrammarKind.REGEX: 32}
_RULE_CHAR_BYTES = 256
"""What a compiled grammar takes: so much, and so much a character of its text, with an answer that follows it.
Measured: 140 to 370 bytes a character for schemas of 30 to 4,000 properties, 13 to 30 for lists of texts."""


def compiled_bytes(grammar: Grammar) -> int:
    """About so much memory a compiled grammar takes, with what its answers share."""
    return GRAMMAR_BYTES + _CHAR_BYTES.get(grammar.kind, _RULE_CHAR_BYTES) * len(grammar.text)


class CompiledGrammar:
    """A grammar over one model's tokens.  Costs some 0.4 ms for a schema, a second for a huge one.

    What every answer begins with is worked out at once: the mask itself, and with it the lexer's first states, which
    all answers share.  So the first of them finds it done.
    """

    def __init__(self, grammar: Grammar, trie: LLTokenizer) -> None:
        """Never raises for what is wrong with a grammar: ``failure`` tells."""
        self._trie = trie
        try:
            source = lark_source(grammar)
        except ValueError as error:
            self._first = None
            self._beginning: bytes | None = None
            self.failure: str | None = short_error(str(error), grammar.kind)
            return
        self._first = LLMatcher(trie, source, log_level=0, limits=_limits(grammar))
        reason = self._first.get_error()
        self.failure = short_error(reason, grammar.kind) if reason else None
        self._beginning = None if reason else self._first_mask()

    def matcher(self) -> GrammarMatcher:
        """At the beginning of an answer; some 5 us.  Raises GrammarRefused for a grammar with a ``failure``."""
        if self._first is None or self.failure is not None:
            raise GrammarRefused(self.failure or "it cannot be compiled")
        return GrammarMatcher(self._trie, self._first.deep_copy(), self._beginning)

    def _first_mask(self) -> bytes | None:
        """At the beginning of an answer; None where that is too expensive, which is then for the answer to find out."""
        if self._first is None:
            return None
        one = self._first.deep_copy()
        try:
            mask = one.compute_bitmask()
        except ValueError:
            return None
        return None if one.is_error() else mask


_LONGEST_REASON = 300
_PLACE = re.compile(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?")


def short_error(error: str, kind: GrammarKind | None = None) -> str:
    """An error of the library in one line: its own words, without the picture of the grammar.

    Places in a text are kept only where the text is the client's own: ``kind`` is Lark.
    """
    if error.startswith("NoExtension"):
        return "no text satisfies it"
    lines = [line.strip() for line in error.replace("<non-verbose/>", "").splitlines()]
    head = lines[0].removesuffix("regex parse error:").removesuffix("(in regex): ").strip() if lines else ""
    cause = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "")
    line = f"{head}: {cause}" if cause else head
    if kind not in (GrammarKind.LARK, GrammarKind.EBNF):
        line = _PLACE.sub("", line, count=1)
    return line if len(line) <= _LONGEST_REASON else line[: _LONGEST_REASON - 3] + "..."


def _limits(grammar: Grammar) -> LLParserLimits:
    rules = grammar.kind in (GrammarKind.LARK, GrammarKind.EBNF) and not grammar.of_tools
    return LLParserLimits(
        max_items_in_row=MAX_ITEMS_IN_ROW_OF_RULES if rules else MAX_ITEMS_IN_ROW,
        initial_lexer_fuel=FIRST_LEXER_FUEL,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        verbose_errors=False,
    )


class GrammarVocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of one model by id, one entry a row of its logits; empty where a row stands for no text."""

    tokens: list[bytes]
    special: tuple[int, ...]  # control tokens: never text
    end_tokens: tuple[int, ...]  # allowed where a grammar is complete, and nowhere else


class _Tokens:
    """What ``LLTokenizer`` asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.eos_token_id = vocabulary.end_tokens[0]
        self.special_token_ids = sorted({*vocabulary.special, *vocabulary.end_tokens})

    def __call__(self, text: str) -> list[int]:
        """Only asked for where a text is forced to be spelled in one way, which is switched off (``sources``)."""
        raise NotImplementedError("text is not tokenized here")


def token_trie(vocabulary: GrammarVocabulary) -> LLTokenizer:
    """The tokens as the matcher wants them; takes 0.6 s for 200,000.  Needs at least one end token."""
    return LLTokenizer(
        _Tokens(vocabulary),  # type: ignore[arg-type]  # the library looks at these attributes only
        n_vocab=len(vocabulary.tokens),
        eos_token=list(vocabulary.end_tokens),
    )
