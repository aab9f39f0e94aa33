"""The special tokens that a tokenizer puts around one text, or around two: found out once, by a probe.

So a text can be cut to what fits and still end as the model expects.  Knows nothing about requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Probed = Sequence[tuple[int, int | None, int]]
"""(token, which text it is of or None for a special one, its type) for each token of some texts."""

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Framing:
    """What stands before, between and behind."""

    one: tuple[Tokens, Tokens]
    two: tuple[Tokens, Tokens, Tokens]
    types: bool  # tokens of a second text are told apart
    type_begin: int  # of the tokens between, the first that counts to the second text

    @classmethod
    def of(cls, probe: Callable[..., Probed]) -> Framing:
        """``probe`` tells what one or two texts become."""
        single, pair = probe("a"), probe("a", "b")
        first, last = _ends(single, 0)
        begin, end = _ends(pair, 0)
        again, behind = _ends(pair, 1)
        ids = [token for token, _, _ in pair]
        kinds = [kind for _, _, kind in pair]
        between = kinds[end:again]
        return cls(
            one=(_tokens(single[:first]), _tokens(single[last:])),
            two=(tuple(ids[:begin]), tuple(ids[end:again]), tuple(ids[behind:])),
            types=kinds[again] > kinds[begin],
            type_begin=next((i for i, kind in enumerate(between) if kind > kinds[begin]), len(between)),
        )

    @property
    def room_taken(self) -> tuple[int, int]:
        """Special tokens around one text, and around two."""
        return sum(map(len, self.one)), sum(map(len, self.two))

    def around(self, text: Tokens) -> Tokens:
        """One text as the model reads it."""
        return (*self.one[0], *text, *self.one[1])

    def around_both(self, first: Tokens, second: Tokens) -> tuple[Tokens, int | None]:
        """Two texts, and where the second begins for models that tell them apart."""
        before, between, behind = self.two
        start = len(before) + len(first) + self.type_begin
        return (*before, *first, *between, *second, *behind), start if self.types else None


def _ends(probed: Probed, text: int) -> tuple[int, int]:
    """Where the tokens of a text begin and end."""
    own = [index for index, (_, which, _) in enumerate(probed) if which == text]
    return own[0], own[-1] + 1


def _tokens(probed: Probed) -> Tokens:
    return tuple(token for token, _, _ in probed)
