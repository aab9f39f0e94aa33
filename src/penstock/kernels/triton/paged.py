"""``paged_attention`` on a GPU: which tiles the kernels of ``attention`` take, and whether partitions are apart.

Sizes follow from the model's shape; the choice between partitions in turn and apart follows from the sizes of a step's
arrays and changes no bit.

This module imports torch and triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
import triton
from torch import Tensor

from penstock.kernels.operands import AttentionSpec, KvShape, StepBatch
from penstock.kernels.reference.attention import ReferenceKv
from penstock.kernels.triton.arithmetic import UNFUSED
from penstock.kernels.triton.attention import LOG2_E, PARTITION_KEYS, attend, join
from penstock.kernels.triton.form import TritonForm
from penstock.kernels.triton.rope import exponents_of, places_of, strides_of
from penstock.types import PAGE_TOKENS

APART_TOKENS: Final = 256
"""Steps up to so many tokens leave a GPU idle unless partitions are apart."""

APART_BYTES: Final = 256 << 20
"""Of partitions that wait to be joined: the most."""

ENOUGH_BYTES: Final = 227 << 10
"""Of shared memory for a program, on an H100, an H200 and later."""

JOINED_HEADS: Final = 4
"""Of one program that joins."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How a model's attention is cut; see ``attention``."""

    group: int  # query heads, a power of two
    queries: int  # positions
    key_main: int  # columns of a key, a power of two
    key_rest: int  # those behind them, if there are any
    value_block: int
    stages: int
    shared: bool  # values are the first columns of keys, and all of them are in one program: nothing is read for them

    @classmethod
    def of(cls, sharing: int, shape: KvShape, dtype: torch.dtype, memory: int = ENOUGH_BYTES) -> Tile:
        """For so many query heads to a key-value head.  Numbers of 4 bytes leave room for smaller tiles only.

        ``memory``: of a program; with enough of it latent keys are copied ahead, which changes no bit.
        """
        key_dim, value_dim = shape.key_dim, shape.value_dim
        narrow = dtype.itemsize == 2
        rows, most_values = (64, 256) if narrow else (16, 128)
        group = min(rows, triton.next_power_of_2(sharing))
        main = max(16, 1 << (key_dim.bit_length() - 1))
        rest = max(16, triton.next_power_of_2(max(1, key_dim - main)))
        shared = shape.shared and main == value_dim and (narrow or value_dim <= most_values)
        value_block = value_dim if shared else min(most_values, max(16, triton.next_power_of_2(value_dim)))
        stages = 2 if narrow and key_dim + value_block <= 256 else 1
        if shared and narrow and (rows + 2 * 64) * (main + rest) * dtype.itemsize <= memory:
            stages = 2
        return cls(
            group=group,
            queries=rows // group,
            key_main=main,
            key_rest=rest,
            value_block=value_block,
            stages=stages,
            shared=shared,
        )


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program can have."""
    if device.type != "cuda":
        return ENOUGH_BYTES
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0))


class TritonAttention:
    """``Ops.paged_attention``."""

    def __init__(self, form: TritonForm, *, apart: bool | None = None) -> None:
        """``apart``: always or never, for tests."""
        self._form = form
        self._apart = apart

    def paged_attention(
        self, q_THC: Tensor, kv: ReferenceKv, layer: int, batch: StepBatch, spec: AttentionSpec
    ) -> Tensor:
        """compute [T, H value_dim]; rows of tokens that no sequence owns are zero.  Raises ValueError for a spec of
        sparse attention, and for limits that are not above 0."""
        if spec.sparse is not None:
            raise ValueError("sparse attention has no kernel of its own")
        for name in ("window", "chunk", "softcap", "until"):
            number = getattr(spec, name)
            if number is not None and number <= 0:
                raise ValueError(f"{name} must be above 0, got {number}")
        scale, softcap, sinks_H = spec.scale, spec.softcap, spec.sinks_H
        masks = {
            "WINDOW": spec.window or 0,
            "CHUNK": spec.chunk or 0,
            "UNTIL": spec.until or 0,
            "SINKS": sinks_H is not None,
        }
        tokens, key_dim, value_dim = len(q_THC), kv.shape.key_dim, kv.shape.value_dim
        q_THC = q_THC.reshape(tokens, -1, key_dim).contiguous()
        out_THV = torch.zeros((tokens, q_THC.shape[1], value_dim), dtype=self._form.dtype, device=q_THC.device)
        if tokens:
            scales = (scale if softcap else scale * LOG2_E, softcap or 0.0)
            self._attend(q_THC, kv, layer, batch, out_THV, scales=scales, sinks_H=sinks_H, masks=masks)
        return out_THV.flatten(1)

    def _attend(
        self,
        q_THC: Tensor,
        kv: ReferenceKv,
        layer: int,
        batch: StepBatch,
        out_THV: Tensor,
        *,
        scales: tuple[float, float],
        sinks_H: Tensor | None,
        masks: dict[str, Any],
    ) -> None:
        """``scales``: of scores, and their cap (0: none); ``masks``: which keys are seen, as the kernels are told."""
        places = places_of(self._form, kv, layer, batch)
        keys, values = kv.keys[:, places.layer], kv.values[:, places.layer]
        (tokens, heads, value_dim), kv_heads = out_THV.shape, kv.shape.kv_heads
        tile = Tile.of(heads // kv_heads, kv.shape, self._form.dtype, shared_memory(self._form.device))
        reach = masks["UNTIL"] or places.table_SP.shape[1] * PAGE_TOKENS
        partitions = triton.cdiv(reach, PARTITION_KEYS)
        apart = self._are_apart(tokens, heads * value_dim, partitions)
        parts = tokens * heads * partitions if apart else 0
        part_tops, part_sums, part_out = (self._form.empty((parts, width)) for width in (1, 1, value_dim))
        blocks = kv_heads * triton.cdiv(heads // kv_heads, tile.group) * triton.cdiv(value_dim, tile.value_block)
        attend[(tokens, blocks, partitions if apart else 1)](
            q_THC, keys, values, *exponents_of(kv, places.layer), out_THV, part_tops, part_sums, part_out, sinks_H,
            float(scales[0]), float(scales[1]), places.positions_T, places.starts_S1, places.table_SP, places.sequences,
            places.table_SP.stride(0), partitions, **strides_of(keys, "K"), **strides_of(values, "V"), **masks,
            HEADS=heads, SHARING=heads // kv_heads, KEY_DIM=kv.shape.key_dim, VALUE_DIM=value_dim,
            KEY_MAIN=tile.key_main, KEY_REST=tile.key_rest, VALUE_BLOCK=tile.value_block, GROUP=tile.group,
            QUERIES=tile.queries, CAPPED=scales[1] > 0, APART=apart, SHARED=tile.shared,
            S_BLOCK=places.sequences_block, STAGES=tile.stages,
            num_warps=8 if tile.value_block > 128 else 4, **UNFUSED,
        )  # fmt: skip
        if apart:
            join[(tokens, triton.cdiv(heads, JOINED_HEADS))](
                part_tops, part_sums, part_out, out_THV, sinks_H, places.positions_T, places.starts_S1,
                places.sequences, partitions, **masks, HEADS=heads, VALUE_DIM=value_dim,
                VALUE_BLOCK=triton.next_power_of_2(value_dim), HEAD_BLOCK=JOINED_HEADS, QUERIES=tile.queries,
                S_BLOCK=places.sequences_block, **UNFUSED,
            )  # fmt: skip

    def _are_apart(self, tokens: int, width: int, partitions: int) -> bool:
        """Is every partition computed by programs of its own?"""
        if self._apart is not None:
            return self._apart
        return partitions > 1 and tokens <= APART_TOKENS and tokens * width * partitions * 4 <= APART_BYTES
