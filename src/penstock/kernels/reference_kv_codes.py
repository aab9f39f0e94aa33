"""The oracle's codes of keys and values (``kv_types``), by torch's own E4M3.

Knows rows of numbers; not pages.  This module imports torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.kv_types import LEAST_EXPONENT, MOST_EXPONENT, NO_NUMBER

_LARGEST = 448.0 / 512
"""What of a number's significand, from 1/2 on, is the largest code's."""


def encoded(x_HC: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 codes [..., C] and exponents [...] of fp32 rows [..., C], to nearest even."""
    largest_H = x_HC.abs().amax(-1)
    significand_H, exponent_H = torch.frexp(largest_H)
    exponent_H = exponent_H + 126 + (significand_H > _LARGEST)
    exponent_H = torch.where(largest_H > 0, exponent_H, LEAST_EXPONENT).clamp(min=LEAST_EXPONENT)
    exponent_H = torch.where(largest_H.isfinite() & (exponent_H <= MOST_EXPONENT), exponent_H, NO_NUMBER).int()
    codes_HC = (x_HC * _power(262 - exponent_H)[..., None]).to(torch.float8_e4m3fn)
    return codes_HC.view(torch.uint8), exponent_H.to(torch.uint8)


def decoded(codes_HC: Tensor, exponents_H: Tensor) -> Tensor:
    """fp32 [..., C]; NaN where there is no number."""
    scale_H = torch.where(exponents_H == NO_NUMBER, torch.nan, _power(exponents_H.int()))
    return codes_HC.view(torch.float8_e4m3fn).float() * 2**-8 * scale_H[..., None]


def _power(biased: Tensor) -> Tensor:
    """2^(biased - 127), exactly; of 255, infinity."""
    return (biased << 23).view(torch.float32)
