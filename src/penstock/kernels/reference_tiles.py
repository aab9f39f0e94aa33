"""Torch, given one shape only: where it chooses its arithmetic by the number of rows, that number is fixed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

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
