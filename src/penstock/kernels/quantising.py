"""Packs quantized matrices into the kernels' memory, with threads that end with the call
(cpp/quantized/quantized_packing.*).

Codes are unpacked a few rows at a time, so the peak is the packed weights themselves.  Knows no files.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from penstock.kernels import _native
from penstock.kernels.memory import WeightArena
from penstock.kernels.operands import PackedLinear
from penstock.kernels.quantised import (
    PANEL_ROWS,
    SUPER_COLUMNS,
    UNIT_COLUMNS,
    QuantizedMatrix,
    fits,
    padded,
    records,
)

CODES_AT_A_TIME = 1 << 20
"""Weights that a thread unpacks at once: what it works on stays in its cache."""


def pack(arena: WeightArena, parts: list[QuantizedMatrix], ends: tuple[int, ...], threads: int) -> PackedLinear | None:
    """The matrices, one below the other; None unless they fit."""
    if not fits(parts, ends):
        return None
    n, k = sum(part.n for part in parts), parts[0].k
    weights = _native.QuantWeights(n, k, list(ends))
    nbytes = 0
    jobs: list[Callable[[], None]] = []
    for part in parts:
        codes, numbers = _room(arena, part)
        jobs += _jobs(part, codes, numbers)
        nbytes += codes.nbytes + numbers.nbytes
        form = part.format
        table = form.table().view(np.uint16)
        sizes = (int(form.scale), int(form.minimum), min(form.group, -(-k // UNIT_COLUMNS) * UNIT_COLUMNS))
        weights.add_part(codes, numbers, table, part.n, form.bits, sizes)
    if parts[0].order is not None:
        weights.set_order(np.ascontiguousarray(parts[0].order, np.int32))
    if threads < 2 or len(jobs) < 2:
        for job in jobs:
            job()
    else:
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(job) for job in jobs]:
                done.result()
    return PackedLinear(n=n, k=k, segments=ends, data=weights, nbytes=nbytes)


def _room(arena: WeightArena, part: QuantizedMatrix) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    panels, form = -(-part.n // PANEL_ROWS), part.format
    codes = arena.bytes(panels * (part.k // UNIT_COLUMNS) * 64 * form.bits)
    record = records(padded(part.read(0, 1)), form)
    wide = SUPER_COLUMNS if form.has_super else form.group
    assert len(record) % -(-part.k // wide) == 0
    return codes, arena.bytes(panels * len(record))


def _jobs(part: QuantizedMatrix, codes: NDArray[np.uint8], numbers: NDArray[np.uint8]) -> list[Callable[[], None]]:
    """One for some panels each."""
    rows = max(1, CODES_AT_A_TIME // part.k // PANEL_ROWS) * PANEL_ROWS
    panels = -(-part.n // PANEL_ROWS)
    codes_PB, numbers_PB = codes.reshape(panels, -1), numbers.reshape(panels, -1)

    def job(first: int) -> None:
        read = padded(part.read(first, min(part.n, first + rows)))
        own = slice(first // PANEL_ROWS, (first + len(read.codes_NK)) // PANEL_ROWS)
        _native.pack_codes(np.ascontiguousarray(read.codes_NK), part.format.bits, codes_PB[own].reshape(-1))
        numbers_PB[own] = records(read, part.format).reshape(len(numbers_PB[own]), -1)

    return [lambda first=first: job(first) for first in range(0, part.n, rows)]  # type: ignore[misc]
