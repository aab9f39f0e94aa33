"""Low-rank adapters (LoRA) on the GPU: rows grouped by adapter on the device, two products for all adapters together.

::

    slot of each row --sort--> rows of one adapter side by side --tiles--> narrow [T, parts, rank] --tiles--> out +=

The host does not know which adapters a step uses.  What a slot holds stands in tables on the device: for each product
the addresses of its matrices, their rank, columns and scale.  So a captured graph can be given other slots, and slots
other adapters; the grid follows from the number of rows and slots, and from what a slot may hold.

A row's product is one of ``matmul``: steps of K from low to high within the product's segments, the same tree, tiles of
one shape; its order follows from the adapter's shape and the product's segments.  A row's bits do not depend on the
adapters of other rows (docs/determinism.md); rows without an adapter are not touched.

This module imports torch and triton.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.lora import AdapterTable, LowRank, PackedAdapter, PackedLowRank, checked_parts
from penstock.kernels.operands import PackedLinear, StepBatch
from penstock.kernels.triton.matmul import FEW_ROWS, MatmulTile, ends_tensor, one, tile_of, whole
from penstock.kernels.triton.moe import ExpertGroups, group_of, rows_of
from penstock.kernels.triton.numerics import UNFUSED, TritonContext, rounded
from penstock.kernels.triton.plain import PlainWeights, plain_step

MOST_PARTS = 4
"""Of one product: queries, keys and values are three."""

MOST_RANK = 512
"""Twice what an engine takes by default."""

RANK_UNIT = 16
"""Ranks are filled up with zeros, which add nothing, to a multiple of this."""

UP_COLUMNS = 64
"""Of a tile of the second product: its inputs are few."""

RANKS = 32
"""Of a tile: most adapters have one."""

_WIDTH = tl.constexpr(4)  # numbers of a part: [0, rank, first column, columns]
_RANK, _FIRST, _COLUMNS = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def _matrix(addresses, at, dtype: tl.constexpr):
    """Where a matrix begins: at a multiple of 16 bytes, as allocators have it."""
    return tl.multiple_of(tl.load(addresses + at), 16).to(tl.pointer_type(dtype))


@triton.jit
def down_kernel(
    x, downs, numbers, ends, narrow, order, starts, tile_ends, x_stride, k, slots,
    SLOTS: tl.constexpr, PARTS: tl.constexpr, MOST: tl.constexpr, SEGMENTS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """narrow [T, PARTS, MOST] = x W^T for each part of each row's adapter.  Grid: tiles of rows, parts."""
    tile, part = tl.program_id(0), tl.program_id(1)
    slot = group_of(tile, tile_ends, slots, SLOTS)
    if slot < slots:
        at = slot * PARTS + part
        rank = tl.load(numbers + at * _WIDTH + _RANK)
        rows_T, live_T = rows_of(tile, slot, order, starts, tile_ends, ROWS)
        x_T1, live_T1 = x + rows_T.to(tl.int64)[:, None] * x_stride, live_T[:, None]
        weight = (_matrix(downs, at, x.dtype.element_ty), k)
        for begin in range(0, rank, COLUMNS):
            columns_N = begin + tl.arange(0, COLUMNS)
            sums_TN = whole(
                x_T1, live_T1, weight, tl.minimum(columns_N, rank - 1), ends, narrow, SEGMENTS, False, plain_step,
                ROWS, COLUMNS, DEPTH, ALIGNED, EVEN,
            )  # fmt: skip
            at_TN = narrow + (rows_T.to(tl.int64)[:, None] * PARTS + part) * MOST + columns_N[None, :]
            tl.store(at_TN, rounded(sums_TN, narrow.dtype.element_ty), mask=live_T1 & (columns_N < rank)[None, :])


