"""AWQ (arXiv:2306.00978) as AutoAWQ's version "gemm" writes it: codes of 4 bits, inputs first.

``qweight`` [K, N / 8]: words of eight outputs, of which nibble i is output ``ORDER[i]``; ``qzeros`` [G, N / 8] in the
same order; ``scales`` [G, N].
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.quantised import Minimum, QuantFormat, QuantizedMatrix, QuantRows, counted
from penstock.weights.fields import Fields
from penstock.weights.formats.coded import Coded, Module, Scheme, group_of, unpacked
from penstock.weights.formats.gptq import group_size

BITS = 4
OUTPUTS = 8
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs each nibble of a word is, from the lowest on."""

ZEROS, SCALES = ".qzeros", ".scales"


class Awq(Scheme, frozen=True, kw_only=True):
    """Groups of so many columns; None: all."""

    end: ClassVar[str] = ".qweight"
    types: ClassVar[frozenset[str]] = frozenset({"I32"})

    group: int | None

    def bits(self) -> float:
        """See ``Scheme.bits``."""
        return BITS + ((16 + BITS) / self.group if self.group else 0)

    def coded(self, module: Module) -> tuple[str, Coded]:
        """See ``Scheme.coded``."""
        shape = module.info(self.end, "I32").shape
        if len(shape) != 2:
            raise module.refuse(self.end, f"has shape {list(shape)}, it must have two dimensions")
        k, words = shape
        n, groups = words * OUTPUTS, -(-k // group_of(self.group, k))
        module.scale(SCALES)
        module.check_shape(SCALES, (groups, n), f"for {k} columns in groups of {group_of(self.group, k)}")
        module.info(ZEROS, "I32")
        module.check_shape(ZEROS, (groups, words), "as the scales say")
        sources = module.sources(self.end, SCALES, ZEROS)
        return f"{module.name}.weight", Coded((n, k), sources, lambda _: self._matrix(module, n, k))

    def _matrix(self, module: Module, n: int, k: int) -> QuantizedMatrix:
        words_KW, scales_GN = module.array(self.end), module.array(SCALES)
        zeros_GN = _outputs(module.array(ZEROS))
        form = QuantFormat(BITS, counted(BITS, 0), group_of(self.group, k), module.scale(SCALES), Minimum.ZERO_POINT)

        def read(first: int, stop: int) -> QuantRows:
            begin = first // OUTPUTS
            codes_KN = _outputs(words_KW[:, begin : -(-stop // OUTPUTS)])
            own = slice(first - begin * OUTPUTS, stop - begin * OUTPUTS)
            return QuantRows(
                np.ascontiguousarray(codes_KN[:, own].T), scales_GN[:, first:stop].T, zeros_GN[:, first:stop].T
            )

        return QuantizedMatrix(n, k, form, read)


def _outputs(words_KW: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Codes with outputs in their order: [K, 8 W]."""
    rows, words = words_KW.shape
    codes = unpacked(words_KW, BITS).reshape(rows, words, OUTPUTS)
    return codes[:, :, np.argsort(ORDER)].reshape(rows, words * OUTPUTS)


def parse(stored: Fields) -> tuple[Scheme, str]:
    """The scheme; activations are not quantised.  Raises ModelError for other versions and bits."""
    bits = stored.size("bits", stored.size("w_bit", BITS))
    if bits != BITS:
        raise stored.refuse(f"bits is {bits}; AWQ of 4 bits can be served")
    version = stored.get("version", str, stored.get("format", str, "gemm")).lower()
    if version != "gemm":
        raise stored.refuse(f"version is {version!r}; 'gemm' can be served")
    return Awq(group=group_size(stored)), ""
