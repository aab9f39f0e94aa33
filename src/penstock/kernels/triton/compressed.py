"""Weights that stay compressed on the GPU (layout: docs/format.md) and give the bits of plain ones.

Few rows: every program decodes its tile in registers, right in front of the matrix units: a quarter less is read.  Many
rows: a slab of the matrix at a time is decoded into a workspace that the second-level cache holds, and multiplied from
there by the plain kernel, so a weight is decoded once whatever the number of rows.  Either way tiles, steps and order
are those of the plain weight, and what is decoded are its very bits, so the products are its bits too.

This module imports torch and triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.errors import KernelError
from penstock.kernels.compressed import (
    GPU_BLOCK_COLUMNS,
    GROUP_COLUMNS,
    MAX_VALUES,
    PANEL_ROWS,
    GpuCompressedMatrix,
    column_blocks,
    stretches_of,
)
from penstock.kernels.triton.matmul import MatmulTile, Operand, ends_tensor, multiply, tile_of
from penstock.kernels.triton.numerics import UNFUSED, TritonContext, dot
from penstock.kernels.triton.plain import adopt, plain_step

UNPACK_ROWS = 256
"""More rows than this are multiplied with slabs: it is the tallest tile, and more tiles would decode every weight
again."""

SLAB_BYTES = 16 << 20
"""Of the workspace: a third of the second-level cache of the GPUs in mind."""

MAX_WORDS = 1 << 31
"""Words of a matrix that 32-bit indices reach."""


@triton.jit
def lane(word, HIGH: tl.constexpr):
    """Half of a word: the bits of one bf16."""
    if HIGH:
        half = word >> 16
    else:
        half = word & 0xFFFF
    return half.to(tl.uint16)


@triton.jit
def pair(bytes_NG, codes_NG, base_NG, A: tl.constexpr, B: tl.constexpr):
    """Columns 4 A + 2 B and the next of every group: two bf16 in a word."""
    if B == 0:
        own = ((bytes_NG & 0x00800080) << 8) | (bytes_NG & 0x007F007F)
    else:
        own = (bytes_NG & 0x80008000) | ((bytes_NG >> 8) & 0x007F007F)
    if A == 0 and B == 0:
        exponents = codes_NG << 7
    elif A == 0:
        exponents = codes_NG << 3
    elif B == 0:
        exponents = codes_NG >> 1
    else:
        exponents = codes_NG >> 5
    return own | ((exponents & 0x07800780) + base_NG)


@triton.jit
def escaped(word, bytes_NG, codes_NG, values_NG, live_NG, A: tl.constexpr, B: tl.constexpr):
    """The same with escapes looked up; ``values_NG``: where the dictionaries begin."""
    low = (
        tl.load(
            values_NG + ((bytes_NG >> (8 * B)) & 0xFF).to(tl.int32),
            mask=live_NG & (((codes_NG >> (8 * A + 4 * B)) & 0xF) == 0),
            other=0,
        )
        .to(tl.uint16, bitcast=True)
        .to(tl.uint32)
    )
    high = (
        tl.load(
            values_NG + ((bytes_NG >> (8 * B + 16)) & 0xFF).to(tl.int32),
            mask=live_NG & (((codes_NG >> (8 * A + 4 * B + 16)) & 0xF) == 0),
            other=0,
        )
        .to(tl.uint16, bitcast=True)
        .to(tl.uint32)
    )
    word = tl.where(((codes_NG >> (8 * A + 4 * B)) & 0xF) == 0, (word & 0xFFFF0000) | low, word)
    return tl.where(((codes_NG >> (8 * A + 4 * B + 16)) & 0xF) == 0, (word & 0xFFFF) | (high << 16), word)


@triton.jit
def decoded(weight, outputs_N, k, end, DEPTH: tl.constexpr, EVEN: tl.constexpr, TILED: tl.constexpr):
    """bf16 [N, DEPTH] from column ``k``, a multiple of 8; finite numbers behind ``end``.

    ``weight``: bytes as 64-bit words, codes as 32-bit words (both of all blocks), bases, starts of dictionaries, their
    values, which tiles have escapes, blocks and dictionaries of a panel.  TILED: outputs are a tile of the matrix, or,
    2, lie in two: that of the first of them and that of the last.
    """
    long_words, short_words, bases, starts, values, escapes, blocks, stretches = weight
    panels_N1 = (outputs_N // 16)[:, None]
    rows_N1 = (outputs_N % 16)[:, None]
    groups_1G = (k // 8 + tl.arange(0, DEPTH // 8))[None, :]
    block_NG = panels_N1 * blocks + groups_1G // 8
    long_NG = long_words + block_NG * 192 + rows_N1 * 8 + groups_1G % 8
    short_NG = short_words + block_NG * 384 + 256 + rows_N1 * 8 + groups_1G % 8
    live_NG = (groups_1G * 8 < end) & (rows_N1 >= 0)
    if EVEN:
        bytes_NG = tl.load(long_NG)
        codes_NG = tl.load(short_NG).to(tl.uint32, bitcast=True)
    else:
        bytes_NG = tl.load(long_NG, mask=live_NG, other=0)
        codes_NG = tl.load(short_NG, mask=live_NG, other=0).to(tl.uint32, bitcast=True)
    first_NG = (bytes_NG & 0xFFFFFFFF).to(tl.uint32)
    second_NG = (bytes_NG >> 32).to(tl.uint32)
    base_NG = tl.load(bases + panels_N1).to(tl.uint32)
    p00 = pair(first_NG, codes_NG, base_NG, 0, 0)
    p01 = pair(first_NG, codes_NG, base_NG, 0, 1)
    p10 = pair(second_NG, codes_NG, base_NG, 1, 0)
    p11 = pair(second_NG, codes_NG, base_NG, 1, 1)
    any_here = 1
    if TILED > 0:
        flags = escapes + tl.min(outputs_N) // outputs_N.shape[0] * blocks
        any_here = tl.load(flags + k // 64) | tl.load(flags + tl.minimum((k + DEPTH - 1) // 64, blocks - 1))
    if TILED == 2:
        flags = escapes + tl.max(outputs_N) // outputs_N.shape[0] * blocks
        any_here |= tl.load(flags + k // 64) | tl.load(flags + tl.minimum((k + DEPTH - 1) // 64, blocks - 1))
    if any_here != 0:
        values_NG = values + tl.load(starts + panels_N1 * stretches + groups_1G // 128, mask=live_NG, other=0)
        p00 = escaped(p00, first_NG, codes_NG, values_NG, live_NG, 0, 0)
        p01 = escaped(p01, first_NG, codes_NG, values_NG, live_NG, 0, 1)
        p10 = escaped(p10, second_NG, codes_NG, values_NG, live_NG, 1, 0)
        p11 = escaped(p11, second_NG, codes_NG, values_NG, live_NG, 1, 1)
    even_NG4 = tl.join(tl.join(lane(p00, False), lane(p10, False)), tl.join(lane(p01, False), lane(p11, False)))
    odd_NG4 = tl.join(tl.join(lane(p00, True), lane(p10, True)), tl.join(lane(p01, True), lane(p11, True)))
    bits_NK = tl.reshape(tl.join(even_NG4, odd_NG4), (outputs_N.shape[0], DEPTH))
    return bits_NK.to(tl.bfloat16, bitcast=True)  # last: Triton 3.6 lays no reshaped tile into shared memory


@triton.jit
def compressed_step(sums_TN, x_TK, weight, outputs_N, k, end, DEPTH: tl.constexpr, EVEN: tl.constexpr):
    """A step of ``matmul.Operand`` over compressed weights."""
    w_NK = decoded(weight, outputs_N, k, end, DEPTH, EVEN, 1)
    return dot(x_TK, tl.trans(w_NK), sums_TN)


@triton.jit
def mixed_step(sums_TN, x_TK, weight, outputs_N, k, end, DEPTH: tl.constexpr, EVEN: tl.constexpr):
    """The same for outputs of two tiles."""
    w_NK = decoded(weight, outputs_N, k, end, DEPTH, EVEN, 2)
    return dot(x_TK, tl.trans(w_NK), sums_TN)


@triton.jit
def decode_kernel(weight, ids, out, first, count, k, GIVEN: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """out [count, K] = rows from ``first`` on, or, GIVEN, rows ``ids``.  Grid: rows, columns."""
    rows_N = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live_N = rows_N < count
    if GIVEN:
        outputs_N = tl.load(ids + rows_N, mask=live_N, other=0)
    else:
        outputs_N = first + tl.minimum(rows_N, count - 1)
    begin = tl.program_id(1) * DEPTH
    w_NK = decoded(weight, outputs_N, begin, k, DEPTH, False, 0)
    columns_K = begin + tl.arange(0, DEPTH)
    live_NK = live_N[:, None] & (columns_K < k)[None, :]
    tl.store(out + rows_N.to(tl.int64)[:, None] * k + columns_K[None, :], w_NK, mask=live_NK)


@triton.jit
def survey_kernel(long_words, short_words, counts, found, blocks, stretches):
    """found [panels, blocks]: 1 where a block has escapes, 3 where one of them is not in its dictionary."""
    block = tl.program_id(0) * blocks + tl.program_id(1)
    groups_G = tl.arange(0, 128)
    bytes_G1 = tl.load(long_words + block * 192 + groups_G)[:, None]
    codes_G1 = tl.load(short_words + block * 384 + 256 + groups_G).to(tl.uint32, bitcast=True)[:, None]
    count = tl.load(counts + tl.program_id(0) * stretches + tl.program_id(1) // 16)
    column_18 = tl.arange(0, 8)[None, :]  # 4 a + 2 b + c
    a, b, c = column_18 // 4, column_18 // 2 % 2, column_18 % 2
    is_escape = ((codes_G1 >> (16 * c + 8 * a + 4 * b).to(tl.uint32)) & 0xF) == 0
    index = (bytes_G1 >> (32 * a + 16 * c + 8 * b).to(tl.int64)) & 0xFF
    state = tl.where(is_escape, tl.where(index < count, 1, 3), 0)
    tl.store(found + block, tl.max(tl.max(state, axis=1), axis=0).to(tl.uint8))


@dataclass(frozen=True, slots=True)
class CompressedWeights:
    """``WeightForm`` of matrices that stay compressed."""

    form: TritonContext
    operands: tuple[Operand, ...]
    workspace: Tensor
    nbytes: int

    def multiply(self, x_TK: Tensor, out_TN: Tensor, *, add: bool) -> None:
        (own,) = self.operands
        if len(x_TK) <= UNPACK_ROWS:
            multiply(self.form, x_TK, own, out_TN, add=add)
            return
        tall = max(own.tile.columns, self.workspace.numel() // own.k // own.tile.columns * own.tile.columns)
        for first in range(0, own.n, tall):
            rows = min(tall, own.n - first)
            slab_NK = self.workspace[: rows * own.k].view(rows, own.k)
            self._decode(slab_NK, first=first)
            part = replace(own, n=rows, step=plain_step, arguments=(slab_NK, own.k), first=first)
            multiply(self.form, x_TK, part, out_TN, add=add)

    def mixed(self, rows: int, *, in_tiles: bool) -> Operand | None:
        """Where they are decoded in registers."""
        return replace(self.operands[0], step=mixed_step) if in_tiles and rows <= UNPACK_ROWS else None

    def rows(self, ids_T: Tensor) -> Tensor:
        out_TK = self.form.empty((len(ids_T), self.operands[0].k), torch.bfloat16)
        if len(ids_T):
            self._decode(out_TK, ids_T=ids_T.to(torch.int32))
        return out_TK.float()

    @property
    def order_K(self) -> None:  # noqa: N802
        return

    @classmethod
    def stacked(cls, forms: Sequence[CompressedWeights]) -> Operand | None:
        own = forms[0].operands[0]
        if own.n % PANEL_ROWS or sum(len(form.operands[0].arguments[1]) for form in forms) >= MAX_WORDS:
            return None
        longs, words, bases, starts, values, escapes = zip(
            *(form.operands[0].arguments[:6] for form in forms), strict=True
        )
        tall = adopt(words)
        for part, long in zip(words, longs, strict=True):
            long.set_(part.view(torch.int64))
        ends = [sum(map(len, values[:e])) for e in range(len(values))]
        begins = torch.cat([start + end for start, end in zip(starts, ends, strict=True)])
        flags = torch.cat(escapes)
        if own.n % own.tile.columns:  # tiles of later experts begin inside of the tiles that the flags are of
            flags = _flags(torch.cat([_by_panel(form) for form in forms]), own.tile)
            flags[:-1] |= flags[1:].clone()
        arrays = tall.view(torch.int64), tall, torch.cat(bases), begins, torch.cat(values), flags
        return replace(own, n=own.n * len(forms), arguments=(*arrays, *own.arguments[6:]))

    def _decode(self, out_NK: Tensor, *, first: int = 0, ids_T: Tensor | None = None) -> None:
        count, k = out_NK.shape
        grid = (triton.cdiv(count, PANEL_ROWS), triton.cdiv(k, 4 * GPU_BLOCK_COLUMNS))
        decode_kernel[grid](
            self.operands[0].arguments, out_NK if ids_T is None else ids_T, out_NK, first, count, k,
            GIVEN=ids_T is not None, ROWS=PANEL_ROWS, DEPTH=4 * GPU_BLOCK_COLUMNS, **UNFUSED,
        )  # fmt: skip


def workspace_of(form: TritonContext, columns: int) -> Tensor:
    """Workspace for slabs of matrices with ``k`` columns: at least one tile."""
    return form.empty((max(SLAB_BYTES // 2, 128 * columns),), torch.bfloat16)


def compressed_weights(
    form: TritonContext, parts: list[GpuCompressedMatrix], ends: tuple[int, ...], workspace: Tensor
) -> CompressedWeights:
    """The parts, one below the other.  Raises KernelError if one contradicts itself."""
    n, k = sum(part.n for part in parts), parts[0].k
    counts = form.tensor(np.concatenate([part.counts_PS.ravel() for part in parts]).astype(np.int32))
    values = form.tensor(np.concatenate([*(part.values for part in parts), np.zeros(1, np.uint16)]).view(np.int16))
    if int(counts.max()) > MAX_VALUES or int(counts.sum()) != len(values) - 1:
        raise KernelError("the sizes of the dictionaries are not those of the table")
    words = torch.cat([form.tensor(part.words_PB.reshape(-1).view(np.int32)) for part in parts])
    bases = np.concatenate([np.full(part.words_PB.shape[0], part.base * 0x00800080, np.int64) for part in parts])
    starts = (torch.cumsum(counts, 0) - counts).to(torch.int32)
    tile = tile_of(ends, form.dtype)
    escapes = _survey(form, words, counts, tile, k)
    arguments = (
        words.view(torch.int64), words, form.tensor(bases.astype(np.int32)), starts, values, escapes,
        column_blocks(k), stretches_of(k),
    )  # fmt: skip
    operand = Operand(n, k, len(ends), ends_tensor(form, ends), tile, compressed_step, arguments)
    nbytes = sum(array.nbytes for array in arguments[:6])
    return CompressedWeights(form, (operand,), workspace, nbytes)


def fits_gpu(parts: list[tuple[int, int]], ends: tuple[int, ...]) -> bool:
    """Whether the kernels can multiply stacked compressed matrices of these sizes without decoding them first."""
    words = sum(n * k for n, k in parts) // 2
    whole = all(n % PANEL_ROWS == 0 for n, _ in parts[:-1])
    return whole and words < MAX_WORDS and all(end % GROUP_COLUMNS == 0 for end in ends)


def _survey(form: TritonContext, words: Tensor, counts: Tensor, tile: MatmulTile, k: int) -> Tensor:
    """Which tiles [columns of a product, blocks] have escapes.  Raises KernelError if one is not in its dictionary."""
    blocks, stretches = column_blocks(k), stretches_of(k)
    panels = len(counts) // stretches
    found_PB = form.empty((panels, blocks), torch.uint8)
    survey_kernel[(panels, blocks)](words.view(torch.int64), words, counts, found_PB, blocks, stretches, **UNFUSED)
    if int(found_PB.max()) > 1:
        raise KernelError("an escape is not in its dictionary")
    return _flags(found_PB, tile)


def _flags(found_PB: Tensor, tile: MatmulTile) -> Tensor:
    """By tile, of what is known by panel."""
    each = tile.columns // PANEL_ROWS
    padded_PB = torch.nn.functional.pad(found_PB, (0, 0, 0, -len(found_PB) % each))
    return padded_PB.view(-1, each, found_PB.shape[1]).amax(dim=1).contiguous()


def _by_panel(weights: CompressedWeights) -> Tensor:
    """Which panels have escapes, as far as is known: those of a tile that has any."""
    own = weights.operands[0]
    flags: Tensor = own.arguments[5]
    return flags.repeat_interleave(own.tile.columns // PANEL_ROWS, dim=0)[: own.n // PANEL_ROWS]
