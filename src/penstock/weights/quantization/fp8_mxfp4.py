"""Matrices of 8-bit codes (FP8, INT8) with scales for the tensor, a row or a block; and MXFP4.

FP8 as DeepSeek-V3 and Qwen3 have it (arXiv:2412.19437): ``weight`` in E4M3, ``weight_scale_inv`` for each block of 128
by 128 (a factor, despite its name); or one scale a tensor; and FBGEMM's, one a row.  The kernels have a scale for each
row and group of columns, so a block's scale is repeated for each of its rows.

MXFP4 (OCP Microscaling Formats 1.0) as gpt-oss has its experts: ``..._blocks`` [E, N, K / 32, 16]: bytes of two codes
each, the lower half first; ``..._scales`` [E, N, K / 32]: a power of two for each 32 columns.  The model knows the
stack as [E, K, N].
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from penstock.kernels.quantization import (
    E2M1,
    UNIT_COLUMNS,
    MinimumType,
    QuantFormat,
    QuantizedMatrix,
    QuantRows,
    ScaleType,
    integer_values,
)
from penstock.weights.config_json import ConfigFields
from penstock.weights.quantization.base import QuantizationScheme, QuantizedTensor, StoredModule, unpack_nibbles

Kind = Literal["e4m3", "int8"]
SIGN = np.uint8(128)

BESIDE = (".input_scale", ".activation_scale", ".input_scale_ub", ".input_zero_point", ".output_scale")
"""Tensors about activations: they stay in the compute type, and these are not needed."""

SCALE_ENDS = (".weight_scale_inv", ".weight_scale")
ZERO_POINTS = ".weight_zero_point"


class EightBitScheme(QuantizationScheme, frozen=True, kw_only=True, tag="EightBits"):
    """``block``: rows and columns that share a scale; None: what the scales' shape says, all or a row."""

    end: ClassVar[str] = ".weight"
    types: ClassVar[frozenset[str]] = frozenset({"F8_E4M3", "I8"})

    kind: Kind = "e4m3"
    block: tuple[int, int] | None = None

    def bits_per_weight(self) -> float:
        return 8 + (32 / (self.block[0] * self.block[1]) if self.block else 0)

    def find_tensor(self, module: StoredModule) -> tuple[str, QuantizedTensor]:
        stored = "F8_E4M3" if self.kind == "e4m3" else "I8"
        info = module.info(self.end, stored)
        if len(info.shape) != 2:
            raise module.error(self.end, f"has shape {list(info.shape)}; of codes with scales, matrices can be served")
        scales = next((end for end in SCALE_ENDS if module.has(end)), SCALE_ENDS[0])
        module.scale(scales)
        self._grid(module, scales, info.shape[0], info.shape[1])
        coded = QuantizedTensor(
            info.shape,
            module.sources(self.end, scales, ZERO_POINTS, *BESIDE),
            lambda _: self._matrix(module, scales, info.shape[0], info.shape[1]),
        )
        return module.name + self.end, coded

    def _grid(self, module: StoredModule, end: str, n: int, k: int) -> tuple[int, int]:
        """Rows and columns that share a scale.  Raises ModelError for a tensor that has not as many scales."""
        shape = module.stored.info(module.name + end).shape
        if self.block is not None:
            rows, columns = self.block
            module.check_shape(end, (-(-n // rows), -(-k // columns)), f"in blocks of {rows} by {columns}")
            return rows, columns
        if shape in ((), (1,), (1, 1)):
            return n, k
        if shape in ((n,), (n, 1)):
            return 1, k
        raise module.error(end, f"has shape {list(shape)}; one scale, or one for each of {n} rows, can be served")

    def _matrix(self, module: StoredModule, end: str, n: int, k: int) -> QuantizedMatrix:
        rows, columns = self._grid(module, end, n, k)
        grid = -(-n // rows), -(-k // columns)
        codes_NK, scales_RG = module.array(self.end), module.array(end).reshape(grid)
        zeros_RG = self._zeros(module, end, grid)
        values = integer_values(8, 0 if zeros_RG is not None else 128) if self.kind == "int8" else E4M3
        minimum = MinimumType.NONE if zeros_RG is None else MinimumType.ZERO_POINT
        form = QuantFormat(8, values, columns, module.scale(end), minimum)
        flip = SIGN if self.kind == "int8" else np.uint8(0)

        def read(first: int, stop: int) -> QuantRows:
            place = np.arange(first, stop) // rows
            return QuantRows(
                codes_NK[first:stop] ^ flip, scales_RG[place], None if zeros_RG is None else zeros_RG[place]
            )

        return QuantizedMatrix(n, k, form, read)

    def _zeros(self, module: StoredModule, end: str, grid: tuple[int, int]) -> NDArray[Any] | None:
        """Zero points of codes that are counted from 0; None where they are those of signed integers."""
        if not module.has(ZERO_POINTS):
            return None
        module.info(ZERO_POINTS, "I8")
        module.check_shape(ZERO_POINTS, module.stored.info(module.name + end).shape, "as the scales have it")
        zeros = module.array(ZERO_POINTS).reshape(grid) ^ SIGN
        return None if (zeros == SIGN).all() else zeros


def _with_negatives(dtype: Any) -> tuple[float, ...]:
    values = np.arange(128, dtype=np.uint8).view(dtype).astype(np.float32).tolist()
    return (*values, *(-value for value in values))


E4M3 = _with_negatives(ml_dtypes.float8_e4m3fn)
"""Values of every byte (OCP 8-bit floating point, E4M3): two are none."""


MAX_BLOCK = 1 << 16


def parse_fp8(stored: ConfigFields) -> tuple[QuantizationScheme, str]:
    """The scheme, and what is not done to activations.  Raises ModelError."""
    if stored.get("fmt", str, "e4m3").lower() != "e4m3":
        raise stored.error(f"fmt is {stored.values['fmt']!r}; 'e4m3' can be served")
    if stored.get("expert_dtype", str, "fp8") != "fp8":
        raise stored.error(f"expert_dtype is {stored.values['expert_dtype']!r}; 'fp8' can be served")
    return EightBitScheme(block=_block(stored)), f"{stored.get('activation_scheme', str, 'dynamic')} FP8"


def parse_fbgemm_fp8(stored: ConfigFields) -> tuple[QuantizationScheme, str]:
    """The same for ``fbgemm_fp8``: a scale a row."""
    return EightBitScheme(), "dynamic FP8"


def _block(stored: ConfigFields) -> tuple[int, int] | None:
    sizes = stored.get("weight_block_size", list, [])
    if not sizes:
        return None
    if len(sizes) != 2 or not all(type(size) is int and 1 <= size <= MAX_BLOCK for size in sizes):
        raise stored.error(f"weight_block_size must be rows and columns, got {sizes!r}")
    return sizes[0], sizes[1]


MXFP4_SCALES = "_scales"
BLOCK_BYTES = UNIT_COLUMNS // 2
MXFP4_FORMAT = QuantFormat(4, E2M1, UNIT_COLUMNS, ScaleType.E8M0)


class Mxfp4Scheme(QuantizationScheme, frozen=True, kw_only=True, tag="Mxfp4"):
    """There is only one kind."""

    end: ClassVar[str] = "_blocks"
    types: ClassVar[frozenset[str]] = frozenset({"U8"})

    def bits_per_weight(self) -> float:
        return MXFP4_FORMAT.bits_a_weight()

    def find_tensor(self, module: StoredModule) -> tuple[str, QuantizedTensor]:
        shape = module.info(self.end, "U8").shape
        if len(shape) != 4 or shape[3] != BLOCK_BYTES:
            raise module.error(self.end, f"has shape {list(shape)}; blocks of {BLOCK_BYTES} bytes in a stack are known")
        count, n, blocks, _ = shape
        module.info(MXFP4_SCALES, "U8")
        module.check_shape(MXFP4_SCALES, (count, n, blocks), "one a block")
        k = blocks * UNIT_COLUMNS
        sources = module.sources(self.end, MXFP4_SCALES)
        return module.name, QuantizedTensor(
            (count, k, n), sources, lambda index: _matrix(module, index, n, k), transposed=True
        )


def _matrix(module: StoredModule, index: int, n: int, k: int) -> QuantizedMatrix:
    blocks_NB = module.array(Mxfp4Scheme.end)[index].reshape(n, k // 2)
    scales_NG = module.array(MXFP4_SCALES)[index]
    return QuantizedMatrix(
        n, k, MXFP4_FORMAT, lambda first, stop: QuantRows(unpack_nibbles(blocks_NB[first:stop]), scales_NG[first:stop])
    )


def parse_mxfp4(stored: ConfigFields) -> tuple[QuantizationScheme, str]:
    """The scheme; activations are not quantized."""
    return Mxfp4Scheme(), ""
