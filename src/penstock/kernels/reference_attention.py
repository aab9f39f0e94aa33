"""The oracle's attention: KV memory, rotary positions, and one tile of 16 positions that attends to all its keys.

Knows nothing about batches: ``reference`` calls it tile by tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.operands import KvShape, StepBatch
from penstock.types import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class ReferenceKv:
    """A page holds of each of its layers keys, then values, a head's tokens one after another; both are views of it."""

    shape: KvShape
    keys: Tensor  # [P, L, G, 16, C], L layers a page
    values: Tensor  # [P, L, G, 16, value_dim]

    def table(self, layer: int, batch: StepBatch) -> tuple[int, NDArray[np.int32]]:
        """The place of a layer in its pages, and the table of these pages [S, P]."""
        group, place = self.shape.places[layer]
        return place, batch.table_of(group, len(self.shape.reaches))


@dataclass(frozen=True, slots=True)
class ReferenceRope:
    """cos and sin by absolute position."""

    table: Tensor  # [position, cos or sin, pairs of columns]
    interleaved: bool
    axes: Tensor | None = None  # [pairs of columns]: which of a token's turns each follows

    def angles(self, positions_T: Tensor, turns_T3: Tensor | None) -> tuple[Tensor, Tensor]:
        """cos and sin of every token, [T, 1, pairs]."""
        if self.axes is None or turns_T3 is None:
            rows_T2C = self.table[positions_T]
        else:
            pairs = torch.arange(len(self.axes), device=self.axes.device)
            rows_T2C = self.table[turns_T3[:, self.axes], :, pairs].transpose(1, 2)
        return rows_T2C[:, :1], rows_T2C[:, 1:]


def kv_over(numbers: Tensor, shape: KvShape) -> ReferenceKv:
    """KV memory over so many numbers."""
    key_dim, value_dim = shape.key_dim, 0 if shape.shared else shape.value_dim
    layers = numbers.view(-1, shape.page_layers, shape.kv_heads * PAGE_TOKENS * (key_dim + value_dim))
    places = (*layers.shape[:2], shape.kv_heads, PAGE_TOKENS)
    of_keys = shape.kv_heads * PAGE_TOKENS * key_dim
    keys = layers[..., :of_keys].view(*places, key_dim)
    values = keys[..., : shape.value_dim] if shape.shared else layers[..., of_keys:].view(*places, value_dim)
    return ReferenceKv(shape, keys, values)


def rotated(x_THC: Tensor, rope: ReferenceRope | None, positions_T: Tensor, turns_T3: Tensor | None = None) -> Tensor:
    """Every head turned by its token's position: its first columns, as many as the table has."""
    if rope is None:
        return x_THC
    cos_T1C, sin_T1C = rope.angles(positions_T, turns_T3)
    columns = 2 * cos_T1C.shape[-1]
    turned, rest = x_THC[..., :columns], x_THC[..., columns:]
    if rope.interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    a, b = first * cos_T1C - second * sin_T1C, second * cos_T1C + first * sin_T1C
    pairs = torch.stack([a, b], dim=-1).flatten(-2) if rope.interleaved else torch.cat([a, b], dim=-1)
    return torch.cat([pairs, rest], dim=-1)


def gathered(memory_PGSC: Tensor, pages: Tensor, seen: tuple[int, int]) -> Tensor:
    """Keys or values [G, N, C] of whole pages in fp32; zero outside of ``seen``, where there may be anything."""
    gathered_GNC = memory_PGSC[pages].float().transpose(0, 1).flatten(1, 2).contiguous()
    gathered_GNC[:, : seen[0]] = 0
    gathered_GNC[:, seen[1] :] = 0
    return gathered_GNC


@dataclass(frozen=True, slots=True)
class Rule:
    """Which keys are seen and how scores become weights; see ``Ops.paged_attention``."""

    scale: float
    window: int | None
    chunk: int | None
    softcap: float | None
    sinks: Tensor | None  # [H]

    def first_key(self, position: int) -> int:
        """That a position sees."""
        left = 0 if self.window is None else position - self.window + 1
        begun = 0 if self.chunk is None else position // self.chunk * self.chunk
        return max(0, left, begun)

    def weights(self, products_GMN: Tensor, hidden_MN: Tensor) -> Tensor:
        """Of all keys for all rows of a tile; a group's rows are its heads, one after another."""
        scores_GMN = products_GMN * self.scale
        if self.softcap is not None:
            scores_GMN = torch.tanh(scores_GMN / self.softcap) * self.softcap
        scores_GMN = scores_GMN.masked_fill(hidden_MN, -torch.inf)
        if self.sinks is None:
            return torch.softmax(scores_GMN, dim=-1)
        groups, rows = scores_GMN.shape[:2]
        sinks_GM = self.sinks.view(groups, -1).repeat_interleave(PAGE_TOKENS, dim=1).view(groups, rows, 1)
        return torch.softmax(torch.cat([scores_GMN, sinks_GM], dim=-1), dim=-1)[..., :-1]


def attend_tile(q_THC: Tensor, k_GNC: Tensor, v_GNC: Tensor, position: int, rule: Rule) -> Tensor:
    """Rows of one aligned tile of 16 positions, each in its own place; keys up to the tile's end."""
    count, heads, head_dim = q_THC.shape
    groups, keys = k_GNC.shape[:2]
    slot = position % PAGE_TOKENS
    tile = torch.zeros((PAGE_TOKENS, heads, head_dim), device=q_THC.device)
    tile[slot : slot + count] = q_THC.float()
    q_GMC = tile.view(PAGE_TOKENS, groups, heads // groups, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    first = keys - PAGE_TOKENS
    seen_SN = torch.zeros((PAGE_TOKENS, keys), dtype=torch.bool, device=q_THC.device)
    for own in range(PAGE_TOKENS):
        seen_SN[own, rule.first_key(first + own) : first + own + 1] = True
    hidden_MN = ~seen_SN.repeat(heads // groups, 1)
    weights_GMN = rule.weights(q_GMC.contiguous() @ k_GNC.transpose(1, 2), hidden_MN)
    out_GMC = weights_GMN @ v_GNC
    out_THC = out_GMC.view(groups, heads // groups, PAGE_TOKENS, -1).permute(2, 0, 1, 3).flatten(1, 2)
    return out_THC[slot : slot + count]
