"""The form of packed weights on the GPU: the protocol of ``PackedLinear.data``, and arrays in the device's layout.

This module imports torch and triton.
"""

from __future__ import annotations

from typing import Any, Protocol

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import KernelError
from penstock.kernels.compressed import AnyCompressed, GpuCompressedMatrix
from penstock.kernels.triton.matmul import Operand
from penstock.kernels.triton.numerics import TritonContext


class WeightForm(Protocol):
    """``PackedLinear.data``."""

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The outputs, in order."""
        ...

    def multiply(self, x_TK: Tensor, out_TN: Tensor, *, add: bool) -> None:
        """out = x W^T, or out += x W^T; x of the compute type."""
        ...

    def rows(self, ids_T: Tensor) -> Tensor:
        """fp32 [T, K]: the weights of these outputs, exactly."""
        ...

    def mixed(self, rows: int, *, in_tiles: bool) -> Operand | None:
        """All outputs, for products of ``rows`` rows that take them in any order; None: only as they are.

        ``in_tiles``: those of one tile lie in two tiles of the matrix at most.
        """
        ...


def for_gpu(part: AnyCompressed) -> GpuCompressedMatrix | None:
    """In the GPU's layout.  Raises KernelError where it is not and the C++ decoder is not built."""
    if isinstance(part, GpuCompressedMatrix):
        return part
    try:
        from penstock.kernels.native.compression import gpu_layout
    except ImportError as error:
        raise KernelError(
            "weights in the CPU's compressed layout are decoded by the kernel extension, which is not built; build it, "
            "or convert the model where it is: penstock compress --for gpu"
        ) from error
    return gpu_layout(part)


def device_matrix(form: TritonContext, weight_NK: NDArray[Any]) -> Tensor:
    """In the compute type, on the device.  Raises KernelError for another element type."""
    if weight_NK.dtype == ml_dtypes.bfloat16:
        bits = np.require(weight_NK, requirements=["C", "ALIGNED", "W"]).view(np.int16)  # torch wants it writable
        return torch.from_numpy(bits).view(torch.bfloat16).to(form.device, form.dtype, copy=True)
    if weight_NK.dtype not in (np.dtype(np.float16), np.dtype(np.float32)):
        raise KernelError(f"weights of type {weight_NK.dtype} are not bfloat16, float16 or float32")
    return form.tensor(weight_NK).to(form.dtype)
