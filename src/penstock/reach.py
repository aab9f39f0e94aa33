"""How far back a layer reads its sequence, and what follows for the pages that its keys and values stand in.

A *group* is some layers of one reach that share pages: a page holds one block of tokens of one group, and pages of all
groups are equally large.  What no later position reads is given back; so a group with a window holds a constant number
of pages, however long the sequence.

::

    blocks        0    1    2    3    4    5    6
    everything  | held .......................... |
    window      | fallen out | held ............. |      from ``kept(next position)`` on

Pure arithmetic: knows neither layers nor memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec


class Reach(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a position reads of those before it; with both limits, what both allow."""

    window: int | None = None  # the last so many, its own included
    chunk: int | None = None  # those with its own floor(position / chunk)

    @property
    def span(self) -> int | None:
        """Positions that one position reads at most; None: all."""
        return min((span for span in (self.window, self.chunk) if span is not None), default=None)

    def first(self, position: int) -> int:
        """The first position that ``position``, and so any after it, reads."""
        left = 0 if self.window is None else position - self.window + 1
        begun = 0 if self.chunk is None else position // self.chunk * self.chunk
        return max(0, left, begun)

    def kept(self, position: int, page_tokens: int) -> int:
        """The first block that is kept while ``position`` is next: of what it reads, and of the position before it, so
        that a sequence always has a page."""
        return min(self.first(position), max(0, position - 1)) // page_tokens


EVERYTHING = Reach()


def blocks_of(tokens: int, page_tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // page_tokens)


def most_blocks(reach: Reach, tokens: int, *, ahead: int, page_tokens: int) -> int:
    """Blocks of a group that a sequence of ``tokens`` tokens holds at most at any time, when a step computes up to
    ``ahead`` of them: what is given back is given back with every page that was filled, so a page is ahead at least.
    """
    whole = blocks_of(tokens, page_tokens)
    if reach.span is None:
        return whole
    return min(whole, blocks_of(reach.span + max(ahead, page_tokens), page_tokens) + 1)


def most_pages(reaches: Sequence[Reach], tokens: int, *, ahead: int, page_tokens: int) -> int:
    """Pages of all groups that a sequence holds at most at any time."""
    return sum(most_blocks(reach, tokens, ahead=ahead, page_tokens=page_tokens) for reach in reaches)


def tokens_held(reaches: Sequence[Reach], pages: int, longest: int, *, ahead: int, page_tokens: int) -> int:
    """Tokens of one sequence, up to ``longest`` and in whole blocks, that so many pages always suffice for."""

    def needed(blocks: int) -> int:
        return most_pages(reaches, blocks * page_tokens, ahead=ahead, page_tokens=page_tokens)

    blocks = bisect_left(range(1, blocks_of(longest, page_tokens) + 1), pages + 1, key=needed)
    return min(longest, blocks * page_tokens)


class Pieces:
    """The pages that a sequence needs to go on behind its first ``tokens`` tokens, numbered in the order in which they
    become final: block by block, within a block group by group.  That is the order in which they travel.
    """

    __slots__ = ("_page_tokens", "_runs", "blocks", "total")

    def __init__(self, reaches: Sequence[Reach], tokens: int, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self.blocks = blocks_of(tokens, page_tokens)
        firsts = [reach.kept(tokens, page_tokens) for reach in reaches]
        edges = [*sorted(set(firsts)), self.blocks]
        self._runs: list[tuple[int, int, tuple[int, ...]]] = []  # blocks [begin, end) of these groups
        for begin, end in pairwise(edges):
            groups = tuple(group for group, first in enumerate(firsts) if first <= begin)
            self._runs.append((begin, end, groups))
        self.total = self.before(self.blocks)

    def before(self, block: int) -> int:
        """Pieces of the blocks below ``block``."""
        return sum(max(0, min(block, end) - begin) * len(groups) for begin, end, groups in self._runs)

    def place(self, piece: int) -> tuple[int, int]:
        """(block, group) of a piece.  Raises IndexError for one that there is not."""
        left = piece
        for begin, end, groups in self._runs:
            size = (end - begin) * len(groups)
            if 0 <= left < size:
                block, which = divmod(left, len(groups))
                return begin + block, groups[which]
            left -= size
        raise IndexError(f"piece {piece} of {self.total}")

    def tokens_in(self, pieces: int) -> int:
        """Tokens of the whole blocks that are complete with the first so many pieces; those of the last block too."""
        block = self.blocks if pieces >= self.total else self.place(pieces)[0]
        return block * self._page_tokens

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(block, group) of all pieces, in order."""
        for begin, end, groups in self._runs:
            for block in range(begin, end):
                for group in groups:
                    yield block, group
