"""How fast this machine multiplies a model's weights, measured in about a second on matrices of random numbers.

Neither the model's files nor its shapes are used: products with large matrices take as long as they have weights.  What
attention and the rest of a step take is left out, so a step takes longer, by a tenth or so for short contexts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from penstock.kernels.native import compression
from penstock.kernels.native.backend import NativeOps
from penstock.kernels.operands import PackedLinear

SIDE = 2048
"""Rows and columns of a matrix."""

PROBE_BYTES = 256 << 20
"""All matrices of one kind together: more than caches hold."""

CHUNK_ROWS = 64
"""As many rows are computed as fast as longer chunks of prompts."""

COMPRESSED_ROWS = (1, 8, CHUNK_ROWS)
"""Responses in a step, and a chunk of a prompt, that are measured with compressed weights, too."""

ROUNDS = 3


@dataclass(frozen=True, slots=True)
class ProbedSpeed:
    """Seconds of products with the weights that one token is multiplied with, in steps of the model."""

    decode_s: float  # of one response
    prefill_tokens_s: float  # tokens of prompts a second
    compressed: Mapping[int, float] = field(default_factory=dict[int, float])
    """Rows -> how many times as fast compressed weights are; empty where they are unpacked when they are loaded."""


def probe_speed(family: str, dtype: str, threads: int, weights: int) -> ProbedSpeed:
    """The speed of a model whose tokens are multiplied with so many ``weights``, held in ``dtype``.

    Raises KernelError for a family that is not one of the C++ kernels of this machine.
    """
    ops = NativeOps(family, dtype, threads=threads)
    values = np.random.default_rng(0).standard_normal((SIDE, SIDE), dtype=np.float32) * np.float32(0.02)
    matrix = values.astype(ml_dtypes.bfloat16) if dtype == "bf16" else values
    count = PROBE_BYTES // matrix.nbytes
    plain = [ops.pack_linear(matrix) for _ in range(count)]
    share = weights / (count * SIDE * SIDE)
    rows_s = {rows: _seconds(ops, plain, rows) for rows in (1, CHUNK_ROWS)}
    return ProbedSpeed(
        decode_s=share * rows_s[1],
        prefill_tokens_s=CHUNK_ROWS / (share * rows_s[CHUNK_ROWS]),
        compressed=_compressed_gains(ops, plain, matrix) if dtype == "bf16" else {},
    )


def _compressed_gains(ops: NativeOps, plain: Sequence[PackedLinear], matrix: np.ndarray) -> dict[int, float]:
    coded = compression.compress(matrix.view(np.uint16))
    if coded is None or (first := ops.pack_compressed([coded])) is None:
        return {}
    rest = [packed for _ in plain[1:] if (packed := ops.pack_compressed([coded])) is not None]
    compressed = [first, *rest]
    return {rows: _seconds(ops, plain, rows) / _seconds(ops, compressed, rows) for rows in COMPRESSED_ROWS}


def _seconds(ops: NativeOps, weights: Sequence[PackedLinear], rows: int) -> float:
    """The median time of products of so many rows with each of the weights."""
    x_TK = ops.compute(np.random.default_rng(1).standard_normal((rows, SIDE)))
    return statistics.median(_timed(lambda: [ops.linear(x_TK, weight) for weight in weights]) for _ in range(ROUNDS))


def _timed(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun
