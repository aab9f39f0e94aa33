"""What the C++ kernels are handed beside arrays: KV memory, kinds of gates, and how a row is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from penstock.kernels import _native
from penstock.kernels.kinds import Activation, Gate
from penstock.kernels.ops import Sampled, SampleRow

ACTIVATIONS: Mapping[Activation, int] = MappingProxyType({kind: number for number, kind in enumerate(Activation)})
"""The kernels' numbers (cpp/family.hpp)."""


def gate_words(gate: Gate) -> tuple[int, float, float, float, bool]:
    """How the kernels are told of a gate."""
    return ACTIVATIONS[gate.activation], gate.alpha, gate.limit, gate.shift, gate.interleaved


@dataclass(frozen=True, slots=True)
class NativeKv:
    """KV memory of one worker: pages one after another."""

    memory: NDArray[np.uint32]
    handle: _native.KvMemory
    kv_heads: int
    head_dim: int


def draw_row(row: SampleRow) -> _native.DrawRow:
    """How the kernels are told to draw a row.  The arrays of ``row`` are read when it is drawn."""
    draw = _native.DrawRow(
        row.seed, row.position, row.choice, row.temperature, row.top_k, row.top_p, row.min_p, row.logprobs
    )
    if row.presence_penalty or row.frequency_penalty or row.repetition_penalty != 1.0:
        draw.penalise(
            row.presence_penalty,
            row.frequency_penalty,
            row.repetition_penalty,
            row.output_ids,
            row.output_counts,
            row.prompt_ids,
        )
    if len(row.bias_ids):
        draw.set_bias(row.bias_ids, row.bias_values)
    if len(row.banned_ids):
        draw.ban(row.banned_ids)
    if row.allowed is not None:
        draw.allow(row.allowed)
    return draw


def sampled(rows: list[SampleRow], answers: list[_native.Answer]) -> list[Sampled]:
    """The kernels' answers to these rows."""
    return [
        Sampled(token) if row.logprobs is None else Sampled(token, logprob, tuple(top))
        for row, (token, logprob, top) in zip(rows, answers, strict=True)
    ]
