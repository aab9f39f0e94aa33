"""Which layers share pages of KV memory: those that read equally far back, so many that all pages are equally large.

Knows layers by number only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.reach import EVERYTHING, Reach

MOST_PADDING = 1 / 12
"""Part of the memory that may be left empty in pages with fewer layers than others: below it, larger pages are
preferred, because every group has a table of its own."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers, in order, that stand in one page."""

    reach: Reach
    layers: tuple[int, ...]


def layer_groups(reaches: Sequence[Reach]) -> tuple[LayerGroup, ...]:
    """The groups of layers that read so far back, one entry a layer.  None at all where all layers read everything.

    Those that read everything come first, as they are held longest.
    """
    kinds: dict[Reach, list[int]] = {}
    for layer, reach in enumerate(reaches):
        kinds.setdefault(reach, []).append(layer)
    if set(kinds) <= {EVERYTHING}:
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
