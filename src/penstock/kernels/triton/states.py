"""Recurrent layers as Triton kernels: a convolution over time, and the gated delta rule.

::

    tokens of a sequence    | ... cell c ......... | cell c + 1 ........ |      pages of states, a cell each
    delta rule              S, from the page of the token before --> S --> S    in registers, token after token
                                                   stored                stored   behind a cell's last, and the last

A program has the state of one head and some of its value columns in registers, and goes through the tokens of its
sequence one by one, in prefill and decode alike: a column of the state does not depend on others, its sums over the
keys are made in one tile whose shape follows from the model, and the state is kept in fp32 between steps.  So neither
the cut of a prompt nor other sequences change a bit.  The convolution of a token reads the inputs before it, of this
step or kept; the kept ones are replaced when all tokens have been computed.

Positions, starts and pages are on the device; grids follow from the numbers of tokens and sequences.

This module imports torch and triton.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.operands import StepBatch
from penstock.kernels.reference.attention import ReferenceKv
from penstock.kernels.triton.numerics import UNFUSED, TritonContext, sigmoid
from penstock.kernels.triton.rope import SEQUENCES, sequence_of
from penstock.kernels.triton.rows import lined, stride_of

CHANNELS = 512
"""Of one program of a convolution."""

VALUES = 32
"""Columns of a state in one program: as many programs for a head as its values have of these."""


@triton.jit
def rows_at(states, pages, rows, page_stride, ROWS_A_PAGE: tl.constexpr, WIDTH: tl.constexpr):
    """Where rows of a state begin; ``pages``: of its parts."""
    page = tl.load(pages + rows // ROWS_A_PAGE).to(tl.int64)
    return states + page * page_stride + rows % ROWS_A_PAGE * WIDTH


@triton.jit
def stored_inputs(
    states, pages, first_row, index, known, page_stride, ROWS_A_PAGE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Numbers of a layer's kept inputs, which lie side by side from ``first_row`` on; and where they are."""
    rows = first_row + index // WIDTH
    page = tl.load(pages + rows // ROWS_A_PAGE, mask=known, other=0).to(tl.int64)
    return states + page * page_stride + rows % ROWS_A_PAGE * WIDTH + index % WIDTH


@triton.jit
def first_cell(position, CELL: tl.constexpr):
    """That a step from this position on reads or writes."""
    return tl.maximum(position - 1, 0) // CELL


@triton.jit(do_not_specialize=["sequences", "pages_stride"])
def conv_kernel(
    x, weight_KC, out, states, positions_T, starts_S1, pages_SW, sequences, pages_stride, page_stride, first_row,
    X_STRIDE: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr, ROWS_A_PAGE: tl.constexpr,
    WIDTH: tl.constexpr, S_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [T, C] = silu of the sum over taps, from 0 on.  Grid: tokens, blocks of channels."""
    token = tl.program_id(0)
    sequence = sequence_of(starts_S1, token, sequences, S_BLOCK)
    if sequence >= sequences:
        return
    start = tl.load(starts_S1 + sequence)
    position = tl.load(positions_T + start)
    pages = pages_SW + sequence.to(tl.int64) * pages_stride
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < CHANNELS
    begun = columns * 0 + position > 0  # something is kept
    sums = tl.zeros((BLOCK,), tl.float32)
    for tap in range(TAPS):
        at = columns * 0 + (token - start - (TAPS - 1) + tap)  # of this step's tokens, below 0: kept
        here, kept = inside & (at >= 0), inside & (at < 0) & begun
        own = tl.load(x + (start + at).to(tl.int64) * X_STRIDE + columns, mask=here, other=0.0)
        index = tl.maximum(at + TAPS - 1, 0) * CHANNELS + columns
        place = stored_inputs(states, pages, first_row, index, kept, page_stride, ROWS_A_PAGE, WIDTH)
        own += tl.load(place, mask=kept, other=0.0)
        sums += own * tl.load(weight_KC + tap * CHANNELS + columns, mask=inside, other=0.0)
    tl.store(out + token.to(tl.int64) * CHANNELS + columns, sums * sigmoid(sums), mask=inside)


@triton.jit(do_not_specialize=["pages_stride"])
def keep_kernel(
    x, states, positions_T, starts_S1, pages_SW, pages_stride, page_stride, first_row, parts,
    X_STRIDE: tl.constexpr, KEPT: tl.constexpr, CHANNELS: tl.constexpr, ROWS_A_PAGE: tl.constexpr,
    WIDTH: tl.constexpr, CELL: tl.constexpr, TAP_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The last inputs behind each cell that a sequence enters, later cells first: what was kept is read by all of them
    and replaced by the first.  Grid: sequences, blocks of channels."""
    sequence = tl.program_id(0)
    start, end = tl.load(starts_S1 + sequence), tl.load(starts_S1 + sequence + 1)
    if start < end:
        position = tl.load(positions_T + start)
        base, from_cell = first_cell(position, CELL), position // CELL
        pages = pages_SW + sequence.to(tl.int64) * pages_stride
        taps = tl.arange(0, TAP_BLOCK)[:, None]
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = (taps < KEPT) & (columns < CHANNELS)
        cells = (position + end - start - 1) // CELL - from_cell + 1
        for back in range(cells):
            cell = from_cell + cells - 1 - back
            behind = tl.minimum(end - start, (cell + 1) * CELL - position)  # tokens of this step up to there
            at = behind - KEPT + taps
            here, kept = inside & (at >= 0), inside & (at < 0) & (taps * 0 + position > 0)
            own = tl.load(x + (start + at).to(tl.int64) * X_STRIDE + columns, mask=here, other=0.0)
            index = tl.maximum(at + KEPT, 0) * CHANNELS + columns
            place = stored_inputs(states, pages, first_row, index, kept, page_stride, ROWS_A_PAGE, WIDTH)
            own += tl.load(place, mask=kept, other=0.0)
            tl.debug_barrier()
            to = pages + (cell - base) * parts
            place = stored_inputs(
                states, to, first_row, taps * CHANNELS + columns, inside, page_stride, ROWS_A_PAGE, WIDTH
            )  # fmt: skip
            tl.store(place, own, mask=inside)
            tl.debug_barrier()


@triton.jit
def unit(x_K, inside_K):
    """Brought to length 1."""
    x_K = tl.where(inside_K, x_K, 0.0)
    return x_K * tl.rsqrt(tl.sum(x_K * x_K, axis=0) + 1e-6)


@triton.jit
def decay_of(gate, rate):
    """exp(-rate softplus(gate))"""
    return tl.exp(-rate * (tl.maximum(gate, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(gate)))))


@triton.jit(do_not_specialize=["pages_stride"])
def delta_kernel(
    qkv, gates, rates_H, shifts_H, out, states, positions_T, starts_S1, pages_SW, pages_stride, page_stride,
    first_row, parts, beta, decay, scale,
    GATE_STRIDE: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, ROWS_A_PAGE: tl.constexpr, CELL: tl.constexpr, KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    """What is read of a head's state, columns of it, token after token.  Grid: sequences, heads, blocks of columns."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(starts_S1 + sequence), tl.load(starts_S1 + sequence + 1)
    if start < end:
        position = tl.load(positions_T + start)
        base = first_cell(position, CELL)
        pages = pages_SW + sequence.to(tl.int64) * pages_stride
        keys_K = tl.arange(0, KEY_BLOCK)
        values_V = tl.program_id(2) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
        known_K, known_V = keys_K < KEY_DIM, values_V < VALUE_DIM
        known_KV = known_K[:, None] & known_V[None, :]
        begun_KV = known_KV & (keys_K * 0 + position > 0)[:, None]
        rows_K = first_row + head * KEY_DIM + tl.minimum(keys_K, KEY_DIM - 1)
        at_K = rows_at(states, pages, rows_K, page_stride, ROWS_A_PAGE, VALUE_DIM)
        state_KV = tl.load(at_K[:, None] + values_V[None, :], mask=begun_KV, other=0.0)
        own = head // (HEADS // KEY_HEADS) * KEY_DIM
        rate, shift = tl.load(rates_H + head), tl.load(shifts_H + head)
        for step in range(end - start):
            token = start.to(tl.int64) + step
            row = qkv + token * (2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM)
            q_K = unit(tl.load(row + own + keys_K, mask=known_K, other=0.0), known_K) * scale
            k_K = unit(tl.load(row + KEY_HEADS * KEY_DIM + own + keys_K, mask=known_K, other=0.0), known_K)
            at_V = row + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + values_V
            v_V = tl.load(at_V, mask=known_V, other=0.0)
            gate = gates + token * GATE_STRIDE + head
            state_KV = state_KV * decay_of(tl.load(gate + decay) + shift, rate)
            change_V = (v_V - tl.sum(state_KV * k_K[:, None], axis=0)) * sigmoid(tl.load(gate + beta))
            state_KV = state_KV + k_K[:, None] * change_V[None, :]
            out_V = out + token * (HEADS * VALUE_DIM) + head * VALUE_DIM + values_V
            tl.store(out_V, tl.sum(state_KV * q_K[:, None], axis=0), mask=known_V)
            here = position + step
            if ((here + 1) % CELL == 0) | (step == end - start - 1):
                tl.debug_barrier()
                to = pages + (here // CELL - base) * parts
                at_K = rows_at(states, to, rows_K, page_stride, ROWS_A_PAGE, VALUE_DIM)
                tl.store(at_K[:, None] + values_V[None, :], state_KV, mask=known_KV)


def causal_conv(
    form: TritonContext, x_TN: Tensor, weight_KC: Tensor, kv: ReferenceKv, layer: int, batch: StepBatch
) -> Tensor:
    """``Ops.causal_conv``: one kernel for the outputs, one for the state kept."""
    own, (taps, channels) = kv.shape.kept_states, weight_KC.shape
    out_TC, x_TN = form.empty((len(x_TN), channels)), lined(x_TN)
    arrays, sizes = _arrays(form, batch), {"ROWS_A_PAGE": kv.shape.state_rows_a_page}
    sequences, first = len(batch.starts_S1) - 1, layer * own.layer_rows + own.matrix_rows
    if not len(x_TN):
        return out_TC
    blocks = triton.cdiv(channels, CHANNELS)
    conv_kernel[(len(x_TN), blocks)](
        x_TN, weight_KC, out_TC, kv.states, *arrays, sequences, arrays[2].stride(0), kv.states.stride(0), first,
        X_STRIDE=stride_of(x_TN), TAPS=taps, CHANNELS=channels, WIDTH=own.value_dim, **sizes,
        S_BLOCK=max(SEQUENCES, triton.next_power_of_2(sequences)), BLOCK=CHANNELS, **UNFUSED,
    )  # fmt: skip
    keep_kernel[(sequences, blocks)](
        x_TN, kv.states, *arrays, arrays[2].stride(0), kv.states.stride(0), first, kv.shape.state_parts,
        X_STRIDE=stride_of(x_TN), KEPT=taps - 1, CHANNELS=channels, WIDTH=own.value_dim, CELL=own.cell, **sizes,
        TAP_BLOCK=triton.next_power_of_2(max(1, taps - 1)), BLOCK=CHANNELS, **UNFUSED,
    )  # fmt: skip
    return out_TC


def delta_rule(
    form: TritonContext,
    qkv_TC: Tensor,
    gates_TN: Tensor,
    kv: ReferenceKv,
    layer: int,
    batch: StepBatch,
    *,
    rates_H: Tensor,
    shifts_H: Tensor,
    beta: int,
    decay: int,
) -> Tensor:
    """Sums over the keys are a tile's."""
    own, arrays = kv.shape.kept_states, _arrays(form, batch)
    out_TV = form.empty((len(qkv_TC), own.heads * own.value_dim))
    qkv_TC, gates_TN = qkv_TC.contiguous(), lined(gates_TN)
    if len(qkv_TC):
        delta_kernel[(len(batch.starts_S1) - 1, own.heads, triton.cdiv(own.value_dim, VALUES))](
            qkv_TC, gates_TN, rates_H, shifts_H, out_TV, kv.states, *arrays, arrays[2].stride(0),
            kv.states.stride(0), layer * own.layer_rows, kv.shape.state_parts, beta, decay, own.key_dim**-0.5,
            GATE_STRIDE=stride_of(gates_TN), KEY_HEADS=own.key_heads, HEADS=own.heads, KEY_DIM=own.key_dim,
            VALUE_DIM=own.value_dim, CELL=own.cell, ROWS_A_PAGE=kv.shape.state_rows_a_page,
            KEY_BLOCK=triton.next_power_of_2(own.key_dim), VALUE_BLOCK=VALUES, **UNFUSED,
        )  # fmt: skip
    return out_TV


def _arrays(form: TritonContext, batch: StepBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, starts, pages.  Raises ValueError for a step without pages of states."""
    if batch.states_SW is None:
        raise ValueError("a step of recurrent layers brings the pages of its states")
    own = (batch.positions_T, batch.starts_S1, batch.states_SW)
    positions_T, starts_S1, pages_SW = map(form.integers, own)
    return positions_T, starts_S1, pages_SW
