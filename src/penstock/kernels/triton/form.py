"""What all Triton kernels share: the device, the compute type, and the one way to multiply tiles.

Without a GPU, Triton's interpreter runs the very same kernels in NumPy.  It multiplies bf16 tiles wrongly, and others
with a library whose order of sums follows from the tile's shape and a row's place in it: what no matrix unit does.  So
there ``dot`` multiplies in float64, where the order is far below what is left after rounding to fp32.  Whether kernels
are interpreted is decided when they are decorated, by ``TRITON_INTERPRET`` in the environment; ``select`` sees to it.

Knows no operation.  This module imports torch and triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.reference.tiles import TorchForm

VERSION = 2
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
class TritonForm:
    """What all parts of the backend share."""

    torch: TorchForm

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
