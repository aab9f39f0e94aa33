"""A model's step recorded for the C++ kernels: the layers call the operations once, on symbolic arrays.

The recorded step is valid for any tokens and rows: shapes are multiples of their numbers, and an operation that chooses
its path by them does so inside.  Running it is one call, without the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from penstock.kernels import _native
from penstock.kernels.lora import AdapterTable
from penstock.kernels.native.arguments import (
    ACTIVATIONS,
    NativeKv,
    attention_rule,
    draw_row,
    gate_words,
    routing_words,
    sampled_tokens,
)
from penstock.kernels.operands import (
    SILU,
    Activation,
    Array,
    AttentionSpec,
    Gate,
    HeadColumns,
    PackedExperts,
    PackedLinear,
    Routes,
    Routing,
    StepBatch,
)
from penstock.kernels.ops import GathersArrays, Ops, RecordableModel, RecordingError, StepProgram
from penstock.kernels.sampling import GumbelRows, Sampled, SampleRow


class SymbolicArray:
    """The number of an array that every run has.  It has no other content."""

    __slots__ = ("slot",)

    def __init__(self, slot: int) -> None:
        self.slot = slot

    def __getattr__(self, name: str) -> NoReturn:
        raise RecordingError(f"a step that asks for .{name} of an array cannot be recorded")

    def _refuse(self, *_: object) -> NoReturn:
        raise RecordingError("a step that looks into an array, or computes with one itself, cannot be recorded")

    __len__ = __bool__ = __iter__ = __getitem__ = __setitem__ = __neg__ = __eq__ = __lt__ = __le__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = _refuse


def _shared(group: GathersArrays) -> _native.ShmGroup:
    native = getattr(group, "native", None)
    if not isinstance(native, _native.ShmGroup):
        raise RecordingError("only ranks that share memory exchange within a recorded step")
    return native


class _Rows:
    """Tokens or output rows of any step, at least one: without output rows their operations are skipped."""

    def __len__(self) -> int:
        return 1


class RecordingOps:
    """Records the operations of a step.  Other operations of ``Ops`` cannot be recorded."""

    def __init__(self, family: str, compute_dtype: str, kv: NativeKv, tapped: tuple[int, ...]) -> None:
        self.compute_dtype = compute_dtype
        self.step = _native.RecordedStep(family, compute_dtype, kv.handle)
        self.kv = kv
        self.head: tuple[_native.ShmGroup, list[int]] | None = None  # ranks that have parts of it, and their rows
        self.tokens, self.wanted = _Rows(), _Rows()
        tokens, positions, starts, table, wanted = (
            cast(Any, name) for name in (self.tokens, _Rows(), _Rows(), _Rows(), self.wanted)
        )
        self.batch = StepBatch(tokens, positions, starts, table, wanted, tapped=tapped)

    def __getattr__(self, name: str) -> NoReturn:
        raise RecordingError(f"{name} cannot be recorded")

    def embed(self, table: PackedLinear, tokens_T: NDArray[np.int32], scale: float = 1.0) -> SymbolicArray:
        if cast(object, tokens_T) is not self.tokens:
            raise RecordingError("only the step's own tokens are looked up")
        hidden_TD = SymbolicArray(self.step.embed(table.data))
        if scale != 1.0:
            self.scale(hidden_TD, scale)
        return hidden_TD

    def embed_add(self, table: PackedLinear, positions_T: NDArray[np.int32], hidden_TD: SymbolicArray) -> None:
        if positions_T is not self.batch.positions_T:
            raise RecordingError("only the step's own positions are looked up")
        self.add(hidden_TD, SymbolicArray(self.step.positions(table.data)))

    def place_rows(self, hidden_TD: SymbolicArray, batch: StepBatch) -> None:
        if batch is not self.batch:
            raise RecordingError("only the step's own rows are given")
        self.step.place_rows(hidden_TD.slot)

    def features(self, batch: StepBatch, width: int) -> SymbolicArray:
        self._check(batch, self.kv)
        return SymbolicArray(self.step.features(width))

    def tap(self, hidden_TD: SymbolicArray, batch: StepBatch, place: int) -> None:
        self._check(batch, self.kv)
        self.step.tap(hidden_TD.slot, place)

    def rms_norm(self, hidden_TD: SymbolicArray, weight_D: Array, eps: float) -> SymbolicArray:
        return SymbolicArray(self.step.rms_norm(hidden_TD.slot, weight_D, eps))

    def norm_add(self, hidden_TD: SymbolicArray, x_TD: SymbolicArray, weight_D: Array, eps: float) -> None:
        self.step.norm_add(x_TD.slot, weight_D, eps, hidden_TD.slot)

    def layer_norm(self, hidden_TD: SymbolicArray, weight_D: Array, bias_D: Array | None, eps: float) -> SymbolicArray:
        return SymbolicArray(self.step.layer_norm(hidden_TD.slot, weight_D, bias_D, eps))

    def layer_norm_in_place(self, hidden_TD: SymbolicArray, weight_D: Array, bias_D: Array | None, eps: float) -> None:
        self.step.layer_norm_in_place(hidden_TD.slot, weight_D, bias_D, eps)

    def linear(self, x_TK: SymbolicArray, weight: PackedLinear) -> SymbolicArray:
        return SymbolicArray(self.step.linear(x_TK.slot, weight.data))

    def linear_add(self, x_TK: SymbolicArray, weight: PackedLinear, hidden_TN: SymbolicArray) -> None:
        self.step.linear_add(x_TK.slot, weight.data, hidden_TN.slot)

    def all_reduce(self, x_TN: SymbolicArray, group: GathersArrays) -> SymbolicArray:
        self.step.all_reduce(x_TN.slot, _shared(group))
        return x_TN

    def gather_columns(self, x_TN: SymbolicArray, group: GathersArrays, widths: Sequence[int]) -> SymbolicArray:
        self.head = (_shared(group), list(widths))
        return x_TN

    def norm_gathered(
        self, x_TN: SymbolicArray, group: GathersArrays, weight_W: Array, eps: float, heads: HeadColumns
    ) -> None:
        all_heads = [list(own) for own in heads.heads]
        self.step.norm_gathered(
            x_TN.slot, _shared(group), heads.firsts[heads.rank], heads.size, all_heads, weight_W, eps
        )

    def zeros(self, x_TK: SymbolicArray, n: int) -> SymbolicArray:
        return SymbolicArray(self.step.zeros(x_TK.slot, n))

    def lora_add(
        self,
        x_TK: SymbolicArray,
        batch: StepBatch,
        adapters: AdapterTable,
        site: int,
        out_TN: SymbolicArray,
        *,
        wanted: bool,
    ) -> None:
        """The adapters of the rows are those of ``x_TK``."""
        self._check(batch, self.kv)
        self.step.lora_add(x_TK.slot, adapters.data, site, out_TN.slot)

    def norm_heads(self, x_TN: SymbolicArray, weight_C: Array, eps: float, *, first: int, count: int) -> None:
        self.step.norm_heads(x_TN.slot, weight_C, eps, first, count)

    def rope_and_write(
        self,
        qkv_TN: SymbolicArray,
        rope: _native.Rope | None,
        kv: NativeKv,
        layer: int,
        batch: StepBatch,
        *,
        heads: int,
        kv_heads: int,
        q_scale: Array | None = None,
    ) -> SymbolicArray:
        self._check(batch, kv)
        if kv_heads != kv.shape.kv_heads:
            raise RecordingError(f"the KV memory has {kv.shape.kv_heads} heads, not {kv_heads}")
        return SymbolicArray(self.step.rope_and_write(qkv_TN.slot, rope, q_scale, layer, heads))

    def latent_write(
        self,
        latent_TC: SymbolicArray,
        rope: _native.Rope,
        kv: NativeKv,
        layer: int,
        batch: StepBatch,
        *,
        norm: Array,
        eps: float,
    ) -> None:
        self._check(batch, kv)
        self.step.latent_write(latent_TC.slot, norm, eps, rope, layer)

    def latent_query(
        self,
        q_TN: SymbolicArray,
        absorb: PackedLinear,
        rope: _native.Rope,
        kv: NativeKv,
        batch: StepBatch,
        *,
        heads: int,
    ) -> SymbolicArray:
        self._check(batch, kv)
        return SymbolicArray(self.step.latent_query(q_TN.slot, absorb.data, rope, heads))

    def heads_linear(self, x_THK: SymbolicArray, weight: PackedLinear, *, heads: int) -> SymbolicArray:
        return SymbolicArray(self.step.heads_linear(x_THK.slot, weight.data, heads))

    def paged_attention(
        self,
        q_THC: SymbolicArray,
        kv: NativeKv,
        layer: int,
        batch: StepBatch,
        spec: AttentionSpec,
    ) -> SymbolicArray:
        self._check(batch, kv)
        return SymbolicArray(self.step.attention(q_THC.slot, layer, attention_rule(spec)))

    def gated(self, gate_up_T2I: SymbolicArray, kind: Gate = SILU) -> SymbolicArray:
        return SymbolicArray(self.step.gated(gate_up_T2I.slot, gate_words(kind)))

    def activate(self, x_TI: SymbolicArray, kind: Activation, alpha: float = 1.0) -> SymbolicArray:
        return SymbolicArray(self.step.activate(x_TI.slot, ACTIVATIONS[kind], alpha))

    def route(self, logits_TE: SymbolicArray, routing: Routing, bias_E: Array | None = None) -> Routes:
        return Routes(SymbolicArray(self.step.route(logits_TE.slot, routing_words(routing), bias_E)), routing.top_k)

    def experts_add(
        self, x_TK: SymbolicArray, routes: Routes, experts: PackedExperts, kind: Gate, hidden_TD: SymbolicArray
    ) -> None:
        self.step.experts_add(x_TK.slot, routes.data.slot, experts.data, gate_words(kind), hidden_TD.slot)

    def add(self, hidden_TD: SymbolicArray, x_TD: SymbolicArray) -> None:
        self.step.add(x_TD.slot, hidden_TD.slot)

    def add_bias(self, x_TN: SymbolicArray, bias_N: Array) -> None:
        self.step.add_bias(x_TN.slot, bias_N)

    def scale(self, x_TN: SymbolicArray, factor: float) -> None:
        self.step.form(x_TN.slot, factor, 0.0)

    def softcap(self, x_TN: SymbolicArray, cap: float) -> None:
        self.step.form(x_TN.slot, 1.0, cap)

    def gated_norm(
        self, x_TN: SymbolicArray, gate_TM: SymbolicArray, weight_C: Array, eps: float, *, first: int
    ) -> SymbolicArray:
        return SymbolicArray(self.step.gated_norm(x_TN.slot, gate_TM.slot, first, weight_C, eps))

    def sigmoid_gated(self, x_TN: SymbolicArray, gate_TN: SymbolicArray) -> SymbolicArray:
        return SymbolicArray(self.step.sigmoid_gated(x_TN.slot, gate_TN.slot))

    def gated_add(self, hidden_TD: SymbolicArray, x_TD: SymbolicArray, gate_T1: SymbolicArray) -> None:
        self.step.gated_add(x_TD.slot, gate_T1.slot, hidden_TD.slot)

    def causal_conv(
        self, x_TN: SymbolicArray, weight_KC: Array, kv: NativeKv, layer: int, batch: StepBatch
    ) -> SymbolicArray:
        self._check(batch, kv)
        return SymbolicArray(self.step.causal_conv(x_TN.slot, weight_KC, layer))

    def delta_rule(
        self,
        qkv_TC: SymbolicArray,
        gates_TN: SymbolicArray,
        kv: NativeKv,
        layer: int,
        batch: StepBatch,
        *,
        rates_H: Array,
        shifts_H: Array,
        beta: int,
        decay: int,
    ) -> SymbolicArray:
        self._check(batch, kv)
        return SymbolicArray(self.step.delta_rule(qkv_TC.slot, gates_TN.slot, (beta, decay), rates_H, shifts_H, layer))

    def rows(self, x_TD: SymbolicArray, rows_R: NDArray[np.int32]) -> SymbolicArray:
        if cast(object, rows_R) is not self.wanted:
            raise RecordingError("only the step's wanted rows are picked out")
        return SymbolicArray(self.step.wanted_rows(x_TD.slot))

    def _check(self, batch: StepBatch, kv: NativeKv) -> None:
        if batch is not self.batch or kv is not self.kv:
            raise RecordingError("a step has one batch and one KV memory")


KEPT_INPUTS = 8
"""Batches that a program remembers: of micro-batches that take turns."""


class RecordedProgram(StepProgram):
    """A recorded step, run by one call into C++."""

    def __init__(self, step: _native.RecordedStep) -> None:
        self.step = step
        self._inputs: list[tuple[StepBatch, GumbelRows, _native.StepInputs]] = []

    def run(
        self,
        batch: StepBatch,
        scored: int,
        rows: list[SampleRow],
        picks: GumbelRows,
        ready: Callable[[], None] | None = None,
    ) -> list[Sampled]:
        results = self.step.run(self._inputs_of(batch, picks), scored, [draw_row(row) for row in rows], ready)
        return sampled_tokens(rows, results) if rows else []

    def compute(self, batch: StepBatch, scored: int, picks: GumbelRows) -> None:
        self.step.compute(self._inputs_of(batch, picks), scored)

    def _inputs_of(self, batch: StepBatch, picks: GumbelRows) -> _native.StepInputs:
        for own, rows, inputs in self._inputs:
            if own is batch and rows is picks:
                return inputs
        inputs = _inputs_of(batch, picks)
        self._inputs = [*self._inputs[1 - KEPT_INPUTS :], (batch, picks, inputs)]
        return inputs

    def hidden(self) -> NDArray[np.float32]:
        out_RD = np.empty(self.step.hidden_shape, np.float32)
        self.step.read_hidden(out_RD)
        return out_RD

    def logits(self) -> NDArray[np.float32]:
        """hidden [R, V] of the last run's rows that drew from logits (tests and tools)."""
        out_RV = np.empty(self.step.logits_shape, np.float32)
        self.step.read_logits(out_RV)
        return out_RV


