"""Rotary positions and writing to pages as Triton kernels: what stands between a product and attention.

::

    qkv [T, N]   | queries, H heads | keys, G heads | values, G heads |
                   split, rotated,    split, rotated,  split,
                   scaled, rounded    rounded, coded   rounded, coded
                   |                  |                |
                   q [T, H, C]        page of the token's block, its slot

One kernel does all of it, a program for some heads of one token.  Which sequence a token belongs to, and so its row of
the table, is looked up in ``starts`` on the device: nothing is computed on the host from what a step holds, so a
captured graph can be given other tokens.  Tokens behind the last sequence (a graph's padding) write nothing; their
positions must be such that the tables have them, as 0 is.

This module imports torch and triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.operands import PackedLinear, StepBatch
from penstock.kernels.reference.attention import ReferenceKv, ReferenceRope
from penstock.kernels.triton.fp8_kv import exponent_of, sizes_of, to_kv_dtype
from penstock.kernels.triton.numerics import UNFUSED, TritonContext, turned_pair
from penstock.kernels.triton.rows import lined, stride_of
from penstock.types import PAGE_TOKENS

PAGE = tl.constexpr(PAGE_TOKENS)

HEADS = 8
"""Of one program."""

SEQUENCES = 256
"""That a kernel looks through at once, at least: one compiled kernel for nearly all steps."""


@triton.jit
def sequence_of(starts_S1, token, sequences, S_BLOCK: tl.constexpr):
    """The sequence that owns a token; ``sequences`` where none does."""
    places = tl.arange(0, S_BLOCK)
    ends = tl.load(starts_S1 + 1 + places, mask=places < sequences, other=2147483647)
    return tl.sum((ends <= token).to(tl.int32), axis=0)


@triton.jit
def _turned(
    heads_HC, out_HC, exponents_H, head_H, inside_H, beside_H, x_head_stride, out_head_stride, angles, turns, axes,
    position, factor, PAIRS: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr, AXES: tl.constexpr,
    PAIR_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """Heads turned by a token's position, times ``factor``; columns behind the pairs are only copied.

    Codes have an exponent a head: that of its largest number, ``beside_H`` among them.  It is stored and given back.
    """
    CODED: tl.constexpr = out_HC.dtype.element_ty == tl.uint8
    exponent_H = tl.zeros_like(head_H)
    x_H1, out_H1 = heads_HC + head_H[:, None] * x_head_stride, out_HC + head_H[:, None] * out_head_stride
    if PAIRS > 0:
        pair = tl.arange(0, PAIR_BLOCK)
        known = pair < PAIRS
        row = tl.zeros_like(pair) + position
        if AXES:
            row = tl.load(turns + tl.load(axes + pair, mask=known, other=0), mask=known, other=0)
        at = row.to(tl.int64) * (2 * PAIRS) + pair
        cos = tl.load(angles + at, mask=known, other=0.0)[None, :]
        sin = tl.load(angles + at + PAIRS, mask=known, other=0.0)[None, :]
        first_1P = 2 * pair[None, :] if INTERLEAVED else pair[None, :]
        second_1P = first_1P + 1 if INTERLEAVED else first_1P + PAIRS
        mask = inside_H[:, None] & known[None, :]
        first = tl.load(x_H1 + first_1P, mask=mask, other=0.0)
        second = tl.load(x_H1 + second_1P, mask=mask, other=0.0)
        a, b = turned_pair(first, second, cos, sin)
        a, b = a * factor, b * factor
    if 2 * PAIRS < WIDTH:
        rest_1R = 2 * PAIRS + tl.arange(0, REST_BLOCK)[None, :]
        mask_HR = inside_H[:, None] & (rest_1R < WIDTH)
        x = tl.load(x_H1 + rest_1R, mask=mask_HR, other=0.0) * factor
    if CODED:
        largest_H = beside_H
        if PAIRS > 0:
            largest_H = tl.maximum(largest_H, tl.max(tl.maximum(sizes_of(a), sizes_of(b)), axis=1))
        if 2 * PAIRS < WIDTH:
            largest_H = tl.maximum(largest_H, tl.max(sizes_of(x), axis=1))
        exponent_H = exponent_of(largest_H)
        tl.store(exponents_H + head_H * PAGE, exponent_H, mask=inside_H)
    if PAIRS > 0:
        tl.store(out_H1 + first_1P, to_kv_dtype(a, exponent_H[:, None], out_HC.dtype.element_ty), mask=mask)
        tl.store(out_H1 + second_1P, to_kv_dtype(b, exponent_H[:, None], out_HC.dtype.element_ty), mask=mask)
    if 2 * PAIRS < WIDTH:
        tl.store(out_H1 + rest_1R, to_kv_dtype(x, exponent_H[:, None], out_HC.dtype.element_ty), mask=mask_HR)
    return exponent_H


@triton.jit(do_not_specialize=["sequences", "table_stride"])
def _rope_and_write(
    qkv_TN, q_THC, keys, values, key_exponents, value_exponents, angles, turns_T3, axes, q_scale, positions_T,
    starts_S1, table_SP, sequences, table_stride, X_STRIDE: tl.constexpr, K_PAGE: tl.constexpr, K_HEAD: tl.constexpr,
    K_SLOT: tl.constexpr, V_PAGE: tl.constexpr, V_HEAD: tl.constexpr, V_SLOT: tl.constexpr, QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, AXES: tl.constexpr, SCALED: tl.constexpr, PAIR_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr, S_BLOCK: tl.constexpr,
):  # fmt: skip
    """Blocks of query heads, then of key heads, then of value heads."""
    token, block = tl.program_id(0), tl.program_id(1)
    sequence = sequence_of(starts_S1, token, sequences, S_BLOCK)
    if sequence >= sequences:
        return
    position = tl.load(positions_T + token)
    query_blocks: tl.constexpr = (QUERY_HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    kv_blocks: tl.constexpr = (KV_HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    x_N = qkv_TN + token.to(tl.int64) * X_STRIDE
    lanes = tl.arange(0, HEAD_BLOCK)
    none_H = tl.zeros((HEAD_BLOCK,), tl.float32)
    turns = turns_T3 + token * 3 if AXES else turns_T3
    if block < query_blocks:
        q_heads = block * HEAD_BLOCK + lanes
        factor = tl.load(q_scale + position) if SCALED else 1.0
        q_out = q_THC + token.to(tl.int64) * (QUERY_HEADS * KEY_DIM)
        _turned(
            x_N, q_out, q_out, q_heads, q_heads < QUERY_HEADS, none_H, KEY_DIM, KEY_DIM, angles, turns, axes, position,
            factor, PAIRS, KEY_DIM, INTERLEAVED, AXES, PAIR_BLOCK, REST_BLOCK,
        )  # fmt: skip
    else:
        page = tl.load(table_SP + sequence.to(tl.int64) * table_stride + position // PAGE).to(tl.int64)
        slot = position % PAGE
        if block < query_blocks + kv_blocks:
            k_heads = (block - query_blocks) * HEAD_BLOCK + lanes
            k_out = keys + page * K_PAGE + slot * K_SLOT
            _turned(
                x_N + QUERY_HEADS * KEY_DIM, k_out, key_exponents + page * K_PAGE + slot, k_heads, k_heads < KV_HEADS,
                none_H, KEY_DIM, K_HEAD, angles, turns, axes, position, 1.0, PAIRS, KEY_DIM, INTERLEAVED, AXES,
                PAIR_BLOCK, REST_BLOCK,
            )  # fmt: skip
        else:
            v_heads = (block - query_blocks - kv_blocks) * HEAD_BLOCK + lanes
            v_out = values + page * V_PAGE + slot * V_SLOT
            _turned(
                x_N + (QUERY_HEADS + KV_HEADS) * KEY_DIM, v_out, value_exponents + page * V_PAGE + slot, v_heads,
                v_heads < KV_HEADS, none_H, VALUE_DIM, V_HEAD, angles, turns, axes, position, 1.0, 0, VALUE_DIM, False,
                False, PAIR_BLOCK, VALUE_BLOCK,
            )  # fmt: skip


@triton.jit(do_not_specialize=["sequences", "table_stride"])
def _latent_write(
    latent_TC, norm_V, eps, keys, key_exponents, angles, positions_T, starts_S1, table_SP, sequences, table_stride,
    X_STRIDE: tl.constexpr, K_PAGE: tl.constexpr, K_SLOT: tl.constexpr, PLAIN: tl.constexpr, TURNED: tl.constexpr,
    PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, PLAIN_BLOCK: tl.constexpr, PAIR_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr, S_BLOCK: tl.constexpr,
):  # fmt: skip
    """One latent vector: the norm of its first ``PLAIN`` columns is summed in one tile."""
    token = tl.program_id(0)
    sequence = sequence_of(starts_S1, token, sequences, S_BLOCK)
    if sequence >= sequences:
        return
    position = tl.load(positions_T + token)
    page = tl.load(table_SP + sequence.to(tl.int64) * table_stride + position // PAGE).to(tl.int64)
    out = keys + page * K_PAGE + (position % PAGE) * K_SLOT
    x_C = latent_TC + token.to(tl.int64) * X_STRIDE
    columns = tl.arange(0, PLAIN_BLOCK)
    inside = columns < PLAIN
    x = tl.load(x_C + columns, mask=inside, other=0.0)
    mean = tl.sum(x * x, axis=0) / PLAIN
    y = x * tl.rsqrt(mean + eps) * tl.load(norm_V + columns, mask=inside, other=0.0)
    one = tl.arange(0, 1)
    exponent = tl.zeros((1,), tl.float32) + tl.max(sizes_of(y), axis=0)
    exponent = _turned(
        x_C + PLAIN, out + PLAIN, key_exponents + page * K_PAGE + position % PAGE, one, one < 1, exponent, 0, 0, angles,
        angles, angles, position, 1.0, PAIRS, TURNED, INTERLEAVED, False, PAIR_BLOCK, REST_BLOCK,
    )  # fmt: skip
    tl.store(out + columns, to_kv_dtype(y, exponent, keys.dtype.element_ty), mask=inside)


@triton.jit
def _latent_query(
    q_TN, absorbed_TN, out_THC, angles, positions_T, X_STRIDE: tl.constexpr, QUERY_HEADS: tl.constexpr,
    ABSORBED: tl.constexpr, PLAIN: tl.constexpr, TURNED: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, PLAIN_BLOCK: tl.constexpr, PAIR_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):  # fmt: skip
    """Heads side by side: what was multiplied (``PLAIN`` columns) is copied, what follows it is turned."""
    token = tl.program_id(0)
    heads = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    inside = heads < QUERY_HEADS
    row = token.to(tl.int64)
    out = out_THC + row * (QUERY_HEADS * (PLAIN + TURNED))
    columns = tl.arange(0, PLAIN_BLOCK)
    mask = inside[:, None] & (columns < PLAIN)[None, :]
    at = heads[:, None] * PLAIN + columns[None, :]
    y = tl.load(absorbed_TN + row * (QUERY_HEADS * PLAIN) + at, mask=mask, other=0.0)
    tl.store(out + heads[:, None] * (PLAIN + TURNED) + columns[None, :], y, mask=mask)
    _turned(
        q_TN + row * X_STRIDE + ABSORBED, out + PLAIN, out, heads, inside, tl.zeros((HEAD_BLOCK,), tl.float32),
        ABSORBED + TURNED, PLAIN + TURNED, angles, angles, angles, tl.load(positions_T + token), 1.0, PAIRS, TURNED,
        INTERLEAVED, False, PAIR_BLOCK, REST_BLOCK,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenPages:
    """Where the tokens of a step stand, on the device."""

    positions_T: Tensor
    starts_S1: Tensor
    table_SP: Tensor  # of the layer's group
    layer: int  # its place in its pages

    @property
    def sequences(self) -> int:
        return len(self.starts_S1) - 1

    @property
    def sequences_block(self) -> int:
        """Sequences that a kernel looks through at once."""
        return max(SEQUENCES, int(triton.next_power_of_2(self.sequences)))


def places_of(form: TritonContext, kv: ReferenceKv, layer: int, batch: StepBatch) -> TokenPages:
    """Page places of a layer's tokens; tensors of the batch are used without a copy."""
    place, table_SP = kv.table(layer, batch)
    positions_T, starts_S1 = form.integers(batch.positions_T), form.integers(batch.starts_S1)
    return TokenPages(positions_T, starts_S1, form.integers(table_SP), place)


