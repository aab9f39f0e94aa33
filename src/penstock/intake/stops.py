"""Stop strings in a text that arrives in pieces.

Knows nothing about tokens.  Every stop string has its Knuth-Morris-Pratt automaton (SIAM J. Comput. 6(2), 1977), so
the work is linear in the text whatever the strings are, and what was found depends on the text only, never on the
pieces it came in: the first stop string to be complete wins, the longest of those complete at one character.
"""

from __future__ import annotations

from collections.abc import Sequence


def _borders(word: str) -> list[int]:
    """For each prefix of ``word``, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(word)
    k = 0
    for i in range(1, len(word)):
        while k and word[i] != word[k]:
            k = borders[k - 1]
        if word[i] == word[k]:
            k += 1
        borders[i] = k
    return borders


class StopScanner:
    """Reads a text once and says where it must be cut."""

    def __init__(self, stops: Sequence[str], *, shown: bool = False) -> None:
        """``stops`` are not empty strings.  ``shown``: the one that is found belongs to the text."""
        self._shown = shown
        self._words = tuple(dict.fromkeys(stops))
        self._borders = [_borders(word) for word in self._words]
        self._matched = [0] * len(self._words)
        self._first = frozenset(word[0] for word in self._words)
        self._seen = 0

    @property
    def held(self) -> int:
        """How many of the last characters may be the beginning of a stop string, and must not be shown yet."""
        return 0 if self._shown else max(self._matched, default=0)

    def passes(self, text: str) -> bool:
        """Read on, if no stop string can begin or go on in ``text``; else nothing is read."""
        if any(self._matched) or not self._first.isdisjoint(text):
            return False
        self._seen += len(text)
        return True

    def feed(self, text: str, *, counts: bool = True) -> int | None:
        """Read on.  Returns where the text ends, in characters from the very start: where the first complete stop
        string begins, or, if it is shown, ends.

        A stop string that completes while ``counts`` is false is passed over.  Not to be called after a find.
        """
        if self.passes(text):
            return None
        for char in text:
            self._seen += 1
            longest = 0
            for i, word in enumerate(self._words):
                if self._step(i, word, char):
                    longest = max(longest, len(word))
            if longest and counts:
                return self._seen if self._shown else self._seen - longest
        return None

    def _step(self, i: int, word: str, char: str) -> bool:
        matched = self._matched[i]
        borders = self._borders[i]
        while matched and word[matched] != char:
            matched = borders[matched - 1]
        if word[matched] == char:
            matched += 1
        complete = matched == len(word)
        self._matched[i] = borders[-1] if complete else matched
        return complete
