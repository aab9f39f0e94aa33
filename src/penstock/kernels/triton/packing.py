"""Weights on the GPU: which form each matrix takes.  One of the parts that ``backend`` puts together.

This module imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import KernelError
from penstock.kernels.compressed_gpu import AnyCompressed, GpuMatrix
from penstock.kernels.operands import PackedExperts, PackedLinear
from penstock.kernels.quantization import QuantizedMatrix, fits
from penstock.kernels.reference.backend import ReferenceModel
from penstock.kernels.triton.adapters import TritonAdapters
from penstock.kernels.triton.compressed import compressed_weights, fits_gpu, workspace_of
from penstock.kernels.triton.experts import stacked_experts
from penstock.kernels.triton.form import TritonForm
from penstock.kernels.triton.plain import PlainWeights
from penstock.kernels.triton.quantised import quantised_weights


class TritonPacking:
    """See ``ops_model.ModelOps``."""

    def __init__(self, form: TritonForm) -> None:
        self._form = form
        self._reference = ReferenceModel(form.torch)
        self._workspace: Tensor | None = None

    def pack_linear(self, weight_NK: NDArray[Any], *, segments: tuple[int, ...] | None = None) -> PackedLinear:
        """See ``Ops.pack_linear``.  Raises KernelError for another element type."""
        return self.pack_tensor(device_matrix(self._form, weight_NK), segments=segments)

    def pack_tensor(self, matrix_NK: Tensor, *, segments: tuple[int, ...] | None = None) -> PackedLinear:
        """The same for a matrix of the compute type that is on the device already, and is not copied.

        Raises ValueError for segments that are not the matrix's."""
        n, k = matrix_NK.shape
        ends = tuple(segments or (k,))
        if list(ends) != sorted(ends) or ends[-1] != k or len(ends) not in (1, 2, 4, 8):
            raise ValueError(f"segments {ends} do not cut {k} columns into 1, 2, 4 or 8")
        data = PlainWeights.over(self._form, matrix_NK, ends)
        return PackedLinear(n=n, k=k, segments=ends, data=data, nbytes=matrix_NK.nbytes)

    def pack_compressed(
        self, parts: Sequence[AnyCompressed], *, segments: tuple[int, ...] | None = None
    ) -> PackedLinear | None:
        """See ``Ops.pack_compressed``: kept compressed under the compute type bf16; the CPU's layout is converted."""
        k = parts[0].k
        ends = tuple(segments or (k,))
        if self._form.dtype != torch.bfloat16 or not fits_gpu([(part.n, part.k) for part in parts], ends):
            return None
        found = [own for part in parts if (own := _for_gpu(part)) is not None]
        if len(found) < len(parts):
            return None
        if self._workspace is None or len(self._workspace) < 128 * k:
            self._workspace = workspace_of(self._form, k)
        data = compressed_weights(self._form, found, ends, self._workspace)
        return PackedLinear(n=data.operands[0].n, k=k, segments=ends, data=data, nbytes=data.nbytes)

    def pack_quantised(
        self, parts: list[QuantizedMatrix], *, segments: tuple[int, ...] | None = None, threads: int = 1
    ) -> PackedLinear | None:
        """See ``Ops.pack_quantised``."""
        k = parts[0].k
        ends = tuple(segments or (k,))
        if not fits(parts, ends):
            return None
        data = quantised_weights(self._form, parts, ends)
        return PackedLinear(n=sum(part.n for part in parts), k=k, segments=ends, data=data, nbytes=data.nbytes)

    def pack_experts(
        self,
        gate_up: Sequence[PackedLinear],
        down: Sequence[PackedLinear],
        *,
        gate_up_biases: Sequence[Tensor] | None = None,
        down_biases: Sequence[Tensor] | None = None,
        weighs_input: bool = False,
    ) -> PackedExperts:
        """See ``Ops.pack_experts``: the matrices stay usable, their memory becomes part of one tall matrix."""
        packed = self._reference.pack_experts(
            gate_up, down, gate_up_biases=gate_up_biases, down_biases=down_biases, weighs_input=weighs_input
        )
        return replace(packed, data=stacked_experts(packed.data))

    def adapter_table(self, sites: Sequence[PackedLinear], slots: int) -> TritonAdapters:
        """See ``Ops.adapter_table``."""
        return TritonAdapters(self._form, self.pack_linear, sites, slots)


def _for_gpu(part: AnyCompressed) -> GpuMatrix | None:
    """In the GPU's layout.  Raises KernelError where it is not and the C++ decoder is not built."""
    if isinstance(part, GpuMatrix):
        return part
    try:
        from penstock.kernels.native.compression import for_gpu
    except ImportError as error:
        raise KernelError(
            "weights in the CPU's compressed layout are decoded by the kernel extension, which is not built; build it, "
            "or convert the model where it is: penstock compress --for gpu"
        ) from error
    return for_gpu(part)


def device_matrix(form: TritonForm, weight_NK: NDArray[Any]) -> Tensor:
    """In the compute type, on the device.  Raises KernelError for another element type."""
    if weight_NK.dtype == ml_dtypes.bfloat16:
        bits = np.require(weight_NK, requirements=["C", "ALIGNED"]).view(np.int16)
        return torch.from_numpy(bits).view(torch.bfloat16).to(form.device, form.dtype, copy=True)
    if weight_NK.dtype not in (np.dtype(np.float16), np.dtype(np.float32)):
        raise KernelError(f"weights of type {weight_NK.dtype} are not bfloat16, float16 or float32")
    return form.tensor(weight_NK).to(form.dtype)
