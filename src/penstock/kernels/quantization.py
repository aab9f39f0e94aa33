# ruff: noqa: N815  (field names carry shapes)
"""What a quantized matrix is, whatever file it comes from: codes, what they stand for, and numbers for their groups.

``weight[n, k] = scale[n, k // group] * values[code[n, k]] + min[n, k // group]``, scales and minimums in fp32; columns
may have been put into another order first, so that those of a group lie side by side.  Each of the formats that people
use is this with other numbers (docs/weight-formats.md).  Knows no kernels and no files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from penstock.errors import KernelError

PANEL_ROWS = 16
UNIT_COLUMNS = 32
PIECE_COLUMNS = 16
"""The smallest group that the kernels know."""

SUPER_COLUMNS = 256

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the four bits of MXFP4 (OCP Microscaling Formats 1.0)."""


class ScaleType(IntEnum):
    """How scales are written; the last two as integers that are multiplied by an fp16 number of a super-block."""

    F16 = 0
    BF16 = 1
    F32 = 2
    E8M0 = 3  # 2 ** (byte - 127)
    U8_OF_F16 = 4
    I8_OF_F16 = 5


class MinimumType(IntEnum):
    """What is added to scale times value."""

    NONE = 0
    ZERO_POINT = 1  # minus scale times an integer below 256
    F16 = 2
    U8_OF_F16 = 3  # minus an integer times an fp16 number of a super-block


_DTYPES = {
    ScaleType.F16: np.dtype(np.float16),
    ScaleType.BF16: np.dtype(ml_dtypes.bfloat16),
    ScaleType.F32: np.dtype(np.float32),
    ScaleType.E8M0: np.dtype(np.uint8),
    ScaleType.U8_OF_F16: np.dtype(np.uint8),
    ScaleType.I8_OF_F16: np.dtype(np.int8),
}


class CodeType(IntEnum):
    """How codes are multiplied with inputs of 8 bits."""

    LINEAR = 0  # as they are
    BYTE = 1  # codes of 8 bits, stored as their integers
    TABLE = 2  # codes of 4 bits, by a table of integers


@dataclass(frozen=True, slots=True)
class IntegerCodes:
    """Values of codes as integers: ``values[code] = unit * (integers[code] - offset)``.

    Integers of LINEAR are the codes themselves, others are -128 to 127.
    """

    kind: CodeType
    unit: float  # a power of two
    offset: int
    integers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """All but the numbers themselves."""

    bits: int  # 4, 5, 6 or 8
    values: tuple[float, ...]  # of every code, 2 ** bits; bf16 holds each
    group: int  # columns that share a scale: 16 or a multiple of 32
    scale: ScaleType
    minimum: MinimumType = MinimumType.NONE

    @property
    def has_super(self) -> bool:
        """Whether scales are integers of a super-block."""
        return self.scale in (ScaleType.U8_OF_F16, ScaleType.I8_OF_F16)

    def table(self) -> NDArray[Any]:
        """The values as bf16.  Raises ValueError if it does not hold one of them."""
        exact = np.array(self.values, np.float32)
        table = exact.astype(ml_dtypes.bfloat16)
        same = (table.astype(np.float32) == exact) | np.isnan(exact)
        if len(exact) != 1 << self.bits or not same.all():
            raise ValueError(f"{1 << self.bits} values that bf16 holds are wanted")
        return table

    def integer_codes(self) -> IntegerCodes | None:
        """The codes as integers, which can be multiplied with inputs of 8 bits; None for floats such as E4M3."""
        values = np.array(self.values, np.float64)
        if not np.isfinite(values).all() or not values.any():
            return None
        bits, least = np.frexp(values[values != 0])
        odd = (bits * 2.0**53).astype(np.int64)
        unit = float(2.0 ** int((least - 53 + np.frexp((odd & -odd).astype(np.float64))[1] - 1).min()))
        whole = values / unit
        low, high, codes = int(whole.min()), int(whole.max()), len(values)
        if self.bits < 8 and np.array_equal(whole, whole[0] + np.arange(codes)):
            return IntegerCodes(CodeType.LINEAR, unit, -int(whole[0]), tuple(range(codes)))
        offset = 0 if low >= -128 and high < 128 else -128 - low
        if high - low > 255 or abs(offset) > 128 or self.bits not in (4, 8):
            return None
        if self.bits == 4 and offset != 0:
            return None
        kind = CodeType.BYTE if self.bits == 8 else CodeType.TABLE
        return IntegerCodes(kind, unit, offset, tuple(int(each) + offset for each in whole))

    @property
    def input_block(self) -> int:
        """Columns of inputs that share a scale where inputs are quantized to 8 bits: those of a super-block, if the
        kernels multiply its scales as integers (``has_integer_scales`` in cpp/quantized/int8_tile.hpp)."""
        codes = self.integer_codes()
        if codes is None or codes.kind is not CodeType.LINEAR:
            return UNIT_COLUMNS
        unsigned = (ScaleType.U8_OF_F16, MinimumType.U8_OF_F16, 32)
        own = (self.scale, self.minimum, self.group)
        integers = (own == unsigned and codes.offset == 0 and self.bits < 6) or (
            own == (ScaleType.I8_OF_F16, MinimumType.NONE, 16) and self.bits == 6
        )
        return SUPER_COLUMNS if integers else UNIT_COLUMNS

    def bits_a_weight(self) -> float:
        """What a weight takes, its share of the numbers included."""
        own = 8 * _DTYPES[self.scale].itemsize + {MinimumType.NONE: 0, MinimumType.F16: 16}.get(self.minimum, 8)
        supers = (16 + 16 * (self.minimum is MinimumType.U8_OF_F16)) if self.has_super else 0
        return float(self.bits + own / self.group + supers / SUPER_COLUMNS)


