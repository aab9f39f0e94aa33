"""Arguments of the C++ kernels that are not arrays: KV memory, gates, routing, experts, attention, sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import KernelError
from penstock.kernels import _native
from penstock.kernels.native.memory import StepBuffers
from penstock.kernels.operands import (
    Activation,
    Array,
    AttentionSpec,
    Gate,
    KvShape,
    PackedExperts,
    PackedLinear,
    Routing,
    Score,
)
from penstock.kernels.sampling import Sampled, SampleRow


@dataclass(frozen=True, slots=True)
class NativeForm:
    """What all parts of one backend share: the kernel family, the compute type, where results go."""

    family: str
    compute_dtype: str
    dtype: np.dtype[Any]  # arrays of the compute type
    per_cell: int  # numbers of the compute type in 32 bits
    buffers: StepBuffers

    @classmethod
    def of(cls, family: str, compute_dtype: str, buffers: StepBuffers) -> NativeForm:
        """For a compute type "bf16" or "fp32"."""
        narrow = compute_dtype == "bf16"
        dtype: np.dtype[Any] = np.dtype(np.uint16 if narrow else np.float32)
        return cls(family, compute_dtype, dtype, 2 if narrow else 1, buffers)


ACTIVATIONS: Mapping[Activation, int] = MappingProxyType({kind: number for number, kind in enumerate(Activation)})
"""The kernels' numbers (cpp/families/family.hpp)."""


def gate_words(gate: Gate) -> tuple[int, float, float, float, bool]:
    """The kernels' form of a gate."""
    return ACTIVATIONS[gate.activation], gate.alpha, gate.limit, gate.shift, gate.interleaved


def fill_weights(weights: _native.Weights, weight_NK: NDArray[Any], source: str) -> None:
    """Pack a matrix that lies with its rows, or with its columns, one after another; any other is copied first."""
    turned = weight_NK.flags.f_contiguous and not weight_NK.flags.c_contiguous
    raw = weight_NK.T if turned else np.ascontiguousarray(weight_NK)
    (weights.fill_turned if turned else weights.fill)(raw if source == "fp32" else raw.view(np.uint16), source)


_SCORES: Mapping[Score, int] = MappingProxyType({score: number for number, score in enumerate(Score)})


def routing_words(how: Routing) -> _native.RoutingWords:
    """The kernels' form of a routing."""
    groups = (how.groups, how.groups_kept, how.pairs)
    return how.experts, how.top_k, _SCORES[how.score], how.normalised, *groups, how.factor


def with_zero_vectors(vectors: Sequence[Array | None] | None) -> list[Array] | None:
    """The vectors; in place of None, zeros."""
    if not vectors:
        return None
    known = next(vector for vector in vectors if vector is not None)
    return [np.zeros_like(known) if vector is None else vector for vector in vectors]


def packed_experts(
    matrices: tuple[Sequence[PackedLinear | None], Sequence[PackedLinear | None]],
    biases: tuple[Sequence[Array] | None, Sequence[Array] | None],
    per_cell: int,
    weighs_input: bool,
) -> PackedExperts:
    """(gate_up, down) of a layer's experts, None for one of another rank, and their biases.  Raises ValueError unless
    all have one shape."""
    wide, narrow = (np.stack(list(own)) if own else None for own in biases)
    gate_ups, downs = ([None if weight is None else weight.data for weight in own] for own in matrices)
    data = _native.Experts(gate_ups, downs, wide, narrow, per_cell, weighs_input)
    inward, outward = ([weight for weight in own if weight is not None] for own in matrices)
    nbytes, partial = sum(weight.nbytes for weight in (*inward, *outward)), len(outward) < len(downs)
    return PackedExperts(len(downs), inward[0].k, outward[0].k, outward[0].n, data, nbytes, partial)


@dataclass(frozen=True, slots=True)
class NativeKv:
    """KV memory of one worker: pages one after another."""

    memory: NDArray[np.uint32]
    handle: _native.KvMemory
    shape: KvShape


def attention_rule(spec: AttentionSpec) -> _native.AttentionRule:
    """The kernels' form of a spec.  Raises KernelError for limits that are not above 0 or exclude each other."""
    for name in ("window", "chunk", "softcap", "until"):
        value = getattr(spec, name)
        if value is not None and not value > 0:
            raise KernelError(f"{name} must be above 0, not {value}")
    if spec.until is not None and (spec.window is not None or spec.chunk is not None):
        raise KernelError("until goes with neither window nor chunk")
    sparse = spec.sparse
    words = None if sparse is None else (sparse.sinks, sparse.window, sparse.chosen, sparse.start)
    return _native.AttentionRule(
        spec.scale, spec.window or 0, spec.chunk or 0, spec.softcap or 0.0, spec.sinks_H, spec.until or 0, words
    )


def angle_table(
    angles_PC2: NDArray[np.float64], factor: float, *, interleaved: bool, axes_C2: Sequence[int] | None = None
) -> _native.Rope:
    """``axes_C2`` as in ``Ops.rope_table``."""
    table = np.empty((len(angles_PC2), 2, angles_PC2.shape[1]), np.float32)
    table[:, 0] = np.cos(angles_PC2) * factor
    table[:, 1] = np.sin(angles_PC2) * factor
    return _native.Rope(table, interleaved, None if axes_C2 is None else np.array(axes_C2, np.uint8))


def draw_row(row: SampleRow) -> _native.DrawRow:
    """The kernels' form of a row to sample.  The arrays of ``row`` are read when it is sampled."""
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


def sampled_tokens(rows: list[SampleRow], results: list[_native.Answer]) -> list[Sampled]:
    """The kernels' results for these rows."""
    return [
        Sampled(token) if row.logprobs is None else Sampled(token, logprob, tuple(top))
        for row, (token, logprob, top) in zip(rows, results, strict=True)
    ]
