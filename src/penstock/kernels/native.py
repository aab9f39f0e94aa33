"""The C++ kernels behind the ``Ops`` signatures, on NumPy arrays: one backend put together from its parts.

The operations are in ``native_model``, ``native_rows``, ``native_products``, ``native_attention``, ``native_states``
and ``native_head``; here is the list, so that a backend is one object whose operations are found by one look.

Arrays of the compute type bf16 are held as uint16.  Imports no torch and starts no thread before the first operation
that is worth more than one: a zygote may pack weights with this and fork afterwards.

Results that are alive are never overwritten (see ``memory.StepBuffers``).  Operations run one at a time in a process.
"""

from __future__ import annotations

import logging
import time

import numpy as np
from numpy.typing import NDArray

from penstock.errors import KernelError
from penstock.kernels import _native
from penstock.kernels.memory import StepBuffers
from penstock.kernels.native_arguments import NativeForm, NativeKv
from penstock.kernels.native_attention import NativeAttention
from penstock.kernels.native_head import NativeHead
from penstock.kernels.native_model import NativeModel
from penstock.kernels.native_products import NativeProducts
from penstock.kernels.native_rows import NativeRows
from penstock.kernels.native_states import NativeStates
from penstock.kernels.ops import StepProgram, Steps
from penstock.kernels.program import DirectProgram, RecordingError
from penstock.kernels.recording import recorded

KV_LAYOUT = "cells16-1"
"""Per page and layer: K as [kv head][pairs of columns][16 tokens], V as [kv head][pairs of tokens][columns] (bf16);
fp32 the same with single columns and tokens.  Shared memory has K only."""


log = logging.getLogger(__name__)


def families() -> tuple[str, ...]:
    """Kernel families that this build has and this processor runs, best first."""
    return tuple(_native.families())


class NativeOps:
    """One kernel family and one compute type (see ``ops.Ops`` for what each operation does)."""

    def __init__(self, family: str, compute_dtype: str, *, threads: int = 1) -> None:
        """``threads`` counts the calling one.  Raises KernelError for a family or type that cannot run here."""
        if family not in families():
            raise KernelError(f"kernel family {family!r} cannot run here; available: {', '.join(families())}")
        if compute_dtype not in ("bf16", "fp32"):
            raise KernelError(f"compute type {compute_dtype!r} is not one of bf16, fp32")
        self.family = family
        self.compute_dtype = compute_dtype
        self.numerics = f"cpp-{family}-{_native.VERSION}-{compute_dtype}"
        self.kv_dtype = compute_dtype
        self.kv_layout = f"{KV_LAYOUT}-{compute_dtype}"
        self._kernels = _native.Kernels(family, compute_dtype)
        _native.set_threads(threads)
        form = NativeForm.of(family, compute_dtype, StepBuffers())
        model = NativeModel(form)
        self.pack_linear, self.pack_compressed = model.pack_linear, model.pack_compressed
        self.pack_experts, self.pack_quantised = model.pack_experts, model.pack_quantised
        self.adapter_table, self.loading = model.adapter_table, model.loading
        self.vector, self.new_kv = model.vector, model.new_kv
        self.page_bytes, self.rope_table = model.page_bytes, model.rope_table
        self.angle_table, self.compute = model.angle_table, model.compute
        self.hidden, self.to_numpy = model.hidden, model.to_numpy
        rows = NativeRows(form)
        self.features, self.tap = rows.features, rows.tap
        self.place_rows, self.joined_rows = rows.place_rows, rows.joined_rows
        self.rows, self.rms_norm = rows.rows, rows.rms_norm
        self.norm_add, self.layer_norm = rows.norm_add, rows.layer_norm
        self.layer_norm_in_place, self.norm_heads = rows.layer_norm_in_place, rows.norm_heads
        self.gated, self.activate = rows.gated, rows.activate
        self.add, self.add_bias = rows.add, rows.add_bias
        self.scale, self.softcap = rows.scale, rows.softcap
        self.gated_norm, self.sigmoid_gated, self.gated_add = rows.gated_norm, rows.sigmoid_gated, rows.gated_add
        products = NativeProducts(form)
        self.embed, self.embed_add = products.embed, products.embed_add
        self.linear, self.linear_add = products.linear, products.linear_add
        self.lora_add, self.heads_linear = products.lora_add, products.heads_linear
        self.route, self.experts_add = products.route, products.experts_add
        self.routes_to_numpy = products.routes_to_numpy
        attention = NativeAttention(form)
        self.rope_and_write, self.latent_write = attention.rope_and_write, attention.latent_write
        self.latent_query, self.paged_attention = attention.latent_query, attention.paged_attention
        self.attention = attention.attention
        states = NativeStates(form, attention.checked)
        self.causal_conv, self.delta_rule = states.causal_conv, states.delta_rule
        head = NativeHead(form)
        self.sample, self.token_logprobs = head.sample, head.token_logprobs
        self.gumbel = head.gumbel

    def record(self, steps: Steps, kv: NativeKv, *, tapped: tuple[int, ...] = ()) -> StepProgram:
        """See ``Ops.record``.  Steps that look into arrays run as they are."""
        try:
            return recorded(steps, self.family, self.compute_dtype, kv, tapped)
        except RecordingError as error:
            log.warning("steps are computed operation by operation, which is slower: %s", error)
            return DirectProgram(self, steps, kv)

    # --- measuring ----------------------------------------------------------------------------------------------------

    def read_bandwidth(self, memory: NDArray[np.uint32]) -> float:
        """Bytes a second at which all threads together just read ``memory``, once."""
        start = time.perf_counter()
        self._kernels.read_cells(memory)
        return memory.nbytes / (time.perf_counter() - start)

    def peak_flops(self, repeats: int = 1_000) -> float:
        """Floating-point operations a second of all threads together, multiplying out of the first-level cache."""
        start = time.perf_counter()
        operations = self._kernels.multiply(repeats)
        return operations / (time.perf_counter() - start)
