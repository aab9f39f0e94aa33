"""The C++ kernels' weights, KV memory and tables: what is made once a model, and looking inside arrays.

One of the parts that ``native`` puts together.  Starts no thread: a zygote may pack weights with this and fork
afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from penstock.errors import KernelError
from penstock.kernels import _native
from penstock.kernels.compressed import BLOCK_COLUMNS, PANEL_ROWS
from penstock.kernels.compressed_gpu import AnyCompressed
from penstock.kernels.compression import for_cpu
from penstock.kernels.loading import Backend, CompressedPlaces, NativeLoading
from penstock.kernels.memory import WeightArena
from penstock.kernels.native_adapters import NativeAdapters
from penstock.kernels.native_arguments import NativeForm, NativeKv, angle_table, fill_weights, packed_experts
from penstock.kernels.operands import Array, KvShape, PackedLinear
from penstock.kernels.quantised import QuantizedMatrix
from penstock.kernels.quantising import pack
from penstock.kernels.routing import PackedExperts

_SOURCES = {np.dtype(bfloat16): "bf16", np.dtype(np.float16): "fp16", np.dtype(np.float32): "fp32"}


class NativeModel:
    """See ``ops_model.ModelOps``."""

    def __init__(self, form: NativeForm) -> None:
        self._form = form
        self._arena = WeightArena()
        self._kernels = _native.Kernels(form.family, form.compute_dtype)
        self._compressed = _native.CompressedKernels(form.family)

    def pack_linear(self, weight_NK: Array, *, segments: tuple[int, ...] | None = None) -> PackedLinear:
        """See ``Ops.pack_linear``.  Raises KernelError for another element type."""
        source = _SOURCES.get(weight_NK.dtype)
        if source is None:
            raise KernelError(f"weights of type {weight_NK.dtype} are not bfloat16, float16 or float32")
        n, k = weight_NK.shape
        ends = list(segments or (k,))
        cells = self._arena.cells(_native.Weights.cells_needed(n, k, ends, self._form.per_cell))
        weights = _native.Weights(cells, n, k, ends, self._form.per_cell)
        fill_weights(weights, weight_NK, source)
        return PackedLinear(n=n, k=k, segments=tuple(ends), data=weights, nbytes=cells.nbytes)

    def pack_compressed(
        self, parts: Sequence[AnyCompressed], *, segments: tuple[int, ...] | None = None
    ) -> PackedLinear | None:
        """See ``Ops.pack_compressed``: where the family decodes in registers, else plain weights are faster."""
        ends = segments or (parts[0].k,)
        if not self._keeps_compressed(parts, ends):
            return None
        own = [matrix for part in parts if (matrix := for_cpu(part)) is not None]
        if len(own) < len(parts):
            return None
        weight = CompressedPlaces(self._arena, own, ends)
        for part, place in zip(own, weight.places, strict=True):
            place.counts[:], place.blocks[:], place.escapes[:] = part.counts, part.blocks, part.escapes
        return weight.finish()

    def pack_experts(
        self,
        gate_up: Sequence[PackedLinear],
        down: Sequence[PackedLinear],
        *,
        gate_up_biases: Sequence[Array] | None = None,
        down_biases: Sequence[Array] | None = None,
        weighs_input: bool = False,
    ) -> PackedExperts:
        """See ``Ops.pack_experts``."""
        return packed_experts((gate_up, down), (gate_up_biases, down_biases), self._form.per_cell, weighs_input)

    def pack_quantised(
        self, parts: list[QuantizedMatrix], *, segments: tuple[int, ...] | None = None, threads: int = 1
    ) -> PackedLinear | None:
        """See ``Ops.pack_quantised``."""
        return pack(self._arena, parts, segments or (parts[0].k,), threads)

    def adapter_table(self, sites: Sequence[PackedLinear], slots: int) -> NativeAdapters:
        """See ``Ops.adapter_table``."""
        return NativeAdapters(sites, slots, self._form.per_cell)

    def loading(self, nbytes: int) -> NativeLoading:
        """See ``Ops.loading``."""
        self._arena.reserve(nbytes)
        return NativeLoading(Backend(self._arena, self._form.per_cell, self._keeps_compressed, self.vector))

    def vector(self, weight_D: Array) -> Array:
        """See ``Ops.vector``."""
        return np.ascontiguousarray(weight_D, dtype=np.float32)

    def new_kv(self, shape: KvShape, *, pages: int, memory: memoryview | None = None) -> NativeKv:
        """See ``Ops.new_kv``.  Raises KernelError when the memory is too small."""
        nbytes = pages * self.page_bytes(shape)
        if memory is None:
            cells = np.zeros(nbytes // 4, np.uint32)
        else:
            if memory.nbytes < nbytes:
                raise KernelError(f"{pages} pages need {nbytes} bytes of KV memory, given are {memory.nbytes}")
            cells = np.frombuffer(memory, np.uint32, count=nbytes // 4)
        sizes = (shape.page_layers, shape.kv_heads, shape.key_dim, shape.value_dim)
        handle = _native.KvMemory(cells, pages, *sizes, shape.shared, self._form.per_cell, list(shape.places))
        if shape.states is not None:
            own = shape.states
            heads = own.layers, own.key_heads, own.heads, own.key_dim, own.value_dim
            handle.keep_states((*heads, own.taps, own.cell, shape.state_rows_a_page))
        return NativeKv(memory=cells, handle=handle, shape=shape)

    def page_bytes(self, shape: KvShape) -> int:
        """See ``Ops.page_bytes``."""
        return shape.page_bytes(self._form.compute_dtype)

    def rope_table(
        self,
        inv_freq_C2: NDArray[np.float64],
        max_positions: int,
        attention_factor: float = 1.0,
        *,
        interleaved: bool = False,
        axes_C2: Sequence[int] | None = None,
    ) -> _native.Rope:
        """See ``Ops.rope_table``."""
        angles = np.outer(np.arange(max_positions, dtype=np.float64), np.asarray(inv_freq_C2, np.float64))
        return angle_table(angles, attention_factor, interleaved=interleaved, axes_C2=axes_C2)

    def angle_table(
        self, angles_PC2: NDArray[np.float64], attention_factor: float = 1.0, *, interleaved: bool = False
    ) -> _native.Rope:
        """See ``Ops.angle_table``."""
        return angle_table(angles_PC2, attention_factor, interleaved=interleaved)

    def compute(self, values: NDArray[Any]) -> Array:
        """See ``Ops.compute``."""
        flat = np.ascontiguousarray(values, np.float32).reshape(-1)
        out = np.empty(flat.shape, self._form.dtype)
        self._kernels.to_compute(flat, out)
        return out.reshape(values.shape)

    def hidden(self, values: NDArray[Any]) -> Array:
        """See ``Ops.hidden``."""
        return np.array(values, np.float32)

    def to_numpy(self, array: Array) -> NDArray[np.float32]:
        """See ``Ops.to_numpy``."""
        wide = array.view(bfloat16) if array.dtype == np.uint16 else array
        return np.asarray(wide, np.float32)

    def _keeps_compressed(self, parts: Sequence[AnyCompressed], ends: tuple[int, ...]) -> bool:
        fits = not any(part.n % PANEL_ROWS for part in parts[:-1]) and not any(end % BLOCK_COLUMNS for end in ends)
        return self._form.compute_dtype == "bf16" and self._compressed.in_registers() and fits
