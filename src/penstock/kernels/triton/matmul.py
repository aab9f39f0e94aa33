"""x W^T with one order of every sum, whatever the number of rows: the kernel behind all products.

::

    columns of W          one program, or one segment of K each      a tile [rows, columns] of the result
    few rows              every segment a program                    partial sums in memory, then ``join_kernel``
    many rows             all segments in one program, persistent    two in registers, the tree's others in memory

Both give the same bits, and so does any number of rows in them:

- A tile's columns follow from the compute type, so they are the same on one device and on each of eight, and the depth
  of one step over K from the weight.  Tiles of 64 rows have four warps, taller ones eight, so on matrix units of warp
  groups (Hopper) every group multiplies 64 rows at a time with all columns of the tile, once or twice: the same
  instruction whatever the tile's height, and one row of its result knows nothing of the other rows.
- A segment is summed from low to high in steps of that depth, its last step padded with zeros, which add nothing.
- Segments are joined by one binary tree in fp32: by ``eight`` in registers, by ``eight_spilled``, which keeps in memory
  what waits for its other half, and by ``eight_stored`` from memory, its own or that of several ranks (``peers``): the
  same additions.  No compiler fuses a product and a sum: the source says where that is done.
- Nothing is added atomically, split by the number of multiprocessors, or chosen by trying.

What a weight is made of stands in its ``Operand``: ``step`` reads one tile of it and adds the product.

This module imports torch and triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.numerics import UNFUSED, TritonContext, rounded

FEW_ROWS = 64
"""Rows up to which every segment has its own programs: the weight is read by as many multiprocessors as possible."""

FEW_STAGES = 6
MANY_STAGES = 4
"""Steps of a tile that are on their way from memory: what fits into 227 KiB of shared memory."""

TOGETHER = 8
"""Row tiles that read the same columns of a weight at about the same time."""

DEPTH = 64
"""Columns of K in one step of a bf16 weight: 128 bytes of a row."""


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """The part of a tile's shape that the weight decides."""

    columns: int  # of the result
    depth: int  # of K, in one step
    aligned: int  # every segment begins and ends at a multiple of this
    even: bool  # every segment is a number of whole steps
    sums: int = 1  # partial sums that a step keeps


@dataclass(frozen=True, slots=True)
class Operand:
    """Some outputs of a weight, in whatever form, ready to be multiplied.  ``ends``: int32 [S + 1], from 0."""

    n: int
    k: int
    segments: int
    ends: Tensor
    tile: MatmulTile
    step: Any
    """A Triton function (sums [T, N], x [T, K], arguments, outputs [N], first column, end, DEPTH, EVEN) -> sums."""

    arguments: tuple[Any, ...]
    first: int = 0  # its first output's column in the result


def tile_of(ends: tuple[int, ...], dtype: torch.dtype, *, group: int | None = None) -> MatmulTile:
    """For a weight with these segments.  With a ``group`` no step is in two; it and ``ends`` are multiples of 16 then.

    A tile half as wide as the widest instruction can be two instructions tall, which is what reading a prompt from the
    second-level cache needs; narrower ones for narrow weights would have other bits when devices share the outputs.
    """
    aligned = gcd(*ends, 1 << 20)
    depth = DEPTH if dtype == torch.bfloat16 else DEPTH // 2
    while group is not None and gcd(aligned, group) % depth:
        depth //= 2
    columns = 128 if dtype == torch.bfloat16 else 64
    return MatmulTile(columns, depth, aligned, even=aligned % depth == 0, sums=1 if group is None else 2)


