"""Attention to paged keys and values as Triton kernels: one order of sums for prefill and decode.

A program computes a *tile*: some consecutive positions of one sequence, times the query heads that share a key-value
head, 64 rows together, as large a product as the matrix units take at once.

::

    positions           | tile      | tile      | tile      |      aligned: a tile begins at a multiple of its size
    a prompt's tokens   | 0 1 2 3   | 4 5 6 7   | 8 . . .   |      rows of which this step has no token are empty
    a decoded token     | . . . .   | . . . .   | . 9 . .   |      the same place in the same tile

Keys are reduced 64 at a time by absolute position; partitions of 512 keys begin anew.  Those of a class (partition mod
8) are joined from low to high, classes by the tree of ``kernels.sum_tree``, in one program (*in turn*), or each
partition has its own program and they are joined by a second kernel (*apart*), with the same operations: which of the
two is a matter of speed alone.  A tile goes through the keys that any of its positions sees,
with or without a token there, and what a row does not read changes nothing in it: weights are zero and rescaling is by
one.  So the bits of a row follow from its query, its position and its keys, not from other rows, other sequences, the
cut of the prompt or the number of tokens (docs/determinism.md).  Contraction of products and sums is off, fused
operations are written out, so both kernels compute alike.

The program of a tile is that of its first token in this step; programs of other tokens end at once.  Nothing about a
step is known on the host but the sizes of its arrays: a captured graph can be given other tokens and lengths.

Tile sizes follow from the model's shape; whether partitions are computed in turn or apart follows from the sizes of a
step's arrays and changes no bit.

This module imports torch and triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.operands import AttentionSpec, KvShape, StepBatch
from penstock.kernels.reference.attention import ReferenceKv
from penstock.kernels.sum_tree import KEY_CLASSES
from penstock.kernels.triton.fp8_kv import numbers_of, scaled
from penstock.kernels.triton.numerics import UNFUSED, TritonContext, dot, rounded, tanh
from penstock.kernels.triton.rope import PAGE, exponents_of, places_of, sequence_of, strides_of
from penstock.types import PAGE_TOKENS

KEYS = tl.constexpr(64)
"""Reduced at a time."""

PARTITION_KEYS: Final = 512
PARTITION = tl.constexpr(PARTITION_KEYS)
_CLASSES = tl.constexpr(KEY_CLASSES)

LOG2_E: Final = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def _first_key(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """That a position sees."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(first, position - (WINDOW - 1))
    if CHUNK > 0:
        first = tl.maximum(first, position // CHUNK * CHUNK)
    return first


@triton.jit
def _span(position, QUERIES: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, UNTIL: tl.constexpr):
    """Keys [low, high) that the tile of a position goes through: those of all its positions."""
    begin = position // QUERIES * QUERIES
    if UNTIL > 0:
        low, high = begin * 0, begin * 0 + UNTIL
    else:
        low, high = _first_key(begin, WINDOW, CHUNK) // KEYS * KEYS, begin + QUERIES
    return low, high


@triton.jit
def _partition_sums(
    q_RC, q_RE, keys, values, key_exponents, value_exponents, pages, begin, end, known_from, known_to, first_R, end_R,
    scale, softcap, value_columns, K_PAGE: tl.constexpr, K_SLOT: tl.constexpr, V_PAGE: tl.constexpr,
    V_SLOT: tl.constexpr, KEY_DIM: tl.constexpr, KEY_MAIN: tl.constexpr, KEY_REST: tl.constexpr,
    VALUE_DIM: tl.constexpr, CAPPED: tl.constexpr, SHARED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows over keys [begin, end): largest score, sum of weights, weighted values; scores are logarithms to base 2.

    Nothing is read but keys [known_from, known_to), those that a row of this step sees.  Of codes, scores and weights
    take the powers of two: 64 of each row, where a key has 128 numbers; the bits are those of scaled keys and values.
    SHARED: the first ``KEY_MAIN`` columns of a key are the values that are asked for, so nothing is read for these.
    """
    CODED: tl.constexpr = keys.dtype.element_ty == tl.uint8
    tops_R = tl.full((q_RC.shape[0],), float("-inf"), tl.float32)
    sums_R = tl.zeros((q_RC.shape[0],), tl.float32)
    out_RV = tl.zeros((q_RC.shape[0], value_columns.shape[0]), tl.float32)
    columns = tl.arange(0, KEY_MAIN)
    rest = KEY_MAIN + tl.arange(0, KEY_REST)
    for key in tl.range(begin, end, KEYS, num_stages=STAGES):
        key_N = key + tl.arange(0, KEYS)
        known_N = (key_N >= known_from) & (key_N < known_to)
        page_N = tl.load(pages + key_N // PAGE, mask=known_N, other=0).to(tl.int64)
        k_N = keys + page_N * K_PAGE + (key_N % PAGE) * K_SLOT
        inside = (columns < KEY_DIM)[:, None] & known_N[None, :]
        k_CN = numbers_of(tl.load(k_N[None, :] + columns[:, None], mask=inside, other=0), q_RC.dtype)
        scores = dot(q_RC, k_CN, tl.zeros((q_RC.shape[0], KEYS), tl.float32))
        if KEY_MAIN < KEY_DIM:
            inside = (rest < KEY_DIM)[:, None] & known_N[None, :]
            k_EN = numbers_of(tl.load(k_N[None, :] + rest[:, None], mask=inside, other=0), q_RC.dtype)
            scores = dot(q_RE, k_EN, scores)
        scores = scaled(scores, key_exponents + page_N * K_PAGE + key_N % PAGE, known_N, CODED) * scale
        if CAPPED:
            scores = tanh(scores / softcap) * (softcap * _LOG2_E)
        seen = (key_N[None, :] >= first_R[:, None]) & (key_N[None, :] < end_R[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        higher_R = tl.maximum(tops_R, tl.max(scores, axis=1))
        shift_R = tl.where(higher_R == float("-inf"), 0.0, higher_R)
        weights = tl.exp2(scores - shift_R[:, None])
        shrink_R = tl.exp2(tops_R - shift_R)
        sums_R = tl.fma(sums_R, shrink_R, tl.sum(weights, axis=1))
        if SHARED:
            v_NV = tl.trans(k_CN)
        else:
            v_N1 = (values + page_N * V_PAGE + (key_N % PAGE) * V_SLOT)[:, None]
            inside = known_N[:, None] & (value_columns < VALUE_DIM)[None, :]
            v_NV = numbers_of(tl.load(v_N1 + value_columns[None, :], mask=inside, other=0), q_RC.dtype)
        weights = scaled(weights, value_exponents + page_N * V_PAGE + key_N % PAGE, known_N, CODED)
        out_RV = dot(rounded(weights, q_RC.dtype), v_NV, out_RV * shrink_R[:, None])
        tops_R = higher_R
    return tops_R, sums_R, out_RV


@triton.jit
def _joined(tops_R, sums_R, out_RV, more_tops_R, more_sums_R, more_RV):
    """Both parts as one."""
    higher_R = tl.maximum(tops_R, more_tops_R)
    shift_R = tl.where(higher_R == float("-inf"), 0.0, higher_R)
    shrink_R, more_R = tl.exp2(tops_R - shift_R), tl.exp2(more_tops_R - shift_R)
    sums_R = tl.fma(sums_R, shrink_R, more_sums_R * more_R)
    shrink_RV = tl.broadcast_to(shrink_R[:, None], out_RV.shape)
    return higher_R, sums_R, tl.fma(out_RV, shrink_RV, more_RV * more_R[:, None])


@triton.jit
def _raised(node, following, here, left):
    """A node of one level of the tree, ``following`` the next in which there are keys, or one behind the last: joined
    with the neighbor that waits for it, if it is a right one, or waiting itself.  Each is whether it is there, and its
    parts; nothing happens until all of a node's classes are there."""
    if node != following:
        if node % 2 == 1:
            any_left, left_tops_R, left_sums_R, left_RV = left
            if any_left:
                any_here, tops_R, sums_R, out_RV = here
                tops_R, sums_R, out_RV = _joined(left_tops_R, left_sums_R, left_RV, tops_R, sums_R, out_RV)
                here = (any_here, tops_R, sums_R, out_RV)
                left = (node < 0, left_tops_R, left_sums_R, left_RV)
        elif node // 2 == following // 2:
            left = here
    return here, left


@triton.jit
def _class_of_keys(index, low, high):
    """Whether a class has partitions between these keys, the first of them, and the next class that has any, or 8."""
    first, behind = low // PARTITION, tl.cdiv(high, PARTITION)
    start, count = first % _CLASSES, behind - first
    place = (index + _CLASSES - start) % _CLASSES
    later = tl.where(start > index, start, _CLASSES)
    following = tl.where((place + 1) % _CLASSES < count, index + 1, later)
    return place < count, first + place, following


@triton.jit
def _finished(tops_R, sums_R, out_RV, sinks, head_R, real_R, SINKS: tl.constexpr):
    """Sinks join last; no zero keeps a sign, as that would tell of keys that a row did not see."""
    if SINKS:
        sink_R = tl.load(sinks + head_R, mask=real_R, other=0.0) * _LOG2_E
        higher_R = tl.maximum(tops_R, sink_R)
        shrink_R = tl.exp2(tops_R - higher_R)
        sums_R = tl.fma(sums_R, shrink_R, tl.exp2(sink_R - higher_R))
        out_RV = out_RV * shrink_R[:, None]
    whole_R = tl.where(sums_R > 0, sums_R, 1.0)
    return out_RV / whole_R[:, None] + 0.0


@triton.jit(do_not_specialize=["sequences", "table_stride", "partitions"])
def attend(
    q_THC, keys, values, key_exponents, value_exponents, out_THV, part_tops, part_sums, part_out, sinks, scale, softcap,
    positions_T, starts_S1, table_SP, sequences, table_stride, partitions,
    K_PAGE: tl.constexpr, K_HEAD: tl.constexpr, K_SLOT: tl.constexpr, V_PAGE: tl.constexpr, V_HEAD: tl.constexpr,
    V_SLOT: tl.constexpr, HEADS: tl.constexpr, SHARING: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_MAIN: tl.constexpr, KEY_REST: tl.constexpr, VALUE_BLOCK: tl.constexpr, GROUP: tl.constexpr,
    QUERIES: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, UNTIL: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, APART: tl.constexpr, SHARED: tl.constexpr, S_BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of ``QUERIES`` positions and ``GROUP`` of the ``SHARING`` heads of one key-value head, over all of its
    keys, or, ``APART``, over one partition.  Long sequences begin first."""
    token = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence = sequence_of(starts_S1, token, sequences, S_BLOCK)
    if sequence >= sequences:
        return
    position, last = tl.load(positions_T + token), tl.load(starts_S1 + sequence + 1)
    if (token > tl.load(starts_S1 + sequence)) & (position % QUERIES != 0):
        return
    head_blocks: tl.constexpr = (SHARING + GROUP - 1) // GROUP
    value_blocks: tl.constexpr = (VALUE_DIM + VALUE_BLOCK - 1) // VALUE_BLOCK
    kv_head = tl.program_id(1) // (head_blocks * value_blocks)
    lanes = tl.arange(0, QUERIES * GROUP)
    own_R = tl.program_id(1) // value_blocks % head_blocks * GROUP + lanes % GROUP
    value_columns = tl.program_id(1) % value_blocks * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    begin = position // QUERIES * QUERIES
    place_R, row_R = begin + lanes // GROUP, token + begin - position + lanes // GROUP
    real_R = (row_R >= token) & (row_R < last) & (own_R < SHARING)
    head_R = kv_head * SHARING + own_R
    at_R = row_R.to(tl.int64) * HEADS + head_R
    columns, rest = tl.arange(0, KEY_MAIN), KEY_MAIN + tl.arange(0, KEY_REST)
    inside = real_R[:, None] & (columns < KEY_DIM)[None, :]
    q_RC = tl.load(q_THC + at_R[:, None] * KEY_DIM + columns[None, :], mask=inside, other=0.0)
    inside = real_R[:, None] & (rest < KEY_DIM)[None, :]
    q_RE = tl.load(q_THC + at_R[:, None] * KEY_DIM + rest[None, :], mask=inside, other=0.0)
    low, high = _span(position, QUERIES, WINDOW, CHUNK, UNTIL)
    first_R = place_R * 0 if UNTIL > 0 else _first_key(place_R, WINDOW, CHUNK)
    end_R = place_R * 0 + UNTIL if UNTIL > 0 else place_R + 1
    known_from = position * 0 if UNTIL > 0 else _first_key(position, WINDOW, CHUNK)
    known_to = position * 0 + UNTIL if UNTIL > 0 else tl.minimum(begin + QUERIES, position + last - token)
    _attend_keys(
        q_RC, q_RE, keys + kv_head * K_HEAD, values + kv_head * V_HEAD, key_exponents + kv_head * PAGE,
        value_exponents + kv_head * PAGE, table_SP + sequence.to(tl.int64) * table_stride, low, high, known_from,
        known_to, first_R, end_R, scale, softcap, value_columns, out_THV, part_tops, part_sums, part_out, sinks, at_R,
        head_R, real_R, partitions, K_PAGE, K_SLOT, V_PAGE, V_SLOT, KEY_DIM, KEY_MAIN, KEY_REST, VALUE_DIM, CAPPED,
        SINKS, APART, SHARED, STAGES,
    )  # fmt: skip


@triton.jit
def _attend_keys(
    q_RC, q_RE, keys, values, key_exponents, value_exponents, pages, low, high, known_from, known_to, first_R, end_R,
    scale, softcap, value_columns, out_THV, part_tops, part_sums, part_out, sinks, at_R, head_R, real_R, partitions,
    K_PAGE: tl.constexpr, K_SLOT: tl.constexpr, V_PAGE: tl.constexpr, V_SLOT: tl.constexpr, KEY_DIM: tl.constexpr,
    KEY_MAIN: tl.constexpr, KEY_REST: tl.constexpr, VALUE_DIM: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, APART: tl.constexpr, SHARED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One partition, kept as it is, or all of them joined and finished."""
    stored = real_R[:, None] & (value_columns < VALUE_DIM)[None, :]
    if APART:
        begin = tl.program_id(2) * PARTITION
        begin, end = tl.maximum(low, begin), tl.minimum(high, begin + PARTITION)
        if begin < end:
            tops_R, sums_R, out_RV = _partition_sums(
                q_RC, q_RE, keys, values, key_exponents, value_exponents, pages, begin, end, known_from, known_to,
                first_R, end_R, scale, softcap, value_columns, K_PAGE, K_SLOT, V_PAGE, V_SLOT, KEY_DIM, KEY_MAIN,
                KEY_REST, VALUE_DIM, CAPPED, SHARED, STAGES,
            )  # fmt: skip
            part_R = at_R * partitions + tl.program_id(2)
            tl.store(part_tops + part_R, tops_R, mask=real_R)
            tl.store(part_sums + part_R, sums_R, mask=real_R)
            tl.store(part_out + part_R[:, None] * VALUE_DIM + value_columns[None, :], out_RV, mask=stored)
    else:
        none_R = tl.full((q_RC.shape[0],), float("-inf"), tl.float32)
        zero_R = tl.zeros((q_RC.shape[0],), tl.float32)
        nothing = (low < 0, none_R, zero_R, tl.zeros((q_RC.shape[0], value_columns.shape[0]), tl.float32))
        here, left_1, left_2, left_4 = nothing, nothing, nothing, nothing
        for index in range(_CLASSES):
            any_keys, first, following = _class_of_keys(index, low, high)
            if any_keys:
                _, tops_R, sums_R, out_RV = nothing
                for partition in range(first, tl.cdiv(high, PARTITION), _CLASSES):
                    begin = tl.maximum(low, partition * PARTITION)
                    end = tl.minimum(high, partition * PARTITION + PARTITION)
                    more_tops_R, more_sums_R, more_RV = _partition_sums(
                        q_RC, q_RE, keys, values, key_exponents, value_exponents, pages, begin, end, known_from,
                        known_to, first_R, end_R, scale, softcap, value_columns, K_PAGE, K_SLOT, V_PAGE, V_SLOT,
                        KEY_DIM, KEY_MAIN, KEY_REST, VALUE_DIM, CAPPED, SHARED, STAGES,
                    )  # fmt: skip
                    tops_R, sums_R, out_RV = _joined(tops_R, sums_R, out_RV, more_tops_R, more_sums_R, more_RV)
                here, left_1 = _raised(index, following, (any_keys, tops_R, sums_R, out_RV), left_1)
                here, left_2 = _raised(index // 2, following // 2, here, left_2)
                here, left_4 = _raised(index // 4, following // 4, here, left_4)
        _, tops_R, sums_R, out_RV = here
        out_RV = _finished(tops_R, sums_R, out_RV, sinks, head_R, real_R, SINKS)
        out_at = out_THV + at_R[:, None] * VALUE_DIM + value_columns[None, :]
        tl.store(out_at, rounded(out_RV, out_THV.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["sequences", "partitions"])
def join(
    part_tops, part_sums, part_out, out_THV, sinks, positions_T, starts_S1, sequences, partitions,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, UNTIL: tl.constexpr, SINKS: tl.constexpr,
    S_BLOCK: tl.constexpr,
):  # fmt: skip
    """The partitions of some heads of one token: those that its tile went through."""
    token = tl.program_id(0)
    if sequence_of(starts_S1, token, sequences, S_BLOCK) >= sequences:
        return
    head_R = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    columns = tl.arange(0, VALUE_BLOCK)
    real_R = head_R < HEADS
    inside = real_R[:, None] & (columns < VALUE_DIM)[None, :]
    at_R = token.to(tl.int64) * HEADS + head_R
    low, high = _span(tl.load(positions_T + token), QUERIES, WINDOW, CHUNK, UNTIL)
    none_R, zero_R = tl.full((HEAD_BLOCK,), float("-inf"), tl.float32), tl.zeros((HEAD_BLOCK,), tl.float32)
    nothing = (low < 0, none_R, zero_R, tl.zeros((HEAD_BLOCK, VALUE_BLOCK), tl.float32))
    here, left_1, left_2, left_4 = nothing, nothing, nothing, nothing
    for index in range(_CLASSES):
        any_keys, first, following = _class_of_keys(index, low, high)
        if any_keys:
            _, tops_R, sums_R, out_RV = nothing
            for partition in range(first, tl.cdiv(high, PARTITION), _CLASSES):
                part_R = at_R * partitions + partition
                more_tops_R = tl.load(part_tops + part_R, mask=real_R, other=0.0)
                more_sums_R = tl.load(part_sums + part_R, mask=real_R, other=0.0)
                more_RV = tl.load(part_out + part_R[:, None] * VALUE_DIM + columns[None, :], mask=inside, other=0.0)
                tops_R, sums_R, out_RV = _joined(tops_R, sums_R, out_RV, more_tops_R, more_sums_R, more_RV)
            here, left_1 = _raised(index, following, (any_keys, tops_R, sums_R, out_RV), left_1)
            here, left_2 = _raised(index // 2, following // 2, here, left_2)
            here, left_4 = _raised(index // 4, following // 4, here, left_4)
    _, tops_R, sums_R, out_RV = here
    out_RV = _finished(tops_R, sums_R, out_RV, sinks, head_R, real_R, SINKS)
    out_at = out_THV + at_R[:, None] * VALUE_DIM + columns[None, :]
    tl.store(out_at, rounded(out_RV, out_THV.dtype.element_ty), mask=inside)


APART_TOKENS: Final = 256
"""Tokens up to which a step leaves a GPU idle unless partitions are computed apart."""

APART_BYTES: Final = 256 << 20
"""Of partitions that wait to be joined: the most."""

ENOUGH_BYTES: Final = 227 << 10
"""Of shared memory for a program, on an H100, an H200 and later."""

JOINED_HEADS: Final = 4
"""Of one program that joins."""


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """How a model's attention is cut; see ``attention``."""

    group: int  # query heads, a power of two
    queries: int  # positions
    key_main: int  # columns of a key, a power of two
    key_rest: int  # those behind them, if there are any
    value_block: int
    stages: int
    shared: bool  # values are the first columns of keys, and all of them are in one program: nothing is read for them

    @classmethod
    def of(cls, sharing: int, shape: KvShape, dtype: torch.dtype, memory: int = ENOUGH_BYTES) -> AttentionTile:
        """The tile for ``sharing`` query heads per key-value head.  Numbers of 4 bytes allow smaller tiles only.

        ``memory``: of a program; with enough of it latent keys are copied ahead, which changes no bit.
        """
        key_dim, value_dim = shape.key_dim, shape.value_dim
        narrow = dtype.itemsize == 2
        rows, most_values = (64, 256) if narrow else (16, 128)
        group = min(rows, triton.next_power_of_2(sharing))
        main = max(16, 1 << (key_dim.bit_length() - 1))
        rest = max(16, triton.next_power_of_2(max(1, key_dim - main)))
        shared = shape.shared and main == value_dim and (narrow or value_dim <= most_values)
        value_block = value_dim if shared else min(most_values, max(16, triton.next_power_of_2(value_dim)))
        stages = 2 if narrow and key_dim + value_block <= 256 else 1
        if shared and narrow and (rows + 2 * 64) * (main + rest) * dtype.itemsize <= memory:
            stages = 2
        return cls(
            group=group,
            queries=rows // group,
            key_main=main,
            key_rest=rest,
            value_block=value_block,
            stages=stages,
            shared=shared,
        )


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program can have."""
    if device.type != "cuda":
        return ENOUGH_BYTES
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0))


class TritonAttention:
    """``Ops.paged_attention``."""

    def __init__(self, form: TritonContext, *, apart: bool | None = None) -> None:
        """``apart``: always or never, for tests."""
        self._form = form
        self._apart = apart

    def paged_attention(
        self, q_THC: Tensor, kv: ReferenceKv, layer: int, batch: StepBatch, spec: AttentionSpec
    ) -> Tensor:
        """compute [T, H value_dim]; rows of tokens that no sequence owns are zero.  Raises ValueError for a spec of
        sparse attention, and for limits that are not above 0."""
        if spec.sparse is not None:
            raise ValueError("sparse attention has no kernel of its own")
        for name in ("window", "chunk", "softcap", "until"):
            number = getattr(spec, name)
            if number is not None and number <= 0:
                raise ValueError(f"{name} must be above 0, got {number}")
        scale, softcap, sinks_H = spec.scale, spec.softcap, spec.sinks_H
        masks = {
            "WINDOW": spec.window or 0,
            "CHUNK": spec.chunk or 0,
            "UNTIL": spec.until or 0,
            "SINKS": sinks_H is not None,
        }
        tokens, key_dim, value_dim = len(q_THC), kv.shape.key_dim, kv.shape.value_dim
        q_THC = q_THC.reshape(tokens, -1, key_dim).contiguous()
        out_THV = torch.zeros((tokens, q_THC.shape[1], value_dim), dtype=self._form.dtype, device=q_THC.device)
        if tokens:
            scales = (scale if softcap else scale * LOG2_E, softcap or 0.0)
            self._attend(q_THC, kv, layer, batch, out_THV, scales=scales, sinks_H=sinks_H, masks=masks)
        return out_THV.flatten(1)

    def _attend(
        self,
        q_THC: Tensor,
        kv: ReferenceKv,
        layer: int,
        batch: StepBatch,
        out_THV: Tensor,
        *,
        scales: tuple[float, float],
        sinks_H: Tensor | None,
        masks: dict[str, Any],
    ) -> None:
        """``scales``: of scores, and their cap (0: none); ``masks``: which keys are read, as kernel constants."""
        places = places_of(self._form, kv, layer, batch)
        keys, values = kv.keys[:, places.layer], kv.values[:, places.layer]
        (tokens, heads, value_dim), kv_heads = out_THV.shape, kv.shape.kv_heads
        tile = AttentionTile.of(heads // kv_heads, kv.shape, self._form.dtype, shared_memory(self._form.device))
        reach = masks["UNTIL"] or places.table_SP.shape[1] * PAGE_TOKENS
        partitions = triton.cdiv(reach, PARTITION_KEYS)
        apart = self._are_apart(tokens, heads * value_dim, partitions)
        parts = tokens * heads * partitions if apart else 0
        part_tops, part_sums, part_out = (self._form.empty((parts, width)) for width in (1, 1, value_dim))
        blocks = kv_heads * triton.cdiv(heads // kv_heads, tile.group) * triton.cdiv(value_dim, tile.value_block)
        attend[(tokens, blocks, partitions if apart else 1)](
            q_THC, keys, values, *exponents_of(kv, places.layer), out_THV, part_tops, part_sums, part_out, sinks_H,
            float(scales[0]), float(scales[1]), places.positions_T, places.starts_S1, places.table_SP, places.sequences,
            places.table_SP.stride(0), partitions, **strides_of(keys, "K"), **strides_of(values, "V"), **masks,
            HEADS=heads, SHARING=heads // kv_heads, KEY_DIM=kv.shape.key_dim, VALUE_DIM=value_dim,
            KEY_MAIN=tile.key_main, KEY_REST=tile.key_rest, VALUE_BLOCK=tile.value_block, GROUP=tile.group,
            QUERIES=tile.queries, CAPPED=scales[1] > 0, APART=apart, SHARED=tile.shared,
            S_BLOCK=places.sequences_block, STAGES=tile.stages,
            num_warps=8 if tile.value_block > 128 else 4, **UNFUSED,
        )  # fmt: skip
        if apart:
            join[(tokens, triton.cdiv(heads, JOINED_HEADS))](
                part_tops, part_sums, part_out, out_THV, sinks_H, places.positions_T, places.starts_S1,
                places.sequences, partitions, **masks, HEADS=heads, VALUE_DIM=value_dim,
                VALUE_BLOCK=triton.next_power_of_2(value_dim), HEAD_BLOCK=JOINED_HEADS, QUERIES=tile.queries,
                S_BLOCK=places.sequences_block, **UNFUSED,
            )  # fmt: skip

    def _are_apart(self, tokens: int, width: int, partitions: int) -> bool:
        """Whether every partition is computed by its own programs."""
        if self._apart is not None:
            return self._apart
        return partitions > 1 and tokens <= APART_TOKENS and tokens * width * partitions * 4 <= APART_BYTES
