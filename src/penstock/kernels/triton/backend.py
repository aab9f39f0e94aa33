"""The backend for a GPU: Triton kernels where they are hot, the oracle's torch operations on the same device elsewhere.

So every model runs, and an operation without a kernel of its own is slow, not wrong.  The parts that have kernels are
put in place of the oracle's one by one, as ``reference`` puts its own together.

This module imports torch and triton; nothing imports it but ``select``, when it is asked for.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from penstock.kernels.operands import PackedLinear, numerics_with
from penstock.kernels.ops import StepProgram, Steps
from penstock.kernels.reference.attention import ReferenceKv
from penstock.kernels.reference.backend import COMPUTE_TYPES, ReferenceOps
from penstock.kernels.reference.tiles import RowTiles, TorchForm
from penstock.kernels.triton.form import TritonForm, numerics_of
from penstock.kernels.triton.fusing import FusedSteps
from penstock.kernels.triton.graphs import AsItIs, CudaGraphs
from penstock.kernels.triton.head import TritonHead
from penstock.kernels.triton.packing import TritonPacking
from penstock.kernels.triton.paged import TritonAttention
from penstock.kernels.triton.products import TritonProducts
from penstock.kernels.triton.program import DeviceProgram
from penstock.kernels.triton.rope import TritonRotary
from penstock.kernels.triton.rows import TritonRows
from penstock.kernels.triton.staging import Draws
from penstock.kernels.triton.states import TritonStates
from penstock.kernels.triton.weights import DeviceLoading
from penstock.kernels.weight_source import Loading


class TritonOps(ReferenceOps):
    """See ``ops.Ops`` for what each operation does."""

    def __init__(self, *, compute_dtype: str, device: str = "cuda", kv_dtype: str | None = None) -> None:
        """``device``: "cuda", "cuda:1", ..., or "cpu" where Triton's interpreter runs the kernels.  ``kv_dtype``: what
        KV pages are in; None: the compute type.

        Raises KernelError for an unknown type or a device that torch does not find.
        """
        super().__init__(compute_dtype=compute_dtype, device=device, kv_dtype=kv_dtype)
        self.numerics = numerics_with(numerics_of(self.device, compute_dtype), kv_dtype)
        form = self.form = TritonForm(TorchForm(self.device, COMPUTE_TYPES[compute_dtype], RowTiles(self.device)))
        packing = TritonPacking(form)
        self.pack_linear, self.pack_compressed = packing.pack_linear, packing.pack_compressed
        self.pack_quantised, self.pack_experts = packing.pack_quantised, packing.pack_experts
        self.adapter_table = packing.adapter_table
        self.loading = partial(weights_loading, packing, form)
        rows = TritonRows(form)
        self.features, self.tap = rows.features, rows.tap
        self.place_rows, self.rows = rows.place_rows, rows.rows
        self.rms_norm, self.norm_add = rows.rms_norm, rows.norm_add
        self.layer_norm, self.layer_norm_in_place = rows.layer_norm, rows.layer_norm_in_place
        self.norm_heads, self.gated_norm = rows.norm_heads, rows.gated_norm
        self.gated, self.activate, self.softcap = rows.gated, rows.activate, rows.softcap
        self.sigmoid_gated, self.gated_add = rows.sigmoid_gated, rows.gated_add
        products = TritonProducts(form, rows.gated)
        self.embed, self.embed_add = products.embed, products.embed_add
        self.linear, self.linear_add = products.linear, products.linear_add
        self.lora_add, self.heads_linear = products.lora_add, products.heads_linear
        self.route, self.experts_add = products.route, products.experts_add
        self.routes_to_numpy = products.routes_to_numpy
        rotary = TritonRotary(form, self.heads_linear)
        self.rope_and_write, self.latent_write = rotary.rope_and_write, rotary.latent_write
        self.latent_query = rotary.latent_query
        self.paged_attention = TritonAttention(form, self.paged_attention).paged_attention
        states = TritonStates(form)
        self.causal_conv, self.delta_rule = states.causal_conv, states.delta_rule
        head = TritonHead(form)
        self.sample, self.token_logprobs = head.sample, head.token_logprobs
        self.pick, self.bring, self.gumbel = head.pick, head.bring, head.gumbel

    def record(self, steps: Steps, kv: ReferenceKv, *, tapped: tuple[int, ...] = ()) -> StepProgram:
        """See ``Ops.record``."""
        return DeviceProgram(
            self,
            FusedSteps(steps, self.form),
            kv,
            device=self.device,
            groups=kv.shape.layer_groups,
            replays=CudaGraphs(self.device) if self.device.type == "cuda" else AsItIs(),
            pick=self._picked,
            state_parts=0 if kv.shape.states is None else kv.shape.state_parts,
        )

    def _picked(self, logits_RV: Tensor, draws: Draws) -> Tensor:
        return self.pick(logits_RV, draws.seeds_R, draws.positions_R, draws.choices_R, draws.temperatures_R)


def weights_loading(packing: TritonPacking, form: TritonForm, nbytes: int) -> Loading:
    """See ``Ops.loading``."""

    def pack(matrix_NK: Tensor, segments: tuple[int, ...] | None) -> PackedLinear:
        return packing.pack_tensor(matrix_NK, segments=segments)

    return DeviceLoading(form.device, form.dtype, pack)
