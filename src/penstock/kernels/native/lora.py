"""LoRA adapters of the C++ kernels.  Each has its own memory, which is freed with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from ml_dtypes import bfloat16

from penstock.errors import KernelError
from penstock.kernels import _native
from penstock.kernels.lora import AdapterTable, LowRank, PackedAdapter, PackedLowRank, checked_parts
from penstock.kernels.native.memory import WeightArena
from penstock.kernels.operands import Array, PackedLinear

_SOURCES = {np.dtype(bfloat16): "bf16", np.dtype(np.float16): "fp16", np.dtype(np.float32): "fp32"}


class NativeAdapters(AdapterTable):
    """Adapters of the C++ kernels."""

    def __init__(self, sites: Sequence[PackedLinear], slots: int, per_cell: int) -> None:
        self.data = _native.Adapters([(site.k, site.n) for site in sites], slots, per_cell)
        self._sites = tuple(sites)
        self._per_cell = per_cell

    def pack(self, parts: Mapping[int, Sequence[LowRank]]) -> PackedAdapter:
        ordered = {site: checked_parts(self._sites[site], own) for site, own in parts.items()}
        arena = WeightArena()
        arena.reserve(sum(self._nbytes(site, part) for site, own in ordered.items() for part in own))
        packed = {site: tuple(self._packed(arena, site, part) for part in own) for site, own in ordered.items()}
        nbytes = sum(part.down.nbytes + part.up.nbytes for own in packed.values() for part in own)
        return PackedAdapter(packed, nbytes)

    def put(self, slot: int, adapter: PackedAdapter) -> None:
        self.data.clear(slot)
        for site, parts in adapter.parts.items():
            words = [(part.down.data, part.up.data, part.first, part.scale) for part in parts]
            self.data.put(slot, site, words)

    def clear(self, slot: int) -> None:
        self.data.clear(slot)

    def _nbytes(self, site: int, part: LowRank) -> int:
        """With what aligning both may cost."""
        (rank, k), n = part.down_RK.shape, len(part.up_NR)
        cells = _native.Weights.cells_needed(rank, k, list(self._sites[site].segments), self._per_cell)
        return 4 * (cells + _native.Weights.cells_needed(n, rank, [rank], self._per_cell)) + 128

    def _packed(self, arena: WeightArena, site: int, part: LowRank) -> PackedLowRank:
        down = self._matrix(arena, part.down_RK, self._sites[site].segments)
        up = self._matrix(arena, part.up_NR, (part.up_NR.shape[1],))
        return PackedLowRank(down, up, part.first, part.scale)

    def _matrix(self, arena: WeightArena, matrix_NK: Array, ends: tuple[int, ...]) -> PackedLinear:
        source = _SOURCES.get(matrix_NK.dtype)
        if source is None:
            raise KernelError(f"adapters of type {matrix_NK.dtype} are not bfloat16, float16 or float32")
        n, k = matrix_NK.shape
        cells = arena.cells(_native.Weights.cells_needed(n, k, list(ends), self._per_cell))
        weights = _native.Weights(cells, n, k, list(ends), self._per_cell)
        raw = np.ascontiguousarray(matrix_NK)
        weights.fill(raw if source == "fp32" else raw.view(np.uint16), source)
        return PackedLinear(n=n, k=k, segments=ends, data=weights, nbytes=cells.nbytes)
