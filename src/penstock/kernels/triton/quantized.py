"""Quantized weights, read as packed as they are stored: codes, and numbers of their groups.

Values of codes are exact in the compute type and go through the matrix units as they are; scales and minimums are
applied in fp32 to the sum of each step, which lies inside one group.  So weights are never rounded, and what differs
from the weights' own product is the order of sums alone.  What a minimum adds is the sum of a row's inputs, which the
matrix units make as well, as a product with ones: a reduction would follow the layout of threads, which may differ by
the number of rows.

Codes of 4 bits lie two a byte, the lower one first; 5 and 6 bits have a second plane with the upper bits, eight or four
a byte.  Groups have one scale in the type of the file.

This module imports torch and triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import ml_dtypes
import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.quantization import E2M1, SUPER_COLUMNS, MinimumType, QuantFormat, QuantizedMatrix, ScaleType
from penstock.kernels.triton.matmul import Operand, ends_tensor, multiply, tile_of
from penstock.kernels.triton.numerics import TritonContext, dot
from penstock.kernels.triton.plain import adopt

LOOKED_UP = tl.constexpr(0)
AFFINE = tl.constexpr(1)  # a code times a number plus a number
TINY_FLOATS = tl.constexpr(2)  # E2M1
SMALL_FLOATS = tl.constexpr(3)  # E4M3

E8M0_SCALE = tl.constexpr(int(ScaleType.E8M0))
U8_SCALE = tl.constexpr(int(ScaleType.U8_OF_F16))
I8_SCALE = tl.constexpr(int(ScaleType.I8_OF_F16))
NO_MINIMUM = tl.constexpr(int(MinimumType.NONE))
ZERO_POINT = tl.constexpr(int(MinimumType.ZERO_POINT))
U8_MINIMUM = tl.constexpr(int(MinimumType.U8_OF_F16))
SUPER = tl.constexpr(SUPER_COLUMNS)


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def codes_of(low, high, outputs_N, k, columns, BITS: tl.constexpr, DEPTH: tl.constexpr):
    """Codes [N, DEPTH] from column ``k`` of ``columns`` on."""
    if BITS == 8:
        at_N1 = low + outputs_N.to(tl.int64)[:, None] * columns + k
        codes = tl.load(at_N1 + tl.arange(0, DEPTH)[None, :])
    else:
        half_N1 = low + outputs_N.to(tl.int64)[:, None] * (columns // 2) + k // 2
        both = tl.load(half_N1 + tl.arange(0, DEPTH // 2)[None, :])
        codes = tl.interleave(both & 0xF, both >> 4)
        if BITS > 4:
            EACH: tl.constexpr = 8 // (BITS - 4)
            above_N1 = high + outputs_N.to(tl.int64)[:, None] * (columns // EACH) + k // EACH
            upper = tl.load(above_N1 + tl.arange(0, DEPTH // EACH)[None, :])
            shifts = (tl.arange(0, EACH) * (BITS - 4)).to(tl.uint8)[None, None, :]
            upper = (upper[:, :, None] >> shifts) & (2 ** (BITS - 4) - 1)
            codes = codes | (tl.reshape(upper, (outputs_N.shape[0], DEPTH)) << 4)
    return codes


@triton.jit
def values_of(codes, table, factor, offset, VALUES: tl.constexpr):
    """What codes stand for, in the type of the table, exactly."""
    if VALUES == LOOKED_UP:
        values = tl.load(table + codes.to(tl.int32))
    elif VALUES == AFFINE:
        values = codes.to(tl.float32) * factor + offset
    elif VALUES == TINY_FLOATS:
        size = (codes & 7).to(tl.uint32)
        bits = tl.where(size > 1, (size << 22) + (126 << 23), tl.where(size == 1, 126 << 23, 0))
        values = (bits.to(tl.uint32) | ((codes & 8).to(tl.uint32) << 28)).to(tl.float32, bitcast=True)
    else:
        wide = codes.to(tl.uint32)
        bits = ((wide & 0x7F) << 20) | ((wide & 0x80) << 24)
        values = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120: the biases' difference
        values = tl.where((wide & 0x7F) == 0x7F, float("nan"), values)
    return values.to(table.dtype.element_ty)


@triton.jit
def scales_of(scales, supers, groups_N, supers_N, SCALE: tl.constexpr):
    """fp32, of these groups."""
    own = tl.load(scales + groups_N)
    if SCALE == E8M0_SCALE:
        bits = own.to(tl.uint32) << 23
        bits = tl.where(own == 0, 1 << 22, tl.where(own == 255, 0x7FC00000, bits))
        found = bits.to(tl.uint32).to(tl.float32, bitcast=True)
    else:
        found = own.to(tl.float32)
        if SCALE == U8_SCALE or SCALE == I8_SCALE:
            found = found * tl.load(supers + supers_N).to(tl.float32)
    return found


@triton.jit
def minimums_of(minimums, supers, groups_N, supers_N, scales_N, MINIMUM: tl.constexpr):
    """fp32, of these groups."""
    own = tl.load(minimums + groups_N).to(tl.float32)
    if MINIMUM == ZERO_POINT:
        own = -(scales_N * own)
    elif MINIMUM == U8_MINIMUM:
        own = -(own * tl.load(supers + supers_N).to(tl.float32))
    return own


@triton.jit
def quantized_step(sums_TN, x_TK, weight, outputs_N, k, end, DEPTH: tl.constexpr, EVEN: tl.constexpr):
    """Segments are whole steps, and no step is in two groups."""
    BITS: tl.constexpr = weight[11]
    GROUP: tl.constexpr = weight[12]
    VALUES: tl.constexpr = weight[13]
    SCALE: tl.constexpr = weight[14]
    MINIMUM: tl.constexpr = weight[15]
    codes_NK = codes_of(weight[0], weight[1], outputs_N, k, weight[9], BITS, DEPTH)
    values_NK = values_of(codes_NK, weight[2], weight[7], weight[8], VALUES)
    groups_N = outputs_N * ((weight[9] + GROUP - 1) // GROUP) + k // GROUP
    supers_N = outputs_N * weight[10] + k // SUPER
    scales_N = scales_of(weight[3], weight[4], groups_N, supers_N, SCALE)
    part_TN = dot(x_TK, tl.trans(values_NK), tl.zeros_like(sums_TN))
    sums_TN = tl.fma(part_TN, tl.broadcast_to(scales_N[None, :], part_TN.shape), sums_TN)
    if MINIMUM != NO_MINIMUM:
        minimums_N = minimums_of(weight[5], weight[6], groups_N, supers_N, scales_N, MINIMUM)
        ones = tl.full((DEPTH, 16), 1.0, x_TK.dtype)
        inputs_T = tl.max(dot(x_TK, ones, tl.zeros((x_TK.shape[0], 16), tl.float32)), axis=1)
        sums_TN = tl.fma(
            tl.broadcast_to(inputs_T[:, None], part_TN.shape),
            tl.broadcast_to(minimums_N[None, :], part_TN.shape),
            sums_TN,
        )
    return sums_TN


# --- weights ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QuantPart:
    """Outputs of one format, on the device; ``None`` where the format has no such numbers."""

    format: QuantFormat
    low: Tensor  # uint8 [N, K] or [N, K / 2]
    high: Tensor | None  # uint8 [N, K / 8] or [N, K / 4]
    table: Tensor  # the compute type [2 ** bits]
    scales_NG: Tensor
    super_scales_NB: Tensor | None
    minimums_NG: Tensor | None
    super_minimums_NB: Tensor | None

    @property
    def optional(self) -> tuple[Tensor | None, ...]:
        """All arrays but the table."""
        numbers = (self.scales_NG, self.super_scales_NB, self.minimums_NG, self.super_minimums_NB)
        return self.low, self.high, *numbers

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        """What a kernel reads; the table stands for what is not there."""
        low, high, *numbers = self.optional
        return tuple(self.table if array is None else array for array in (low, high, self.table, *numbers))

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.optional if array is not None)

    def operand(self, form: TritonContext, k: int, ends: tuple[int, ...], first: int) -> Operand:
        """To multiply with; its outputs begin at column ``first`` of the result."""
        kind = self.format
        values, factor, offset = _values(kind)
        arguments = (
            *self.arrays, factor, offset, k, 1 if self.super_scales_NB is None else self.super_scales_NB.shape[1],
            tl.constexpr(kind.bits), tl.constexpr(min(kind.group, k)), values,
            tl.constexpr(int(kind.scale)), tl.constexpr(int(kind.minimum)),
        )  # fmt: skip
        n, tile = len(self.low), tile_of(ends, form.dtype, group=kind.group)
        return Operand(n, k, len(ends), ends_tensor(form, ends), tile, quantized_step, arguments, first)

    def rows(self, ids_T: Tensor) -> Tensor:
        """fp32 [T, K], each weight rounded as ``quantization.dequantized`` does it."""
        codes_TK = self._codes(ids_T)
        weights_TK = self.table.float()[codes_TK.long()]
        scales_TG, minimums_TG = self._numbers(ids_T)
        group, k = min(self.format.group, weights_TK.shape[1]), weights_TK.shape[1]
        weights_TK = weights_TK * scales_TG.repeat_interleave(group, dim=1)[:, :k]
        if minimums_TG is None:
            return weights_TK
        return weights_TK + minimums_TG.repeat_interleave(group, dim=1)[:, :k]

    def _codes(self, ids_T: Tensor) -> Tensor:
        low = self.low[ids_T]
        if self.format.bits == 8:
            return low
        codes = torch.stack([low & 0xF, low >> 4], dim=2).flatten(1)
        if self.high is None:
            return codes
        bits = self.format.bits - 4
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=low.device)
        upper = (self.high[ids_T][:, :, None] >> shifts & (1 << bits) - 1).flatten(1)
        return codes | upper << 4

    def _numbers(self, ids_T: Tensor) -> tuple[Tensor, Tensor | None]:
        scales_TG = self.scales_NG[ids_T]
        if self.format.scale is ScaleType.E8M0:
            exact = torch.where(scales_TG == 0, 1 << 22, scales_TG.int() << 23).view(torch.float32)
            scales_TG = torch.where(scales_TG == 255, torch.nan, exact)
        scales_TG = scales_TG.float()
        each = SUPER_COLUMNS // self.format.group
        if self.super_scales_NB is not None:
            scales_TG = scales_TG * _spread(self.super_scales_NB[ids_T], each, scales_TG.shape[1])
        if self.minimums_NG is None:
            return scales_TG, None
        minimums_TG = self.minimums_NG[ids_T].float()
        if self.format.minimum is MinimumType.ZERO_POINT:
            minimums_TG = -(scales_TG * minimums_TG)
        if self.super_minimums_NB is not None:
            minimums_TG = -(minimums_TG * _spread(self.super_minimums_NB[ids_T], each, scales_TG.shape[1]))
        return scales_TG, minimums_TG


@dataclass(frozen=True, slots=True)
class QuantWeights:
    """``WeightForm`` of quantized matrices."""

    form: TritonContext
    operands: tuple[Operand, ...]
    parts: tuple[QuantPart, ...]
    order_K: Tensor | None  # column i of the codes is column order[i] of the matrix
    nbytes: int

    def multiply(self, x_TK: Tensor, out_TN: Tensor, *, add: bool) -> None:
        x_TK = x_TK if self.order_K is None else x_TK[:, self.order_K]
        for operand in self.operands:
            multiply(self.form, x_TK, operand, out_TN, add=add)

    def mixed(self, rows: int, *, in_tiles: bool) -> Operand | None:
        return self.operands[0] if len(self.operands) == 1 and self.order_K is None else None

    def rows(self, ids_T: Tensor) -> Tensor:
        found_TK: Tensor | None = None
        for operand, part in zip(self.operands, self.parts, strict=True):
            inside_T = ids_T - operand.first
            own_TK = part.rows(inside_T.clamp(0, operand.n - 1))
            found_TK = own_TK if found_TK is None else torch.where((inside_T >= 0)[:, None], own_TK, found_TK)
        assert found_TK is not None
        return found_TK if self.order_K is None else found_TK[:, torch.argsort(self.order_K)]

    @classmethod
    def stacked(cls, forms: Sequence[QuantWeights]) -> Operand | None:
        parts = [form.parts[0] for form in forms]
        if len({part.format for part in parts}) > 1:
            return None
        tall = [
            None if arrays[0] is None else adopt([array for array in arrays if array is not None])
            for arrays in zip(*(part.optional for part in parts), strict=True)
        ]
        table = parts[0].table
        own = forms[0].operands[0]
        arrays = [table if array is None else array for array in (*tall[:2], table, *tall[2:])]
        return replace(own, n=own.n * len(forms), arguments=(*arrays, *own.arguments[len(arrays) :]))


def quantized_weights(form: TritonContext, matrices: list[QuantizedMatrix], ends: tuple[int, ...]) -> QuantWeights:
    """The matrices, one below the other, which fit (``fits_kernels``); adjacent ones of one format are one part."""
    k = matrices[0].k
    parts = tuple(_part(form, kind, list(own)) for kind, own in groupby(matrices, key=lambda matrix: matrix.format))
    operands, first = [], 0
    for part in parts:
        operands.append(part.operand(form, k, ends, first))
        first += len(part.low)
    order = matrices[0].order
    order_K = None if order is None else form.tensor(np.asarray(order, np.int64))
    return QuantWeights(form, tuple(operands), parts, order_K, sum(part.nbytes for part in parts))


def _part(form: TritonContext, kind: QuantFormat, matrices: list[QuantizedMatrix]) -> QuantPart:
    rows = [matrix.read_all() for matrix in matrices]

    def joined(arrays: Sequence[NDArray[Any] | None]) -> Tensor | None:
        found = [array for array in arrays if array is not None]
        return _tensor(form, np.concatenate(found)) if found else None

    codes = [_planes(own.codes_NK, kind.bits) for own in rows]
    low, scales = joined([low for low, _ in codes]), joined([own.scales_NG for own in rows])
    assert low is not None
    assert scales is not None
    return QuantPart(
        kind,
        low,
        joined([high for _, high in codes]),
        _tensor(form, kind.table()).to(form.dtype),
        scales,
        joined([own.super_scales_NB for own in rows]),
        joined([own.minimums_NG for own in rows]),
        joined([own.super_minimums_NB for own in rows]),
    )


def _planes(codes_NK: NDArray[np.uint8], bits: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None]:
    """Lower bits, two codes a byte unless a code is one; upper bits."""
    if bits == 8:
        return codes_NK, None
    low: NDArray[np.uint8] = codes_NK & np.uint8(0xF)
    nibbles: NDArray[np.uint8] = low[:, ::2] | low[:, 1::2] << np.uint8(4)
    if bits == 4:
        return nibbles, None
    each = 8 // (bits - 4)
    upper = (codes_NK >> 4).reshape(len(codes_NK), -1, each) << np.arange(0, 8, bits - 4, dtype=np.uint8)
    return nibbles, np.bitwise_or.reduce(upper, axis=2).astype(np.uint8)


def _values(kind: QuantFormat) -> tuple[tl.constexpr, float, float]:
    """How a kernel makes values of codes, and the two numbers of an affine one."""
    values = np.array(kind.values, np.float32)
    step = values[1] - values[0]
    if (values == values[0] + step * np.arange(len(values), dtype=np.float32)).all():
        return AFFINE, float(step), float(values[0])
    if _same(values, np.array(E2M1, np.float32)):
        return TINY_FLOATS, 0.0, 0.0
    if _same(values, np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)):
        return SMALL_FLOATS, 0.0, 0.0
    return LOOKED_UP, 0.0, 0.0


def _same(values: NDArray[np.float32], others: NDArray[np.float32]) -> bool:
    return np.array_equal(values, others, equal_nan=True) and bool(
        (np.signbit(values) == np.signbit(others))[~np.isnan(values)].all()
    )


def _tensor(form: TritonContext, array: NDArray[Any]) -> Tensor:
    """On the device; torch knows no ``ml_dtypes``."""
    if array.dtype == ml_dtypes.bfloat16:
        return form.tensor(array.view(np.int16)).view(torch.bfloat16)
    return form.tensor(array)


def _spread(array_TB: Tensor, each: int, groups: int) -> Tensor:
    return array_TB.float().repeat_interleave(each, dim=1)[:, :groups]