def exponents_of(kv: ReferenceKv, layer: int) -> tuple[Tensor, Tensor]:
    """Scales of a layer's keys and values, for kernels: pages are as far apart as those of the codes, heads ``PAGE``,
    tokens one.  Memory without codes has none, and anything stands for them."""
    if kv.key_exponents is None or kv.value_exponents is None:
        return kv.keys, kv.values
    return kv.key_exponents[:, layer], kv.value_exponents[:, layer]


def strides_of(memory_PGSC: Tensor, name: str) -> dict[str, int]:
    """Strides of a layer's keys ("K") or values ("V"): between pages, heads, tokens."""
    return dict(zip((f"{name}_PAGE", f"{name}_HEAD", f"{name}_SLOT"), memory_PGSC.stride(), strict=False))


def pairs_of(rope: ReferenceRope | None, width: int) -> dict[str, Any]:
    """A rope table's constants for kernels over heads of ``width`` columns.  ValueError if it rotates more."""
    pairs = 0 if rope is None else rope.table.shape[-1]
    if 2 * pairs > width:
        raise ValueError(f"rope turns {2 * pairs} columns, more columns than a head has, {width}")
    return {
        "PAIRS": pairs,
        "INTERLEAVED": rope is not None and rope.interleaved,
        "PAIR_BLOCK": triton.next_power_of_2(max(1, pairs)),
        "REST_BLOCK": triton.next_power_of_2(max(1, width - 2 * pairs)),
    }


