"""Quantized matrices of every kind, with random codes and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from penstock.kernels.quantization import (
    SUPER_COLUMNS,
    MinimumType,
    QuantFormat,
    QuantizedMatrix,
    QuantRows,
    ScaleType,
    dequantized,
)

FORMATS: Mapping[str, QuantFormat] = MappingProxyType(
    {
        "8 bits, fp16": QuantFormat(8, tuple(float(i - 128) for i in range(256)), 32, ScaleType.F16),
        "8 bits, columns": QuantFormat(8, tuple(float(i - 128) for i in range(256)), 1 << 20, ScaleType.F32),
        "8 bits, fp32": QuantFormat(8, tuple(float(i) * 0.125 for i in range(256)), 128, ScaleType.F32),
        "8 bits with signs": QuantFormat(
            8, (*(i / 4 for i in range(128)), *(-i / 4 for i in range(128))), 32, ScaleType.F16
        ),
        "4 bits, zero point": QuantFormat(4, tuple(map(float, range(16))), 128, ScaleType.F16, MinimumType.ZERO_POINT),
        "4 bits, bf16": QuantFormat(4, tuple(float(i - 8) for i in range(16)), 32, ScaleType.BF16),
        "4 bits, exponents": QuantFormat(4, tuple(float(i - 8) * 0.5 for i in range(16)), 32, ScaleType.E8M0),
        "4 bits, fp16 minimum": QuantFormat(4, tuple(map(float, range(16))), 32, ScaleType.F16, MinimumType.F16),
        "4 bits of super-blocks": QuantFormat(
            4, tuple(map(float, range(16))), 32, ScaleType.U8_OF_F16, MinimumType.U8_OF_F16
        ),
        "5 bits of super-blocks": QuantFormat(
            5, tuple(map(float, range(32))), 32, ScaleType.U8_OF_F16, MinimumType.U8_OF_F16
        ),
        "4 bits of super-blocks with signs": QuantFormat(
            4, tuple(float(i - 4) for i in range(16)), 16, ScaleType.I8_OF_F16
        ),
        "4 bits, groups of 256": QuantFormat(4, tuple(float(i - 1) for i in range(16)), 256, ScaleType.F16),
        "6 bits of super-blocks": QuantFormat(6, tuple(float(i - 32) for i in range(64)), 16, ScaleType.I8_OF_F16),
        "5 bits, groups of 16": QuantFormat(5, tuple(float(i - 16) for i in range(32)), 16, ScaleType.F16),
    }
)

FLOATS: Mapping[str, QuantFormat] = MappingProxyType(
    {
        "6 bits, floats": QuantFormat(
            6, (*(i / 8 for i in range(32)), *(-float(i * i % 61) for i in range(32))), 32, ScaleType.F16
        ),
    }
)
"""Values that cannot be multiplied with inputs of 8 bits."""


def random_rows(form: QuantFormat, n: int, k: int, seed: int) -> QuantRows:
    """Weights of a size around 0.05."""
    rng = np.random.default_rng(seed)
    groups, blocks = -(-k // form.group), -(-k // SUPER_COLUMNS)
    spread = float(np.std(form.values))
    size = 0.05 / spread * rng.uniform(0.5, 1.5, (n, groups))
    minimums: NDArray[Any] | None = None
    super_scales = super_minimums = None
    if form.minimum is MinimumType.ZERO_POINT:
        minimums = rng.integers(0, 16, (n, groups), np.uint8)
    if form.minimum is MinimumType.F16:
        minimums = (-size * float(np.mean(form.values))).astype(np.float16)
    kind = {ScaleType.F16: np.float16, ScaleType.BF16: ml_dtypes.bfloat16}.get(form.scale, np.float32)
    scales: NDArray[Any] = size.astype(kind)
    if form.scale is ScaleType.E8M0:
        scales = (np.log2(size).round() + 127).astype(np.uint8)
    if form.has_super:
        scales = rng.integers(1, 64, (n, groups)).astype(np.uint8 if form.scale is ScaleType.U8_OF_F16 else np.int8)
        if form.scale is ScaleType.I8_OF_F16:
            scales *= rng.choice(np.array([-1, 1], np.int8), (n, groups))
        super_scales = (0.05 / spread / 32 * rng.uniform(0.5, 1.5, (n, blocks))).astype(np.float16)
    if form.minimum is MinimumType.U8_OF_F16:
        minimums = rng.integers(0, 64, (n, groups), np.uint8)
        super_minimums = (0.05 / 32 * rng.uniform(0.5, 1.5, (n, blocks))).astype(np.float16)
    codes = rng.integers(0, 1 << form.bits, (n, k), np.uint8)
    return QuantRows(codes, scales, minimums, super_scales, super_minimums)


def matrix_of(
    form: QuantFormat, n: int, k: int, seed: int = 0, *, order: NDArray[np.int32] | None = None
) -> tuple[QuantizedMatrix, NDArray[np.float32]]:
    """A matrix and its weights in fp32, columns where ``order`` says."""
    rows = random_rows(form, n, k, seed)

    def part(array: NDArray[Any] | None, first: int, stop: int) -> Any:
        return None if array is None else array[first:stop]

    def read(first: int, stop: int) -> QuantRows:
        arrays = (rows.codes_NK, rows.scales_NG, rows.minimums_NG, rows.super_scales_NB, rows.super_minimums_NB)
        return QuantRows(*(part(array, first, stop) for array in arrays))

    matrix, weight_NK = QuantizedMatrix(n, k, form, read, order), dequantized(rows, form)
    if order is not None:
        weight_NK = weight_NK[:, np.argsort(order)]
    return matrix, weight_NK
