"""The quantised types of GGUF: blocks of a row to codes and numbers (``kernels.quantised``), as ggml-quants.c has them.

Knows rows of bytes, no files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.quantization import E2M1, MinimumType, QuantFormat, QuantRows, ScaleType, integer_values

Blocks = NDArray[np.uint8]
"""[rows, blocks, bytes of a block]"""

_NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class GgufQuant:
    """One type: how many columns and bytes a block has, what it becomes, and how."""

    columns: int
    nbytes: int
    format: QuantFormat
    unpack: Callable[[Blocks], QuantRows]

    def rows(self, raw: NDArray[np.uint8]) -> QuantRows:
        """``raw``: [rows, bytes of a row]."""
        return self.unpack(raw.reshape(len(raw), -1, self.nbytes))


def _halves(blocks: Blocks, at: int) -> NDArray[Any]:
    """An fp16 number of each block."""
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16)[:, :, 0]


def _nibbles(packed: Blocks) -> NDArray[np.uint8]:
    """Lower halves of all bytes, then upper ones: [rows, blocks, 2 * bytes]."""
    return np.concatenate([packed & 15, packed >> 4], axis=2)


def _flat(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return codes.reshape(len(codes), -1)


def _q8_0(blocks: Blocks) -> QuantRows:
    return QuantRows(_flat(blocks[:, :, 2:] ^ np.uint8(128)), _halves(blocks, 0))


def _q4_0(blocks: Blocks) -> QuantRows:
    return QuantRows(_flat(_nibbles(blocks[:, :, 2:])), _halves(blocks, 0))


def _q4_1(blocks: Blocks) -> QuantRows:
    return QuantRows(_flat(_nibbles(blocks[:, :, 4:])), _halves(blocks, 0), _halves(blocks, 2))


def _fifth_bits(blocks: Blocks, at: int) -> NDArray[np.uint8]:
    bits: NDArray[np.uint8] = np.unpackbits(blocks[:, :, at : at + 4], axis=2, bitorder="little")
    return bits << np.uint8(4)


def _q5_0(blocks: Blocks) -> QuantRows:
    return QuantRows(_flat(_nibbles(blocks[:, :, 6:]) | _fifth_bits(blocks, 2)), _halves(blocks, 0))


def _q5_1(blocks: Blocks) -> QuantRows:
    codes = _nibbles(blocks[:, :, 8:]) | _fifth_bits(blocks, 4)
    return QuantRows(_flat(codes), _halves(blocks, 0), _halves(blocks, 2))


def _mxfp4(blocks: Blocks) -> QuantRows:
    return QuantRows(_flat(_nibbles(blocks[:, :, 1:])), blocks[:, :, 0])


def _six_bits(packed: Blocks) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Eight scales and eight minimums of six bits each out of twelve bytes; [rows, 8 * blocks]."""
    first, second, third = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=2)
    minimums = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=2)
    return _flat(scales), _flat(minimums)


def _pairs(packed: Blocks) -> NDArray[np.uint8]:
    """Of every 32 bytes the lower halves, then the upper ones: [rows, blocks, 8, 32]."""
    rows, blocks, _ = packed.shape
    quads = packed.reshape(rows, blocks, 4, 32)
    return np.stack([quads & 15, quads >> 4], axis=3).reshape(rows, blocks, 8, 32)


def _q4_k(blocks: Blocks) -> QuantRows:
    scales, minimums = _six_bits(blocks[:, :, 4:16])
    return QuantRows(_flat(_pairs(blocks[:, :, 16:])), scales, minimums, _halves(blocks, 0), _halves(blocks, 2))


def _q5_k(blocks: Blocks) -> QuantRows:
    scales, minimums = _six_bits(blocks[:, :, 4:16])
    places = np.arange(8, dtype=np.uint8)[:, None]
    fifth = (blocks[:, :, None, 16:48] >> places & np.uint8(1)) << np.uint8(4)
    return QuantRows(_flat(_pairs(blocks[:, :, 48:]) | fifth), scales, minimums, _halves(blocks, 0), _halves(blocks, 2))


def _q6_k(blocks: Blocks) -> QuantRows:
    rows, count, _ = blocks.shape
    low = blocks[:, :, :128].reshape(rows, count, 2, 1, 2, 32)  # half, nibble, 32 or 32 more, column
    nibbles = np.concatenate([low & 15, low >> 4], axis=3).reshape(rows, count, 2, 4, 32)
    places = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = blocks[:, :, 128:192].reshape(rows, count, 2, 1, 32) >> places & 3
    scales = _flat(blocks[:, :, 192:208]).view(np.int8)
    return QuantRows(_flat(nibbles | high << 4), scales, None, _halves(blocks, 208))


_SUPER = (ScaleType.U8_OF_F16, MinimumType.U8_OF_F16)

GGUF_QUANTS: Mapping[str, GgufQuant] = MappingProxyType(
    {
        "Q4_0": GgufQuant(32, 18, QuantFormat(4, integer_values(4, 8), 32, ScaleType.F16), _q4_0),
        "Q4_1": GgufQuant(32, 20, QuantFormat(4, integer_values(4, 0), 32, ScaleType.F16, MinimumType.F16), _q4_1),
        "Q5_0": GgufQuant(32, 22, QuantFormat(5, integer_values(5, 16), 32, ScaleType.F16), _q5_0),
        "Q5_1": GgufQuant(32, 24, QuantFormat(5, integer_values(5, 0), 32, ScaleType.F16, MinimumType.F16), _q5_1),
        "Q8_0": GgufQuant(32, 34, QuantFormat(8, integer_values(8, 128), 32, ScaleType.F16), _q8_0),
        "IQ4_NL": GgufQuant(32, 18, QuantFormat(4, tuple(map(float, _NON_LINEAR)), 32, ScaleType.F16), _q4_0),
        "MXFP4": GgufQuant(32, 17, QuantFormat(4, E2M1, 32, ScaleType.E8M0), _mxfp4),
        "Q4_K": GgufQuant(256, 144, QuantFormat(4, integer_values(4, 0), 32, *_SUPER), _q4_k),
        "Q5_K": GgufQuant(256, 176, QuantFormat(5, integer_values(5, 0), 32, *_SUPER), _q5_k),
        "Q6_K": GgufQuant(256, 210, QuantFormat(6, integer_values(6, 32), 16, ScaleType.I8_OF_F16), _q6_k),
    }
)
"""Types that can be served, by name."""
