"""Weights in the kernels' memory: loaded from files, and packed from quantized matrices, by several threads.

Each tensor is read, checked and packed piece by piece (cpp/host/weight_loader.hpp), and codes are unpacked a few rows
at a time (cpp/quantized/quantized_packing.*), so the peak is the packed weights themselves.  The threads end with the
call: the process forks afterwards.  Knows offsets in files, no file formats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import KernelError
from penstock.kernels import _native
from penstock.kernels.compressed import BLOCK_COLUMNS, CompressedMatrix, ends_with_blocks, panels_of
from penstock.kernels.native.compression import ESCAPE_PADDING, native_weights
from penstock.kernels.native.memory import WeightArena
from penstock.kernels.operands import PackedLinear
from penstock.kernels.quantization import (
    PANEL_ROWS,
    SUPER_COLUMNS,
    UNIT_COLUMNS,
    CodeType,
    IntegerCodes,
    QuantizedMatrix,
    fits_kernels,
    integers_of,
    padded_rows,
    panel_records,
)
from penstock.kernels.weight_source import LoadFailed, ProgressCallback, StoredTensor, WeightLoading

WATCH_EVERY_S = 0.05
"""Interval of progress callbacks."""


@dataclass(frozen=True, slots=True)
class LoadingBackend:
    """What loading needs of a backend."""

    arena: WeightArena
    family: str
    per_cell: int
    keeps_compressed: Callable[[Sequence[CompressedMatrix], tuple[int, ...]], bool]
    vector: Callable[[NDArray[Any]], Any]


class NativeWeightLoading(WeightLoading):
    """Loads weights into an arena with C++ threads."""

    def __init__(self, backend: LoadingBackend) -> None:
        self._backend = backend
        self._native = _native.Loading()
        self._names: list[str] = []
        self._indices: dict[str, int] = {}
        self._finish: dict[str, Callable[[], Any]] = {}

    def add_vector(self, name: str, tensor: StoredTensor, dtype: np.dtype[Any]) -> None:
        raw = np.empty(tensor.columns * dtype.itemsize, np.uint8)
        self._native.add_bytes(self._tensor(tensor.name), tensor.file, tensor.offset, raw)
        self._finish[name] = lambda: self._backend.vector(raw.view(dtype))

    def add_matrix(self, name: str, parts: list[StoredTensor], segments: tuple[int, ...] | None) -> None:
        n, k = sum(part.rows for part in parts), parts[0].columns
        ends, per_cell = list(segments or (k,)), self._backend.per_cell
        cells = self._backend.arena.cells(_native.Weights.cells_needed(n, k, ends, per_cell))
        weights = _native.Weights(cells, n, k, ends, per_cell)
        first = 0
        for part in parts:
            index = self._tensor(part.name)
            self._native.add_rows(index, part.file, part.offset, weights, part.dtype, first, part.rows)
            first += part.rows
        packed = PackedLinear(n=n, k=k, segments=tuple(ends), data=weights, nbytes=cells.nbytes)
        self._finish[name] = lambda: packed

    def add_compressed(
        self,
        name: str,
        parts: list[tuple[StoredTensor, CompressedMatrix]],
        segments: tuple[int, ...] | None,
    ) -> bool:
        matrices = [matrix for _, matrix in parts]
        stored, last = parts[-1]
        ends = segments or (stored.column + last.k,)
        if not self._backend.keeps_compressed(matrices, ends):
            return self._add_decoded(name, parts, ends)
        if stored.column:
            return False
        weight = CompressedBuffers(self._backend.arena, matrices, ends)
        counted = np.zeros(sum(panels_of(matrix.n) for matrix in matrices), np.uint32)
        panel = 0
        for (stored, matrix), place in zip(parts, weight.places, strict=True):
            index, offset = self._tensor(stored.name), stored.offset
            self._native.add_bytes(index, stored.file, offset, place.counts.view(np.uint8))
            offset += place.counts.nbytes
            blocks_a_panel = -(-matrix.k // BLOCK_COLUMNS)
            panels = counted[panel : (panel := panel + panels_of(matrix.n))]
            self._native.add_panels(index, stored.file, offset, place.blocks, blocks_a_panel, panels)
            self._native.add_bytes(index, stored.file, offset + place.blocks.nbytes, place.escapes)
        self._finish[name] = lambda: weight.finish(counted)
        return True

    def _add_decoded(
        self, name: str, parts: list[tuple[StoredTensor, CompressedMatrix]], ends: tuple[int, ...]
    ) -> bool:
        """Plain weights, each piece decoded as it is read; False where panels and blocks do not fit them."""
        matrices, k = [matrix for _, matrix in parts], ends[-1]
        columns = tuple(stored.column for stored, _ in parts)
        if self._backend.per_cell != 2 or not ends_with_blocks(matrices, (*columns, *ends)):
            return False
        n = sum(matrix.n for stored, matrix in parts if stored.column == 0)
        cells = self._backend.arena.cells(_native.Weights.cells_needed(n, k, list(ends), 2))
        weights = _native.Weights(cells, n, k, list(ends), 2)
        first = 0
        for stored, matrix in parts:
            index, code = self._tensor(stored.name), (matrix.base, matrix.step)
            counts = np.zeros(panels_of(matrix.n), np.uint32)
            escapes = np.zeros(matrix.escapes.nbytes + ESCAPE_PADDING, np.uint8)
            place, size = (first, stored.column), (matrix.n, matrix.k)
            into = weights, self._backend.family, place, size
            self._native.add_decoded(index, stored.file, stored.offset, *into, code, counts, escapes)
            first += matrix.n if stored.column + matrix.k == k else 0
        packed = PackedLinear(n=n, k=k, segments=ends, data=weights, nbytes=cells.nbytes)
        self._finish[name] = lambda: packed
        return True

    def run(self, threads: int, watch: ProgressCallback) -> dict[str, Any]:
        total = self._native.all_bytes()
        try:
            self._native.start(threads)
            while not self._native.wait(WATCH_EVERY_S):
                watch(self._native.done_bytes(), total)
        finally:
            self._native.stop()
        failed = self._native.failure()
        if failed is not None:
            raise LoadFailed(self._names[failed[0]], failed[1])
        watch(total, total)
        return {name: _finished(name, finish) for name, finish in self._finish.items()}

    def checksum(self, tensor: str, text: str) -> str:
        return self._native.checksum(self._indices[tensor], text).hex()

    def _tensor(self, name: str) -> int:
        index = self._native.add_tensor()
        self._names.append(name)
        self._indices.setdefault(name, index)
        return index


@dataclass(frozen=True, slots=True)
class SectionBuffers:
    """Where the sections of one part go."""

    counts: NDArray[np.uint32]
    blocks: NDArray[np.uint8]
    escapes: NDArray[np.uint8]


class CompressedBuffers:
    """One weight that stays compressed: memory for its parts, one below the other, to be filled and finished."""

    def __init__(self, arena: WeightArena, parts: list[CompressedMatrix], ends: tuple[int, ...]) -> None:
        self._parts = parts
        self._ends = ends
        self._blocks = arena.bytes(sum(part.blocks.nbytes for part in parts))
        self._escapes = arena.bytes(sum(part.escapes.nbytes for part in parts) + ESCAPE_PADDING)
        self.places: list[SectionBuffers] = []
        block = escape = 0
        for part in parts:
            blocks = self._blocks[block : (block := block + part.blocks.nbytes)]
            escapes = self._escapes[escape : (escape := escape + part.escapes.nbytes)]
            self.places.append(SectionBuffers(np.zeros_like(part.counts), blocks, escapes))

    def finish(self, counted: NDArray[np.uint32] | None = None) -> PackedLinear:
        """``counted``: escapes of each panel by its planes, if known.  Raises KernelError if sections contradict."""
        read = [
            CompressedMatrix(part.n, part.k, part.base, part.step, place.counts, place.blocks, place.escapes)
            for part, place in zip(self._parts, self.places, strict=True)
        ]
        weights = native_weights(read, self._ends, self._blocks, self._escapes, counted)
        nbytes = self._blocks.nbytes + self._escapes.nbytes
        return PackedLinear(n=sum(p.n for p in read), k=read[0].k, segments=self._ends, data=weights, nbytes=nbytes)


def _finished(name: str, finish: Callable[[], Any]) -> Any:
    try:
        return finish()
    except KernelError as error:
        raise LoadFailed(name, f"damaged, {error}") from error


CODES_AT_A_TIME = 1 << 20
"""Weights that a thread unpacks at once: what it works on stays in its cache."""


def pack_quantized(
    arena: WeightArena, parts: list[QuantizedMatrix], ends: tuple[int, ...], threads: int, *, int8_inputs: bool
) -> PackedLinear | None:
    """The matrices, one below the other; None unless they fit.

    ``int8_inputs``: they are multiplied with inputs of 8 bits.  Raises KernelError if their codes are not integers.
    """
    if not fits_kernels(parts, ends):
        return None
    n, k = sum(part.n for part in parts), parts[0].k
    weights = _native.QuantWeights(n, k, list(ends))
    nbytes = 0
    jobs: list[Callable[[], None]] = []
    for part in parts:
        codes, numbers = _room(arena, part)
        integers = integers_of(part.format) if int8_inputs else None
        jobs += _jobs(part, codes, numbers, integers)
        nbytes += codes.nbytes + numbers.nbytes
        form = part.format
        table = form.table().view(np.uint16)
        sizes = (int(form.scale), int(form.minimum), min(form.group, -(-k // UNIT_COLUMNS) * UNIT_COLUMNS))
        weights.add_part(codes, numbers, table, part.n, form.bits, sizes)
        if integers is not None:
            own = np.array(integers.integers[:16], np.int64).astype(np.int8)
            weights.set_integers((int(integers.kind), integers.unit, integers.offset), own)
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
    record = panel_records(padded_rows(part.read(0, 1)), form)
    wide = SUPER_COLUMNS if form.has_super else form.group
    assert len(record) % -(-part.k // wide) == 0
    return codes, arena.bytes(panels * len(record))


def _jobs(
    part: QuantizedMatrix, codes: NDArray[np.uint8], numbers: NDArray[np.uint8], integers: IntegerCodes | None
) -> list[Callable[[], None]]:
    """One for some panels each.  ``integers``: of codes that inputs of 8 bits are multiplied with."""
    rows = max(1, CODES_AT_A_TIME // part.k // PANEL_ROWS) * PANEL_ROWS
    panels = -(-part.n // PANEL_ROWS)
    codes_PB, numbers_PB = codes.reshape(panels, -1), numbers.reshape(panels, -1)
    stored = np.arange(256, dtype=np.uint8)
    if integers is not None and integers.kind is CodeType.BYTE:
        stored = np.array(integers.integers, np.int64).astype(np.uint8)

    def job(first: int) -> None:
        read = padded_rows(part.read(first, min(part.n, first + rows)))
        own = slice(first // PANEL_ROWS, (first + len(read.codes_NK)) // PANEL_ROWS)
        codes_NK, to = np.ascontiguousarray(read.codes_NK), codes_PB[own].reshape(-1)
        if integers is None:
            _native.pack_codes(codes_NK, part.format.bits, to)
        else:
            _native.pack_quads(codes_NK, stored, part.format.bits, to)
        numbers_PB[own] = panel_records(read, part.format).reshape(len(numbers_PB[own]), -1)

    return [lambda first=first: job(first) for first in range(0, part.n, rows)]  # type: ignore[misc]
