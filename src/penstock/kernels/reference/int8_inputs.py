# ruff: noqa: N815  (field names carry shapes)
"""The oracle's inputs of 8 bits: nearest multiples of a block's largest size by 127 (cpp/quantized/int8_inputs.hpp).

This module imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.quantization import QuantizedMatrix

LARGEST = 127
TINY = 2.0**-100
"""A block whose largest size is below counts as zero."""


@dataclass(frozen=True, slots=True)
class InputBlocks:
    """How the inputs of one weight are quantized: columns of a block for each output, and the order of columns."""

    block_N: Tensor
    order_K: Tensor | None


def input_blocks(parts: Sequence[QuantizedMatrix]) -> InputBlocks:
    """The blocks for matrices one below the other."""
    blocks = torch.cat([torch.full((part.n,), part.format.input_block) for part in parts])
    order = parts[0].order
    return InputBlocks(blocks, None if order is None else torch.from_numpy(order.astype("int64")))


def quantized_inputs(x_TK: Tensor, block: int, segments: Sequence[int], order_K: Tensor | None) -> Tensor:
    """The inputs in fp32 as multiples of their blocks' scales; blocks end with segments.  A block that has an infinite
    number or a NaN is NaN."""
    ordered_TK = x_TK.float() if order_K is None else x_TK.float()[:, order_K]
    rounded_TK = torch.empty_like(ordered_TK)
    begin = 0
    for end in segments:
        while begin < end:
            stop = min(end, (begin // block + 1) * block)
            rounded_TK[:, begin:stop] = _quantized_block(ordered_TK[:, begin:stop])
            begin = stop
    if order_K is None:
        return rounded_TK
    placed_TK = torch.empty_like(rounded_TK)
    placed_TK[:, order_K] = rounded_TK
    return placed_TK


def _quantized_block(x_TB: Tensor) -> Tensor:
    largest_T1 = x_TB.abs().amax(dim=1, keepdim=True)
    usual_T1 = torch.where(largest_T1 < TINY, torch.ones_like(largest_T1), largest_T1)
    steps_T1 = torch.full_like(usual_T1, LARGEST)  # a number divided by a tensor is its reciprocal times the number
    integers_TB = torch.round(x_TB * (steps_T1 / usual_T1))
    rounded_TB = integers_TB * (usual_T1 / steps_T1)
    rounded_TB = torch.where(largest_T1 < TINY, torch.zeros_like(rounded_TB), rounded_TB)
    return torch.where(torch.isfinite(largest_T1), rounded_TB, torch.full_like(rounded_TB, torch.nan))