def ends_tensor(form: TritonContext, ends: tuple[int, ...]) -> Tensor:
    """Begin and ends of the segments on the device."""
    return torch.tensor((0, *ends), dtype=torch.int32, device=form.device)


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def one(
    s, x_T1, live_T1, weight, outputs_N, ends,
    STEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    ALIGNED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The sums [ROWS, COLUMNS] of segment ``s``."""
    begin = tl.multiple_of(tl.load(ends + s), ALIGNED)
    end = tl.multiple_of(tl.load(ends + s + 1), ALIGNED)
    sums_TN = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(begin, end, DEPTH):
        columns_K = k + tl.arange(0, DEPTH)
        live_TK = live_T1
        if not EVEN:
            live_TK = live_T1 & (columns_K < end)[None, :]
        x_TK = tl.load(x_T1 + columns_K[None, :], mask=live_TK, other=0.0)
        sums_TN = STEP(sums_TN, x_TK, weight, outputs_N, k, end, DEPTH, EVEN)
    return sums_TN


@triton.jit
def two(
    s, x_T1, live_T1, weight, outputs_N, ends,
    STEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    ALIGNED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Segments ``s`` and the next, joined."""
    left_TN = one(s, x_T1, live_T1, weight, outputs_N, ends, STEP, ROWS, COLUMNS, DEPTH, ALIGNED, EVEN)
    return left_TN + one(s + 1, x_T1, live_T1, weight, outputs_N, ends, STEP, ROWS, COLUMNS, DEPTH, ALIGNED, EVEN)


@triton.jit
def four(
    s, x_T1, live_T1, weight, outputs_N, ends,
    STEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    ALIGNED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Four segments from ``s`` on, joined."""
    left_TN = two(s, x_T1, live_T1, weight, outputs_N, ends, STEP, ROWS, COLUMNS, DEPTH, ALIGNED, EVEN)
    return left_TN + two(s + 2, x_T1, live_T1, weight, outputs_N, ends, STEP, ROWS, COLUMNS, DEPTH, ALIGNED, EVEN)


@triton.jit
def eight(
    s, x_T1, live_T1, weight, outputs_N, ends,
    STEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    ALIGNED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Eight segments from ``s`` on, joined."""
    left_TN = four(s, x_T1, live_T1, weight, outputs_N, ends, STEP, ROWS, COLUMNS, DEPTH, ALIGNED, EVEN)
    return left_TN + four(s + 4, x_T1, live_T1, weight, outputs_N, ends, STEP, ROWS, COLUMNS, DEPTH, ALIGNED, EVEN)


@triton.jit
def four_spilled(
    s, kept, x_T1, live_T1, weight, outputs_N, ends,
    STEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    ALIGNED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """``four``, whose first half waits at ``kept``, memory of this program.  Barriers: the reader may be another
    thread than who wrote, and nothing may be read before it is needed, or it would take registers."""
    left_TN = two(s, x_T1, live_T1, weight, outputs_N, ends, STEP, ROWS, COLUMNS, DEPTH, ALIGNED, EVEN)
    tl.debug_barrier()
    tl.store(kept, left_TN)
    right_TN = two(s + 2, x_T1, live_T1, weight, outputs_N, ends, STEP, ROWS, COLUMNS, DEPTH, ALIGNED, EVEN)
    tl.debug_barrier()
    return tl.load(kept) + right_TN


@triton.jit
def eight_spilled(
    s, kept, x_T1, live_T1, weight, outputs_N, ends,
    STEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    ALIGNED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """``eight``, of which two tiles wait at ``kept``."""
    above = kept + ROWS * COLUMNS
    left_TN = four_spilled(s, kept, x_T1, live_T1, weight, outputs_N, ends, STEP, ROWS, COLUMNS, DEPTH, ALIGNED, EVEN)
    tl.store(above, left_TN)
    right_TN = four_spilled(
        s + 4, kept, x_T1, live_T1, weight, outputs_N, ends, STEP, ROWS, COLUMNS, DEPTH, ALIGNED, EVEN
    )
    tl.debug_barrier()
    return tl.load(above) + right_TN


@triton.jit
def whole(
    x_T1, live_T1, weight, outputs_N, ends, kept,
    SEGMENTS: tl.constexpr, KEPT: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """All segments, joined; ``kept``: if KEPT, memory of this program for two tiles of fp32."""
    if KEPT and SEGMENTS > 2:
        lanes = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        if SEGMENTS == 8:
            sums_TN = eight_spilled(
                0, kept + lanes, x_T1, live_T1, weight, outputs_N, ends, STEP, ROWS, COLUMNS, DEPTH, ALIGNED, EVEN
            )
        else:
            sums_TN = four_spilled(
                0, kept + lanes, x_T1, live_T1, weight, outputs_N, ends, STEP, ROWS, COLUMNS, DEPTH, ALIGNED, EVEN
            )
    elif SEGMENTS == 8:
        sums_TN = eight(0, x_T1, live_T1, weight, outputs_N, ends, STEP, ROWS, COLUMNS, DEPTH, ALIGNED, EVEN)
    elif SEGMENTS == 4:
        sums_TN = four(0, x_T1, live_T1, weight, outputs_N, ends, STEP, ROWS, COLUMNS, DEPTH, ALIGNED, EVEN)
    elif SEGMENTS == 2:
        sums_TN = two(0, x_T1, live_T1, weight, outputs_N, ends, STEP, ROWS, COLUMNS, DEPTH, ALIGNED, EVEN)
    else:
        sums_TN = one(0, x_T1, live_T1, weight, outputs_N, ends, STEP, ROWS, COLUMNS, DEPTH, ALIGNED, EVEN)
    return sums_TN


@triton.jit
def tile_at(tile, row_tiles, column_tiles, TOGETHER: tl.constexpr):
    """Row and column of a tile: ``TOGETHER`` row tiles that read the same columns of W run side by side."""
    band = tile // (TOGETHER * column_tiles) * TOGETHER
    height = tl.minimum(row_tiles - band, TOGETHER)
    inside = tile % (TOGETHER * column_tiles)
    return band + inside % height, inside // height


@triton.jit(do_not_specialize=["t"])
def product_kernel(
    x, weight, ends, out, kept, turn, x_stride, out_stride, out_apart, half, t, n, k,
    STEP: tl.constexpr, SEGMENTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    ALIGNED: tl.constexpr, EVEN: tl.constexpr, APART: tl.constexpr, KEPT: tl.constexpr, ADD: tl.constexpr,
    TURNS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """out [T, H N] = x [T, H K] W^T, each head with its own N outputs; or, ADD, out += that.

    Grid: persistent programs over tiles; segments if APART, which then go to ``out + segment * out_apart``; heads.
    ``kept``: two tiles of fp32 for each program, if KEPT.  TURNS: ``out`` is one of two halves, ``half`` numbers apart:
    the first one where the number at ``turn`` is even.
    """
    head = tl.program_id(2)
    x += head * k
    out += tl.program_id(1).to(tl.int64) * out_apart + head * n
    if TURNS:
        out += tl.load(turn) % 2 * half
    row_tiles = tl.cdiv(t, ROWS)
    column_tiles = tl.cdiv(n, COLUMNS)
    kept += tl.program_id(0).to(tl.int64) * (2 * ROWS * COLUMNS)
    for tile in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row_tile, column_tile = tile_at(tile, row_tiles, column_tiles, TOGETHER)
        rows_T = row_tile * ROWS + tl.arange(0, ROWS)
        columns_N = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        live_T1 = (rows_T < t)[:, None]
        x_T1 = x + rows_T.to(tl.int64)[:, None] * x_stride
        outputs_N = head * n + tl.minimum(columns_N, n - 1)
        if APART:
            s = tl.program_id(1)
            sums_TN = one(s, x_T1, live_T1, weight, outputs_N, ends, STEP, ROWS, COLUMNS, DEPTH, ALIGNED, EVEN)
        else:
            sums_TN = whole(
                x_T1, live_T1, weight, outputs_N, ends, kept, SEGMENTS, KEPT, STEP, ROWS, COLUMNS, DEPTH, ALIGNED, EVEN
            )
        at_TN = out + rows_T.to(tl.int64)[:, None] * out_stride + columns_N[None, :]
        live_TN = live_T1 & (columns_N < n)[None, :]
        if ADD:
            sums_TN = tl.load(at_TN, mask=live_TN, other=0.0) + sums_TN
        tl.store(at_TN, rounded(sums_TN, out.dtype.element_ty), mask=live_TN)


@triton.jit
def stored(parts, part: tl.constexpr, at, live, apart, EACH: tl.constexpr):
    """A part of a sum.  ``parts``: all of them, ``apart``; or, if EACH, an address for every EACH of them."""
    if EACH:
        first = tl.load(parts + part // EACH).to(tl.pointer_type(tl.float32)) + part % EACH * apart
    else:
        first = parts + part * apart
    return tl.load(first + at, mask=live, other=0.0)


@triton.jit
def two_stored(parts, part: tl.constexpr, at, live, apart, EACH: tl.constexpr):
    """Two parts from ``part`` on, joined."""
    left = stored(parts, part, at, live, apart, EACH)
    return left + stored(parts, part + 1, at, live, apart, EACH)


@triton.jit
def four_stored(parts, part: tl.constexpr, at, live, apart, EACH: tl.constexpr):
    """Four parts, joined."""
    left = two_stored(parts, part, at, live, apart, EACH)
    return left + two_stored(parts, part + 2, at, live, apart, EACH)


@triton.jit
def eight_stored(parts, part: tl.constexpr, at, live, apart, EACH: tl.constexpr):
    """Eight parts, joined."""
    left = four_stored(parts, part, at, live, apart, EACH)
    return left + four_stored(parts, part + 4, at, live, apart, EACH)


@triton.jit
def joined_block(
    parts, offset, out, out_stride, block, t, n, SEGMENTS: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """A block of out [T, N] = the tree over SEGMENTS parts, which begin at ``offset``; or, ADD, out += that."""
    index = block * BLOCK + tl.arange(0, BLOCK)
    apart = t * n  # of few rows: far below 2 ** 31, all parts together
    live = index < apart
    if SEGMENTS == 8:
        sums = eight_stored(parts, 0, offset + index, live, apart, EACH)
    elif SEGMENTS == 4:
        sums = four_stored(parts, 0, offset + index, live, apart, EACH)
    else:
        sums = two_stored(parts, 0, offset + index, live, apart, EACH)
    at = out + (index // n).to(tl.int64) * out_stride + index % n
    if ADD:
        sums = tl.load(at, mask=live, other=0.0) + sums
    tl.store(at, rounded(sums, out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["t"])
def join_kernel(parts, out, out_stride, t, n, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """out [T, N] = the tree over parts [SEGMENTS, T, N]; or, ADD, out += that."""
    joined_block(parts, 0, out, out_stride, tl.program_id(0), t, n, SEGMENTS, 0, BLOCK, ADD)


# --- launching --------------------------------------------------------------------------------------------------------


BLOCK = 1024
"""Numbers that a program joins at a time."""


def multiply(form: TritonContext, x_TK: Tensor, operand: Operand, out_TN: Tensor, *, add: bool, heads: int = 1) -> None:
    """``operand``'s columns of out [T, N] become x W^T, or grow by it; rows of ``out`` may lie apart.

    ``heads``: x is [T, H K] and each head has its share of the outputs.
    """
    t, n = x_TK.shape[0], operand.n // heads
    if t == 0 or n == 0:
        return
    out_TN = out_TN[:, operand.first : operand.first + operand.n]
    apart = t <= FEW_ROWS and operand.segments > 1
    if not apart:
        launch_product(form, x_TK, operand, out_TN, add=add, heads=heads)
        return
    parts_STN = form.empty((operand.segments, t, n))
    launch_product(form, x_TK, operand, parts_STN, heads=heads, apart=True)
    join_kernel[(triton.cdiv(t * n, BLOCK),)](
        parts_STN, out_TN, out_TN.stride(0), t, n, SEGMENTS=operand.segments, BLOCK=BLOCK, ADD=add, **UNFUSED
    )


@dataclass(frozen=True, slots=True)
class Halves:
    """Two places for a result, ``apart`` numbers from each other: the first where ``turn`` [1] has an even number."""

    turn: Tensor
    apart: int


def launch_product(
    form: TritonContext,
    x_TK: Tensor,
    operand: Operand,
    out: Tensor,
    *,
    add: bool = False,
    heads: int = 1,
    apart: bool = False,
    halves: Halves | None = None,
) -> None:
    """out [T, N] = x W^T, or grows by it; ``apart``: out [S, T, N], a sum for each segment.  ``halves``: ``out`` is the
    first of them."""
    t, n = x_TK.shape[0], operand.n // heads
    x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
    few = t <= FEW_ROWS
    rows = tile_rows(t, operand, form.dtype)
    tiles = triton.cdiv(t, rows) * triton.cdiv(n, operand.tile.columns)
    programs = tiles if few or heads > 1 else min(tiles, multiprocessors(form.device))
    keeps = not apart and keeps_apart(operand, operand.tile)
    kept = form.empty((programs if keeps else 0, 2, rows, operand.tile.columns))
    product_kernel[(programs, operand.segments if apart else 1, heads)](
        x_TK, operand.arguments, operand.ends, out, kept, None if halves is None else halves.turn,
        x_TK.stride(0), out.stride(-2), out.stride(0) if apart else 0, 0 if halves is None else halves.apart,
        t, n, operand.k, STEP=operand.step, SEGMENTS=operand.segments, ROWS=rows, COLUMNS=operand.tile.columns,
        DEPTH=operand.tile.depth, ALIGNED=operand.tile.aligned, EVEN=operand.tile.even, APART=apart, KEPT=keeps,
        ADD=add, TURNS=halves is not None, TOGETHER=TOGETHER, num_warps=4 if rows == FEW_ROWS else 8,
        num_stages=FEW_STAGES if few else MANY_STAGES, **UNFUSED,
    )  # fmt: skip


def tile_rows(t: int, operand: Operand, dtype: torch.dtype) -> int:
    """How tall a tile is: bits do not depend on it.  Sums that are kept together must fit into registers."""
    if t <= FEW_ROWS or dtype != torch.bfloat16:
        return FEW_ROWS
    tall = operand.segments == 1 and operand.tile.sums == 1
    return 4 * FEW_ROWS if tall and t > 2 * FEW_ROWS else 2 * FEW_ROWS


def keeps_apart(operand: Operand, tile: MatmulTile) -> bool:
    """Whether sums that wait to be joined are spilled to memory.  Narrow tiles hold all of them in registers."""
    return operand.segments > 2 and tile.columns > 64


@cache
def multiprocessors(device: torch.device) -> int:
    """Programs that a persistent kernel starts."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
