"""Finds any of many words in long texts, in pieces short enough that other threads get their turn.

A regular expression holds the interpreter's lock for as long as one search takes.  Here a search reads ``PIECE``
characters at most, and the words are one trie, so that a text full of their beginnings costs little more than another.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

PIECE = 1 << 15

Trie = dict[str, "Trie"]
"""Characters to what may follow them; the empty string marks the end of a word."""


class Words:
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
