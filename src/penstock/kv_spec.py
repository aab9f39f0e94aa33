"""How far back a layer reads its sequence, and what follows for the pages that its keys and values stand in.

A *group* is some layers of one reach that share pages: a page holds one block of tokens of one group, and pages of all
groups are equally large.  What no later position reads is given back; so a group with a window holds a constant number
of pages, however long the sequence.

::

    blocks        0    1    2    3    4    5    6
    everything  | held .......................... |
    window      | fallen out | held ............. |      from ``kept(next position)`` on

A recurrent layer reads nothing but the state before a token.  Its pages are kept at a grid of absolute positions: a
page holds not a block but a *cell* of the grid, many blocks long, and in it the state behind the last token computed
there.  A state is larger than a page: each part of it is a group, and all these groups are alike.

Pure arithmetic: knows neither layers nor memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec


class KvSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a position reads of those before it; with both limits, what both allow."""

    window: int | None = None  # the last so many, its own included
    chunk: int | None = None  # those with its own floor(position / chunk)
    state_interval: int | None = None  # a page holds the state behind so many tokens; None: keys and values of a block

    def tokens_per_page(self, page_tokens: int) -> int:
        """Tokens of one page, where a block has ``page_tokens``."""
        return page_tokens if self.state_interval is None else self.state_interval

    @property
    def span(self) -> int | None:
        """Positions that one position reads at most; None: all."""
        return min((span for span in (self.window, self.chunk) if span is not None), default=None)

    def first_read_position(self, position: int) -> int:
        """The first position that ``position``, and so any after it, reads."""
        left = 0 if self.window is None else position - self.window + 1
        begun = 0 if self.chunk is None else position // self.chunk * self.chunk
        return max(0, left, begun)

    def first_needed_block(self, position: int, page_tokens: int) -> int:
        """The first block (of states: cell) that is kept while ``position`` is next: of what it reads, and of the
        position before it, so that a sequence always has a page."""
        return min(self.first_read_position(position), max(0, position - 1)) // self.tokens_per_page(page_tokens)


FULL_ATTENTION = KvSpec()


