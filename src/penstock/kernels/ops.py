"""The operations that layers may call: one signature each, whatever the backend.

Arrays are opaque to callers: a layer passes on what an operation returned and never looks inside.  Shapes are given by
the letters in the names: T tokens of this step (all sequences one after another), S sequences, R rows that sample,
D hidden size, H query heads, G key-value heads, C size of a head's keys, N outputs of a linear, K its inputs,
V vocabulary, P pages in the longest table.  Types: *hidden* is fp32 (the residual stream and every accumulator),
*compute* is the backend's compute type (bf16 or fp32: what a matrix product reads).

Batch invariance (docs/determinism.md) is part of every signature: one output row has the same bits whatever other rows
are in the call, whatever their number, and however a prompt is cut into calls.  So the order of every sum depends on
the model only: over K from low to high within a segment, segments joined by the fixed binary tree (``sum_tree``);
attention over keys 64 at a time by absolute position, in partitions of 512 keys, those of a class (partition mod 8)
joined from low to high, classes by the tree; experts of a group by ascending id, groups by the tree.

A new operation goes here, into the three backends (``native.backend``, ``reference.backend`` and, where it is hot,
``triton.backend``), and into ``native.program`` in its recorded form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from penstock.errors import KernelError
from penstock.kernels.compressed import AnyCompressed
from penstock.kernels.lora import AdapterTable
from penstock.kernels.operands import (
    SILU,
    Activation,
    Array,
    AttentionSpec,
    Gate,
    HeadColumns,
    KvShape,
    PackedExperts,
    PackedLinear,
    Routes,
    Routing,
    StepBatch,
)
from penstock.kernels.quantization import QuantizedMatrix
from penstock.kernels.sampling import GumbelRows, Sampled, SampleRow
from penstock.kernels.weight_source import WeightLoading


class RecordableModel(Protocol):
    """A model as its order of operations.  Both methods call only the given ``Ops``."""

    def forward(self, ops: Ops, batch: StepBatch, kv: Array) -> Array | None:
        """hidden [R, D] of the output rows, or None when there are none."""
        ...

    def logits(self, ops: Ops, hidden_RD: Array) -> Array:
        """hidden [R, V]."""
        ...


class GathersArrays(Protocol):
    """One rank's connection to a group of ranks (``parallel.collectives``)."""

    def all_gather(self, own: Array) -> list[Array]:
        """The arrays that all ranks gave, by rank."""
        ...


class StepProgram(Protocol):
    """All operations of a model's step as a program that runs for any tokens and rows.

    The output rows of a batch have this order: rows that are only scored, rows sampled from logits, Gumbel rows.
    """

    def run(
        self,
        batch: StepBatch,
        scored: int,
        rows: list[SampleRow],
        picks: GumbelRows,
        ready: Callable[[], None] | None = None,
    ) -> list[Sampled]:
        """Compute the batch and return the sampled tokens of ``rows``; those of ``picks`` are in their array.

        A row gives the same token however it is sampled.  Every run reads the arrays again, so a batch whose arrays
        were overwritten may be passed again.  Raises ValueError for indices out of range.

        ``ready``: called when the logits are computed and before any of ``rows`` is sampled; until it returns, another
        thread may write the rows' ``allowed``.  ``run`` raises what it raises.
        """
        ...

    def hidden(self) -> Array:
        """hidden [R, D] of the last run's output rows, valid until the next run; for ``RecordableModel.logits``."""
        ...


class SharedProgram(StepProgram, Protocol):
    """A program that several ranks run together."""

    def compute(self, batch: StepBatch, scored: int, picks: GumbelRows) -> None:
        """``run`` on a rank that does not lead: it has its part in the rows that are sampled, and samples none."""
        ...


