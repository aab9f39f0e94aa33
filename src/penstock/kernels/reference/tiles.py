"""Row-wise functions in torch, on tiles of one fixed number of rows.

Where torch chooses its arithmetic by the number of rows, ``RowTiles`` fixes that number.  The functions take one tile
[rows, width] of fp32.  ``TorchContext`` is what a torch backend shares: device, compute type, arrays to tensors.

This module imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.operands import Activation, Gate

TILE_ROWS = 64
"""Rows of one product on a GPU, whatever was asked for."""


class RowTiles:
    """Runs what works row by row on tiles of one size: one row on the CPU, ``TILE_ROWS`` elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows = 1 if device.type == "cpu" else TILE_ROWS

    def map(self, fn: Callable[[Tensor], Tensor], x_TD: Tensor) -> Tensor:
        """``fn`` on tiles of always the same number of rows, in fresh (so equally aligned) memory."""
        tiles = []
        for start in range(0, x_TD.shape[0], self._rows):
            tile = torch.zeros((self._rows, x_TD.shape[1]), dtype=x_TD.dtype, device=self._device)
            rows = x_TD[start : start + self._rows]
            tile[: len(rows)] = rows
            tiles.append(fn(tile)[: len(rows)])
        return torch.cat(tiles)

    def product(self, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
        """x W^T; zeros when K is 0."""
        if weight_NK.shape[1] == 0:
            return torch.zeros((x_TK.shape[0], weight_NK.shape[0]), device=self._device)
        if self._rows == 1:
            return self.map(lambda tile: torch.mv(weight_NK, tile[0]).unsqueeze(0), x_TK)
        return self.map(lambda tile: tile @ weight_NK.T, x_TK)


def arithmetic_of(device: torch.device) -> str:
    """What else the bits depend on: the CPU's instruction set, the GPU's generation."""
    if device.type == "cpu":
        return f"cpu_{torch.backends.cpu.get_cpu_capability().lower()}"
    if device.type == "cuda":
        return "cuda_sm{}{}".format(*torch.cuda.get_device_capability(device))
    return device.type


@dataclass(frozen=True, slots=True)
class TorchContext:
    """What all parts of one backend share."""

    device: torch.device
    dtype: torch.dtype  # the compute type
    tiles: RowTiles

    def tensor(self, values: NDArray[Any]) -> Tensor:
        """A copy on the device."""
        return torch.from_numpy(np.array(values, order="C")).to(self.device)

    def indices(self, values: NDArray[np.int32] | Tensor) -> Tensor:
        """The same, to pick rows with; also of a tensor that is there already."""
        if isinstance(values, Tensor):
            return values.to(torch.int64)
        return torch.from_numpy(values.astype(np.int64)).to(self.device)


def on_host(values: NDArray[np.int32] | Tensor) -> NDArray[np.int32]:
    """Numbers to compute places from; those of a device are waited for."""
    return values.cpu().numpy() if isinstance(values, Tensor) else values


def numpy_of(array: Tensor) -> NDArray[np.float32]:
    """What is in it."""
    return np.asarray(array.float().cpu().numpy(), np.float32)


def activated(x: Tensor, kind: Activation, alpha: float = 1.0) -> Tensor:
    """``operands.Activation`` of a tile."""
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
    """``operands.Gate`` of a tile."""
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
