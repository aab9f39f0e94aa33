"""compressed-tensors (vLLM's LLM Compressor): groups of modules, each with its own scheme.

Served: "pack-quantized" (4 or 8 bits in words), "int-quantized", "naive-quantized" and "float-quantized" (a byte each).
Packed: ``weight_packed`` [N, K bits / 32]: codes, counted from the smallest integer; ``weight_scale`` [N, G];
``weight_zero_point`` [N bits / 32, G], packed along outputs; ``weight_shape``: N and K; ``weight_g_idx`` [K]: the group
of each column where their order was changed.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.quantization import MinimumType, QuantFormat, QuantizedMatrix, QuantRows, integer_values
from penstock.weights.config_json import ConfigFields
from penstock.weights.quantization.base import (
    EVERY_LINEAR,
    QuantizationScheme,
    QuantizedTensor,
    StoredModule,
    column_order,
    group_columns,
    unpack_words,
)
from penstock.weights.quantization.fp8_mxfp4 import BESIDE, EightBitScheme

WORD_BITS = 32
SCALES, ZEROS, SHAPE, GROUPS = ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx"


class PackedIntScheme(QuantizationScheme, frozen=True, kw_only=True, tag="Packed"):
    """Integers of 4 or 8 bits in 32-bit words.  ``group``: columns that share a scale, None for all."""

    end: ClassVar[str] = ".weight_packed"
    types: ClassVar[frozenset[str]] = frozenset({"I32"})

    code_bits: int  # 4 or 8
    group: int | None
    symmetric: bool = True

    def bits_per_weight(self) -> float:
        zero = 0 if self.symmetric else self.code_bits
        return self.code_bits + ((16 + zero) / self.group if self.group else 0)

    def find_tensor(self, module: StoredModule) -> tuple[str, QuantizedTensor]:
        shape = module.info(self.end, "I32").shape
        if len(shape) != 2:
            raise module.error(self.end, f"has shape {list(shape)}, it must have two dimensions")
        n, k = shape[0], shape[1] * WORD_BITS // self.code_bits
        groups = -(-k // group_columns(self.group, k))
        module.scale(SCALES)
        module.check_shape(SCALES, (n, groups), f"for {k} columns in groups of {group_columns(self.group, k)}")
        if not self.symmetric:
            module.info(ZEROS, "I32")
            module.check_shape(ZEROS, (-(-n * self.code_bits // WORD_BITS), groups), "packed as the weights are")
        sources = module.sources(self.end, SCALES, ZEROS, SHAPE, GROUPS, *BESIDE)
        return f"{module.name}.weight", QuantizedTensor((n, k), sources, lambda _: self._matrix(module, n, k))

    def _matrix(self, module: StoredModule, n: int, k: int) -> QuantizedMatrix:
        self._check_size(module, n, k)
        bits, group = self.code_bits, group_columns(self.group, k)
        words_NW, scales_NG = module.array(self.end), module.array(SCALES)
        order = column_order(module, GROUPS, k, group)
        zeros_NG = None if self.symmetric else self._zeros(module, n)
        values = integer_values(bits, 1 << bits - 1 if zeros_NG is None else 0)
        minimum = MinimumType.NONE if zeros_NG is None else MinimumType.ZERO_POINT
        form = QuantFormat(bits, values, group, module.scale(SCALES), minimum)

        def read(first: int, stop: int) -> QuantRows:
            codes_NK = unpack_words(words_NW[first:stop], bits)
            if order is not None:
                codes_NK = codes_NK[:, order]
            return QuantRows(codes_NK, scales_NG[first:stop], None if zeros_NG is None else zeros_NG[first:stop])

        return QuantizedMatrix(n, k, form, read, order)

    def _check_size(self, module: StoredModule, n: int, k: int) -> None:
        """The tensor about the shape must say what the other shapes do."""
        if module.has(SHAPE):
            module.info(SHAPE, "I64", "I32")
            said = module.array(SHAPE).reshape(-1).tolist()
            if said != [n, k]:
                raise module.error(SHAPE, f"says {said}, the codes are of [{n}, {k}]")

    def _zeros(self, module: StoredModule, n: int) -> NDArray[np.uint8]:
        """[N, G]"""
        words_WG = module.array(ZEROS)
        return np.ascontiguousarray(unpack_words(words_WG.T, self.code_bits)[:, :n].T)


PACKED = "pack-quantized"
BYTES = ("int-quantized", "naive-quantized", "float-quantized")
MIXED = "mixed-precision"
MAX_GROUPS = 1000


def parse_compressed_tensors(stored: ConfigFields) -> tuple[list[tuple[tuple[str, ...], QuantizationScheme]], str]:
    """Each group's targets and scheme, and what is not done to activations.  Raises ModelError."""
    _refuse_more(stored)
    groups = stored.get("config_groups", dict, {})
    if not 1 <= len(groups) <= MAX_GROUPS:
        raise stored.error(f"config_groups has {len(groups)} groups, it must have 1 to {MAX_GROUPS}")
    found, activations = [], set[str]()
    for name in groups:
        group = ConfigFields(groups, f"{stored.where}: config_groups").section(str(name))
        weights = None if group is None else group.section("weights")
        if group is None or weights is None:
            raise stored.error(f"config_groups: {name}: has no weights")
        targets = group.get("targets", list, [EVERY_LINEAR])
        if not all(isinstance(target, str) for target in targets):
            raise group.error(f"targets must name modules, got {targets!r}")
        written = group.get("format", str, stored.get("format", str, ""))
        found.append((tuple(targets), _scheme(weights, "" if written == MIXED else written)))
        activations.add(_activations(group))
    return found, ", ".join(sorted(activations - {""}))


