"""Tensors that a file has in slices: runs of rows or columns, each on its own, so that a rank reads those it needs.

A slice of a plain matrix is a plain matrix, one of a compressed matrix has its own three sections; slices follow one
another.  Each has a checksum like that of a tensor, and the tensor's is made of theirs: a rank proves what it reads
without the rest.  A tensor that is not cut is one slice here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.kernels.compressed import AnyCompressed, CompressedMatrix
from penstock.kernels.compressed_cuts import cut_compressed, join_columns, join_rows
from penstock.weights.compression_format import (
    COLUMNS,
    GPU,
    ROWS,
    OriginalTensor,
    SliceEntry,
    checksum,
    gpu_sections_of,
    sections,
    sections_of,
    sliced_checksum,
)
from penstock.weights.safetensors_header import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class TensorCut:
    """Where a matrix is cut: ends of runs of its rows or columns, as it is stored; the last is that of the matrix."""

    axis: str  # "rows" or "columns"
    ends: tuple[int, ...]


Cuts = Mapping[str, TensorCut]
"""By tensor; others are stored whole."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Rows or columns ``first`` to ``stop`` of a tensor, or all of it; then ``name`` is the tensor's."""

    name: str
    tensor: str
    axis: str  # empty: the whole tensor
    first: int
    stop: int
    begin: int  # of its bytes among the tensor's
    nbytes: int
    entry: OriginalTensor | None  # its own shape and checksum; None in a file that has no table


def slices_of(name: str, original: OriginalTensor | None, nbytes: int) -> tuple[TensorSlice, ...]:
    """The slices of a tensor that takes ``nbytes`` in its file."""
    if original is None or not original.slices:
        return (TensorSlice(name, name, "", 0, 0, 0, nbytes, original),)
    found: list[TensorSlice] = []
    first = begin = 0
    for own in original.slices:
        entry = slice_entry(original, own.end - first, own.checksum)
        text = slice_name(name, original.axis, first, own.end)
        found.append(TensorSlice(text, name, original.axis, first, own.end, begin, own.nbytes, entry))
        first, begin = own.end, begin + own.nbytes
    return tuple(found)


def slice_name(name: str, axis: str, first: int, stop: int) -> str:
    """What a slice is called in its checksum."""
    return f"{name}:{axis}:{first}:{stop}"


def slice_entry(original: OriginalTensor, count: int, found: str = "") -> OriginalTensor:
    """What would be said of ``count`` of its rows or columns if they were a tensor."""
    n, k = original.shape
    shape = (count, k) if original.axis == ROWS else (n, count)
    return msgspec.structs.replace(original, shape=shape, checksum=found, axis="", slices=())


def matrix_of(original: OriginalTensor, stored: memoryview, where: str) -> AnyCompressed | None:
    """The compressed matrix in a tensor's bytes, unchecked but for its sizes; None if it is plain.

    Raises ModelError, beginning with ``where``.
    """
    if original.code is None:
        return None
    return joined_matrix(slices_of(where, original, stored.nbytes), stored, where)


def joined_matrix(slices: Sequence[TensorSlice], stored: memoryview, where: str) -> AnyCompressed | None:
    """The compressed matrix of slices that follow one another; ``stored`` are all bytes of their tensor."""
    found: list[CompressedMatrix] = []
    for own in slices:
        entry = own.entry
        if entry is None or entry.code is None:
            return None
        (n, k), raw = entry.shape, stored[own.begin : own.begin + own.nbytes]
        if entry.layout == GPU:
            return gpu_sections_of(raw, (n, k), entry.code[0], where)
        found.append(sections_of(raw, (n, k), entry.code, where))
    return join_columns(found) if slices[0].axis == COLUMNS else join_rows(found)


def joined_bytes(slices: Sequence[TensorSlice], stored: memoryview) -> memoryview:
    """The plain bytes of slices that follow one another: a view of ``stored`` unless columns must be joined."""
    if slices[0].axis != COLUMNS:
        return stored[slices[0].begin : slices[-1].begin + slices[-1].nbytes]
    arrays = []
    for own in slices:
        assert own.entry is not None
        raw = np.frombuffer(stored[own.begin : own.begin + own.nbytes], np.uint8)
        arrays.append(raw.reshape(own.entry.shape[0], -1))
    return np.concatenate(arrays, axis=1).reshape(-1).data.cast("B").toreadonly()


def stored_checksum(name: str, original: OriginalTensor, stored: memoryview) -> str:
    """The checksum of a tensor by its bytes in the file."""
    if not original.slices:
        return checksum(name, original, [stored])
    return sliced_checksum(
        name,
        original,
        [
            checksum(own.name, own.entry, [stored[own.begin : own.begin + own.nbytes]])
            for own in slices_of(name, original, stored.nbytes)
            if own.entry is not None
        ],
    )


def encode_slices(
    name: str, original: OriginalTensor, content: memoryview | AnyCompressed, cut: TensorCut | None
) -> tuple[OriginalTensor, list[memoryview]]:
    """A tensor's entry with its checksums, and the sections of bytes that the file has of it.

    ``original``: without slices and checksums.  ``content``: of a plain tensor its bytes.
    """
    if cut is None:
        own = [content] if isinstance(content, memoryview) else sections(content)
        return msgspec.structs.replace(original, checksum=checksum(name, original, own)), own
    original = msgspec.structs.replace(original, axis=cut.axis)
    entries: list[SliceEntry] = []
    written: list[memoryview] = []
    first = 0
    for end in cut.ends:
        own = _cut_sections(original, content, (first, end))
        found = checksum(slice_name(name, cut.axis, first, end), slice_entry(original, end - first), own)
        entries.append(SliceEntry(end, sum(section.nbytes for section in own), found))
        written += own
        first = end
    sums = sliced_checksum(name, original, [entry.checksum for entry in entries])
    return msgspec.structs.replace(original, slices=tuple(entries), checksum=sums), written


def _cut_sections(
    original: OriginalTensor, content: memoryview | AnyCompressed, run: tuple[int, int]
) -> list[memoryview]:
    by_rows = original.axis == ROWS
    if not isinstance(content, memoryview):
        part = cut_compressed(content, run if by_rows else None, None if by_rows else run)
        assert part is not None, "cuts are where panels and chunks of blocks end"
        return sections(part)
    first, end = run
    table = np.frombuffer(content, np.uint8).reshape(original.shape[0], -1)
    size = DTYPE_BYTES[original.dtype]
    own: NDArray[np.uint8] = table[first:end] if by_rows else table[:, first * size : end * size]
    return [np.ascontiguousarray(own).reshape(-1).data.cast("B")]