def blocks_for(tokens: int, page_tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // page_tokens)


def max_blocks(reach: KvSpec, tokens: int, *, ahead: int, page_tokens: int) -> int:
    """Blocks (of states: cells) of a group that a sequence of ``tokens`` tokens holds at most at any time, when a step
    computes up to ``ahead`` of them: what is given back is given back with every block that was filled, so a block is
    ahead at least.
    """
    size = reach.tokens_per_page(page_tokens)
    whole = blocks_for(tokens, size)
    if reach.span is None:
        return whole
    return min(whole, blocks_for(reach.span + max(ahead, page_tokens), size) + 1)


def max_pages(reaches: Sequence[KvSpec], tokens: int, *, ahead: int, page_tokens: int) -> int:
    """Pages of all groups that a sequence holds at most at any time."""
    return sum(max_blocks(reach, tokens, ahead=ahead, page_tokens=page_tokens) for reach in reaches)


def tokens_that_fit(reaches: Sequence[KvSpec], pages: int, longest: int, *, ahead: int, page_tokens: int) -> int:
    """Tokens of one sequence, up to ``longest`` and in whole blocks, that so many pages always suffice for."""

    def needed(blocks: int) -> int:
        return max_pages(reaches, blocks * page_tokens, ahead=ahead, page_tokens=page_tokens)

    blocks = bisect_left(range(1, blocks_for(longest, page_tokens) + 1), pages + 1, key=needed)
    return min(longest, blocks * page_tokens)


class TransferOrder:
    """The pages that a sequence needs to go on behind its first ``tokens`` tokens, numbered in the order in which they
    become final: block by block, within a block group by group, and at the end the state behind the last token, part
    by part.  That is the order in which they travel.

    ``ahead``: and those of so many tokens after them.  A state is never ahead: it changes with every token.
    """

    __slots__ = ("_keyed", "_page_tokens", "_runs", "_states", "_tokens", "blocks", "total")

    def __init__(self, reaches: Sequence[KvSpec], tokens: int, page_tokens: int, *, ahead: int = 0) -> None:
        self._page_tokens = page_tokens
        self._tokens = tokens + ahead
        self.blocks = blocks_for(tokens + ahead, page_tokens)
        firsts = [reach.first_needed_block(tokens, page_tokens) for reach in reaches]
        keyed = [group for group, reach in enumerate(reaches) if reach.state_interval is None]
        edges = [*sorted({firsts[group] for group in keyed}), self.blocks]
        self._runs: list[tuple[int, int, tuple[int, ...]]] = []  # blocks [begin, end) of these groups
        for begin, end in pairwise(edges):
            groups = tuple(group for group in keyed if firsts[group] <= begin)
            self._runs.append((begin, end, groups))
        self._states = [
            (firsts[group], group, reach.state_interval)
            for group, reach in enumerate(reaches)
            if reach.state_interval is not None
        ]
        self._keyed = sum((end - begin) * len(groups) for begin, end, groups in self._runs)
        self.total = self._keyed + len(self._states)

    def pages_before(self, block: int) -> int:
        """Pieces of the blocks below ``block``; of all blocks, all pieces."""
        if block >= self.blocks:
            return self.total
        return sum(max(0, min(block, end) - begin) * len(groups) for begin, end, groups in self._runs)

    def page_at(self, piece: int) -> tuple[int, int]:
        """(block, or cell of a group of states; group) of a piece.  Raises IndexError for one that there is not."""
        left = piece
        for begin, end, groups in self._runs:
            size = (end - begin) * len(groups)
            if 0 <= left < size:
                block, which = divmod(left, len(groups))
                return begin + block, groups[which]
            left -= size
        if 0 <= left < len(self._states):
            return self._states[left][:2]
        raise IndexError(f"piece {piece} of {self.total}")

    def tokens_of(self, piece: int) -> int:
        """Tokens that a piece is of.  Raises IndexError for one that there is not."""
        block, _ = self.page_at(piece)
        size = self._page_tokens if piece < self._keyed else self._states[piece - self._keyed][2]
        return min(size, self._tokens - block * size)

    def tokens_in(self, pieces: int) -> int:
        """Tokens of the whole blocks that are complete with the first so many pieces; those of the last block too.
        Without all of the state the last block is not complete."""
        if pieces >= self.total:
            return self.blocks * self._page_tokens
        block = self.page_at(pieces)[0] if pieces < self._keyed else self.blocks - 1
        return block * self._page_tokens

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(block or cell, group) of all pieces, in order."""
        for begin, end, groups in self._runs:
            for block in range(begin, end):
                for group in groups:
                    yield block, group
        for cell, group, _ in self._states:
            yield cell, group


# MERGED: Which layers share pages of KV memory: those that read equally far back, so many that all pages are
# MERGED: equally large.
# MERGED:
# MERGED: Knows layers by number only.


MOST_PADDING = 1 / 12
"""Part of the memory that may be left empty in pages with fewer layers than others: below it, larger pages are
preferred, because every group has a table of its own."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers, in order, that stand in one page."""

    spec: KvSpec
    layers: tuple[int, ...]


def layer_groups(reaches: Sequence[KvSpec]) -> tuple[LayerGroup, ...]:
    """The groups of layers that read so far back, one entry a layer.  None at all where all layers read everything.

    Those that read everything come first, as they are held longest.
    """
    kinds: dict[KvSpec, list[int]] = {}
    for layer, reach in enumerate(reaches):
        kinds.setdefault(reach, []).append(layer)
    if set(kinds) <= {FULL_ATTENTION}:
        return ()
    size = _page_layers([len(layers) for layers in kinds.values()])
    ordered = sorted(kinds.items(), key=lambda kind: (kind[0].span is not None, kind[1]))
    return tuple(
        LayerGroup(reach, tuple(layers[begin : begin + size]))
        for reach, layers in ordered
        for begin in range(0, len(layers), size)
    )


def _page_layers(counts: Sequence[int]) -> int:
    """Layers in a page, the most that leave little enough room empty."""
    most = sum(counts) * (1 + MOST_PADDING)
    sizes = range(min(counts), 1, -1)
    return next((size for size in sizes if sum(-(-count // size) * size for count in counts) <= most), 1)
