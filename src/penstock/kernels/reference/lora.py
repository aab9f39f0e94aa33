"""The oracle's adapters, in torch: the rows of each slot, one product down and one up for each part.

This module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.lora import AdapterTable, LowRank, PackedAdapter, PackedLowRank, checked_parts
from penstock.kernels.operands import PackedLinear


class ReferenceAdapters(AdapterTable):
    """Adapters of the oracle; ``data`` holds the packed ones by slot."""

    def __init__(self, sites: Sequence[PackedLinear], slots: int, pack: Callable[..., PackedLinear]) -> None:
        self.data: list[PackedAdapter | None] = [None] * slots
        self._sites = tuple(sites)
        self._pack = pack

    def pack(self, parts: Mapping[int, Sequence[LowRank]]) -> PackedAdapter:
        packed = {
            site: tuple(self._part(site, part) for part in self._ordered(site, own)) for site, own in parts.items()
        }
        nbytes = sum(part.down.nbytes + part.up.nbytes for own in packed.values() for part in own)
        return PackedAdapter(packed, nbytes)

    def put(self, slot: int, adapter: PackedAdapter) -> None:
        self.data[slot] = adapter

    def clear(self, slot: int) -> None:
        self.data[slot] = None

    def _ordered(self, site: int, parts: Sequence[LowRank]) -> list[LowRank]:
        return checked_parts(self._sites[site], parts)

    def _part(self, site: int, part: LowRank) -> PackedLowRank:
        down = self._pack(part.down_RK, segments=self._sites[site].segments)
        return PackedLowRank(down, self._pack(part.up_NR), part.first, part.scale)


def lora_add(
    x_TK: Tensor,
    slots_T: NDArray[np.int32],
    adapters: ReferenceAdapters,
    site: int,
    out_TN: Tensor,
    *,
    linear: Callable[[Tensor, PackedLinear], Tensor],
) -> None:
    """``Ops.lora_add``, given the slot of every row."""
    for slot in sorted({int(slot) for slot in slots_T if slot >= 0}):
        adapter = adapters.data[slot]
        rows = torch.as_tensor(np.flatnonzero(slots_T == slot), device=x_TK.device)
        for part in () if adapter is None else adapter.parts.get(site, ()):
            narrow_TR = linear(x_TK[rows], part.down).to(x_TK.dtype)
            columns = slice(part.first, part.first + part.up.n)
            out_TN[rows, columns] += linear(narrow_TR, part.up) * part.scale
