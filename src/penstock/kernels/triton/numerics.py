"""Shared by all Triton kernels: device and compute type, the product of tiles, rounding, activations.

Without a GPU, Triton's interpreter runs the same kernels in NumPy.  It multiplies bf16 tiles wrongly, and others with a
library whose order of sums follows from the tile's shape and a row's place in it, unlike any matrix unit.  So there
``dot`` multiplies in float64, where the order is far below what is left after rounding to fp32.  Whether kernels are
interpreted is decided when they are decorated, by ``TRITON_INTERPRET`` in the environment; ``select`` sets it.

No function here overflows on its way to a finite result.  This module imports torch and triton.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.operands import Activation
from penstock.kernels.reference.tiles import TorchContext

VERSION = 3
"""Of the kernels' bits: part of the numerics class, raised with every change that a sum could notice."""

INTERPRETED = tl.constexpr(not isinstance(tl.cdiv, triton.runtime.JITFunction))


@triton.jit
def dot(a_MK, b_KN, sums_MN):
    """sums + a b, summed in fp32; operands of the compute type."""
    if INTERPRETED:
        return sums_MN + tl.dot(a_MK.to(tl.float64), b_KN.to(tl.float64)).to(tl.float32)
    return tl.dot(a_MK, b_KN, sums_MN, input_precision="ieee")


_Device: TypeAlias = torch.device  # the class below has a field with the name of torch
_Type: TypeAlias = torch.dtype
_FP32 = torch.float32


@dataclass(frozen=True, slots=True)
class TritonContext:
    """What all parts of the backend share."""

    torch: TorchContext

    @property
    def device(self) -> _Device:
        return self.torch.device

    @property
    def dtype(self) -> _Type:
        """The compute type."""
        return self.torch.dtype

    def empty(self, shape: Sequence[int], dtype: _Type = _FP32) -> Tensor:
        """Memory for a result, contiguous, not zeroed."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def tensor(self, values: NDArray[Any]) -> Tensor:
        """A copy on the device."""
        return self.torch.tensor(values)

    def integers(self, values: NDArray[np.int32] | Tensor) -> Tensor:
        """int32 on the device: a tensor that is there already is taken as it is, so captured graphs may own it."""
        return values if isinstance(values, Tensor) else self.torch.tensor(np.asarray(values, np.int32))


def numerics_of(device: torch.device, compute_dtype: str) -> str:
    """The numerics class: version of the kernels, what runs them, Triton's version, torch's, compute type.

    Torch's, since operations without a kernel of their own are torch's.
    """
    where = "interpreter"
    if device.type == "cuda":
        where = "sm{}{}".format(*torch.cuda.get_device_capability(device))
    return f"triton-{VERSION}-{where}-{triton.__version__}-torch{torch.__version__}-{compute_dtype}"


UNFUSED: Mapping[str, bool] = MappingProxyType({"enable_fp_fusion": False})
"""For every launch: a product and a sum become one operation where the source says so, not at the compiler's choice."""

KIND_NUMBERS: Mapping[Activation, int] = MappingProxyType({kind: number for number, kind in enumerate(Activation)})
"""The kernels' numbers of activations."""

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
    """``alpha`` is of silu."""
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
    """Two numbers made one."""
    if LIMITED:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    return activated(gate, alpha, KIND) * (up + shift)


@triton.jit
def turned_pair(first, second, cos, sin):
    """Two numbers, turned by an angle."""
    return first * cos - second * sin, second * cos + first * sin