@runtime_checkable
class MultiStepProgram(Protocol):
    """A program whose sampled tokens can feed the next step without a copy to the host."""

    def can_run_ahead(self, batch: StepBatch, picks: GumbelRows) -> bool:
        """Whether steps like this one can run ahead: every token is sampled, as a Gumbel row."""
        ...

    def run_ahead(
        self, picks: GumbelRows, steps: int, batch_of: Callable[[int], StepBatch | None]
    ) -> NDArray[np.int32]:
        """Run up to ``steps`` steps; returns their tokens [steps done, F], valid until the next run.

        ``batch_of(i)`` is called while step i - 1 is computed.  It fills the arrays, those of ``picks`` included, for
        step i except its tokens (for step 0 with them); None ends the run before that step.
        """
        ...


CAPTURE_S = 2.0
"""Time for capturing steps at the start; other sizes are captured when they first come."""


@runtime_checkable
class CapturableProgram(Protocol):
    """A program that can capture steps of some sizes before the first request."""

    def capture(self, alive: Callable[[], None] | None = None, budget_s: float = CAPTURE_S) -> int:
        """Capture steps for up to ``budget_s`` seconds, not counting compilation; returns the number of sizes.

        ``alive`` is called now and then.  Only while the KV memory is empty.
        """
        ...


