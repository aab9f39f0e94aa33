"""Matrices of one byte a weight, floats or integers, whose scales lie on a grid: one for all, a row, or a block.

The kernels have a scale for each row and group of columns, so a block's scale stands once for each of its rows.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from penstock.kernels.quantised import Minimum, QuantFormat, QuantizedMatrix, QuantRows, counted
from penstock.weights.formats.coded import Coded, Module, Scheme

Kind = Literal["e4m3", "int8"]
SIGN = np.uint8(128)

BESIDE = (".input_scale", ".activation_scale", ".input_scale_ub", ".input_zero_point", ".output_scale")
"""Tensors about activations: they stay in the compute type, and these are not needed."""

SCALES = (".weight_scale_inv", ".weight_scale")
ZEROS = ".weight_zero_point"


class EightBits(Scheme, frozen=True, kw_only=True):
    """``block``: rows and columns that share a scale; None: what the scales' shape says, all or a row."""

    end: ClassVar[str] = ".weight"
    types: ClassVar[frozenset[str]] = frozenset({"F8_E4M3", "I8"})

    kind: Kind = "e4m3"
    block: tuple[int, int] | None = None

    def bits(self) -> float:
        """See ``Scheme.bits``."""
        return 8 + (32 / (self.block[0] * self.block[1]) if self.block else 0)

    def coded(self, module: Module) -> tuple[str, Coded]:
        """See ``Scheme.coded``."""
        stored = "F8_E4M3" if self.kind == "e4m3" else "I8"
        info = module.info(self.end, stored)
        if len(info.shape) != 2:
            raise module.refuse(self.end, f"has shape {list(info.shape)}; of codes with scales, matrices can be served")
        scales = next((end for end in SCALES if module.has(end)), SCALES[0])
        module.scale(scales)
        self._grid(module, scales, info.shape[0], info.shape[1])
        coded = Coded(
            info.shape,
            module.sources(self.end, scales, ZEROS, *BESIDE),
            lambda _: self._matrix(module, scales, info.shape[0], info.shape[1]),
        )
        return module.name + self.end, coded

    def _grid(self, module: Module, end: str, n: int, k: int) -> tuple[int, int]:
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
        raise module.refuse(end, f"has shape {list(shape)}; one scale, or one for each of {n} rows, can be served")

    def _matrix(self, module: Module, end: str, n: int, k: int) -> QuantizedMatrix:
        rows, columns = self._grid(module, end, n, k)
        grid = -(-n // rows), -(-k // columns)
        codes_NK, scales_RG = module.array(self.end), module.array(end).reshape(grid)
        zeros_RG = self._zeros(module, end, grid)
        values = counted(8, 0 if zeros_RG is not None else 128) if self.kind == "int8" else E4M3
        minimum = Minimum.NONE if zeros_RG is None else Minimum.ZERO_POINT
        form = QuantFormat(8, values, columns, module.scale(end), minimum)
        flip = SIGN if self.kind == "int8" else np.uint8(0)

        def read(first: int, stop: int) -> QuantRows:
            place = np.arange(first, stop) // rows
            return QuantRows(
                codes_NK[first:stop] ^ flip, scales_RG[place], None if zeros_RG is None else zeros_RG[place]
            )

        return QuantizedMatrix(n, k, form, read)

    def _zeros(self, module: Module, end: str, grid: tuple[int, int]) -> NDArray[Any] | None:
        """Zero points of codes that are counted from 0; None where they are those of signed integers."""
        if not module.has(ZEROS):
            return None
        module.info(ZEROS, "I8")
        module.check_shape(ZEROS, module.stored.info(module.name + end).shape, "as the scales have it")
        zeros = module.array(ZEROS).reshape(grid) ^ SIGN
        return None if (zeros == SIGN).all() else zeros


def _with_negatives(dtype: Any) -> tuple[float, ...]:
    values = np.arange(128, dtype=np.uint8).view(dtype).astype(np.float32).tolist()
    return (*values, *(-value for value in values))


E4M3 = _with_negatives(ml_dtypes.float8_e4m3fn)
"""Values of every byte (OCP 8-bit floating point, E4M3): two are none."""
