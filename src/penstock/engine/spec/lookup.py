"""Draft tokens looked up in what was said before: where the last few tokens stood already, what followed them?

Prompt lookup decoding (Saxena 2023; LLMA, arXiv:2304.04487).  Costs no model, and in a step without a match less than a
microsecond: places are chained by their last two tokens, as LZ77 does it.  Knows tokens, not how likely they are to be
right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LONGEST_MATCH = 16
"""A longer match says no more."""

CANDIDATES = 8
"""Latest places that are compared further back."""

SEARCHED_TOKENS = 32_768
"""Of a prompt only so many last tokens are searched."""


@dataclass(frozen=True, slots=True)
class Guess:
    """What may come next, and how many tokens before it stood in the same order earlier."""

    match: int
    tokens: tuple[int, ...]


class Lookup:
    """The tokens of one request: prompt, then answer.

    ``_last``: where the latest place of each two tokens ends.  ``_before``: of the place that ends here, where the one
    before it ends; -1 for none.
    """

    __slots__ = ("_before", "_last", "_tokens", "seen")

    def __init__(self, tokens: Sequence[int]) -> None:
        self.seen = len(tokens)  # tokens that were given, also those that are not searched
        self._tokens = list(tokens[-SEARCHED_TOKENS:])
        text = np.array(self._tokens, np.int64)
        pairs = text[:-1] << 32 | text[1:]
        order = np.argsort(pairs, kind="stable")  # equal pairs side by side, in the order of the text
        sorted_pairs, ends = pairs[order], order + 1
        before = np.full(len(text), -1, np.int64)
        before[ends[1:]] = np.where(sorted_pairs[1:] == sorted_pairs[:-1], ends[:-1], -1)
        self._before: list[int] = before.tolist()
        self._last: dict[int, int] = dict(zip(sorted_pairs.tolist(), ends.tolist(), strict=True))

    def extend(self, tokens: Sequence[int]) -> None:
        """These came since."""
        own, last = self._tokens, self._last
        for token in tokens:
            if own:
                pair = own[-1] << 32 | token
                self._before.append(last.get(pair, -1))
                last[pair] = len(own)
            else:
                self._before.append(-1)
            own.append(token)
        self.seen += len(tokens)

    def guess(self, most: int) -> Guess | None:
        """Up to ``most`` tokens; None when the last two tokens never stood together before.

        The longest match counts, among equals the latest.  What runs beyond the end of the text goes round: a text
        that repeats itself is expected to do so again.
        """
        text, before = self._tokens, self._before
        end = before[-1] if before else -1
        if end < 0 or most < 1:
            return None
        best, at = 0, 0
        for _ in range(CANDIDATES):
            match = self._match(end)
            if match > best:
                best, at = match, end + 1
            end = before[end]
            if end < 0 or best == LONGEST_MATCH:
                break
        follows = text[at : at + most]
        period = len(text) - at
        while len(follows) < most:
            follows.append(follows[len(follows) - period])
        return Guess(best, tuple(follows))

    def _match(self, end: int) -> int:
        """How many tokens up to ``end`` are the last ones of the text; two at least."""
        text, match, most = self._tokens, 2, min(LONGEST_MATCH, end + 1)
        last = len(text) - 1
        while match < most and text[end - match] == text[last - match]:
            match += 1
        return match