class Ops(Protocol):
    """A backend."""

    numerics: str
    """Numerics class: two backends with one name give the same bits."""

    compute_dtype: str
    """"bf16" or "fp32"."""

    kv_dtype: str
    """What keys and values are kept in: the compute type, or "fp8_e4m3" (``operands.KvType``)."""

    activation_dtype: str
    """What inputs are multiplied with quantized weights in: the compute type, or "int8"."""

    kv_layout: str
    """Name of the layout of the bytes in a page; pages pass only between equal layouts of one numerics class."""

    def record(self, steps: RecordableModel, kv: Array, *, tapped: tuple[int, ...] = ()) -> StepProgram:
        """The model's steps as one program over this KV memory: recorded where the backend can, else run one by one.

        ``tapped``: as in every batch of the program.
        """
        ...

    # --- weights, KV memory, tables; looking inside arrays ------------------------------------------------------------

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

    def packed_rows(self, weight: PackedLinear, rows: range) -> PackedLinear | None:
        """These rows of a packed matrix as a matrix of their own, in the same memory; None where its layout does not
        allow that.  Rows begin and end with units of 16, or with the matrix."""
        ...

    def pack_experts(
        self,
        gate_up: Sequence[PackedLinear | None],
        down: Sequence[PackedLinear | None],
        *,
        gate_up_biases: Sequence[Array | None] | None = None,
        down_biases: Sequence[Array | None] | None = None,
        weighs_input: bool = False,
    ) -> PackedExperts:
        """The experts of one layer over packed matrices of any form, which are not copied; biases are vectors.

        None: another rank has this expert, which adds nothing here; what is added is then a part of the sum (``join``).
        ``weighs_input``: a token is multiplied by its weight before its expert, not after it (Llama 4).
        Raises ValueError unless all have one shape.
        """
        ...

    def pack_quantized(
        self, parts: list[QuantizedMatrix], *, segments: tuple[int, ...] | None = None, threads: int = 1
    ) -> PackedLinear | None:
        """The same for quantized matrices (docs/weight-formats.md), whose columns may be permuted.

        None: dequantize them.  Leaves no thread.
        """

    def adapter_table(self, sites: Sequence[PackedLinear], slots: int) -> AdapterTable:
        """An empty table of ``slots`` adapters for these products of a model, whatever form their weights have."""

    def loading(self, nbytes: int) -> WeightLoading | None:
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

    # --- row by row ---------------------------------------------------------------------------------------------------

    def features(self, batch: StepBatch, width: int) -> Array:
        """hidden [T, width]: what the batch brings with every token; once a step."""
        ...

    def tap(self, hidden_TD: Array, batch: StepBatch, place: int) -> None:
        """Hand the wanted rows of a hidden state out: they become columns [place D, (place + 1) D) of the batch's
        ``taps_RW``, if it has one."""
        ...

    def place_rows(self, hidden_TD: Array, batch: StepBatch) -> None:
        """The batch's given rows take the place of those of hidden; nothing where none are given."""
        ...

    def joined_rows(self, x_TK: Array, count: int) -> Array:
        """compute [T / count, count K]: rows, ``count`` at a time, one after another in a row."""
        ...

    def rows(self, x_TD: Array, rows_R: NDArray[np.int32]) -> Array:
        """The rows of x with these indices."""
        ...

    def rms_norm(self, hidden_TD: Array, weight_D: Array, eps: float) -> Array:
        """compute [T, D]: x / sqrt(mean(x^2) + eps) * weight, in fp32, rounded once."""
        ...

    def norm_add(self, hidden_TD: Array, x_TD: Array, weight_D: Array, eps: float) -> None:
        """hidden += rms_norm(x), in place; x fp32 [T, D], and the norm is not rounded to the compute type."""
        ...

    def layer_norm(self, hidden_TD: Array, weight_D: Array, bias_D: Array | None, eps: float) -> Array:
        """compute [T, D]: (x - mean) / sqrt(variance + eps) * weight + bias, in fp32, rounded once
        (arXiv:1607.06450); the variance is the mean square distance, in a second pass."""
        ...

    def layer_norm_in_place(self, hidden_TD: Array, weight_D: Array, bias_D: Array | None, eps: float) -> None:
        """hidden = layer_norm(hidden), in place and fp32: post-norm encoders, whose residual stream is normed."""
        ...

    def norm_heads(self, x_TN: Array, weight_C: Array, eps: float, *, first: int, count: int) -> None:
        """In place, in fp32: ``rms_norm`` of each of ``count`` groups of C columns of hidden [T, N], the first of which
        begins at column ``first`` (norms of queries and keys; with C = all heads together, one norm for them)."""
        ...

    def gated(self, gate_up_T2I: Array, kind: Gate = SILU) -> Array:
        """compute [T, I] = activation(gate) * up, in fp32, rounded once.  ``kind`` says which columns are which."""
        ...

    def activate(self, x_TI: Array, kind: Activation, alpha: float = 1.0) -> Array:
        """compute [T, I] = activation(x), in fp32, rounded once."""
        ...

    def add(self, hidden_TD: Array, x_TD: Array) -> None:
        """hidden += x, in place; both fp32."""
        ...

    def add_bias(self, x_TN: Array, bias_N: Array) -> None:
        """x += bias in every row, in place; x fp32."""
        ...

    def scale(self, x_TN: Array, factor: float) -> None:
        """x *= factor, in place; x fp32.  Of logits: tokens can still be picked without storing them."""
        ...

    def softcap(self, x_TN: Array, cap: float) -> None:
        """x = cap * tanh(x / cap), in place; x fp32.  Of logits: as ``scale``, which may come before it."""
        ...

    def gated_norm(self, x_TN: Array, gate_TM: Array, weight_C: Array, eps: float, *, first: int) -> Array:
        """compute [T, N]: ``rms_norm`` of each group of C columns of hidden x, times silu of the gate: columns
        [first, first + N) of hidden [T, M].  In fp32, rounded once."""
        ...

    def sigmoid_gated(self, x_TN: Array, gate_TN: Array) -> Array:
        """compute [T, N] = x * sigmoid(gate), of compute x and hidden gates, in fp32, rounded once."""
        ...

    def gated_add(self, hidden_TD: Array, x_TD: Array, gate_T1: Array) -> None:
        """hidden += x * sigmoid(gate), in place; all fp32, multiply and add are fused."""
        ...

    # --- packed matrices ----------------------------------------------------------------------------------------------

    def embed(self, table: PackedLinear, tokens_T: NDArray[np.int32], scale: float = 1.0) -> Array:
        """hidden [T, D]: rows of the table, times ``scale`` in fp32."""
        ...

    def embed_add(self, table: PackedLinear, positions_T: NDArray[np.int32], hidden_TD: Array) -> None:
        """hidden += rows of the table, in place: learned positions.  Recorded: the batch's ``positions_T`` only."""
        ...

    def linear(self, x_TK: Array, weight: PackedLinear) -> Array:
        """hidden [T, N] = x W^T, summed in fp32 over K, segment by segment."""
        ...

    def linear_add(self, x_TK: Array, weight: PackedLinear, hidden_TN: Array) -> None:
        """hidden += x W^T, in place: the product is finished before it is added."""
        ...

    def join(self, parts: Sequence[Array]) -> Array:
        """hidden [T, N] = the sum of 1, 2, 4 or 8 hidden [T, N], by the tree of ``kernels.sum_tree``.  So a product
        whose segments are divided over ranks (``PackedLinear.partial``) has the bits of the whole product.  The parts
        may be overwritten.  Raises ValueError for another number of parts."""
        ...

    def all_reduce(self, x_TN: Array, group: GathersArrays) -> Array:
        """hidden [T, N] = the sum of what all ranks of a group give, each its own hidden [T, N]: ``join`` of what the
        group gathers.  What was given may be overwritten."""
        ...

    def gather_columns(self, x_TN: Array, group: GathersArrays, widths: Sequence[int]) -> Array:
        """hidden [T, sum of ``widths``]: what all ranks of a group give, side by side; rank r gives ``widths[r]``
        columns.  In a recorded step only of the logits, as its last operation."""
        ...

    def zeros(self, x_TK: Array, n: int) -> Array:
        """hidden [T, n] of zeros, with as many rows as x."""
        ...

    def norm_gathered(self, x_TN: Array, group: GathersArrays, weight_W: Array, eps: float, heads: HeadColumns) -> None:
        """In place: ``norm_heads`` over all heads of a layer together, of which x has this rank's.  Every rank of the
        group gives its own."""
        ...

    def lora_add(
        self, x_TK: Array, batch: StepBatch, adapters: AdapterTable, site: int, out_TN: Array, *, wanted: bool
    ) -> None:
        """out += scale * up (down x), in place, for rows whose sequence has an adapter (``batch.adapters_S``) that adds
        to this product; all others stay as they are, to the bit.

        Rows are tokens of the batch, or wanted rows.  down x is summed in the product's segments and rounded once to
        the compute type, up is summed over the rank, both in fp32; the rest is one fused multiply and add."""

    def heads_linear(self, x_THK: Array, weight: PackedLinear, *, heads: int) -> Array:
        """compute [T, H N]: head h of x times rows [h N, (h + 1) N) of a weight [H N, K] (plain, one segment), each sum
        in fp32 over K from low to high, rounded once."""
        ...

    def route(self, logits_TE: Array, routing: Routing, bias_E: Array | None = None) -> Routes:
        """Each token's experts and their weights, by fp32 logits; ``bias_E`` (a vector) matters for the choice only."""
        ...

    def experts_add(self, x_TK: Array, routes: Routes, experts: PackedExperts, kind: Gate, hidden_TD: Array) -> None:
        """hidden += sum over a token's experts of weight * (down(gated(gate_up(x) + bias)) + bias), in place.

        Rows are grouped by expert; an expert without tokens is not read.  A token's experts are summed in fp32: those
        of each of 64 groups (``sum_tree.expert_group``) by ascending id, groups by the tree, in which groups that the
        token did not choose are skipped.  The finished sum, in which no zero has a sign, is added.
        """
        ...

    def routes_to_numpy(self, routes: Routes) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """ids [T, top_k] and weights [T, top_k] (tests and tools)."""
        ...

    # --- across a sequence --------------------------------------------------------------------------------------------

    def rope_and_write(
        self,
        qkv_TN: Array,
        rope: Array | None,
        kv: Array,
        layer: int,
        batch: StepBatch,
        *,
        heads: int,
        kv_heads: int,
        q_scale: Array | None = None,
    ) -> Array:
        """Split qkv [T, (H + G) C + G value_dim]; rotate q and k by their positions (``rope`` None: leave them); write
        k and v to their pages, rounded to the type that these keep; return q as compute [T, H, C].  ``heads`` may be 0.

        ``q_scale``: fp32 by absolute position, which the rotated q is multiplied by.
        """
        ...

    def latent_write(
        self,
        latent_TC: Array,
        rope: Array,
        kv: Array,
        layer: int,
        batch: StepBatch,
        *,
        norm: Array,
        eps: float,
    ) -> None:
        """Write fp32 latent vectors (MLA, arXiv:2405.04434) to the pages of shared KV memory, rounded to the
        type that these keep: the first value_dim columns normed as by ``rms_norm``, the others rotated."""
        ...

    def latent_query(
        self, q_TN: Array, absorb: PackedLinear, rope: Array, kv: Array, batch: StepBatch, *, heads: int
    ) -> Array:
        """Queries of latent attention: compute [T, H, C] of hidden [T, H (K + rotated)].

        The first K columns of head h, in the compute type, are multiplied by rows [h value_dim, (h + 1) value_dim) of
        ``absorb`` [H value_dim, K] (plain, one segment) and become its first value_dim columns; the others are rotated
        and follow them.  Prefill and decode use one form.
        """
        ...

    def paged_attention(
        self,
        q_THC: Array,
        kv: Array,
        layer: int,
        batch: StepBatch,
        spec: AttentionSpec,
    ) -> Array:
        """Causal attention of every token to its sequence's pages; compute [T, H value_dim] of q [T, H, C] or [T, H C].

        A token at position p reads keys up to p: of these the last ``spec.window`` (p itself is one of them), and those
        with its floor(p / chunk).  Scores are q . k * scale, then softcap * tanh(score / softcap), then what ``vector``
        made of ``sinks_H`` joins the softmax as one more score of each head, whose weight takes no value (StreamingLLM,
        arXiv:2309.17453, as gpt-oss has it).

        ``until``: instead, every token reads the keys of positions below it and no others, wherever it stands itself
        (cross-attention to what a sequence begins with); every sequence reaches that far.

        ``sparse``: of all keys up to p, those of the blocks that it names (``operands.Sparse``); with neither window,
        chunk nor ``until``.

        Keys are reduced 64 at a time by absolute position, in partitions of 512 keys that begin anew.  Partitions of
        a class (partition mod 8) are joined from low to high, classes by the tree (``sum_tree``), where what a row does
        not read is skipped, and the sink last.  Codes (``operands.KvType``) are converted exactly to the compute type.
        What a token does not read is not multiplied: its pages may hold anything, but the table must name pages of the
        memory.
        """
        ...

    def attention(
        self,
        qkv_TN: Array,
        starts_S1: NDArray[np.int32],
        *,
        heads: int,
        kv_heads: int,
        scale: float,
        causal: bool = False,
        window: int | None = None,
        softcap: float | None = None,
        rope: Array | None = None,
        rows_T: NDArray[np.int32] | None = None,
        bias_HR: Array | None = None,
    ) -> Array:
        """Attention of whole sequences, without a cache; compute [T, H C] of hidden [T, (H + 2 G) C]: queries, keys,
        values.  Sequence s owns tokens ``starts[s]:starts[s + 1]``.

        A token reads all of its sequence, or, ``causal``, what stands up to itself; with a ``window`` only tokens less
        than ``window`` positions away.  Queries and keys are rotated by row ``rows_T`` of ``rope``, by default the
        token's place in its sequence.  Scores are q . k * scale, then soft-capped as in ``paged_attention``; then entry
        ``clip(key - position, -R, R) + R`` of the head's row of ``bias_HR``, which ``vector`` made of [H, 2 R + 1], is
        added (relative positions of T5, arXiv:1910.10683, by distance).

        Keys are reduced as in ``paged_attention``, by place in their sequence.
        """
        ...

    # --- recurrent layers ---------------------------------------------------------------------------------------------

    def causal_conv(self, x_TN: Array, weight_KC: Array, kv: Array, layer: int, batch: StepBatch) -> Array:
        """hidden [T, C]: silu of a convolution over time of the first C columns of hidden x, each column by itself.

        ``weight_KC``, a vector [K, C]: tap K - 1 is the token's own, tap 0 that of the token K - 1 before it; before
        the first token there are zeros.  Summed from tap 0 on, in fp32.
        """
        ...

    def delta_rule(
        self,
        qkv_TC: Array,
        gates_TN: Array,
        kv: Array,
        layer: int,
        batch: StepBatch,
        *,
        rates_H: Array,
        shifts_H: Array,
        beta: int,
        decay: int,
    ) -> Array:
        """hidden [T, H value_dim]: the gated delta rule (arXiv:2412.06464), of hidden [T, C] queries, keys, values.

        Head h has the queries and keys of head floor(h G / H) of the G key heads.  Of its gates, columns ``beta + h``
        and ``decay + h`` of hidden ``gates_TN``, are made b = sigmoid(gate) and d = exp(-rate softplus(gate + shift)).
        Queries and keys are brought to length 1 (x / sqrt(sum of squares + 1e-6)), queries then divided by
        sqrt(key_dim).  Of the state S [key_dim, value_dim], zero before the first token, becomes d S + k u with
        u = b (v - d S^T k); what comes out is S^T q of the new one.  All in fp32; the two sums over key_dim are each of
        even rows, then of odd ones, joined last.
        """
        ...

    # --- from logits to tokens ----------------------------------------------------------------------------------------

    def sample(self, logits_RV: Array, rows: list[SampleRow]) -> list[Sampled]:
        """Draw one token a row: logit_bias, penalties, bans and mask, then temperature, top_k, top_p, min_p, then
        Gumbel-max (or argmax at temperature 0, ties to the lower id).  Random numbers: Philox4x32-10 as in
        ``kernels.sampling``."""
        ...

    def token_logprobs(self, logits_RV: Array, tokens_R: NDArray[np.int32], top: int) -> list[Sampled]:
        """Log-probability of given tokens under each row, with the ``top`` likeliest (ties to the lower id)."""
        ...