def record_steps(
    steps: RecordableModel, family: str, compute_dtype: str, kv: NativeKv, tapped: tuple[int, ...] = ()
) -> RecordedProgram:
    """The steps over this KV memory as a program.  Raises RecordingError."""
    recorder = RecordingOps(family, compute_dtype, kv, tapped)
    ops = cast(Ops, recorder)
    try:
        hidden_RD = steps.forward(ops, recorder.batch, kv)
        if not isinstance(hidden_RD, SymbolicArray):
            raise RecordingError("forward gave no array for the wanted rows")
        logits_RV = steps.logits(ops, SymbolicArray(recorder.step.drawn_rows(hidden_RD.slot)))
        if recorder.head is None:
            recorder.step.finish(logits_RV.slot)
        else:
            recorder.step.finish_part(logits_RV.slot, *recorder.head)
    except ValueError as error:  # operations in an order that is not kept
        raise RecordingError(str(error)) from error
    return RecordedProgram(recorder.step)


def _inputs_of(batch: StepBatch, picks: GumbelRows) -> _native.StepInputs:
    table_SP = np.ascontiguousarray(batch.table_SP, np.int32)
    inputs = _native.StepInputs(
        batch.tokens_T, batch.positions_T, batch.starts_S1, table_SP, batch.sample_rows_R, batch.turns_T3
    )
    if batch.given is not None:
        inputs.give(batch.given.rows_G, batch.given.values_GD)
    if batch.features_TW is not None:
        inputs.bring(batch.features_TW)
    if batch.taps_RW is not None:
        inputs.hand_out(batch.taps_RW)
    if batch.states_SW is not None:
        inputs.recur(batch.states_SW)
    if batch.adapters_S is not None:
        inputs.adapt(batch.adapters_S)
    inputs.pick(picks.seeds_F, picks.positions_F, picks.choices_F, picks.temperatures_F, picks.tokens_F)
    return inputs
