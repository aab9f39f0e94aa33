"""GPTQ (arXiv:2210.17323) as AutoGPTQ and GPTQModel write it, and AWQ (arXiv:2306.00978) as AutoAWQ's version "gemm".

GPTQ: codes of 4 or 8 bits, inputs first.  ``qweight`` [K bits / 32, N]: words of codes of one output; ``scales`` [G,
N]; ``qzeros`` [G, N bits / 32]: zero points, less one in the first version of the format; ``g_idx`` [K]: the group of
each column, in any order where columns were sorted by activation (``desc_act``).  Files for other kernels (Marlin) are
refused.

AWQ: codes of 4 bits, inputs first.  ``qweight`` [K, N / 8]: words of eight outputs, of which nibble i is output
``ORDER[i]``; ``qzeros`` [G, N / 8] in the same order; ``scales`` [G, N].
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.quantization import MinimumType, QuantFormat, QuantizedMatrix, QuantRows, integer_values
from penstock.weights.config_json import ConfigFields
from penstock.weights.quantization.base import (
    QuantizationScheme,
    QuantizedTensor,
    StoredModule,
    column_order,
    group_columns,
    unpack_words,
)

GPTQ_ZEROS, GPTQ_SCALES, GPTQ_GROUPS = ".qzeros", ".scales", ".g_idx"
WORD_BITS = 32


class GptqScheme(QuantizationScheme, frozen=True, kw_only=True, tag="Gptq"):
    """``mixed``: the file gives some modules other bits, and their tensors' shapes say which."""

    end: ClassVar[str] = ".qweight"
    types: ClassVar[frozenset[str]] = frozenset({"I32"})

    code_bits: int  # 4 or 8
    group: int | None  # columns; None: all
    zero_offset: int = 1  # is added to stored zero points
    mixed: bool = False

    def bits_per_weight(self) -> float:
        return self.code_bits + ((16 + self.code_bits) / self.group if self.group else 0)

    def find_tensor(self, module: StoredModule) -> tuple[str, QuantizedTensor]:
        rows, n = self._matrix_shape(module, self.end)
        groups, scaled = self._matrix_shape(module, GPTQ_SCALES)
        zero_groups, zero_words = self._matrix_shape(module, GPTQ_ZEROS)
        bits = WORD_BITS * zero_words // n if n else 0
        if scaled != n or zero_groups != groups or bits * n != WORD_BITS * zero_words or bits not in (4, 8):
            raise module.error(GPTQ_ZEROS, f"does not fit {n} outputs in {groups} groups of codes of 4 or 8 bits")
        if bits != self.code_bits and not self.mixed:
            raise module.error(
                GPTQ_ZEROS, f"is of codes of {bits} bits, by quantization_config they have {self.code_bits}"
            )
        k = rows * WORD_BITS // bits
        group = group_columns(self.group, k)
        if groups != -(-k // group):
            raise module.error(
                GPTQ_SCALES, f"has {groups} groups; {k} columns in groups of {group} are {-(-k // group)}"
            )
        if module.has(GPTQ_GROUPS):
            module.info(GPTQ_GROUPS, "I32")
            module.check_shape(GPTQ_GROUPS, (k,), "for as many columns")
        sources = module.sources(self.end, GPTQ_SCALES, GPTQ_ZEROS, GPTQ_GROUPS)
        return f"{module.name}.weight", QuantizedTensor((n, k), sources, lambda _: self._matrix(module, (n, k), bits))

    def _matrix_shape(self, module: StoredModule, end: str) -> tuple[int, int]:
        types = ("F16", "BF16", "F32") if end == GPTQ_SCALES else ("I32",)
        shape = module.info(end, *types).shape
        if len(shape) != 2:
            raise module.error(end, f"has shape {list(shape)}, it must have two dimensions")
        return shape[0], shape[1]

    def _matrix(self, module: StoredModule, shape: tuple[int, int], bits: int) -> QuantizedMatrix:
        (n, k), group = shape, group_columns(self.group, shape[1])
        words_WN, scales_GN = module.array(self.end), module.array(GPTQ_SCALES)
        order = column_order(module, GPTQ_GROUPS, k, group)
        zeros_NG = self._zeros(module, bits)
        middle = 1 << bits - 1
        even = bool((zeros_NG == middle).all())
        values = integer_values(bits, middle if even else 0)
        form = QuantFormat(
            bits, values, group, module.scale(GPTQ_SCALES), MinimumType.NONE if even else MinimumType.ZERO_POINT
        )

        def read(first: int, stop: int) -> QuantRows:
            codes_NK = unpack_words(words_WN[:, first:stop].T, bits)
            if order is not None:
                codes_NK = codes_NK[:, order]
            return QuantRows(codes_NK, scales_GN[:, first:stop].T, None if even else zeros_NG[first:stop])

        return QuantizedMatrix(n, k, form, read, order)

    def _zeros(self, module: StoredModule, bits: int) -> NDArray[np.uint8]:
        """[N, G]"""
        zeros_GN: NDArray[Any] = unpack_words(module.array(GPTQ_ZEROS), bits).astype(np.uint16) + self.zero_offset
        if int(zeros_GN.max(initial=0)) > np.iinfo(np.uint8).max:
            raise module.error(GPTQ_ZEROS, "has a zero point of 256, which codes of 8 bits cannot have")
        return np.ascontiguousarray(zeros_GN.T).astype(np.uint8)


def parse_gptq(stored: ConfigFields) -> tuple[QuantizationScheme, str]:
    """The scheme; activations are not quantized.  Raises ModelError for what no tensor here would look like."""
    bits = stored.positive_int("bits")
    if bits not in (4, 8):
        raise stored.error(f"bits is {bits}; GPTQ of 4 or 8 bits can be served")
    version = stored.get("checkpoint_format", str, stored.get("format", str, "gptq"))
    if version not in ("gptq", "gptq_v2") or stored.get("is_marlin_format", bool, False):
        raise stored.error(f"checkpoint_format is {version!r}; 'gptq' and 'gptq_v2' can be served")
    if stored.get("pack_dtype", str, "int32") != "int32":
        raise stored.error(f"pack_dtype is {stored.values['pack_dtype']!r}; 'int32' can be served")
    offset = 1 if version == "gptq" else 0
    return GptqScheme(code_bits=bits, group=group_size(stored), zero_offset=offset, mixed=stored.has("dynamic")), ""


def group_size(stored: ConfigFields) -> int | None:
    """``group_size``, -1 for all columns.  Raises ModelError."""
    size = stored.get("group_size", int, 128)
    if size == -1:
        return None
    if size < 1:
        raise stored.error(f"group_size must be a positive integer or -1, got {size}")
    return size


BITS = 4
OUTPUTS = 8
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs each nibble of a word is, from the lowest on."""

AWQ_ZEROS, AWQ_SCALES = ".qzeros", ".scales"


class AwqScheme(QuantizationScheme, frozen=True, kw_only=True, tag="Awq"):
    """Codes of 4 bits.  ``group``: columns that share a scale, None for all."""

    end: ClassVar[str] = ".qweight"
    types: ClassVar[frozenset[str]] = frozenset({"I32"})

    group: int | None

    def bits_per_weight(self) -> float:
        return BITS + ((16 + BITS) / self.group if self.group else 0)

    def find_tensor(self, module: StoredModule) -> tuple[str, QuantizedTensor]:
        shape = module.info(self.end, "I32").shape
        if len(shape) != 2:
            raise module.error(self.end, f"has shape {list(shape)}, it must have two dimensions")
        k, words = shape
        n, groups = words * OUTPUTS, -(-k // group_columns(self.group, k))
        module.scale(AWQ_SCALES)
        module.check_shape(AWQ_SCALES, (groups, n), f"for {k} columns in groups of {group_columns(self.group, k)}")
        module.info(AWQ_ZEROS, "I32")
        module.check_shape(AWQ_ZEROS, (groups, words), "as the scales say")
        sources = module.sources(self.end, AWQ_SCALES, AWQ_ZEROS)
        return f"{module.name}.weight", QuantizedTensor((n, k), sources, lambda _: self._matrix(module, n, k))

    def _matrix(self, module: StoredModule, n: int, k: int) -> QuantizedMatrix:
        words_KW, scales_GN = module.array(self.end), module.array(AWQ_SCALES)
        zeros_GN = _outputs(module.array(AWQ_ZEROS))
        form = QuantFormat(
            BITS,
            integer_values(BITS, 0),
            group_columns(self.group, k),
            module.scale(AWQ_SCALES),
            MinimumType.ZERO_POINT,
        )

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
    codes = unpack_words(words_KW, BITS).reshape(rows, words, OUTPUTS)
    return codes[:, :, np.argsort(ORDER)].reshape(rows, words * OUTPUTS)


def parse_awq(stored: ConfigFields) -> tuple[QuantizationScheme, str]:
    """The scheme; activations are not quantized.  Raises ModelError for other versions and bits."""
    bits = stored.positive_int("bits", stored.positive_int("w_bit", BITS))
    if bits != BITS:
        raise stored.error(f"bits is {bits}; AWQ of 4 bits can be served")
    version = stored.get("version", str, stored.get("format", str, "gemm")).lower()
    if version != "gemm":
        raise stored.error(f"version is {version!r}; 'gemm' can be served")
    return AwqScheme(group=group_size(stored)), ""