def rope_and_write(
    form: TritonContext,
    qkv_TN: Tensor,
    rope: ReferenceRope | None,
    kv: ReferenceKv,
    layer: int,
    batch: StepBatch,
    *,
    heads: int,
    kv_heads: int,
    q_scale: Tensor | None = None,
) -> Tensor:
    """``Ops.rope_and_write``."""
    key_dim, value_dim, tokens = kv.shape.key_dim, kv.shape.value_dim, len(qkv_TN)
    places, qkv_TN = places_of(form, kv, layer, batch), lined(qkv_TN)
    keys, values = kv.keys[:, places.layer], kv.values[:, places.layer]
    turns_T3 = None
    if rope is not None and rope.axes is not None and batch.turns_T3 is not None:
        turns_T3 = form.integers(batch.turns_T3)
    q_THC = form.empty((tokens, heads, key_dim), form.dtype)
    blocks = triton.cdiv(heads, HEADS) + 2 * triton.cdiv(kv_heads, HEADS)
    if tokens:
        _rope_and_write[(tokens, blocks)](
            qkv_TN, q_THC, keys, values, *exponents_of(kv, places.layer), None if rope is None else rope.table,
            turns_T3, None if rope is None else rope.axes, q_scale, places.positions_T, places.starts_S1,
            places.table_SP, places.sequences, places.table_SP.stride(0), X_STRIDE=stride_of(qkv_TN),
            **strides_of(keys, "K"), **strides_of(values, "V"), QUERY_HEADS=heads, KV_HEADS=kv_heads,
            KEY_DIM=key_dim, VALUE_DIM=value_dim, AXES=turns_T3 is not None, SCALED=q_scale is not None,
            **pairs_of(rope, key_dim), VALUE_BLOCK=triton.next_power_of_2(value_dim), HEAD_BLOCK=HEADS,
            S_BLOCK=places.sequences_block, **UNFUSED,
        )  # fmt: skip
    return q_THC


