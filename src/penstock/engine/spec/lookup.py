"""Draft tokens looked up in what was said before: where the last few tokens stood already, what followed them?

Prompt lookup decoding (Saxena 2023; LLMA, arXiv:2304.04487).  Costs no model: one pass of comparisons over the tokens
of the request, some microseconds for a prompt of thousands.  Knows tokens, not how likely they are to be right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST_MATCH = 2
"""Tokens that must have stood together before."""

LONGEST_MATCH = 16
"""A longer match says no more."""

CANDIDATES = 8
"""Latest places that are compared further back."""

SEARCHED_TOKENS = 32_768
"""Only so many last tokens are searched."""


@dataclass(frozen=True, slots=True)
class Guess:
    """What may come next, and how many tokens before it stood in the same order earlier."""

    match: int
    tokens: tuple[int, ...]


class Lookup:
    """The tokens of one request: prompt, then answer."""

    __slots__ = ("_count", "_tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self._count = len(tokens)
        self._tokens = np.empty(2 * max(self._count, 32), np.int32)
        self._tokens[: self._count] = tokens

    def __len__(self) -> int:
        return self._count

    def extend(self, tokens: Sequence[int]) -> None:
        """These came since."""
        count = self._count + len(tokens)
        if count > len(self._tokens):
            grown = np.empty(2 * count, np.int32)
            grown[: self._count] = self._tokens[: self._count]
            self._tokens = grown
        self._tokens[self._count : count] = tokens
        self._count = count

    def guess(self, most: int) -> Guess | None:
        """Up to ``most`` tokens; None when the last tokens are new.

        The longest match counts, among equals the latest.  What runs beyond the end of the text goes round: a text
        that repeats itself is expected to do so again.
        """
        begin = max(0, self._count - SEARCHED_TOKENS)
        text = self._tokens[begin : self._count]
        count = len(text)
        if most < 1 or count <= LEAST_MATCH:
            return None
        same = text[1:-1] == text[-1]
        same &= text[:-2] == text[-2]
        ends = np.flatnonzero(same)[-CANDIDATES:] + 2  # the token after the match
        if not len(ends):
            return None
        match, at = max((self._match(text, int(end)), int(end)) for end in ends)
        period = count - at
        follows = text[at : at + most].tolist()
        while len(follows) < most:
            follows.append(follows[len(follows) - period])
        return Guess(match, tuple(follows))

    @staticmethod
    def _match(text: np.ndarray[tuple[int], np.dtype[np.int32]], end: int) -> int:
        """How many tokens before ``end`` are those before the end of the text."""
        most = min(LONGEST_MATCH, end)
        differ = np.flatnonzero(text[end - most : end][::-1] != text[len(text) - most :][::-1])
        return int(differ[0]) if len(differ) else most
