"""Integers of 4 or 8 bits in 32-bit words, as compressed-tensors' "pack-quantized" has them (Kimi K2.5).

``weight_packed`` [N, K bits / 32]: codes, which count from the smallest integer on; ``weight_scale`` [N, G];
``weight_zero_point`` [N bits / 32, G], packed along outputs; ``weight_shape``: N and K; ``weight_g_idx`` [K]: the group
of each column where their order was changed.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.quantised import Minimum, QuantFormat, QuantizedMatrix, QuantRows, counted
from penstock.weights.formats.coded import Coded, Module, Scheme, column_order, group_of, unpacked
from penstock.weights.formats.eight_bits import BESIDE

WORD_BITS = 32
SCALES, ZEROS, SHAPE, GROUPS = ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx"


class Packed(Scheme, frozen=True, kw_only=True):
    """Groups of so many columns; None: all."""

    end: ClassVar[str] = ".weight_packed"
    types: ClassVar[frozenset[str]] = frozenset({"I32"})

    code_bits: int  # 4 or 8
    group: int | None
    symmetric: bool = True

    def bits(self) -> float:
        """See ``Scheme.bits``."""
        zero = 0 if self.symmetric else self.code_bits
        return self.code_bits + ((16 + zero) / self.group if self.group else 0)

    def coded(self, module: Module) -> tuple[str, Coded]:
        """See ``Scheme.coded``."""
        shape = module.info(self.end, "I32").shape
        if len(shape) != 2:
            raise module.refuse(self.end, f"has shape {list(shape)}, it must have two dimensions")
        n, k = shape[0], shape[1] * WORD_BITS // self.code_bits
        groups = -(-k // group_of(self.group, k))
        module.scale(SCALES)
        module.check_shape(SCALES, (n, groups), f"for {k} columns in groups of {group_of(self.group, k)}")
        if not self.symmetric:
            module.info(ZEROS, "I32")
            module.check_shape(ZEROS, (-(-n * self.code_bits // WORD_BITS), groups), "packed as the weights are")
        sources = module.sources(self.end, SCALES, ZEROS, SHAPE, GROUPS, *BESIDE)
        return f"{module.name}.weight", Coded((n, k), sources, lambda _: self._matrix(module, n, k))

    def _matrix(self, module: Module, n: int, k: int) -> QuantizedMatrix:
        self._check_size(module, n, k)
        bits, group = self.code_bits, group_of(self.group, k)
        words_NW, scales_NG = module.array(self.end), module.array(SCALES)
        order = column_order(module, GROUPS, k, group)
        zeros_NG = None if self.symmetric else self._zeros(module, n)
        values = counted(bits, 1 << bits - 1 if zeros_NG is None else 0)
        minimum = Minimum.NONE if zeros_NG is None else Minimum.ZERO_POINT
        form = QuantFormat(bits, values, group, module.scale(SCALES), minimum)

        def read(first: int, stop: int) -> QuantRows:
            codes_NK = unpacked(words_NW[first:stop], bits)
            if order is not None:
                codes_NK = codes_NK[:, order]
            return QuantRows(codes_NK, scales_NG[first:stop], None if zeros_NG is None else zeros_NG[first:stop])

        return QuantizedMatrix(n, k, form, read, order)

    def _check_size(self, module: Module, n: int, k: int) -> None:
        """The tensor about the shape must say what the other shapes do."""
        if module.has(SHAPE):
            module.info(SHAPE, "I64", "I32")
            said = module.array(SHAPE).reshape(-1).tolist()
            if said != [n, k]:
                raise module.refuse(SHAPE, f"says {said}, the codes are of [{n}, {k}]")

    def _zeros(self, module: Module, n: int) -> NDArray[np.uint8]:
        """[N, G]"""
        words_WG = module.array(ZEROS)
        return np.ascontiguousarray(unpacked(words_WG.T, self.code_bits)[:, :n].T)