@triton.jit
def up_kernel(
    narrow, ups, numbers, scales, out, order, starts, tile_ends, out_stride, slots,
    SLOTS: tl.constexpr, PARTS: tl.constexpr, MOST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """out [T, N] += scale * (narrow W^T), a part's columns, one fused multiply and add.  Grid: tiles of rows, of
    columns, parts."""
    tile, part = tl.program_id(0), tl.program_id(2)
    slot = group_of(tile, tile_ends, slots, SLOTS)
    if slot < slots:
        at = slot * PARTS + part
        columns = tl.load(numbers + at * _WIDTH + _COLUMNS)
        columns_N = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        if tl.program_id(1) * COLUMNS < columns:
            rows_T, live_T = rows_of(tile, slot, order, starts, tile_ends, ROWS)
            narrow_T1, live_T1 = narrow + (rows_T.to(tl.int64)[:, None] * PARTS + part) * MOST, live_T[:, None]
            rank = tl.multiple_of(tl.load(numbers + at * _WIDTH + _RANK), UNIT)
            weight = (_matrix(ups, at, narrow.dtype.element_ty), rank)
            sums_TN = one(
                0, narrow_T1, live_T1, weight, tl.minimum(columns_N, columns - 1), numbers + at * _WIDTH, plain_step,
                ROWS, COLUMNS, DEPTH, UNIT, False,
            )  # fmt: skip
            scale_TN = tl.zeros_like(sums_TN) + tl.load(scales + at)
            first = tl.load(numbers + at * _WIDTH + _FIRST)
            at_TN = out + rows_T.to(tl.int64)[:, None] * out_stride + first + columns_N[None, :]
            live_TN = live_T1 & (columns_N < columns)[None, :]
            tl.store(at_TN, tl.fma(sums_TN, scale_TN, tl.load(at_TN, mask=live_TN, other=0.0)), mask=live_TN)


@dataclass(frozen=True, slots=True)
class _Site:
    """What the slots hold for one product, on the device."""

    downs_SP: Tensor  # int64: addresses
    ups_SP: Tensor
    numbers_SP4: Tensor  # int32: 0, rank, first column, columns; a rank of 0: there is no such part
    scales_SP: Tensor  # fp32
    ends: Tensor
    tile: MatmulTile  # of down


class TritonAdapters(AdapterTable):
    """Adapters on the device; ``data`` holds the packed ones by slot, which keeps their memory."""

    def __init__(
        self, form: TritonContext, pack: Callable[..., PackedLinear], sites: Sequence[PackedLinear], slots: int
    ) -> None:
        """``pack``: ``Ops.pack_linear``."""
        self.data: list[PackedAdapter | None] = [None] * slots
        self._form = form
        self._pack = pack
        self._weights = tuple(sites)
        self._sites = tuple(_empty_site(form, weight, slots) for weight in sites)
        self._grouped: tuple[StepBatch, dict[bool, ExpertGroups]] | None = None

    def pack(self, parts: Mapping[int, Sequence[LowRank]]) -> PackedAdapter:
        """Raises ValueError also for more parts or a larger rank than a slot holds."""
        packed = {
            site: tuple(self._part(site, part) for part in self._checked(site, own)) for site, own in parts.items()
        }
        nbytes = sum(part.down.nbytes + part.up.nbytes for own in packed.values() for part in own)
        return PackedAdapter(packed, nbytes)

    def put(self, slot: int, adapter: PackedAdapter) -> None:
        self.data[slot] = adapter
        for site, own in enumerate(self._sites):
            _write(own, slot, adapter.parts.get(site, ()))

    def clear(self, slot: int) -> None:
        for own in self._sites:
            own.numbers_SP4[slot] = 0
        self.data[slot] = None

    def add(self, x_TK: Tensor, batch: StepBatch, site: int, out_TN: Tensor, *, wanted: bool) -> None:
        own, form, slots = self._sites[site], self._form, len(self.data)
        if not len(x_TK) or not slots or batch.adapters_S is None:
            return
        x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
        groups = self._groups(batch, wanted=wanted)
        narrow = form.empty((len(x_TK), MOST_PARTS, MOST_RANK), form.dtype)
        shape = {"SLOTS": triton.next_power_of_2(slots), "PARTS": MOST_PARTS, "MOST": MOST_RANK, "ROWS": groups.rows}
        tile, grouped = own.tile, (groups.order, groups.starts, groups.tile_ends)
        down_kernel[(groups.bound, MOST_PARTS)](
            x_TK, own.downs_SP, own.numbers_SP4, own.ends, narrow, *grouped, x_TK.stride(0), x_TK.shape[1], slots,
            **shape, SEGMENTS=len(own.ends) - 1, COLUMNS=tile.columns, DEPTH=tile.depth, ALIGNED=tile.aligned,
            EVEN=tile.even, num_warps=4, num_stages=4, **UNFUSED,
        )  # fmt: skip
        up_kernel[(groups.bound, triton.cdiv(out_TN.shape[1], UP_COLUMNS), MOST_PARTS)](
            narrow, own.ups_SP, own.numbers_SP4, own.scales_SP, out_TN, *grouped, out_TN.stride(0), slots,
            **shape, COLUMNS=UP_COLUMNS, DEPTH=tile.depth, UNIT=RANK_UNIT, num_warps=4, num_stages=2, **UNFUSED,
        )  # fmt: skip

    def _groups(self, batch: StepBatch, *, wanted: bool) -> ExpertGroups:
        """The rows of a step by slot, found out once a step."""
        if self._grouped is None or self._grouped[0] is not batch:
            self._grouped = (batch, {})
        found = self._grouped[1]
        if wanted not in found:
            slots_T = _slots(self._form, batch, len(self.data))
            if wanted:
                slots_T = slots_T[self._form.integers(batch.sample_rows_R).long()]
            found[wanted] = ExpertGroups.of(slots_T, len(self.data), rows=FEW_ROWS)
        return found[wanted]

    def _checked(self, site: int, parts: Sequence[LowRank]) -> list[LowRank]:
        ordered = checked_parts(self._weights[site], parts)
        rank = max((len(part.down_RK) for part in ordered), default=0)
        if len(ordered) > MOST_PARTS or rank > MOST_RANK:
            raise ValueError(
                f"an adapter of {len(ordered)} parts and rank {rank} does not fit: a product has at most {MOST_PARTS} "
                f"parts of rank {MOST_RANK} on a GPU"
            )
        return ordered

    def _part(self, site: int, part: LowRank) -> PackedLowRank:
        """With zeros up to a rank that kernels can read 16 bytes at a time."""
        more = -len(part.down_RK) % RANK_UNIT
        down_RK = np.pad(part.down_RK, ((0, more), (0, 0)))
        up_NR = np.pad(part.up_NR, ((0, 0), (0, more)))
        down = self._pack(down_RK, segments=self._weights[site].segments)
        return PackedLowRank(down, self._pack(up_NR), part.first, part.scale)


def _empty_site(form: TritonContext, weight: PackedLinear, slots: int) -> _Site:
    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros((slots, MOST_PARTS, *shape), dtype=dtype, device=form.device)

    return _Site(
        zeros(dtype=torch.int64),
        zeros(dtype=torch.int64),
        zeros(4, dtype=torch.int32),
        zeros(dtype=torch.float32),
        ends_tensor(form, weight.segments),
        replace(tile_of(weight.segments, form.dtype), columns=RANKS),
    )


def _write(site: _Site, slot: int, parts: Sequence[PackedLowRank]) -> None:
    """What a slot holds, a row of each table."""
    addresses, numbers = np.zeros((2, MOST_PARTS), np.int64), np.zeros((MOST_PARTS, 4), np.int32)
    scales = np.zeros(MOST_PARTS, np.float32)
    for index, part in enumerate(parts):
        down, up = _memory(part.down), _memory(part.up)
        addresses[:, index] = down.data_ptr(), up.data_ptr()
        numbers[index] = 0, part.down.n, part.first, part.up.n
        scales[index] = part.scale
    site.downs_SP[slot] = torch.from_numpy(addresses[0])
    site.ups_SP[slot] = torch.from_numpy(addresses[1])
    site.numbers_SP4[slot] = torch.from_numpy(numbers)
    site.scales_SP[slot] = torch.from_numpy(scales)


def _memory(weight: PackedLinear) -> Tensor:
    data: PlainWeights = weight.data
    return data.matrix_NK


def _slots(form: TritonContext, batch: StepBatch, slots: int) -> Tensor:
    """int32 [T]: the slot of every token, ``slots`` for those without one and those that no sequence owns."""
    starts_S1, tokens = form.integers(batch.starts_S1), len(batch.tokens_T)
    owners_T = torch.searchsorted(
        starts_S1[1:].contiguous(), torch.arange(tokens, dtype=torch.int32, device=form.device), right=True
    )
    adapters_S = form.integers(batch.adapters_S)  # type: ignore[arg-type]
    none = torch.full((1,), slots, dtype=torch.int32, device=form.device)
    slots_S1 = torch.cat([torch.where(adapters_S < 0, none, adapters_S), none])
    return slots_S1[owners_T]