def latent_write(
    form: TritonContext,
    latent_TC: Tensor,
    rope: ReferenceRope,
    kv: ReferenceKv,
    layer: int,
    batch: StepBatch,
    *,
    norm: Tensor,
    eps: float,
) -> None:
    """``Ops.latent_write``."""
    plain, turned = kv.shape.value_dim, kv.shape.key_dim - kv.shape.value_dim
    places, latent_TC = places_of(form, kv, layer, batch), lined(latent_TC)
    keys = kv.keys[:, places.layer]
    if len(latent_TC):
        _latent_write[(len(latent_TC),)](
            latent_TC, norm, float(eps), keys, exponents_of(kv, places.layer)[0], rope.table, places.positions_T,
            places.starts_S1, places.table_SP, places.sequences, places.table_SP.stride(0),
            X_STRIDE=stride_of(latent_TC), K_PAGE=keys.stride(0), K_SLOT=keys.stride(2), PLAIN=plain, TURNED=turned,
            **pairs_of(rope, turned), PLAIN_BLOCK=triton.next_power_of_2(plain), S_BLOCK=places.sequences_block,
            **UNFUSED,
        )  # fmt: skip


def latent_query(
    form: TritonContext,
    q_TN: Tensor,
    absorb: PackedLinear,
    rope: ReferenceRope,
    kv: ReferenceKv,
    batch: StepBatch,
    *,
    heads: int,
    heads_linear: Callable[..., Tensor],
) -> Tensor:
    """``Ops.latent_query``; ``heads_linear`` multiplies by the absorbed matrices."""
    tokens, plain, turned = len(q_TN), kv.shape.value_dim, kv.shape.key_dim - kv.shape.value_dim
    q_TN, out_THC = lined(q_TN), form.empty((tokens, heads, plain + turned), form.dtype)
    if not tokens:
        return out_THC
    x_THK = q_TN.view(tokens, heads, -1)[..., : absorb.k].to(form.dtype).contiguous()
    absorbed_TN = heads_linear(x_THK, absorb, heads=heads)
    _latent_query[(tokens, triton.cdiv(heads, HEADS))](
        q_TN, absorbed_TN, out_THC, rope.table, form.integers(batch.positions_T), X_STRIDE=stride_of(q_TN),
        QUERY_HEADS=heads, ABSORBED=absorb.k, PLAIN=plain, TURNED=turned, **pairs_of(rope, turned),
        PLAIN_BLOCK=triton.next_power_of_2(plain), HEAD_BLOCK=HEADS, **UNFUSED,
    )  # fmt: skip
    return out_THC