class RecordingError(Exception):
    """The steps do something that cannot be recorded, such as looking into an array."""


def checked_widths(parts: list[Array], widths: Sequence[int]) -> list[Array]:
    """What ranks gave.  Raises KernelError unless they have these columns."""
    found = [part.shape[1] for part in parts]
    if found != list(widths):
        raise KernelError(f"ranks gave {found} columns instead of {list(widths)}")
    return parts


class DirectProgram(StepProgram):
    """Runs the steps operation by operation; every row samples from stored logits."""

    def __init__(self, ops: Ops, steps: RecordableModel, kv: Array) -> None:
        self._ops = ops
        self._steps = steps
        self._kv = kv
        self._hidden: Array = None

    def run(
        self,
        batch: StepBatch,
        scored: int,
        rows: list[SampleRow],
        picks: GumbelRows,
        ready: Callable[[], None] | None = None,
    ) -> list[Sampled]:
        self._hidden = self._steps.forward(self._ops, replace(batch), self._kv)
        wanted = batch.sample_rows_R
        if len(wanted) == scored:
            return []
        hidden_RD = (
            self._hidden
            if scored == 0
            else self._ops.rows(self._hidden, np.arange(scored, len(wanted), dtype=np.int32))
        )
        logits_RV = self._steps.logits(self._ops, hidden_RD)
        if ready is not None:
            ready()
        sampled = self._ops.sample(logits_RV, [*rows, *picks.rows()])
        picks.tokens_F[:] = [one.token for one in sampled[len(rows) :]]
        return sampled[: len(rows)]

    def compute(self, batch: StepBatch, scored: int, picks: GumbelRows) -> None:
        self._hidden = self._steps.forward(self._ops, replace(batch), self._kv)
        wanted = len(batch.sample_rows_R)
        if wanted > scored:
            drawn_RD = self._ops.rows(self._hidden, np.arange(scored, wanted, dtype=np.int32))
            self._steps.logits(self._ops, drawn_RD)

    def hidden(self) -> Array:
        return self._hidden
