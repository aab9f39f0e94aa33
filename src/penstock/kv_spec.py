"""KV specs: how far back a layer attends, and what follows for the KV pages of its sequences.

A *group* is some layers with one spec that share pages: a page holds one block of tokens of one group, and the pages of
all groups are equally large.  Pages that no later position reads are freed, so a group with a window holds a constant
number of pages, however long the sequence.

::

    blocks        0    1    2    3    4    5    6
    full          | held .......................... |
    window        | freed      | held ............. |      from ``first_needed_block(next position)`` on

A recurrent layer reads nothing but the state before a token.  Its states are kept at a grid of absolute positions: a
page holds not a block but a *cell* of the grid, many blocks long, and in it the state behind the last token computed
there.  A state is larger than a page: each part of it is a group, and all these groups are alike.

Pure arithmetic: knows layers by number only, and no memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec


class KvSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a position reads of those before it; with both limits, what both allow."""

    window: int | None = None  # positions, its own included
    chunk: int | None = None  # those with its own floor(position / chunk)
    state_interval: int | None = None  # tokens whose state a page holds; None: keys and values of a block

    def tokens_per_page(self, page_tokens: int) -> int:
        """Tokens of one page, where a block has ``page_tokens``."""
        return page_tokens if self.state_interval is None else self.state_interval

    @property
    def span(self) -> int | None:
        """The most positions that one position reads; None for all."""
        return min((span for span in (self.window, self.chunk) if span is not None), default=None)

    def first_read_position(self, position: int) -> int:
        """The first position that ``position``, and so any later one, reads."""
        left = 0 if self.window is None else position - self.window + 1
        begun = 0 if self.chunk is None else position // self.chunk * self.chunk
        return max(0, left, begun)

    def first_needed_block(self, position: int, page_tokens: int) -> int:
        """The first block (for states: cell) that is needed while ``position`` is next: the first that it reads, or
        that of the position before it, so that a sequence always has a page."""
        return min(self.first_read_position(position), max(0, position - 1)) // self.tokens_per_page(page_tokens)


FULL_ATTENTION = KvSpec()


def blocks_for(tokens: int, page_tokens: int) -> int:
    """Blocks that hold ``tokens`` tokens."""
    return -(-tokens // page_tokens)


def max_blocks(reach: KvSpec, tokens: int, *, ahead: int, page_tokens: int) -> int:
    """The most blocks (for states: cells) of a group that a sequence of ``tokens`` tokens holds at any time, when a
    step computes up to ``ahead`` of them.  Blocks are freed with every block that fills, so at least one block is
    ahead."""
    size = reach.tokens_per_page(page_tokens)
    whole = blocks_for(tokens, size)
    if reach.span is None:
        return whole
    return min(whole, blocks_for(reach.span + max(ahead, page_tokens), size) + 1)


def max_pages(reaches: Sequence[KvSpec], tokens: int, *, ahead: int, page_tokens: int) -> int:
    """The most pages of all groups that a sequence holds at any time."""
    return sum(max_blocks(reach, tokens, ahead=ahead, page_tokens=page_tokens) for reach in reaches)


def tokens_that_fit(reaches: Sequence[KvSpec], pages: int, longest: int, *, ahead: int, page_tokens: int) -> int:
    """The longest sequence, up to ``longest`` and in whole blocks, that ``pages`` pages always suffice for."""

    def needed(blocks: int) -> int:
        return max_pages(reaches, blocks * page_tokens, ahead=ahead, page_tokens=page_tokens)

    blocks = bisect_left(range(1, blocks_for(longest, page_tokens) + 1), pages + 1, key=needed)
    return min(longest, blocks * page_tokens)


class TransferOrder:
    """The pages that a sequence needs to continue behind its first ``tokens`` tokens, in the order in which they become
    final and travel: block by block, within a block group by group, and last the state behind the last token, part by
    part.

    ``ahead``: include the pages of this many tokens after them.  A state is never ahead: it changes with every token.
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
        """Number of pages of the blocks below ``block``; of all blocks, all pages."""
        if block >= self.blocks:
            return self.total
        return sum(max(0, min(block, end) - begin) * len(groups) for begin, end, groups in self._runs)

    def page_at(self, piece: int) -> tuple[int, int]:
        """(block, or cell of a group of states; group) of a page.  Raises IndexError outside the order."""
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
        """Tokens in a page.  Raises IndexError outside the order."""
        block, _ = self.page_at(piece)
        size = self._page_tokens if piece < self._keyed else self._states[piece - self._keyed][2]
        return min(size, self._tokens - block * size)

    def tokens_in(self, pieces: int) -> int:
        """Tokens of the whole blocks that are complete with the first ``pieces`` pages; of the last block too.
        Without all parts of the state the last block is not complete."""
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


MOST_PADDING = 1 / 12
"""Part of the memory that may be left empty in pages with fewer layers than others: below it, larger pages are
preferred, because every group has a table of its own."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers, in order, that share a page."""

    spec: KvSpec
    layers: tuple[int, ...]


def layer_groups(reaches: Sequence[KvSpec]) -> tuple[LayerGroup, ...]:
    """The groups of layers with these specs, one entry a layer; as large as lets all pages be equally large.  Empty
    where all layers attend to everything.

    Groups with full attention come first, as they are held longest.
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
    """The most layers in a page that leave little enough of the memory empty."""
    most = sum(counts) * (1 + MOST_PADDING)
    sizes = range(min(counts), 1, -1)
    return next((size for size in sizes if sum(-(-count // size) * size for count in counts) <= most), 1)
