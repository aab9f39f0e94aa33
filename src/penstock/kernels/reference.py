"""The oracle: every operation in torch, on the CPU or a GPU, written to be read rather than to be fast.

The operations are in ``reference_model``, ``reference_over_rows``, ``reference_products``, ``reference_sequences``,
``reference_states`` and ``reference_head``; here is the list.

Batch-invariant in the simple way: where torch chooses its arithmetic by shape, it is only ever given one.  On the CPU a
linear, a norm and an activation see one row at a time, elsewhere fixed tiles padded with zeros; attention sees tiles
of 16 positions aligned to absolute position, so a token stands in the same place of the same shapes in every call.
Products are in fp32 over operands rounded to the compute type.

This module imports torch; nothing imports this module but ``select``, when it is asked for, and the Triton backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from penstock.errors import KernelError
from penstock.kernels.kv_types import numerics_with
from penstock.kernels.ops import StepProgram, Steps
from penstock.kernels.page_writing import PageWriter
from penstock.kernels.program import DirectProgram
from penstock.kernels.reference_attention import ReferenceKv
from penstock.kernels.reference_head import ReferenceHead
from penstock.kernels.reference_model import ReferenceModel
from penstock.kernels.reference_over_rows import ReferenceRows
from penstock.kernels.reference_pages import TorchPageWriter
from penstock.kernels.reference_products import ReferenceProducts
from penstock.kernels.reference_sequences import ReferenceAttention
from penstock.kernels.reference_states import ReferenceStates
from penstock.kernels.reference_tiles import RowTiles, TorchForm, arithmetic_of
from penstock.types import FP8_E4M3

COMPUTE_TYPES: Mapping[str, torch.dtype] = MappingProxyType({"bf16": torch.bfloat16, "fp32": torch.float32})


class ReferenceOps:
    """See ``ops.Ops`` for what each operation does."""

    def __init__(self, *, compute_dtype: str, device: str = "cpu", kv_dtype: str | None = None) -> None:
        """``kv_dtype``: what KV pages are in; None: the compute type.

        Raises KernelError for an unknown type or a device that torch does not find.
        """
        _check(compute_dtype, device, kv_dtype)
        self.compute_dtype = compute_dtype
        self.device = torch.device(device)
        numerics = f"torch-{arithmetic_of(self.device)}-{torch.__version__}-{compute_dtype}"
        self.numerics = numerics_with(numerics, kv_dtype)
        self.kv_dtype = kv_dtype or compute_dtype
        self.kv_layout = f"plain-1-{self.kv_dtype}"
        if self.device.type == "cpu":
            torch.set_num_threads(1)  # a library may cut K by threads
        form = TorchForm(self.device, COMPUTE_TYPES[compute_dtype], RowTiles(self.device))
        model = ReferenceModel(form, coded=kv_dtype is not None)
        self.pack_linear, self.pack_compressed = model.pack_linear, model.pack_compressed
        self.pack_experts, self.pack_quantised = model.pack_experts, model.pack_quantised
        self.adapter_table, self.loading = model.adapter_table, model.loading
        self.vector, self.new_kv = model.vector, model.new_kv
        self.page_bytes, self.rope_table = model.page_bytes, model.rope_table
        self.angle_table, self.compute = model.angle_table, model.compute
        self.hidden, self.to_numpy = model.hidden, model.to_numpy
        rows = ReferenceRows(form)
        self.features, self.tap = rows.features, rows.tap
        self.place_rows, self.joined_rows = rows.place_rows, rows.joined_rows
        self.rows, self.rms_norm = rows.rows, rows.rms_norm
        self.norm_add, self.layer_norm = rows.norm_add, rows.layer_norm
        self.layer_norm_in_place, self.norm_heads = rows.layer_norm_in_place, rows.norm_heads
        self.gated, self.activate = rows.gated, rows.activate
        self.add, self.add_bias = rows.add, rows.add_bias
        self.scale, self.softcap = rows.scale, rows.softcap
        self.gated_norm, self.sigmoid_gated, self.gated_add = rows.gated_norm, rows.sigmoid_gated, rows.gated_add
        products = ReferenceProducts(form, rows.gated)
        self.embed, self.embed_add = products.embed, products.embed_add
        self.linear, self.linear_add = products.linear, products.linear_add
        self.lora_add, self.heads_linear = products.lora_add, products.heads_linear
        self.route, self.experts_add = products.route, products.experts_add
        self.routes_to_numpy = products.routes_to_numpy
        attention = ReferenceAttention(form, products.heads_linear)
        self.rope_and_write, self.latent_write = attention.rope_and_write, attention.latent_write
        self.latent_query, self.paged_attention = attention.latent_query, attention.paged_attention
        self.attention = attention.attention
        states = ReferenceStates()
        self.causal_conv, self.delta_rule = states.causal_conv, states.delta_rule
        head = ReferenceHead()
        self.sample, self.token_logprobs = head.sample, head.token_logprobs

    def page_writer(self, kv: ReferenceKv, memory: memoryview, layout: str) -> PageWriter:
        """See ``page_writing.WritesPages``."""
        return TorchPageWriter(kv, memory, layout)

    def record(self, steps: Steps, kv: ReferenceKv, *, tapped: tuple[int, ...] = ()) -> StepProgram:
        """See ``Ops.record``: run as they are."""
        return DirectProgram(self, steps, kv)


def _check(compute_dtype: str, device: str, kv_dtype: str | None) -> None:
    """Raises KernelError."""
    if compute_dtype not in COMPUTE_TYPES:
        raise KernelError(f"compute type {compute_dtype!r} is not one of bf16, fp32")
    if kv_dtype not in (None, FP8_E4M3):
        raise KernelError(f"KV pages in {kv_dtype!r}: there is {FP8_E4M3}, or None for the compute type")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise KernelError(f"device {device!r} was asked for, but torch finds no CUDA device")
