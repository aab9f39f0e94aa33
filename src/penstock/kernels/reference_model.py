"""The oracle's weights, KV memory and tables: what is made once a model, and looking inside arrays.

One of the parts that ``reference`` puts together.  This module imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import KernelError
from penstock.kernels.adapters import AdapterTable
from penstock.kernels.compressed_gpu import AnyCompressed
from penstock.kernels.operands import KvShape, PackedLinear
from penstock.kernels.quantised import QuantizedMatrix
from penstock.kernels.reference_adapters import ReferenceAdapters
from penstock.kernels.reference_attention import ReferenceKv, ReferenceRope, kv_over
from penstock.kernels.reference_experts import ReferenceExperts
from penstock.kernels.reference_tiles import TorchForm, numpy_of
from penstock.kernels.routing import PackedExperts
from penstock.kernels.stored import Loading
from penstock.types import FP8_E4M3


class ReferenceModel:
    """See ``ops_model.ModelOps``."""

    def __init__(self, form: TorchForm, *, coded: bool = False) -> None:
        """``coded``: keys and values are kept as codes (``kv_types``), not in the compute type."""
        self._form = form
        self._coded = coded

    def pack_linear(self, weight_NK: Any, *, segments: tuple[int, ...] | None = None) -> PackedLinear:
        """See ``Ops.pack_linear``: one contiguous fp32 matrix a segment, rounded to the compute type."""
        return self._packed(self._form.tensor(np.asarray(weight_NK, np.float32)).to(self._form.dtype).float(), segments)

    def pack_compressed(
        self, parts: Sequence[AnyCompressed], *, segments: tuple[int, ...] | None = None
    ) -> PackedLinear | None:
        """See ``Ops.pack_compressed``: plain weights only."""
        return None

    def pack_experts(
        self,
        gate_up: Sequence[PackedLinear],
        down: Sequence[PackedLinear],
        *,
        gate_up_biases: Sequence[Tensor] | None = None,
        down_biases: Sequence[Tensor] | None = None,
        weighs_input: bool = False,
    ) -> PackedExperts:
        """See ``Ops.pack_experts``."""
        wide, narrow = (torch.stack(list(own)) if own else None for own in (gate_up_biases, down_biases))
        data = ReferenceExperts(list(gate_up), list(down), wide, narrow, weighs_input)
        if {(w.n, w.k) for w in gate_up} != {(2 * down[0].k, gate_up[0].k)} or len({(w.n, w.k) for w in down}) > 1:
            raise ValueError("all experts of a layer have one shape")
        nbytes = sum(weight.nbytes for weight in (*gate_up, *down))
        return PackedExperts(len(down), gate_up[0].k, down[0].k, down[0].n, data, nbytes)

    def pack_quantised(
        self, parts: list[QuantizedMatrix], *, segments: tuple[int, ...] | None = None, threads: int = 1
    ) -> PackedLinear | None:
        """See ``Ops.pack_quantised``: dequantised to fp32, so that the products are those of the weights."""
        whole_NK = np.concatenate([part.dequantised() for part in parts])
        return self._packed(self._form.tensor(whole_NK), segments)

    def adapter_table(self, sites: Sequence[PackedLinear], slots: int) -> AdapterTable:
        """See ``Ops.adapter_table``."""
        return ReferenceAdapters(sites, slots, self.pack_linear)

    def loading(self, nbytes: int) -> Loading | None:
        """See ``Ops.loading``: it cannot."""
        return None

    def vector(self, weight_D: Any) -> Tensor:
        """See ``Ops.vector``."""
        return self._form.tensor(np.asarray(weight_D, np.float32))

    def new_kv(self, shape: KvShape, *, pages: int, memory: memoryview | None = None) -> ReferenceKv:
        """See ``Ops.new_kv``.  ``memory`` is served on the CPU only, and codes have no states beside them (KernelError
        elsewhere)."""
        if self._coded and shape.states is not None:
            raise KernelError(f"states of recurrent layers are in fp32: the pages they lie in cannot be in {FP8_E4M3}")
        nbytes, dtype = pages * self.page_bytes(shape), torch.uint8 if self._coded else self._form.dtype
        if memory is None:
            return kv_over(torch.zeros(nbytes // dtype.itemsize, dtype=dtype, device=self._form.device), shape)
        if self._form.device.type != "cpu":
            raise KernelError(f"KV memory on {self._form.device} cannot lie in the host's memory")
        if memory.nbytes < nbytes:
            raise KernelError(f"{pages} pages need {nbytes} bytes of KV memory, given are {memory.nbytes}")
        return kv_over(torch.frombuffer(memory, dtype=dtype, count=nbytes // dtype.itemsize), shape)

    def page_bytes(self, shape: KvShape) -> int:
        """See ``Ops.page_bytes``."""
        return shape.page_bytes(FP8_E4M3 if self._coded else "bf16" if self._form.dtype.itemsize == 2 else "fp32")

    def rope_table(
        self,
        inv_freq_C2: NDArray[np.float64],
        max_positions: int,
        attention_factor: float = 1.0,
        *,
        interleaved: bool = False,
        axes_C2: Sequence[int] | None = None,
    ) -> ReferenceRope:
        """See ``Ops.rope_table``."""
        angles = np.outer(np.arange(max_positions, dtype=np.float64), np.asarray(inv_freq_C2, np.float64))
        rope = self.angle_table(angles, attention_factor, interleaved=interleaved)
        return rope if axes_C2 is None else replace(rope, axes=self._form.indices(np.array(axes_C2, np.int32)))

    def angle_table(
        self, angles_PC2: NDArray[np.float64], attention_factor: float = 1.0, *, interleaved: bool = False
    ) -> ReferenceRope:
        """See ``Ops.angle_table``."""
        table = np.stack([np.cos(angles_PC2), np.sin(angles_PC2)], axis=1) * attention_factor
        return ReferenceRope(self._form.tensor(table.astype(np.float32)), interleaved)

    def compute(self, values: NDArray[Any]) -> Tensor:
        """See ``Ops.compute``."""
        return self._form.tensor(np.asarray(values, np.float32)).to(self._form.dtype)

    def hidden(self, values: NDArray[Any]) -> Tensor:
        """See ``Ops.hidden``."""
        return self._form.tensor(np.array(values, np.float32))

    def to_numpy(self, array: Tensor) -> NDArray[np.float32]:
        """See ``Ops.to_numpy``."""
        return numpy_of(array)

    def _packed(self, whole: Tensor, segments: tuple[int, ...] | None) -> PackedLinear:
        (n, k), ends = whole.shape, segments or (whole.shape[1],)
        begins = (0, *ends[:-1])
        parts = [whole[:, a:b].contiguous() for a, b in zip(begins, ends, strict=True)]
        return PackedLinear(n=n, k=k, segments=tuple(ends), data=parts, nbytes=whole.nbytes)
