"""What kernels compute of single numbers: rounding to the compute type, activations, tanh.

Device functions, called from kernels.  None overflows on its way to a finite answer.

This module imports triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import triton
import triton.language as tl

from penstock.kernels.operands import Activation
from penstock.kernels.triton.form import INTERPRETED

UNFUSED: Mapping[str, bool] = MappingProxyType({"enable_fp_fusion": False})
"""For every launch: a product and a sum become one operation where the source says so, not where a compiler likes."""

KIND_NUMBERS: Mapping[Activation, int] = MappingProxyType({kind: number for number, kind in enumerate(Activation)})
"""How kernels are told of an activation."""

_SILU = tl.constexpr(KIND_NUMBERS[Activation.SILU])
_GELU = tl.constexpr(KIND_NUMBERS[Activation.GELU])
_GELU_TANH = tl.constexpr(KIND_NUMBERS[Activation.GELU_TANH])
_RELU = tl.constexpr(KIND_NUMBERS[Activation.RELU])
_RELU2 = tl.constexpr(KIND_NUMBERS[Activation.RELU2])


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """fp32 in another type, to nearest even.  Triton's interpreter cuts bf16 off, so there it is done by hand."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = tl.where(x == x, x, 0.0).to(tl.uint32, bitcast=True)  # noqa: PLR0124  (not for NaN)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        y = tl.where(x == x, bits, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)  # noqa: PLR0124
    else:
        y = x.to(dtype)
    return y


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))"""
    e = tl.exp(-tl.abs(x))
    r = 1.0 / (1.0 + e)
    return tl.where(x >= 0, r, e * r)


@triton.jit
def tanh(x):
    """To 2 ulp: near 0 a fraction of its continued fraction (error below 1e-9 of the value), else by exp."""
    size = tl.abs(x)
    near = size < 0.65
    s = tl.where(near, x, 0.0)
    z = s * s
    above = ((z + 378.0) * z + 17325.0) * z + 135135.0
    below = ((28.0 * z + 3150.0) * z + 62370.0) * z + 135135.0
    e = tl.exp(-2.0 * size)
    far = (1.0 - e) / (1.0 + e)
    return tl.where(near, s * (above / below), tl.where(x < 0, -far, far))


@triton.jit
def activated(x, alpha, KIND: tl.constexpr):
    """See ``kinds.Activation``; ``alpha`` is of silu."""
    if KIND == _SILU:
        y = x * sigmoid(alpha * x)
    elif KIND == _GELU:
        y = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == _GELU_TANH:
        y = x * 0.5 * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif KIND == _RELU:
        y = tl.maximum(x, 0.0)
    elif KIND == _RELU2:
        y = tl.maximum(x, 0.0)
        y = y * y
    else:
        y = x
    return y


@triton.jit
def gate_of(gate, up, alpha, limit, shift, KIND: tl.constexpr, LIMITED: tl.constexpr):
    """See ``kinds.Gate``: two numbers made one."""
    if LIMITED:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    return activated(gate, alpha, KIND) * (up + shift)


@triton.jit
def turned_pair(first, second, cos, sin):
    """Two numbers, turned by an angle."""
    return first * cos - second * sin, second * cos + first * sin
