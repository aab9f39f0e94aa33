"""Products fused with the operation that reads them: gates, rotary positions with writes to KV pages, sums over ranks.

::

    columns of a tile     pair p: output a, output b | pair p + 1: a, b | ...     two numbers of one row, side by side
    gate and up           a, b = gate(p), up(p)                --> act(a) * b, rounded
    queries, keys         a, b = the two that are rotated      --> rotated, scaled, rounded: to q, or to a page's slot
    values                a, b = neighbors                     --> rounded: to a page's slot

The bits are those of the separate operations: a tile is as wide as ``matmul``'s and has its steps over K, so every sum
is made by the same instructions in the same order, only in another column of a tile.  It stays the fp32 number that
``linear`` would have stored and ``gated`` or ``rope_and_write`` read again; what is done with it is written once
(``gate_of``, ``turned_pair``), and it is rounded where they round, once.  The two outputs of a pair are in one thread:
nothing is exchanged.  Only products of one segment are fused: a tree's segments have programs of their own where rows
are few.

``FusingOps`` defers a product until the next operation is called::

    linear, gated                        -> gated_product
    linear, [add_bias], rope_and_write   -> written_product
    linear, all_reduce, [add]            -> peers.PeerTable.multiply, where ranks read each other's memory
    linear, anything else                -> computed before anything else

This module imports torch and triton.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.operands import SILU, Array, Gate, PackedLinear, StepBatch
from penstock.kernels.ops import GathersArrays, Ops, RecordableModel
from penstock.kernels.reference.attention import ReferenceKv, ReferenceRope
from penstock.kernels.triton.linear import WeightForm
from penstock.kernels.triton.matmul import (
    FEW_ROWS,
    FEW_STAGES,
    MANY_STAGES,
    TOGETHER,
    Operand,
    multiprocessors,
    one,
    tile_at,
    tile_rows,
)
from penstock.kernels.triton.numerics import KIND_NUMBERS, UNFUSED, TritonContext, gate_of, rounded, turned_pair
from penstock.kernels.triton.peers import PeerTable, peers_of
from penstock.kernels.triton.rope import PAGE, pairs_of, places_of, sequence_of, strides_of


@triton.jit
def split(sums_TN):
    """Even columns and odd ones."""
    pairs_TP2 = tl.reshape(sums_TN, (sums_TN.shape[0], sums_TN.shape[1] // 2, 2))
    return tl.split(pairs_TP2)


@triton.jit(do_not_specialize=["t"])
def gated_product_kernel(
    x, weight, ends, out, x_stride, t, alpha, limit, shift,
    WIDTH: tl.constexpr, KIND: tl.constexpr, LIMITED: tl.constexpr, INTERLEAVED: tl.constexpr, STEP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """out [T, WIDTH] = the gate of x W^T, which is 2 WIDTH wide.  Grid: persistent programs over tiles."""
    HALF: tl.constexpr = COLUMNS // 2
    row_tiles, column_tiles = tl.cdiv(t, ROWS), tl.cdiv(WIDTH, HALF)
    for tile in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row_tile, column_tile = tile_at(tile, row_tiles, column_tiles, TOGETHER)
        rows_T = row_tile * ROWS + tl.arange(0, ROWS)
        live_T1 = (rows_T < t)[:, None]
        lanes_N = tl.arange(0, COLUMNS)
        own_N = tl.minimum(column_tile * HALF + lanes_N // 2, WIDTH - 1)
        outputs_N = 2 * own_N + lanes_N % 2 if INTERLEAVED else own_N + lanes_N % 2 * WIDTH
        x_T1 = x + rows_T.to(tl.int64)[:, None] * x_stride
        sums_TN = one(0, x_T1, live_T1, weight, outputs_N, ends, STEP, ROWS, COLUMNS, DEPTH, ALIGNED, EVEN)
        gate_TI, up_TI = split(sums_TN)
        y_TI = gate_of(gate_TI, up_TI, alpha, limit, shift, KIND, LIMITED)
        columns_I = column_tile * HALF + tl.arange(0, HALF)
        at_TI = out + rows_T.to(tl.int64)[:, None] * WIDTH + columns_I[None, :]
        tl.store(at_TI, rounded(y_TI, out.dtype.element_ty), mask=live_T1 & (columns_I < WIDTH)[None, :])


@triton.jit(do_not_specialize=["sequences", "table_stride"])
def slots_kernel(slots_T, positions_T, starts_S1, table_SP, sequences, table_stride, S_BLOCK: tl.constexpr):
    """Page times ``PAGE`` plus slot of each token; below 0: no sequence owns it.  Grid: tokens."""
    token = tl.program_id(0)
    sequence = sequence_of(starts_S1, token, sequences, S_BLOCK)
    position = tl.load(positions_T + token)
    at = table_SP + sequence.to(tl.int64) * table_stride + position // PAGE
    page = tl.load(at, mask=sequence < sequences, other=-1).to(tl.int64)
    tl.store(slots_T + token, page * PAGE + position % PAGE)


@triton.jit
def columns_of(pair, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The outputs of a pair: of ``HEADS`` heads that are turned, then of values; and the pair's number in its head,
    ``KEY_DIM`` for values, which no table has."""
    turned: tl.constexpr = HEADS * (KEY_DIM // 2)
    head, own = pair // (KEY_DIM // 2), pair % (KEY_DIM // 2)
    first = 2 * own
    second = first + 1
    if not INTERLEAVED:
        first = tl.where(own < PAIRS, own, first)
        second = tl.where(own < PAIRS, own + PAIRS, second)
    is_turned = pair < turned
    a = tl.where(is_turned, head * KEY_DIM + first, 2 * pair)
    b = tl.where(is_turned, head * KEY_DIM + second, 2 * pair + 1)
    return a, b, tl.where(is_turned, own, KEY_DIM)


@triton.jit
def store_heads(out_T1, a_TP, b_TP, a_P, b_P, live_TP, apart, WIDTH: tl.constexpr):
    """Pairs to heads that lie ``apart``; columns are counted from the first head on."""
    at_TP = out_T1 + (a_P // WIDTH * apart + a_P % WIDTH)[None, :]
    tl.store(at_TP, rounded(a_TP, out_T1.dtype.element_ty), mask=live_TP)
    at_TP = out_T1 + (b_P // WIDTH * apart + b_P % WIDTH)[None, :]
    tl.store(at_TP, rounded(b_TP, out_T1.dtype.element_ty), mask=live_TP)


@triton.jit
def store_pairs(
    a_TP, b_TP, a_P, b_P, begin, rows_T, slot_T, position_T, q_THC, keys, values, q_scale,
    K_PAGE: tl.constexpr, K_HEAD: tl.constexpr, K_SLOT: tl.constexpr, V_PAGE: tl.constexpr, V_HEAD: tl.constexpr,
    V_SLOT: tl.constexpr, QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Pairs from ``begin`` on, whose outputs are a and b, to q, to pages' keys, to their values."""
    HALF: tl.constexpr = a_P.shape[0]
    KEYS_FROM: tl.constexpr = QUERY_HEADS * KEY_DIM
    VALUES_FROM: tl.constexpr = (QUERY_HEADS + KV_HEADS) * KEY_DIM
    to_keys: tl.constexpr = KEYS_FROM // 2
    to_values: tl.constexpr = VALUES_FROM // 2
    pair_P = begin + tl.arange(0, HALF)
    live_TP = (slot_T >= 0)[:, None] & (pair_P < to_values + KV_HEADS * VALUE_DIM // 2)[None, :]
    page_T1, in_page_T1 = (slot_T // PAGE)[:, None], (slot_T % PAGE)[:, None]
    if begin < to_keys:
        factor_T1 = tl.full((rows_T.shape[0], 1), 1.0, tl.float32)
        if SCALED:
            factor_T1 = tl.load(q_scale + position_T)[:, None]
        q_T1 = q_THC + rows_T.to(tl.int64)[:, None] * (QUERY_HEADS * KEY_DIM)
        q_TP = live_TP & (pair_P < to_keys)[None, :]
        store_heads(q_T1, a_TP * factor_T1, b_TP * factor_T1, a_P, b_P, q_TP, KEY_DIM, KEY_DIM)
    if (begin < to_values) & (begin + HALF > to_keys):
        k_T1 = keys + page_T1 * K_PAGE + in_page_T1 * K_SLOT
        k_TP = live_TP & ((pair_P >= to_keys) & (pair_P < to_values))[None, :]
        store_heads(k_T1, a_TP, b_TP, a_P - KEYS_FROM, b_P - KEYS_FROM, k_TP, K_HEAD, KEY_DIM)
    if begin + HALF > to_values:
        v_T1 = values + page_T1 * V_PAGE + in_page_T1 * V_SLOT
        v_TP = live_TP & (pair_P >= to_values)[None, :]
        store_heads(v_T1, a_TP, b_TP, a_P - VALUES_FROM, b_P - VALUES_FROM, v_TP, V_HEAD, VALUE_DIM)


@triton.jit(do_not_specialize=["t"])
def written_product_kernel(
    x, weight, ends, bias, q_THC, keys, values, angles, q_scale, positions_T, slots_T, x_stride, t,
    K_PAGE: tl.constexpr, K_HEAD: tl.constexpr, K_SLOT: tl.constexpr, V_PAGE: tl.constexpr, V_HEAD: tl.constexpr,
    V_SLOT: tl.constexpr, QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, SCALED: tl.constexpr,
    BIASED: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    ALIGNED: tl.constexpr, EVEN: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Queries, keys and values of x W^T + bias: turned, and put where they belong.  Grid: persistent programs."""
    HALF: tl.constexpr = COLUMNS // 2
    HEADS: tl.constexpr = QUERY_HEADS + KV_HEADS
    all_pairs: tl.constexpr = (HEADS * KEY_DIM + KV_HEADS * VALUE_DIM) // 2
    row_tiles, column_tiles = tl.cdiv(t, ROWS), tl.cdiv(all_pairs, HALF)
    for tile in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row_tile, column_tile = tile_at(tile, row_tiles, column_tiles, TOGETHER)
        rows_T = row_tile * ROWS + tl.arange(0, ROWS)
        lanes_N, begin = tl.arange(0, COLUMNS), column_tile * HALF
        a_N, b_N, _ = columns_of(
            tl.minimum(begin + lanes_N // 2, all_pairs - 1), HEADS, KEY_DIM, PAIRS, INTERLEAVED
        )  # fmt: skip
        x_T1, live_T1 = x + rows_T.to(tl.int64)[:, None] * x_stride, (rows_T < t)[:, None]
        outputs_N = tl.where(lanes_N % 2 == 0, a_N, b_N)
        a_TP, b_TP = split(
            one(0, x_T1, live_T1, weight, outputs_N, ends, STEP, ROWS, COLUMNS, DEPTH, ALIGNED, EVEN)
        )  # fmt: skip
        pair_P = begin + tl.arange(0, HALF)
        a_P, b_P, own_P = columns_of(pair_P, HEADS, KEY_DIM, PAIRS, INTERLEAVED)
        if BIASED:
            a_TP += tl.load(bias + a_P, mask=pair_P < all_pairs, other=0.0)[None, :]
            b_TP += tl.load(bias + b_P, mask=pair_P < all_pairs, other=0.0)[None, :]
        slot_T = tl.load(slots_T + rows_T, mask=rows_T < t, other=-1)
        position_T = tl.load(positions_T + rows_T, mask=slot_T >= 0, other=0)
        if PAIRS > 0:
            turned_TP = (own_P < PAIRS)[None, :] & (slot_T >= 0)[:, None]
            at_TP = angles + position_T.to(tl.int64)[:, None] * (2 * PAIRS) + own_P[None, :]
            cos_TP = tl.load(at_TP, mask=turned_TP, other=0.0)
            sin_TP = tl.load(at_TP + PAIRS, mask=turned_TP, other=0.0)
            c_TP, d_TP = turned_pair(a_TP, b_TP, cos_TP, sin_TP)
            a_TP, b_TP = tl.where(turned_TP, c_TP, a_TP), tl.where(turned_TP, d_TP, b_TP)
        store_pairs(
            a_TP, b_TP, a_P, b_P, begin, rows_T, slot_T, position_T, q_THC, keys, values, q_scale, K_PAGE, K_HEAD,
            K_SLOT, V_PAGE, V_HEAD, V_SLOT, QUERY_HEADS, KV_HEADS, KEY_DIM, VALUE_DIM, SCALED,
        )  # fmt: skip


# --- launching --------------------------------------------------------------------------------------------------------


def gated_product(form: TritonContext, x_TK: Tensor, operand: Operand, kind: Gate) -> Tensor:
    """compute [T, I]: the gate of x W^T, as ``linear`` and ``gated`` make it."""
    width = operand.n // 2
    out_TI = form.empty((len(x_TK), width), form.dtype)
    if len(x_TK):
        x_TK, how = _rows(x_TK), _shape(form, len(x_TK), operand)
        gated_product_kernel[(_programs(form, len(x_TK), width, how),)](
            x_TK, operand.arguments, operand.ends, out_TI, x_TK.stride(0), len(x_TK), float(kind.alpha),
            float(kind.limit), float(kind.shift), WIDTH=width, KIND=KIND_NUMBERS[kind.activation],
            LIMITED=kind.limit < math.inf, INTERLEAVED=kind.interleaved, **how, **UNFUSED,
        )  # fmt: skip
    return out_TI


@dataclass(frozen=True, slots=True)
class WriteSlots:
    """Where the tokens of a step stand."""

    positions_T: Tensor
    slots_T: Tensor  # int64: page times its tokens, plus place in it
    layer: int  # its place in its pages


def slots_of(form: TritonContext, kv: ReferenceKv, layer: int, batch: StepBatch) -> Tensor:
    """int64 [T]: where tokens stand in the pages of a layer's group."""
    places = places_of(form, kv, layer, batch)
    slots_T = form.empty((len(batch.tokens_T),), torch.int64)
    if len(slots_T):
        slots_kernel[(len(slots_T),)](
            slots_T, places.positions_T, places.starts_S1, places.table_SP, places.sequences,
            places.table_SP.stride(0), S_BLOCK=places.sequences_block, **UNFUSED,
        )  # fmt: skip
    return slots_T


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How the outputs of a product are cut, and what turns them."""

    query: int
    kv: int
    rope: ReferenceRope | None
    q_scale: Tensor | None


def written_product(
    form: TritonContext,
    x_TK: Tensor,
    operand: Operand,
    bias_N: Tensor | None,
    heads: HeadLayout,
    kv: ReferenceKv,
    own: WriteSlots,
) -> Tensor:
    """Queries, compute [T, H, C], of x W^T + bias, whose keys and values go to the pages of ``own.layer``: as
    ``linear``, ``add_bias`` and ``rope_and_write`` make them."""
    tokens, key_dim = len(x_TK), kv.shape.key_dim
    q_THC = form.empty((tokens, heads.query, key_dim), form.dtype)
    if tokens:
        keys, values = kv.keys[:, own.layer], kv.values[:, own.layer]
        turns = pairs_of(heads.rope, key_dim)
        x_TK, how = _rows(x_TK), _shape(form, tokens, operand)
        written_product_kernel[(_programs(form, tokens, operand.n // 2, how),)](
            x_TK, operand.arguments, operand.ends, bias_N, q_THC, keys, values,
            None if heads.rope is None else heads.rope.table, heads.q_scale, own.positions_T, own.slots_T,
            x_TK.stride(0), tokens, **strides_of(keys, "K"), **strides_of(values, "V"), QUERY_HEADS=heads.query,
            KV_HEADS=heads.kv, KEY_DIM=key_dim, VALUE_DIM=kv.shape.value_dim, PAIRS=turns["PAIRS"],
            INTERLEAVED=turns["INTERLEAVED"], SCALED=heads.q_scale is not None, BIASED=bias_N is not None, **how,
            **UNFUSED,
        )  # fmt: skip
    return q_THC


def _rows(x_TK: Tensor) -> Tensor:
    return x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()


def _shape(form: TritonContext, tokens: int, operand: Operand) -> dict[str, Any]:
    """The tile that ``matmul.multiply`` takes for this number of rows."""
    rows, tile = tile_rows(tokens, operand, form.dtype), operand.tile
    return {
        "STEP": operand.step,
        "ROWS": rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "ALIGNED": tile.aligned,
        "EVEN": tile.even,
        "TOGETHER": TOGETHER,
        "num_warps": 4 if rows == FEW_ROWS else 8,
        "num_stages": FEW_STAGES if tokens <= FEW_ROWS else MANY_STAGES,
    }


def _programs(form: TritonContext, tokens: int, pairs: int, how: dict[str, Any]) -> int:
    tiles = triton.cdiv(tokens, how["ROWS"]) * triton.cdiv(pairs, how["COLUMNS"] // 2)
    return int(tiles if tokens <= FEW_ROWS else min(tiles, multiprocessors(form.device)))


WIDEST_HEAD = 256
"""Columns of a head that lie in two tiles at most."""


class FusedSteps(RecordableModel):
    """A model's steps over ``FusingOps``."""

    def __init__(self, steps: RecordableModel, form: TritonContext) -> None:
        self._steps = steps
        self._form = form

    def forward(self, ops: Ops, batch: StepBatch, kv: Array) -> Array | None:
        own = FusingOps(ops, self._form)
        return own.made(self._steps.forward(cast(Ops, own), batch, kv))

    def logits(self, ops: Ops, hidden_RD: Array) -> Array:
        own = FusingOps(ops, self._form)
        return own.made(self._steps.logits(cast(Ops, own), hidden_RD))


class _Product:
    """x W^T + bias, computed on demand."""

    def __init__(self, x_TK: Tensor, weight: PackedLinear) -> None:
        self.x_TK = x_TK
        self.weight = weight
        self.bias_N: Tensor | None = None
        self.reduced: tuple[PeerTable, Operand] | None = None  # it is a part of a sum over ranks, which is wanted
        self.made_TN: Tensor | None = None


class FusingOps:
    """The operations of one step; what is not said here is the backend's own, over products that are made."""

    def __init__(self, ops: Ops, form: TritonContext) -> None:
        self._ops = ops
        self._form = form
        self._waiting: _Product | None = None
        self._slots: dict[int, tuple[StepBatch, Tensor]] = {}  # of each group of layers

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._ops, name)
        return partial(self._plainly, operation) if callable(operation) else operation

    def made(self, array: Any) -> Any:
        """What stands for a product, as an array; anything else as it is."""
        if not isinstance(array, _Product):
            return array
        if array.made_TN is None:
            if array.reduced is None:
                array.made_TN = self._ops.linear(array.x_TK, array.weight)
            else:
                array.made_TN = self._form.empty((len(array.x_TK), array.weight.n))
                self._reduce(array, array.made_TN, add=False)
            if array.bias_N is not None:
                self._ops.add_bias(array.made_TN, array.bias_N)
        return array.made_TN

    def linear(self, x_TK: Any, weight: PackedLinear) -> Any:
        self._make()
        self._waiting = _Product(self.made(x_TK), weight)
        return self._waiting

    def add_bias(self, out_TN: Any, bias_N: Tensor) -> None:
        if self._waits(out_TN) and out_TN.bias_N is None:
            out_TN.bias_N = bias_N
        else:
            self._plainly(self._ops.add_bias, out_TN, bias_N)

    def all_reduce(self, x_TN: Any, group: GathersArrays) -> Any:
        peers = peers_of(group)
        if peers is not None and self._waits(x_TN) and x_TN.bias_N is None and x_TN.reduced is None:
            operand = peers.operand(x_TN.weight, len(x_TN.x_TK))
            if operand is not None:
                x_TN.reduced = peers, operand
                return x_TN
        return self._plainly(self._ops.all_reduce, x_TN, group)

    def add(self, hidden_TD: Any, x_TD: Any) -> None:
        if self._waits(x_TD) and x_TD.reduced is not None and x_TD.bias_N is None:
            self._waiting = None
            self._reduce(x_TD, self.made(hidden_TD), add=True)
        else:
            self._plainly(self._ops.add, hidden_TD, x_TD)

    def gated(self, gate_up_T2I: Any, kind: Gate = SILU) -> Any:
        if self._waits(gate_up_T2I) and gate_up_T2I.bias_N is None:
            aligned = kind.interleaved or gate_up_T2I.weight.n // 2 % 64 == 0
            operand = _operand(gate_up_T2I, in_tiles=aligned)
            if operand is not None and operand.n % 2 == 0:
                self._waiting = None
                return gated_product(self._form, gate_up_T2I.x_TK, operand, kind)
        return self._plainly(self._ops.gated, gate_up_T2I, kind)

    def rope_and_write(
        self,
        qkv_TN: Any,
        rope: ReferenceRope | None,
        kv: ReferenceKv,
        layer: int,
        batch: StepBatch,
        *,
        heads: int,
        kv_heads: int,
        q_scale: Tensor | None = None,
    ) -> Any:
        if self._waits(qkv_TN) and kv.key_exponents is None and batch.turns_T3 is None:
            operand = _operand(qkv_TN, in_tiles=_lie_in_tiles(kv, heads, kv_heads))
            if operand is not None and heads:
                self._waiting = None
                own = HeadLayout(heads, kv_heads, rope, q_scale)
                places = self._places(kv, layer, batch)
                return written_product(self._form, qkv_TN.x_TK, operand, qkv_TN.bias_N, own, kv, places)
        return self._plainly(
            self._ops.rope_and_write, qkv_TN, rope, kv, layer, batch, heads=heads, kv_heads=kv_heads, q_scale=q_scale
        )

    def _places(self, kv: ReferenceKv, layer: int, batch: StepBatch) -> WriteSlots:
        group, place = kv.shape.places[layer]
        known = self._slots.get(group)
        if known is None or known[0] is not batch:
            known = self._slots[group] = (batch, slots_of(self._form, kv, layer, batch))
        return WriteSlots(self._form.integers(batch.positions_T), known[1], place)

    def _reduce(self, product: _Product, out_TN: Tensor, *, add: bool) -> None:
        assert product.reduced is not None
        peers, operand = product.reduced
        peers.multiply(self._form, product.x_TK.to(self._form.dtype), operand, out_TN, add=add)

    def _waits(self, array: Any) -> bool:
        return array is self._waiting and isinstance(array, _Product)

    def _make(self) -> None:
        waiting, self._waiting = self._waiting, None
        self.made(waiting)

    def _plainly(self, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._make()
        return operation(*map(self.made, args), **{name: self.made(value) for name, value in kwargs.items()})


def _operand(product: _Product, *, in_tiles: bool) -> Operand | None:
    """What multiplies it in one segment, with outputs in another order."""
    form: WeightForm = product.weight.data
    if len(product.weight.segments) > 1 or product.reduced is not None:
        return None
    return form.mixed(len(product.x_TK), in_tiles=in_tiles)


def _lie_in_tiles(kv: ReferenceKv, heads: int, kv_heads: int) -> bool:
    width = kv.shape.key_dim
    whole = heads * width % 128 == 0 and kv_heads * width % 128 == 0
    return whole and width <= WIDEST_HEAD and width & (width - 1) == 0
