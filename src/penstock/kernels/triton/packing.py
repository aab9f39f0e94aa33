"""Weights on the GPU: which form each matrix takes.  One of the parts that ``backend`` puts together.

This module imports torch.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import KernelError
from penstock.kernels.compressed_gpu import AnyCompressed, GpuMatrix
from penstock.kernels.triton.form import TritonForm


def for_gpu(part: AnyCompressed) -> GpuMatrix | None:
    """In the GPU's layout.  Raises KernelError where it is not and the C++ decoder is not built."""
    if isinstance(part, GpuMatrix):
        return part
    try:
        from penstock.kernels.native.compression import for_gpu as gpu_layout
    except ImportError as error:
        raise KernelError(
            "weights in the CPU's compressed layout are decoded by the kernel extension, which is not built; build it, "
            "or convert the model where it is: penstock compress --for gpu"
        ) from error
    return gpu_layout(part)


def device_matrix(form: TritonForm, weight_NK: NDArray[Any]) -> Tensor:
    """In the compute type, on the device.  Raises KernelError for another element type."""
    if weight_NK.dtype == ml_dtypes.bfloat16:
        bits = np.require(weight_NK, requirements=["C", "ALIGNED"]).view(np.int16)
        return torch.from_numpy(bits).view(torch.bfloat16).to(form.device, form.dtype, copy=True)
    if weight_NK.dtype not in (np.dtype(np.float16), np.dtype(np.float32)):
        raise KernelError(f"weights of type {weight_NK.dtype} are not bfloat16, float16 or float32")
    return form.tensor(weight_NK).to(form.dtype)
