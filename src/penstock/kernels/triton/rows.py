"""Operations that go row by row as Triton kernels: norms, gates, activations.

One program computes one row (or one group of its columns), so a row's bits know nothing of its company.  What a
program sums, it sums in one tile whose size and number of warps follow from the row's width alone; addresses are
aligned and strides are constants of the compiled kernel, so one width has one kernel and one order of its sums.

Sums of two arrays, biases and scaling stay torch's operations in place: one kernel each, no sum, nothing to gain.

This module imports torch and triton.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.operands import Activation, Gate
from penstock.kernels.triton.numerics import KIND_NUMBERS, UNFUSED, activated, gate_of, rounded, sigmoid, tanh

COLUMNS = 1024
"""Of one program, where columns know nothing of each other."""

MOST_WARPS = 16


@triton.jit
def _normed_groups(
    x_TN, weight_C, gate_TN, out_TN, eps, X_STRIDE: tl.constexpr, GATE_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr, WIDTH: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = [out +] rms_norm(x) [silu(gate)]; a program for each group of ``WIDTH`` columns of each row."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at = group * WIDTH + columns
    x = tl.load(x_TN + row * X_STRIDE + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x * x, axis=0) / WIDTH
    y = x * tl.rsqrt(mean + eps) * tl.load(weight_C + columns, mask=inside, other=0.0)
    if GATED:
        gate = tl.load(gate_TN + row * GATE_STRIDE + at, mask=inside, other=0.0)
        y = y * (gate * sigmoid(gate))
    out = out_TN + row * OUT_STRIDE + at
    if ADDED:
        y = tl.load(out, mask=inside, other=0.0) + y
    tl.store(out, rounded(y, out_TN.dtype.element_ty), mask=inside)


@triton.jit
def _layer_normed(
    x_TD, weight_D, bias_D, out_TD, eps, X_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, WIDTH: tl.constexpr,
    BIASED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = (x - mean) / sqrt(variance + eps) weight + bias; the variance in a second pass over the same tile."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    x = tl.load(x_TD + row * X_STRIDE + columns, mask=inside, other=0.0)
    apart = tl.where(inside, x - tl.sum(x, axis=0) / WIDTH, 0.0)
    variance = tl.sum(apart * apart, axis=0) / WIDTH
    y = apart * tl.rsqrt(variance + eps) * tl.load(weight_D + columns, mask=inside, other=0.0)
    if BIASED:
        y = y + tl.load(bias_D + columns, mask=inside, other=0.0)
    tl.store(out_TD + row * OUT_STRIDE + columns, rounded(y, out_TD.dtype.element_ty), mask=inside)


@triton.jit
def _gated(
    gate_up_TN, out_TI, alpha, limit, shift, STRIDE: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
    LIMITED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    row_N = gate_up_TN + row * STRIDE
    if INTERLEAVED:
        gate = tl.load(row_N + 2 * columns, mask=inside, other=0.0)
        up = tl.load(row_N + 2 * columns + 1, mask=inside, other=0.0)
    else:
        gate = tl.load(row_N + columns, mask=inside, other=0.0)
        up = tl.load(row_N + WIDTH + columns, mask=inside, other=0.0)
    y = gate_of(gate, up, alpha, limit, shift, KIND, LIMITED)
    tl.store(out_TI + row * WIDTH + columns, rounded(y, out_TI.dtype.element_ty), mask=inside)


ACTIVATE, SOFTCAP, SIGMOID_GATED, GATED_ADD = (tl.constexpr(number) for number in range(4))


@triton.jit
def _each(
    x_TN, other_TN, out_TN, number, X_STRIDE: tl.constexpr, OTHER_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr, WHAT: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out of x, number by number; ``other`` is a gate, of each number or of a whole row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    x = tl.load(x_TN + row * X_STRIDE + columns, mask=inside, other=0.0).to(tl.float32)
    out = out_TN + row * OUT_STRIDE + columns
    if WHAT == ACTIVATE:
        y = activated(x, number, KIND)
    elif WHAT == SOFTCAP:
        y = number * tanh(tl.math.div_rn(x, number))
    elif WHAT == SIGMOID_GATED:
        y = x * sigmoid(tl.load(other_TN + row * OTHER_STRIDE + columns, mask=inside, other=0.0))
    else:
        gate = sigmoid(tl.load(other_TN + row * OTHER_STRIDE))
        y = tl.fma(x, gate + tl.zeros_like(x), tl.load(out, mask=inside, other=0.0))
    tl.store(out, rounded(y, out_TN.dtype.element_ty), mask=inside)


def lined(x: Tensor) -> Tensor:
    """Rows that lie as kernels are compiled for: numbers side by side, from an aligned address."""
    if x.stride(-1) == 1 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def stride_of(x_TN: Tensor) -> int:
    """Between rows, the same for one row as for many."""
    return max(x_TN.stride(0), x_TN.shape[1])


def warps_of(block: int) -> int:
    """Warps of a program, by the size of its tile alone: the order of its sums follows from it."""
    return min(MOST_WARPS, max(1, block // 512))


def launch_norm(
    x_TN: Tensor,
    weight_C: Tensor,
    eps: float,
    out_TN: Tensor,
    *,
    gate: Tensor | None = None,
    added: bool = False,
) -> None:
    """out = [out +] rms_norm(x) [silu(gate)], by groups of ``len(weight_C)`` columns."""
    width = len(weight_C)
    block = triton.next_power_of_2(width)
    if x_TN.numel():
        _normed_groups[(len(x_TN), x_TN.shape[1] // width)](
            x_TN, weight_C, gate, out_TN, float(eps),
            X_STRIDE=stride_of(x_TN), GATE_STRIDE=0 if gate is None else stride_of(gate),
            OUT_STRIDE=stride_of(out_TN), WIDTH=width, GATED=gate is not None, ADDED=added, BLOCK=block,
            num_warps=warps_of(block), **UNFUSED,
        )  # fmt: skip


def launch_layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float, out_TD: Tensor) -> None:
    """out = layer_norm(x)."""
    block = triton.next_power_of_2(x_TD.shape[1])
    if len(x_TD):
        _layer_normed[(len(x_TD),)](
            x_TD, weight_D, bias_D, out_TD, float(eps), X_STRIDE=stride_of(x_TD), OUT_STRIDE=stride_of(out_TD),
            WIDTH=x_TD.shape[1], BIASED=bias_D is not None, BLOCK=block, num_warps=warps_of(block),
            **UNFUSED,
        )  # fmt: skip


def launch_each(
    x_TN: Tensor,
    other_TN: Tensor | None,
    out_TN: Tensor,
    number: float,
    what: tl.constexpr,
    kind: Activation = Activation.NONE,
) -> None:
    """out = ``what`` of each number of x, and of ``other_TN`` where it takes two."""
    rows, width = x_TN.shape
    if rows:
        _each[(rows, triton.cdiv(width, COLUMNS))](
            x_TN, other_TN, out_TN, float(number), X_STRIDE=stride_of(x_TN),
            OTHER_STRIDE=0 if other_TN is None else stride_of(other_TN), OUT_STRIDE=stride_of(out_TN),
            WIDTH=width, WHAT=what.value, KIND=KIND_NUMBERS[kind], BLOCK=COLUMNS, **UNFUSED,
        )  # fmt: skip


def launch_gated(gate_up_T2I: Tensor, out_TI: Tensor, kind: Gate) -> None:
    """out = activation(gate) * up."""
    rows, width = out_TI.shape
    if rows:
        _gated[(rows, triton.cdiv(width, COLUMNS))](
            gate_up_T2I, out_TI, float(kind.alpha), float(kind.limit), float(kind.shift),
            STRIDE=stride_of(gate_up_T2I), WIDTH=width, KIND=KIND_NUMBERS[kind.activation],
            LIMITED=kind.limit < math.inf, INTERLEAVED=kind.interleaved, BLOCK=COLUMNS, **UNFUSED,
        )  # fmt: skip