@dataclass(frozen=True, slots=True)
class QuantRows:
    """Some rows of a matrix; G groups and B super-blocks a row."""

    codes_NK: NDArray[np.uint8]
    scales_NG: NDArray[Any]
    minimums_NG: NDArray[Any] | None = None
    super_scales_NB: NDArray[np.float16] | None = None
    super_minimums_NB: NDArray[np.float16] | None = None

    def map_arrays(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> QuantRows:
        """The same with every array changed."""
        arrays = (self.codes_NK, self.scales_NG, self.minimums_NG, self.super_scales_NB, self.super_minimums_NB)
        return QuantRows(*(None if array is None else change(array) for array in arrays))  # type: ignore[arg-type]

    def every_nth(self, step: int) -> QuantRows:
        """The first row, and each ``step`` rows another one."""
        return self.map_arrays(lambda array: array[::step])


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix [n, k] whose rows are read on demand, from any thread."""

    n: int
    k: int
    format: QuantFormat
    read: Callable[[int, int], QuantRows]  # rows [first, stop)
    order: NDArray[np.int32] | None = None
    """Column ``i`` of what is read is column ``order[i]`` of the matrix: so groups lie side by side.  [K]"""

    def read_all(self) -> QuantRows:
        """All rows."""
        return self.read(0, self.n)

    def dequantized(self) -> NDArray[np.float32]:
        """The weights [N, K], columns where they belong; for tests, and where no kernel reads the codes."""
        weights_NK = dequantized(self.read_all(), self.format)
        if self.order is None:
            return weights_NK
        placed_NK = np.empty_like(weights_NK)
        placed_NK[:, self.order] = weights_NK
        return placed_NK

    def select_rows(self, rows: range) -> QuantizedMatrix:
        """These rows of it, in ascending order."""

        def read(first: int, stop: int) -> QuantRows:
            own = rows[first:stop]
            all_NK = self.read(own.start, own[-1] + 1)
            return all_NK if own.step == 1 else all_NK.every_nth(own.step)

        return QuantizedMatrix(len(rows), self.k, self.format, read, self.order)


def integers_of(form: QuantFormat) -> IntegerCodes:
    """The format's codes as integers.  Raises KernelError if they are not."""
    found = form.integer_codes()
    if found is None:
        raise KernelError("inputs of 8 bits can be multiplied with integer codes only, and these are floats")
    return found


def integer_values(bits: int, offset: int) -> tuple[float, ...]:
    """Values of codes that are integers from -offset on."""
    return tuple(float(code - offset) for code in range(1 << bits))


def fits_kernels(parts: list[QuantizedMatrix], ends: tuple[int, ...]) -> bool:
    """Whether the kernels can multiply these matrices, stacked and cut at these columns, without dequantizing."""
    whole = all(part.n % PANEL_ROWS == 0 for part in parts[:-1]) and all(end % UNIT_COLUMNS == 0 for end in ends)
    units = all(_fits_units(part.format, min(part.format.group, part.k)) for part in parts)
    return whole and units and all(_same_order(part, parts[0]) for part in parts)


def _fits_units(form: QuantFormat, group: int) -> bool:
    """A minimum is added once for each unit, so no group may be smaller."""
    return group % UNIT_COLUMNS == 0 or (group == PIECE_COLUMNS and form.minimum is MinimumType.NONE)


def _same_order(one: QuantizedMatrix, other: QuantizedMatrix) -> bool:
    if one.order is None or other.order is None:
        return one.order is other.order
    return np.array_equal(one.order, other.order)


def scales_and_minimums(rows: QuantRows, form: QuantFormat) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """Scales and minimums [N, G] in fp32."""
    if form.scale is ScaleType.E8M0:
        scales = np.ldexp(np.float32(1), rows.scales_NG.astype(np.int32) - 127).astype(np.float32)
        scales[rows.scales_NG == 255] = np.nan
    else:
        scales = rows.scales_NG.astype(np.float32)
    each = SUPER_COLUMNS // form.group
    if rows.super_scales_NB is not None:
        scales *= _spread(rows.super_scales_NB, each, scales.shape[1])
    if rows.minimums_NG is None:
        return scales, None
    minimums = rows.minimums_NG.astype(np.float32)
    if form.minimum is MinimumType.ZERO_POINT:
        minimums = -(scales * minimums)
    if rows.super_minimums_NB is not None:
        minimums = -(minimums * _spread(rows.super_minimums_NB, each, scales.shape[1]))
    return scales, minimums


def dequantized(rows: QuantRows, form: QuantFormat) -> NDArray[np.float32]:
    """The weights [N, K]; for tests, and where no kernel reads the codes."""
    k = rows.codes_NK.shape[1]
    scales, minimums = scales_and_minimums(rows, form)
    weights = np.array(form.values, np.float32)[rows.codes_NK]
    group = min(form.group, k)
    weights *= np.repeat(scales, group, axis=1)[:, :k]
    if minimums is not None:
        weights += np.repeat(minimums, group, axis=1)[:, :k]
    return weights


def panel_records(rows: QuantRows, form: QuantFormat) -> NDArray[np.uint8]:
    """The numbers of whole panels as the kernels read them (cpp/quantized/quantized.hpp), one record after another."""
    scales = _by_panel(rows.scales_NG.astype(_DTYPES[form.scale], copy=False))
    kind = np.float16 if form.minimum is MinimumType.F16 else np.uint8
    minimums = None if rows.minimums_NG is None else _by_panel(rows.minimums_NG.astype(kind, copy=False))
    if rows.super_scales_NB is None:
        return np.concatenate([scales, *([] if minimums is None else [minimums])], axis=2).reshape(-1)
    panels, each = scales.shape[0], SUPER_COLUMNS // form.group
    parts = [_by_panel(rows.super_scales_NB)]
    if rows.super_minimums_NB is not None:
        parts.append(_by_panel(rows.super_minimums_NB))
    blocks = parts[0].shape[1]
    for own in (scales, minimums):
        if own is not None:
            full = np.zeros((panels, blocks * each, own.shape[2]), np.uint8)
            full[:, : own.shape[1]] = own
            parts.append(full.reshape(panels, blocks, -1))
    return np.concatenate(parts, axis=2).reshape(-1)


def padded_rows(rows: QuantRows) -> QuantRows:
    """The same with rows of zeros up to a whole panel."""
    missing = -len(rows.codes_NK) % PANEL_ROWS
    if missing == 0:
        return rows

    def fill(array: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([array, np.zeros((missing, array.shape[1]), array.dtype)])

    return rows.map_arrays(fill)


def _by_panel(array_NG: NDArray[Any]) -> NDArray[np.uint8]:
    """[panels, G, bytes of sixteen rows]."""
    n, groups = array_NG.shape
    turned = array_NG.reshape(n // PANEL_ROWS, PANEL_ROWS, groups).swapaxes(1, 2)
    return np.ascontiguousarray(turned).view(np.uint8).reshape(n // PANEL_ROWS, groups, -1)


def _spread(array_NB: NDArray[np.float16], each: int, groups: int) -> NDArray[np.float32]:
    wide: NDArray[np.float32] = np.repeat(array_NB.astype(np.float32), each, axis=1)[:, :groups]
    return wide
