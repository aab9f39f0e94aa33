"""The oracle's operations that go row by row, in torch: activations, norms, caps.

Functions of one tile [rows, width] of fp32; ``reference`` cuts the tiles.  This module imports torch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.kernels.kinds import Activation, Gate


def activated(x: Tensor, kind: Activation, alpha: float = 1.0) -> Tensor:
    """See ``kinds.Activation``."""
    match kind:
        case Activation.SILU:
            return x / (1 + torch.exp(-alpha * x))
        case Activation.GELU:
            return x * 0.5 * torch.erfc(-x * math.sqrt(0.5))
        case Activation.GELU_TANH:
            return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        case Activation.RELU:
            return torch.relu(x)
        case Activation.RELU2:
            return torch.relu(x).square()
        case Activation.NONE:
            return x


def gated(gate_up: Tensor, kind: Gate) -> Tensor:
    """See ``kinds.Gate``."""
    gate, up = (gate_up[:, ::2], gate_up[:, 1::2]) if kind.interleaved else gate_up.chunk(2, dim=1)
    up = up.clamp(-kind.limit, kind.limit) + kind.shift if kind.limit < math.inf or kind.shift else up
    return activated(gate.clamp(max=kind.limit), kind.activation, kind.alpha) * up


def rms_norm(tile: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """In fp32."""
    return tile * torch.rsqrt(tile.square().mean(dim=1, keepdim=True) + eps) * weight_D


def layer_norm(tile: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
    """In fp32."""
    apart = tile - tile.mean(dim=1, keepdim=True)
    normed = apart * torch.rsqrt(apart.square().mean(dim=1, keepdim=True) + eps) * weight_D
    return normed if bias_D is None else normed + bias_D


def softcapped(tile: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap)."""
    return cap * torch.tanh(tile / cap)


def gated_norm(tile: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """Values and gates side by side: each group of C values normed, times silu of its gates."""
    values, gates = tile.chunk(2, dim=1)
    groups = rms_norm(values.reshape(-1, len(weight_C)), weight_C, eps)
    return groups.view(values.shape) * activated(gates, Activation.SILU)
