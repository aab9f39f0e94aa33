"""Which tensors of a checkpoint make which weight of a model: plain data, filled in by a family.

Several tensors may be one weight (queries, keys and values are one matrix product): their rows follow one another.
One tensor may hold several weights (experts in a stack, gate and up row by row), or a weight the other way round.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ModelError
from penstock.kernels.compressed import AnyCompressed
from penstock.kernels.compressed_cuts import cut_compressed
from penstock.kernels.operands import HeadColumns
from penstock.kernels.quantization import QuantizedMatrix
from penstock.weights.checkpoint_reader import Checkpoint
from penstock.weights.computed_tensor import ComputedTensor
from penstock.weights.quantization.base import QuantizedTensor


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Rows ``first``, ``first + step``, ... below ``stop``."""

    first: int
    stop: int
    step: int = 1

    @property
    def count(self) -> int:
        return len(range(self.first, self.stop, self.step))


@dataclass(frozen=True, slots=True)
class HeadGroups:
    """Rows ``first`` to ``stop`` of every one of ``count`` equal groups of rows; ``turned``: inputs and outputs turned
    round within each."""

    count: int
    first: int
    stop: int
    turned: bool = False

    def share(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """What is left of a matrix of this shape."""
        picked = self.stop - self.first
        return (self.count * shape[1], picked) if self.turned else (self.count * picked, shape[1])

    def of(self, matrix: NDArray[Any]) -> NDArray[Any]:
        """The groups, one below the other."""
        picked = matrix.reshape(self.count, -1, matrix.shape[1])[:, self.first : self.stop]
        picked = picked.swapaxes(1, 2) if self.turned else picked
        return picked.reshape(-1, picked.shape[2])


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A matrix or vector that one tensor of the checkpoint holds: all of it, or what is left after, in this order,
    making it flat, taking one of a stack, turning inputs and outputs round, picking rows, or rows of groups, and
    picking columns."""

    tensor: str
    shape: tuple[int, ...]  # that the tensor must have
    index: int | None = None  # of a stack: [E, N, K]
    transposed: bool = False  # stored as [K, N]
    rows: RowSlice | None = None
    groups: HeadGroups | None = None
    flat: bool = False  # stored as [N, ...]: all but its first axis is one
    columns: tuple[int, int] | None = None  # [first, stop)

    @property
    def is_whole(self) -> bool:
        """Whether the part is the tensor as it is stored."""
        picked = self.rows is not None or self.groups is not None or self.columns is not None
        return not picked and self.index is None and not self.transposed and len(self.shape) <= 2

    @property
    def run_of_rows(self) -> range | None:
        """The rows that the part is of its tensor, one after another, if it is nothing else."""
        if self.rows is None or self.rows.step != 1 or not replace(self, rows=None).is_whole:
            return None
        return range(self.rows.first, self.rows.stop)

    @property
    def numbers(self) -> int:
        """How many numbers of its tensor it has."""
        shape, total = self._stored_shape, math.prod(self._stored_shape)
        outputs, inputs = (1, 0) if self.transposed and len(shape) > 1 else (0, 1)
        if self.rows is not None:
            total = total // shape[outputs] * self.rows.count
        if self.columns is not None:
            total = total // shape[inputs] * (self.columns[1] - self.columns[0])
        return total

    @property
    def outputs(self) -> int:
        """Rows of the matrix; of a vector, numbers."""
        shape = self._stored_shape
        return self.rows.count if self.rows is not None else shape[1 if self.transposed and len(shape) > 1 else 0]

    @property
    def _stored_shape(self) -> tuple[int, ...]:
        """The shape before rows and columns are picked, inputs first if ``transposed``."""
        shape = self.shape if self.index is None else self.shape[1:]
        return shape if self.groups is None else self.groups.share(shape)

    @property
    def is_matrix(self) -> bool:
        """Whether it is rows and columns of a matrix that is stored as one, inputs or outputs first."""
        return self.index is None and self.groups is None and len(self.shape) == 2

    @property
    def stored_edges(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The runs of its tensor's rows and columns that such a part is in: first and stop of each."""
        n, k = self.shape[::-1] if self.transposed else self.shape
        rows = (0, n) if self.rows is None else (self.rows.first, min(self.rows.stop, n))
        edges = rows, self.columns or (0, k)
        return edges[::-1] if self.transposed else edges

    def within(self, rows: tuple[int, int], columns: tuple[int, int]) -> TensorPart:
        """The same part of what is left of its tensor: a run of rows and one of columns, which hold all of it."""
        (first, stop), (left, right) = (columns, rows) if self.transposed else (rows, columns)
        own, picked = self.rows, self.columns
        if own is not None:
            own = RowSlice(own.first - first, own.stop - first, own.step)
            own = None if own == RowSlice(0, stop - first) else own
        if picked is not None:
            picked = picked[0] - left, picked[1] - left
            picked = None if picked == (0, right - left) else picked
        shape = rows[1] - rows[0], columns[1] - columns[0]
        return replace(self, shape=shape, rows=own, columns=picked)

    def row_range(self, first: int, stop: int) -> TensorPart:
        """Its rows ``first`` to ``stop``.  Raises ValueError for rows of groups."""
        if self.groups is not None:
            raise ValueError(f"{self.tensor}: rows of groups have no ranges")
        if (first, stop) == (0, self.outputs):
            return self
        own = self.rows or RowSlice(0, self.outputs)
        return replace(self, rows=RowSlice(own.first + first * own.step, own.first + stop * own.step, own.step))

    def of(self, tensor: NDArray[Any]) -> NDArray[Any]:
        """The part of a tensor: a view where it can be one."""
        if self.flat:
            tensor = tensor.reshape(len(tensor), -1)
        if self.index is not None:
            tensor = tensor[self.index]
        if self.transposed:
            tensor = tensor.T
        if self.rows is not None:
            tensor = tensor[self.rows.first : self.rows.stop : self.rows.step]
        if self.groups is not None:
            tensor = self.groups.of(tensor)
        if self.columns is not None:
            tensor = tensor[:, self.columns[0] : self.columns[1]]
        return tensor

    def quantized(self, coded: QuantizedTensor) -> QuantizedMatrix | None:
        """The part as it is stored, None where it is not rows of the matrix.  Raises ModelError."""
        if self.groups is not None or self.columns is not None or self.transposed != coded.transposed:
            return None
        matrix = coded.matrix(self.index or 0)
        if self.rows is None:
            return matrix
        return matrix.select_rows(range(self.rows.first, self.rows.stop, self.rows.step))

    def compressed(self, matrix: AnyCompressed) -> AnyCompressed | None:
        """The part of a compressed matrix; None where it is not whole panels of its rows, or blocks of its columns.

        Raises KernelError if the matrix contradicts itself.
        """
        rows = self.rows
        if not self.is_matrix or self.transposed or (rows is not None and rows.step != 1):
            return None
        return cut_compressed(matrix, None if rows is None else (rows.first, rows.stop), self.columns)

    def computed(self, tensor: ComputedTensor) -> NDArray[Any]:
        """The part of a tensor that is computed: of a stack, no more than one matrix is."""
        if self.index is None or len(tensor.shape) < 3:
            return self.of(tensor.array())
        return replace(self, index=None).of(tensor.read(self.index))

    def dequantized(self, coded: QuantizedTensor) -> NDArray[np.float32]:
        """The part of a tensor of codes, as fp32.  Raises ModelError."""
        matrix_NK = coded.matrix(self.index or 0).dequantized()
        turned = matrix_NK if self.transposed == coded.transposed else matrix_NK.T
        return replace(self, index=None, transposed=False).of(turned)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight of ``linear`` or ``embed``: rows of its parts, one part after another."""

    name: str
    parts: tuple[TensorPart, ...]
    segments: tuple[int, ...] | None = None  # ends of the segments of K; None for a plain sum
    partial: bool = False  # K is one rank's segments of the sum (``PackedLinear.partial``)


@dataclass(frozen=True, slots=True)
class Vector:
    """A norm weight or a bias: its parts one after another, each number plus ``offset`` (some norms store w - 1)."""

    name: str
    parts: tuple[TensorPart, ...]
    offset: float = 0.0
    heads: HeadColumns | None = None  # of a norm over all heads of a layer that ranks divide (``GatheredNorm``)

    def of(self, parts: list[NDArray[Any]]) -> NDArray[Any]:
        """The vector, of its parts; fp32 unless it is just one tensor."""
        if len(parts) == 1 and not self.offset:
            return parts[0]
        return np.concatenate(parts, dtype=np.float32) + np.float32(self.offset)


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """All weights of a model, and the tensors that may be there although nothing needs them."""

    weights: tuple[Matrix | Vector, ...]
    ignored: re.Pattern[str]
    others: tuple[WeightLayout, ...] = ()  # the same weights by the names of other releases

    def found_in(self, checkpoint: Checkpoint) -> WeightLayout:
        """This layout, or the first of the others that has its first tensor there."""
        for layout in (self, *self.others):
            if next(layout.parts).tensor in checkpoint:
                return layout
        return self

    @property
    def parts(self) -> Iterator[TensorPart]:
        """The parts of all weights."""
        return (part for weight in self.weights for part in weight.parts)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that the model needs, by name."""
        return {part.tensor: part.shape for part in self.parts}

    @property
    def parameters(self) -> int:
        """Numbers in all tensors that the model needs."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def check(self, checkpoint: Checkpoint) -> None:
        """Raises ModelError unless every tensor exists with its shape, and there is no unknown tensor."""
        used = set[str]()
        for tensor, wanted in self.shapes.items():
            shape, sources = checkpoint.shape(tensor), checkpoint.sources(tensor)
            used.update(sources)
            if shape != wanted:
                raise ModelError(
                    f"{checkpoint.path_of(sources[0])}: tensor {tensor!r} has shape {list(shape)}, "
                    f"by config.json it must have {list(wanted)}"
                )
        for name in checkpoint.names:
            if name not in used and not self.ignored.fullmatch(name) and not checkpoint.is_redundant(name):
                raise ModelError(
                    f"{checkpoint.path_of(name)}: tensor {name!r} is not part of this architecture; "
                    "leaving it out would change the answers"
                )

    def widest_dtype(self, checkpoint: Checkpoint) -> str:
        """ "bf16", "fp16" or "fp32": what holds every matrix without loss (bf16 and fp16 together need fp32).

        Raises ModelError for a type that weights cannot have.
        """
        found = set[str]()
        for weight in self.weights:
            for part in weight.parts:
                dtype = checkpoint.weight_dtype(part.tensor)
                if isinstance(weight, Matrix) and not checkpoint.is_widened(part.tensor):
                    found.add(dtype)
        return found.pop() if len(found) == 1 else "fp32"