def _refuse_more(stored: ConfigFields) -> None:
    """Raise ModelError for transformations of weights that are not supported."""
    sparsity = stored.section("sparsity_config")
    if sparsity is not None and sparsity.get("format", str, "dense") != "dense":
        raise stored.error(f"sparsity_config: format {sparsity.values['format']!r}; dense matrices can be served")
    if any(stored.get("transform_config", dict, {}).values()):
        raise stored.error("transform_config: rotated weights need operations that are not computed here")


def _scheme(weights: ConfigFields, written: str) -> QuantizationScheme:
    kind, bits = weights.get("type", str, "int"), weights.positive_int("num_bits")
    if weights.get("dynamic", bool, False):
        raise weights.error("dynamic is true, which weights in a file cannot be")
    packs = written == PACKED or (not written and bits == 4)
    if packs and kind == "int" and bits in (4, 8):
        symmetric = weights.get("symmetric", bool, True)
        return PackedIntScheme(code_bits=bits, group=_group(weights), symmetric=symmetric)
    if bits == 8 and kind in ("int", "float") and (written in BYTES or not written):
        return EightBitScheme(kind="int8" if kind == "int" else "e4m3", block=_block(weights))
    raise weights.error(
        f"{kind} of {bits} bits, format {written!r}; these can be served: {PACKED} of 4 or 8 bits, "
        f"{', '.join(BYTES)} of 8"
    )


def _group(weights: ConfigFields) -> int | None:
    """Columns that share a scale; None: all."""
    strategy = weights.get("strategy", str, "group" if weights.has("group_size") else "channel")
    if strategy not in ("group", "channel"):
        raise weights.error(f"strategy is {strategy!r}; 'group' and 'channel' can be served with packed codes")
    if strategy == "channel":
        return None
    size = weights.get("group_size", int)
    if size == -1:
        return None
    return weights.positive_int("group_size")


def _block(weights: ConfigFields) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None: what the scales' shape says."""
    match weights.get("strategy", str, "channel"):
        case "tensor" | "channel":
            return None
        case "group":
            return 1, weights.positive_int("group_size")
        case "block":
            sizes: list[Any] = weights.get("block_structure", list)
            if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
                raise weights.error(f"block_structure must be rows and columns, got {sizes!r}")
            return sizes[0], sizes[1]
        case other:
            raise weights.error(f"strategy is {other!r}; tensor, channel, group and block can be served")


def _activations(group: ConfigFields) -> str:
    """How activations would be quantized."""
    inputs = group.section("input_activations")
    if inputs is None:
        return ""
    when = "dynamic" if inputs.values.get("dynamic") else "static"
    return f"{when} {inputs.get('type', str, 'int')}{inputs.positive_int('num_bits', 8)}"
