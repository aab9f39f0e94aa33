"""Keeps control tokens under the template's control.

A client's text may spell a control token (``<|end|>``), whole or in parts that only the template joins.  Before
rendering, ``ControlTokenGuard.mark`` puts invisible marks around such spellings; after rendering, unmarked text is the
template's own.  ``guarded`` then gives the template's control tokens random names, for a tokenizer that knows only
those names.  Text without such spellings takes the plain path and gets no marks.

``WordMatcher`` finds many words in a long text by one trie, in searches of ``PIECE`` characters: a regular expression
holds the interpreter's lock for a whole search, and shorter ones let other threads run.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable, Iterator
from typing import Any

PIECE = 1 << 15

Trie = dict[str, "Trie"]
"""Characters to what may follow them; the empty string marks the end of a word."""


class WordMatcher:
    """Where ``words``, each within ``before`` and ``after``, lie in a text; the longest word at a place counts."""

    def __init__(self, words: Collection[str], *, before: str = "", after: str = "", or_else: str = "") -> None:
        """``or_else`` is an expression for what else is looked for; its matches are at most as long as the words'.

        A match's group ``word`` is the word, or None for ``or_else``.
        """
        alternatives = [f"{re.escape(before)}(?P<word>{trie_pattern(words)}){re.escape(after)}"]
        self._pattern = re.compile("|".join([*alternatives, or_else] if or_else else alternatives))
        self._longest = len(before) + len(after) + max(map(len, words), default=0)

    def matches(self, text: str) -> Iterator[re.Match[str]]:
        """In order, none within another."""
        at, end = 0, PIECE
        while at < len(text):
            match = self._pattern.search(text, at, end + self._longest)
            if match is not None and match.start() < end:  # one beyond could be cut off by the window
                yield match
                at = match.end()
            else:
                at = end
            end = max(end, at) if at < end else at + PIECE

    def found_in(self, text: str) -> bool:
        """Is there any?"""
        return next(self.matches(text), None) is not None


def trie_pattern(words: Collection[str]) -> str:
    """An expression that matches the longest of ``words``; nothing when there are none."""
    trie: Trie = {}
    for word in words:
        node = trie
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    return _pattern_of(trie) if words else "(?!)"


def _pattern_of(node: Trie) -> str:
    branches = [re.escape(char) + _pattern_of(below) for char, below in sorted(node.items()) if char]
    if not branches:
        return ""
    joined = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
    return f"{joined}?" if "" in node else joined


_SPACE = " \t\r\n\f\v"


class ControlTokenGuard:
    """The spellings of one tokenizer's control tokens, and the secret marks of this process."""

    def __init__(self, spellings: Iterable[str]) -> None:
        self.spellings = tuple(sorted(set(spellings), key=lambda word: (-len(word), word)))
        nonce = secrets.token_hex(8)
        # Noncharacters (Unicode 23.7) with a nonce: no client can write a mark or a guarded name.
        self._open, self._close = f"\ufdd0{nonce}\ufdd1", f"\ufdd2{nonce}\ufdd3"
        self._guard = (f"\ufdd4{nonce}\ufdd5", f"\ufdd6{nonce}\ufdd7")
        words = trie_pattern(self.spellings)
        marks = f"{re.escape(self._open)}|{re.escape(self._close)}"
        self._words = WordMatcher(self.spellings)
        self._rendered = WordMatcher(
            self.spellings, before=self._open, after=self._close, or_else=f"(?P<own>{words})|{marks}"
        )
        self._beginnings = frozenset(word[:i] for word in self.spellings for i in range(1, len(word)))
        self._ends = frozenset(word[i:] for word in self.spellings for i in range(1, len(word)))
        self._longest_part = max(map(len, self.spellings), default=1) - 1

    def guarded_name(self, spelling: str) -> str:
        """The name that the guarded tokenizer knows this control token by."""
        return f"{self._guard[0]}{spelling}{self._guard[1]}"

    def suspicious(self, value: Any) -> bool:
        """Does any text in ``value`` (strings, lists, dicts, keys) spell a control token, or part of one at an end?"""
        if isinstance(value, str):
            return any(self._partial(value)) or self._words.found_in(value)
        if isinstance(value, dict):
            return any(self.suspicious(key) or self.suspicious(item) for key, item in value.items())
        if isinstance(value, list | tuple):
            return any(map(self.suspicious, value))
        return False

    def mark(self, value: Any) -> Any:
        """A copy of ``value`` with marks around control tokens, and where a part of one meets the template's text."""
        if isinstance(value, str):
            return self._mark_text(value)
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return value

    def guarded(self, rendered: str) -> str:
        """``rendered`` without marks, and with the template's own control tokens under their guarded names."""
        pieces: list[str] = []
        at = 0
        for match in self._rendered.matches(rendered):
            own = match["own"]
            pieces += rendered[at : match.start()], (match["word"] or "") if own is None else self.guarded_name(own)
            at = match.end()
        return "".join((*pieces, rendered[at:]))

    def unmarked_chars(self, rendered: str) -> int:
        """Characters of ``rendered`` without marks."""
        marks = (self._open, self._close)
        return len(rendered) - sum(rendered.count(mark) * len(mark) for mark in marks)

    def _partial(self, text: str) -> tuple[bool, bool]:
        core = text.strip(_SPACE)
        reach = range(1, min(self._longest_part, len(core)) + 1)
        return any(core[:i] in self._ends for i in reach), any(core[-i:] in self._beginnings for i in reach)

    def _mark_text(self, text: str) -> str:
        begins, ends = self._partial(text)
        if begins or ends:
            # Inside the white space, so that templates that trim still trim.
            left = len(text) - len(text.lstrip(_SPACE))
            right = len(text.rstrip(_SPACE))
            core = self._wrapped(text[left:right])
            core = f"{self._open if begins else ''}{core}{self._close if ends else ''}"
            return f"{text[:left]}{core}{text[right:]}"
        return self._wrapped(text)

    def _wrapped(self, text: str) -> str:
        pieces: list[str] = []
        at = 0
        for match in self._words.matches(text):
            pieces += text[at : match.start()], self._open, match[0], self._close
            at = match.end()
        return "".join((*pieces, text[at:]))
