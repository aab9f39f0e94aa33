"""Operations once a model, and looking inside arrays: packing weights, KV memory, tables of rotary positions.

Part of ``ops.Ops``, which says what the letters in the names mean.  Here goes what is called before the first step, or
by tests and tools; never by a layer in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.adapters import AdapterTable
from penstock.kernels.compressed_gpu import AnyCompressed
from penstock.kernels.operands import Array, KvShape, PackedLinear
from penstock.kernels.quantised import QuantizedMatrix
from penstock.kernels.routing import PackedExperts
from penstock.kernels.stored import Loading


class ModelOps(Protocol):
    """What a backend makes of a model before its first step."""

    def pack_linear(self, weight_NK: Array, *, segments: tuple[int, ...] | None = None) -> PackedLinear:
        """Lay out a weight (NumPy array: ml_dtypes.bfloat16, float16 or float32) for ``linear`` and ``embed``.

        bf16 stays bf16 under the bf16 compute type; float16 and float32 are rounded to it (to nearest even), which
        loses nothing for the compute type fp32.
        """
        ...

    def pack_compressed(
        self, parts: Sequence[AnyCompressed], *, segments: tuple[int, ...] | None = None
    ) -> PackedLinear | None:
        """The same for compressed matrices, one below the other, which stay compressed; their bytes are copied.

        Either layout is taken, that of another device at the cost of a conversion.  None if this backend computes from
        plain weights only, or not from this shape: then ``pack_linear`` them.
        Raises KernelError if a part contradicts itself.
        """
        ...

    def pack_experts(
        self,
        gate_up: Sequence[PackedLinear],
        down: Sequence[PackedLinear],
        *,
        gate_up_biases: Sequence[Array] | None = None,
        down_biases: Sequence[Array] | None = None,
        weighs_input: bool = False,
    ) -> PackedExperts:
        """The experts of one layer over packed matrices of any form, which are not copied; biases are vectors.

        ``weighs_input``: a token is multiplied by its weight before its expert, not after it (Llama 4).
        Raises ValueError unless all have one shape.
        """
        ...

    def pack_quantised(
        self, parts: list[QuantizedMatrix], *, segments: tuple[int, ...] | None = None, threads: int = 1
    ) -> PackedLinear | None:
        """The same for quantised matrices (docs/weight-formats.md), whose columns may have one order of their own.

        None: dequantise them.  No thread is left.
        """

    def adapter_table(self, sites: Sequence[PackedLinear], slots: int) -> AdapterTable:
        """An empty table of ``slots`` adapters for these products of a model, whatever form their weights have."""

    def loading(self, nbytes: int) -> Loading | None:
        """What reads a model's weights (about ``nbytes`` in memory) straight from files, if this backend can."""
        ...

    def vector(self, weight_D: Array) -> Array:
        """A small parameter (norm weights, biases) as the backend wants it, in fp32."""
        ...

    def new_kv(self, shape: KvShape, *, pages: int, memory: memoryview | None = None) -> Array:
        """KV memory of ``pages`` pages over ``memory`` (zeroed, page after page) or freshly allocated."""
        ...

    def page_bytes(self, shape: KvShape) -> int:
        """Bytes of one page of all layers: what ``new_kv`` needs for each page."""
        ...

    def rope_table(
        self,
        inv_freq_C2: NDArray[np.float64],
        max_positions: int,
        attention_factor: float = 1.0,
        *,
        interleaved: bool = False,
        axes_C2: Sequence[int] | None = None,
    ) -> Array:
        """cos and sin times ``attention_factor`` for every position, computed in float64 and rounded once to fp32.

        Rotates the first ``2 * len(inv_freq)`` columns of a head, the others stay.  Pairs are columns (i, i + half) as
        in Hugging Face's order, or, interleaved, (2 i, 2 i + 1).

        ``axes_C2``: which of a token's three turns (``StepBatch.turns_T3``) a pair follows (M-RoPE, arXiv:2409.12191);
        without them every pair follows the position.
        """
        ...

    def angle_table(
        self, angles_PC2: NDArray[np.float64], attention_factor: float = 1.0, *, interleaved: bool = False
    ) -> Array:
        """The same for rows of any angles, as of places in an image, which need not be positions."""
        ...

    def compute(self, values: NDArray[Any]) -> Array:
        """An array in the compute type, rounded to nearest even (an encoder's input, tests and tools; layers never
        make arrays)."""
        ...

    def hidden(self, values: NDArray[Any]) -> Array:
        """An fp32 array of the backend (given rows, tests and tools)."""
        ...

    def to_numpy(self, array: Array) -> NDArray[np.float32]:
        """What an array of hidden or compute type contains (an encoder's output, tests and tools)."""
        ...
