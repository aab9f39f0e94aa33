"""Codes of keys and values (``KvType``) as device functions: made where pages are written, read in registers.

Whole numbers do it all, so that a GPU without E4M3 of its own (8.0) gives the same codes as others, and Triton's
interpreter, too.  Codes are read as numbers up to 1.75: shifted by seven bits, E4M3 is an fp16 number with another
bias, subnormal ones included.  The power of two that is missing then, an exponent's, is the bits of an fp32 number.

This module imports triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.operands import LEAST_EXPONENT, MOST_EXPONENT, NO_NUMBER
from penstock.kernels.triton.numerics import rounded

_LEAST = tl.constexpr(LEAST_EXPONENT)
_MOST = tl.constexpr(MOST_EXPONENT)
_NO_NUMBER = tl.constexpr(NO_NUMBER)
_NAN_BITS = tl.constexpr(0x7FC00000)

_SMALL = tl.constexpr(2.0**-14)  # below it codes are subnormal, 2^-17 apart
_ROUNDS_SMALL = tl.constexpr(64.0)  # the fp32 numbers behind it are 2^-17 apart
_ROUNDS_SMALL_BITS = tl.constexpr(133 << 23)
_BIASES = tl.constexpr(112 << 23)  # fp32's less fp16's


@triton.jit
def sizes_of(x):
    """Absolute values; infinity for what is no number."""
    return tl.where(x == x, tl.abs(x), float("inf"))  # noqa: PLR0124


@triton.jit
def exponent_of(largest):
    """uint8, of rows whose largest absolute value this is: with it, none of them exceeds 1.75.

    No number for what no exponent will do for, infinity among it.
    """
    exponent = (largest.to(tl.uint32, bitcast=True) + 0x1FFFFF) >> 23
    return tl.where(exponent <= _MOST, tl.maximum(exponent, _LEAST), _NO_NUMBER).to(tl.uint8)


@triton.jit
def encoded(x, exponent):
    """uint8 codes, to nearest even, of fp32 numbers not larger than this exponent says; of no number, anything."""
    y = x * ((254 - exponent.to(tl.uint32)) << 23).to(tl.float32, bitcast=True)
    size = tl.abs(y)
    bits = size.to(tl.uint32, bitcast=True)
    large = (bits + (0x7FFFF + ((bits >> 20) & 1)) - _BIASES) >> 20
    small = (size + _ROUNDS_SMALL).to(tl.uint32, bitcast=True) - _ROUNDS_SMALL_BITS
    code = tl.where(size < _SMALL, small, large)
    return (code | ((y.to(tl.uint32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def to_kv_dtype(x, exponent, dtype: tl.constexpr):
    """What is stored of fp32 numbers: codes where memory is of bytes, else numbers rounded."""
    if dtype == tl.uint8:
        y = encoded(x, exponent)
    else:
        y = rounded(x, dtype)
    return y


@triton.jit
def numbers_of(stored, dtype: tl.constexpr):
    """What was stored, in the compute type: of codes, the numbers up to 1.75 that they stand for, exactly."""
    if stored.dtype == tl.uint8:
        wide = stored.to(tl.uint16)
        bits = ((wide & 0x7F) << 7) | ((wide & 0x80) << 8)
        y = bits.to(tl.float16, bitcast=True).to(dtype)
    else:
        y = stored
    return y


@triton.jit
def scaled(x_RN, exponents_N, known_N, CODED: tl.constexpr):
    """Columns times their powers of two, where there are codes: 0 where nothing was ever written, NaN of no number."""
    if CODED:
        exponent_N = tl.load(exponents_N, mask=known_N, other=0).to(tl.uint32)
        bits_N = tl.where(exponent_N == _NO_NUMBER, _NAN_BITS, exponent_N << 23)  # not infinity: less of it is no key
        x_RN = x_RN * bits_N.to(tl.uint32).to(tl.float32, bitcast=True)[None, :]
    return x_RN
