"""Quantized types of GGUF files, as the kernels' codes and scales (``kernels.quantization``).

Blocks are those of ggml-quants.c.  Types of less than four bits become codes of four: a code of an IQ type is a level
of its codebook and a sign.  No value is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.quantization import E2M1, MinimumType, QuantFormat, QuantRows, ScaleType, integer_values
from penstock.weights.gguf.codebooks import codebook

Number = TypeVar("Number", bound=np.generic)
Blocks = NDArray[np.uint8]
"""[rows, blocks, bytes of a block]"""

_NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class GgufQuant:
    """One quantized type: columns and bytes of a block, the format that it becomes, and the conversion."""

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


def _flat(numbers: NDArray[Number]) -> NDArray[Number]:
    return numbers.reshape(len(numbers), -1)


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
    """The lower halves of every 32 bytes, then the upper ones: [rows, blocks, 8, 32]."""
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


def _bit_fields(packed: NDArray[Any], places: tuple[int, ...], bits: int) -> NDArray[np.uint8]:
    """Numbers of so many bits at these places of every number; [..., places]."""
    shifts = np.array(places, packed.dtype)
    fields: NDArray[Any] = packed[..., None] >> shifts & packed.dtype.type((1 << bits) - 1)
    return fields.astype(np.uint8)


def _words(blocks: Blocks, kind: type[np.unsignedinteger[Any]]) -> NDArray[Any]:
    """Bytes as larger numbers, the lowest byte first; [rows, blocks, numbers]."""
    return np.ascontiguousarray(blocks).view(np.dtype(kind).newbyteorder("<"))


def _quarters(packed: Blocks) -> NDArray[np.uint8]:
    """Numbers of two bits: of every 32 bytes the lowest of all, then the next ones: [rows, blocks, 4 * bytes]."""
    rows, blocks, size = packed.shape
    groups = packed.reshape(rows, blocks, size // 32, 1, 32)
    codes: NDArray[np.uint8] = groups >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & np.uint8(3)
    return codes.reshape(rows, blocks, 4 * size)


def _q2_k(blocks: Blocks) -> QuantRows:
    scales, minimums = _flat(blocks[:, :, :16] & 15), _flat(blocks[:, :, :16] >> 4)
    return QuantRows(_flat(_quarters(blocks[:, :, 16:80])), scales, minimums, _halves(blocks, 80), _halves(blocks, 82))


def _q3_k(blocks: Blocks) -> QuantRows:
    """Codes from 0 on, which stand for -4 and up."""
    rows, count, _ = blocks.shape
    third = blocks[:, :, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    codes = _quarters(blocks[:, :, 32:96]) | third.reshape(rows, count, 256) << np.uint8(2)
    low = _nibbles(blocks[:, :, 96:104])
    high = np.concatenate([blocks[:, :, 104:108] >> place & np.uint8(3) for place in (0, 2, 4, 6)], axis=2)
    scales = (low | high << np.uint8(4)).astype(np.int8) - np.int8(32)
    return QuantRows(_flat(codes), _flat(scales), None, _halves(blocks, 108))


def _iq4_xs(blocks: Blocks) -> QuantRows:
    rows, count, _ = blocks.shape
    high = _bit_fields(_words(blocks[:, :, 2:4], np.uint16)[:, :, 0], tuple(range(0, 16, 2)), 2)
    low = _bit_fields(blocks[:, :, 4:8], (0, 4), 4).reshape(rows, count, 8)
    scales = (low | high << np.uint8(4)).astype(np.int8) - np.int8(32)
    quads = blocks[:, :, 8:].reshape(rows, count, 8, 16)
    codes = np.concatenate([quads & 15, quads >> 4], axis=3)
    return QuantRows(_flat(codes), _flat(scales), None, _halves(blocks, 0))


def _tq1_0(blocks: Blocks) -> QuantRows:
    """Five digits of base 3 a byte, as the part of 256 that a byte of all 243 numbers is."""
    rows, count, _ = blocks.shape

    def digits(packed: Blocks, places: int) -> NDArray[np.uint8]:
        powers = np.array([1, 3, 9, 27, 81], np.uint8)[:places, None]
        turned = packed[:, :, None, :] * powers  # modulo 256
        return (turned.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(rows, count, -1)

    parts = [digits(blocks[:, :, :32], 5), digits(blocks[:, :, 32:48], 5), digits(blocks[:, :, 48:52], 4)]
    return QuantRows(_flat(np.concatenate(parts, axis=2)), _halves(blocks, 52))


def _tq2_0(blocks: Blocks) -> QuantRows:
    return QuantRows(_flat(_quarters(blocks[:, :, :64])), _halves(blocks, 64))


_SIGN = np.uint8(8)
"""The bit of a code of an IQ type that makes its value negative."""


def _signs(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A bit for each of eight columns, as the sign of their codes; [..., 8]."""
    return _bit_fields(packed, tuple(range(8)), 1) * _SIGN


def _even_signs(packed: NDArray[Any]) -> NDArray[np.uint8]:
    """The same of seven bits: the eighth makes the number of negative values even."""
    seven = (packed & packed.dtype.type(127)).astype(np.uint8)
    return _signs(seven | np.bitwise_count(seven) % np.uint8(2) << np.uint8(7))


def _odd(numbers: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Scales are stored as the number of an odd one; [rows, groups]."""
    return _flat(numbers).astype(np.int8) * np.int8(2) + np.int8(1)


def _iq2_xxs(blocks: Blocks) -> QuantRows:
    words = _words(blocks[:, :, 2:], np.uint32).reshape(*blocks.shape[:2], 8, 2)
    entries = _bit_fields(words[..., 0], (0, 8, 16, 24), 8)
    signs = _even_signs(words[..., 1:] >> np.array([0, 7, 14, 21], np.uint32))
    scales = _odd((words[..., 1] >> np.uint32(28)).astype(np.uint8))
    return QuantRows(_flat(codebook("IQ2_XXS")[entries] | signs), scales, None, _halves(blocks, 0))


def _iq2_xs(blocks: Blocks) -> QuantRows:
    words = _words(blocks[:, :, 2:66], np.uint16)
    codes = codebook("IQ2_XS")[words & np.uint16(511)] | _even_signs(words >> np.uint16(9))
    return QuantRows(_flat(codes), _odd(_bit_fields(blocks[:, :, 66:], (0, 4), 4)), None, _halves(blocks, 0))


def _iq2_s(blocks: Blocks) -> QuantRows:
    high = _bit_fields(blocks[:, :, 66:74], (0, 2, 4, 6), 2).reshape(*blocks.shape[:2], 32)
    entries = blocks[:, :, 2:34] | high.astype(np.uint16) << np.uint16(8)
    codes = codebook("IQ2_S")[entries] | _signs(blocks[:, :, 34:66])
    return QuantRows(_flat(codes), _odd(_bit_fields(blocks[:, :, 74:], (0, 4), 4)), None, _halves(blocks, 0))


def _iq3_xxs(blocks: Blocks) -> QuantRows:
    rows, count, _ = blocks.shape
    words = _words(blocks[:, :, 66:], np.uint32)
    signs = _even_signs(words[..., None] >> np.array([0, 7, 14, 21], np.uint32))
    levels = codebook("IQ3_XXS")[blocks[:, :, 2:66]].reshape(rows, count, 8, 4, 8)
    scales = _odd((words >> np.uint32(28)).astype(np.uint8))
    return QuantRows(_flat(levels | signs), scales, None, _halves(blocks, 0))


def _iq3_s(blocks: Blocks) -> QuantRows:
    rows, count, _ = blocks.shape
    high = _bit_fields(blocks[:, :, 66:74], tuple(range(8)), 1).reshape(rows, count, 64)
    entries = blocks[:, :, 2:66] | high.astype(np.uint16) << np.uint16(8)
    levels = codebook("IQ3_S")[entries].reshape(rows, count, 32, 8)
    scales = _odd(_bit_fields(blocks[:, :, 106:], (0, 4), 4))
    return QuantRows(_flat(levels | _signs(blocks[:, :, 74:106])), scales, None, _halves(blocks, 0))


_LOWERED = np.uint8(3)
"""Added to the code of a level of IQ1: the level less an eighth, not plus one."""


def _iq1_s(blocks: Blocks) -> QuantRows:
    rows, count, _ = blocks.shape
    words = _words(blocks[:, :, 34:], np.uint16)
    high = _bit_fields(words, (0, 3, 6, 9), 3).reshape(rows, count, 32)
    levels = codebook("IQ1_S")[blocks[:, :, 2:34] | high.astype(np.uint16) << np.uint16(8)]
    lowered = _bit_fields(words, (15,), 1)[..., None] * _LOWERED
    codes = levels.reshape(rows, count, 8, 4, 8) + lowered
    return QuantRows(_flat(codes), _odd(_bit_fields(words, (12,), 3)), None, _halves(blocks, 0))


def _iq1_m(blocks: Blocks) -> QuantRows:
    rows, count, _ = blocks.shape
    words = _words(blocks[:, :, 48:], np.uint16)
    high = _bit_fields(blocks[:, :, 32:48], (0, 4), 4).reshape(rows, count, 32)
    levels = codebook("IQ1_S")[blocks[:, :, :32] | (high & np.uint8(7)).astype(np.uint16) << np.uint16(8)]
    codes = levels + (high >> np.uint8(3))[..., None] * _LOWERED
    nibbles = (words >> np.uint16(12)) << np.array([0, 4, 8, 12], np.uint16)
    supers = np.bitwise_or.reduce(nibbles, axis=2).astype(np.uint16).view(np.float16)
    return QuantRows(_flat(codes), _odd(_bit_fields(words, (0, 3, 6, 9), 3)), None, supers)


def _padded(*values: float) -> tuple[float, ...]:
    """A table of sixteen values of which only these occur."""
    return (*values, *[0.0] * (16 - len(values)))


def _signed(*levels: float) -> tuple[float, ...]:
    """The values of codes with a sign."""
    positive = (*levels, *[0.0] * (8 - len(levels)))
    return (*positive, *(-level for level in positive))


_SUPER = (ScaleType.U8_OF_F16, MinimumType.U8_OF_F16)
_IQ2 = _signed(1.0, 3.125, 5.375)
_IQ3_XXS = _signed(1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.5)
_IQ3_S = _signed(1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0)
_IQ1 = _padded(-0.875, 0.125, 1.125, -1.125, -0.125, 0.875)
_OF_SUPER = partial(QuantFormat, 4, scale=ScaleType.I8_OF_F16)

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
        "Q2_K": GgufQuant(256, 84, QuantFormat(4, integer_values(4, 0), 16, *_SUPER), _q2_k),
        "Q3_K": GgufQuant(256, 110, _OF_SUPER(values=integer_values(4, 4), group=16), _q3_k),
        "IQ4_XS": GgufQuant(256, 136, _OF_SUPER(values=tuple(map(float, _NON_LINEAR)), group=32), _iq4_xs),
        "IQ3_S": GgufQuant(256, 110, _OF_SUPER(values=_IQ3_S, group=32), _iq3_s),
        "IQ3_XXS": GgufQuant(256, 98, _OF_SUPER(values=_IQ3_XXS, group=32), _iq3_xxs),
        "IQ2_S": GgufQuant(256, 82, _OF_SUPER(values=_IQ2, group=16), _iq2_s),
        "IQ2_XS": GgufQuant(256, 74, _OF_SUPER(values=_IQ2, group=16), _iq2_xs),
        "IQ2_XXS": GgufQuant(256, 66, _OF_SUPER(values=_IQ2, group=32), _iq2_xxs),
        "IQ1_M": GgufQuant(256, 56, _OF_SUPER(values=_IQ1, group=16), _iq1_m),
        "IQ1_S": GgufQuant(256, 50, _OF_SUPER(values=_IQ1, group=32), _iq1_s),
        "TQ1_0": GgufQuant(256, 54, QuantFormat(4, integer_values(4, 1), 256, ScaleType.F16), _tq1_0),
        "TQ2_0": GgufQuant(256, 66, QuantFormat(4, integer_values(4, 1), 256, ScaleType.F16), _tq2_0),
    }
)
"""Types that can be served, by name."""
