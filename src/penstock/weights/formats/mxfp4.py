"""MXFP4 (OCP Microscaling Formats 1.0) as gpt-oss has its experts: a stack in two tensors.

``..._blocks`` [E, N, K / 32, 16]: bytes of two codes each, the lower half first; ``..._scales`` [E, N, K / 32]: a power
of two for each 32 columns.  The model knows the stack as [E, K, N].
"""

from __future__ import annotations

from typing import ClassVar

from penstock.kernels.quantised import E2M1, UNIT_COLUMNS, QuantFormat, QuantizedMatrix, QuantRows, Scale
from penstock.weights.fields import Fields
from penstock.weights.formats.coded import Coded, Module, Scheme, nibbles

SCALES = "_scales"
BLOCK_BYTES = UNIT_COLUMNS // 2
FORMAT = QuantFormat(4, E2M1, UNIT_COLUMNS, Scale.E8M0)


class Mxfp4(Scheme, frozen=True, kw_only=True):
    """There is only one kind."""

    end: ClassVar[str] = "_blocks"
    types: ClassVar[frozenset[str]] = frozenset({"U8"})

    def bits(self) -> float:
        """See ``Scheme.bits``."""
        return FORMAT.bits_a_weight()

    def coded(self, module: Module) -> tuple[str, Coded]:
        """See ``Scheme.coded``."""
        shape = module.info(self.end, "U8").shape
        if len(shape) != 4 or shape[3] != BLOCK_BYTES:
            raise module.refuse(
                self.end, f"has shape {list(shape)}; blocks of {BLOCK_BYTES} bytes in a stack are known"
            )
        count, n, blocks, _ = shape
        module.info(SCALES, "U8")
        module.check_shape(SCALES, (count, n, blocks), "one a block")
        k = blocks * UNIT_COLUMNS
        sources = module.sources(self.end, SCALES)
        return module.name, Coded((count, k, n), sources, lambda index: _matrix(module, index, n, k), turned=True)


def _matrix(module: Module, index: int, n: int, k: int) -> QuantizedMatrix:
    blocks_NB = module.array(Mxfp4.end)[index].reshape(n, k // 2)
    scales_NG = module.array(SCALES)[index]
    return QuantizedMatrix(
        n, k, FORMAT, lambda first, stop: QuantRows(nibbles(blocks_NB[first:stop]), scales_NG[first:stop])
    )


def parse(stored: Fields) -> tuple[Scheme, str]:
    """The scheme; activations are not quantised."""
    return Mxfp4(), ""
