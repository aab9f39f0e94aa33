"""Decoded copies of compressed weights: measuring where they are faster, and making them (``kernels.decoded_copies``
decides which).

Measuring starts the kernels' threads: it is for a process that does not fork afterwards.  The threads that decode end
with the call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from penstock.kernels import _native
from penstock.kernels.compressed import PANEL_ROWS, panels_of
from penstock.kernels.decoded_copies import MEASURED_ROWS, MEASURING_S, ProductTimes, ShapeTimes
from penstock.kernels.native.memory import WeightArena
from penstock.kernels.native.weights import WATCH_EVERY_S
from penstock.kernels.operands import PackedLinear

ROUNDS = 3
"""Products of each kind and number of rows, of which the fastest counts: other processes only make them slower."""

SLICE_OUTPUTS = 128
"""Outputs of a slice for each thread: enough work to share out."""

MIN_SLICE_OUTPUTS = 256

SLICES_BYTES = 64 << 20
"""Decoded slices of one shape together: more than most caches hold, so that each product reads its weights from
memory, as a step does."""

DECODED_AT_A_TIME = 1 << 20
"""Weights that a thread decodes at once."""

Shape = tuple[int, ...]
"""K and the ends of its segments: what the speed of a product depends on, besides its outputs."""


def shape_of(weight: PackedLinear) -> Shape:
    """What measurements of this weight are found by."""
    return weight.k, *weight.segments


def compressed_weights(weights: Mapping[str, Any]) -> dict[str, PackedLinear]:
    """The compressed ones that can have a copy, by name; one that has several names only once.

    Parts of others cannot: they read the copy of the whole, if that has one.
    """
    found: dict[int, tuple[str, PackedLinear]] = {}
    for name, weight in weights.items():
        data = weight.data if isinstance(weight, PackedLinear) else None
        if isinstance(data, _native.CompressedWeights) and data.whole_blocks and not data.is_part:
            found.setdefault(id(data), (name, weight))
    return dict(found.values())


def copy_bytes(weight: PackedLinear) -> int:
    """Bytes of a decoded copy."""
    return 4 * _native.Weights.cells_needed(weight.n, weight.k, list(weight.segments), 2)


def add_copies(
    family: str,
    chosen: Iterable[tuple[PackedLinear, int]],
    threads: int = 1,
    keep_watch: Callable[[], None] = lambda: None,
) -> int:
    """Decode these weights; products of the given number of rows and more read the copies from now on.

    For weights of which no step has been recorded yet: those go on without.  ``keep_watch`` is called now and then.
    Returns the bytes of the copies.  Raises OSError, and changes nothing, where there is no memory for them.
    """
    pairs = list(chosen)
    kernels, arena = _native.CompressedKernels(family), WeightArena()
    total = sum(copy_bytes(weight) for weight, _ in pairs)
    arena.reserve(total)
    jobs: list[Callable[[], None]] = []
    made = []
    for weight, rows in pairs:
        cells = arena.cells(copy_bytes(weight) // 4)
        jobs += _decoding_jobs(kernels, weight, cells)
        made.append((weight, cells, rows))
    _run_all(jobs, threads, keep_watch)
    for weight, cells, rows in made:
        weight.data.keep_decoded(cells, rows)
    return total


def measure_shapes(
    family: str, weights: Sequence[PackedLinear], threads: int, budget_s: float = MEASURING_S
) -> dict[Shape, ShapeTimes]:
    """Times of products with slices of these weights, by shape, as ``threads`` threads take now; shapes for which the
    time did not suffice are left out."""
    end = time.perf_counter() + budget_s
    _native.set_threads(threads)
    by_shape: dict[Shape, list[PackedLinear]] = {}
    for weight in weights:
        by_shape.setdefault(shape_of(weight), []).append(weight)
    probes = {}
    for shape, own in by_shape.items():
        if time.perf_counter() < end:
            probes[shape] = _ShapeProbe(family, own, threads)
    for _ in range(ROUNDS):
        for probe in probes.values():
            for rows in MEASURED_ROWS:
                if time.perf_counter() > end:
                    break
                probe.measure(rows)
    found = {shape: probe.times() for shape, probe in probes.items()}
    return {shape: times for shape, times in found.items() if len(times.by_rows) == len(MEASURED_ROWS)}


class _ShapeProbe:
    """Slices of weights of one shape, compressed and decoded, and the times of products with them."""

    def __init__(self, family: str, weights: Sequence[PackedLinear], threads: int) -> None:
        k, ends = weights[0].k, list(weights[0].segments)
        widest = max(weight.n for weight in weights)
        outputs = min(max(MIN_SLICE_OUTPUTS, SLICE_OUTPUTS * threads), panels_of(widest) * PANEL_ROWS)
        self._slice_bytes = 4 * _native.Weights.cells_needed(outputs, k, ends, 2)
        self._compressed = list(_slices(weights, outputs, max(2, SLICES_BYTES // self._slice_bytes)))
        self._kernels = _native.CompressedKernels(family)
        self._plain_kernels = _native.Kernels(family, "bf16")
        self._plain: list[tuple[_native.Weights, int]] = []
        jobs: list[Callable[[], None]] = []
        for part in self._compressed:
            cells = np.empty(_native.Weights.cells_needed(part.n, k, ends, 2), np.uint32)
            jobs += _decoding_jobs(self._kernels, part, cells)
            self._plain.append((_native.Weights(cells, part.n, k, ends, 2), part.n))
        _run_all(jobs, threads)
        values = np.random.default_rng(0).standard_normal((max(MEASURED_ROWS), k), np.float32)
        self._x_TK = values.astype(bfloat16).view(np.uint16)
        self._out = np.empty((max(MEASURED_ROWS), outputs), np.float32)
        self._next = 0
        self._fastest: dict[int, ProductTimes] = {}
        self._product(MEASURED_ROWS[0], self._plain_kernels, self._plain[0][0], self._plain[0][1])  # wakes the threads

    def measure(self, rows: int) -> None:
        """One product of each kind with so many rows, with the next slice."""
        index = self._next % len(self._compressed)
        self._next += 1
        part, (plain, outputs) = self._compressed[index], self._plain[index]
        scale = self._out.shape[1] / outputs  # the last slice of a matrix may be shorter
        own = ProductTimes(
            scale * self._product(rows, self._kernels, part.data, outputs),
            scale * self._product(rows, self._plain_kernels, plain, outputs),
        )
        known = self._fastest.get(rows, own)
        self._fastest[rows] = ProductTimes(min(known.compressed, own.compressed), min(known.plain, own.plain))

    def times(self) -> ShapeTimes:
        return ShapeTimes(self._slice_bytes, self._fastest)

    def _product(self, rows: int, kernels: Any, weight: Any, outputs: int) -> float:
        out_TN = self._out.reshape(-1)[: rows * outputs].reshape(rows, outputs)
        begun = time.perf_counter()
        kernels.linear(self._x_TK[:rows], weight, out_TN, False)
        return time.perf_counter() - begun


def _slices(weights: Sequence[PackedLinear], outputs: int, most: int) -> Iterable[PackedLinear]:
    """Some outputs of each weight in turn, up to ``most`` slices: first ones of all weights, then second ones.  Those
    that would be less than half as large are left out, unless there are no others."""
    widest = max(weight.n for weight in weights)
    found = 0
    for first in range(0, widest, outputs):
        for weight in weights:
            stop = min(weight.n, first + outputs)
            if stop - first < min(outputs, widest) // 2:
                continue
            yield PackedLinear(stop - first, weight.k, weight.segments, weight.data.rows(first, stop), 0)
            found += 1
            if found == most:
                return


def _decoding_jobs(
    kernels: _native.CompressedKernels, weight: PackedLinear, cells: NDArray[np.uint32]
) -> list[Callable[[], None]]:
    """One for some panels each."""
    panels = panels_of(weight.n)
    each = max(1, DECODED_AT_A_TIME // (PANEL_ROWS * weight.k))
    cells_PC = cells.reshape(panels, -1)

    def job(panel: int) -> None:
        kernels.decode_cells(weight.data, panel, cells_PC[panel : panel + each].reshape(-1))

    return [lambda panel=panel: job(panel) for panel in range(0, panels, each)]  # type: ignore[misc]


def _run_all(jobs: Sequence[Callable[[], None]], threads: int, keep_watch: Callable[[], None] = lambda: None) -> None:
    watched = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for done in [pool.submit(job) for job in jobs]:
                done.result()
                if time.monotonic() > watched + WATCH_EVERY_S:
                    keep_watch()
                    watched = time.monotonic()
        finally:
            pool.shutdown(cancel_futures=True)
