"""Weights that are made of arrays: quantised ones, parts of stacks, and all of them for a backend that reads no files.

Small weights are packed side by side, a thread each; large ones one after another, by all threads where they can be
cut.  No thread is left: the process is about to fork.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import KernelError, ModelError
from penstock.kernels.operands import PackedLinear
from penstock.kernels.ops import Ops
from penstock.kernels.quantised import QuantizedMatrix
from penstock.kernels.stored import Watch
from penstock.weights.formats.quantization import Quantization
from penstock.weights.layout import Matrix, Part, Vector
from penstock.weights.reader import Checkpoint

LARGE = 1 << 25
"""Numbers of a weight from which on it is worth all threads."""

NAMED = 3
"""Weights that a line of the log names."""

log = logging.getLogger(__name__)


class Packing:
    """Of one checkpoint, for one backend."""

    def __init__(self, checkpoint: Checkpoint, ops: Ops) -> None:
        self._checkpoint = checkpoint
        self._ops = ops
        self._dequantised: list[str] = []

    def all(self, weights: Sequence[Matrix | Vector], threads: int, progress: Watch) -> dict[str, Any]:
        """Weights by name.  Raises ModelError, and what ``progress`` raises; then the others are left undone."""
        packed: dict[str, Any] = {}
        small = [weight for weight in weights if _numbers(weight) < LARGE]
        if threads < 2:
            small = []
        with ThreadPoolExecutor(max(1, threads)) as pool:
            jobs = {pool.submit(self.one, weight): weight.name for weight in small}
            try:
                for job in as_completed(jobs):
                    packed[jobs[job]] = job.result()
                    progress(len(packed), len(weights))
            finally:
                pool.shutdown(cancel_futures=True)
        for weight in weights:
            if weight.name not in packed:
                packed[weight.name] = self.one(weight, threads)
                progress(len(packed), len(weights))
        return packed

    def one(self, weight: Matrix | Vector, threads: int = 1) -> Any:
        """A weight.  Raises ModelError."""
        if isinstance(weight, Vector):
            return self._ops.vector(_aligned(weight.of([self._array(part) for part in weight.parts])))
        packed = self._quantised(weight, threads) or self._compressed(weight)
        if packed is not None:
            return packed
        parts = [self._array(part) for part in weight.parts]
        if any(self._checkpoint.coded(part.tensor) is not None for part in weight.parts):
            self._dequantised.append(weight.name)
        if len(parts) == 1:
            return self._ops.pack_linear(_packable(parts[0]), segments=weight.segments)
        dtypes = {part.dtype for part in parts}
        whole_NK = np.concatenate(parts, dtype=dtypes.pop() if len(dtypes) == 1 else np.float32)
        return self._ops.pack_linear(whole_NK, segments=weight.segments)

    def tell(self, quantization: Quantization | None) -> None:
        """To the log: which weights were dequantised, and what is not done to activations."""
        if self._dequantised:
            names = sorted(self._dequantised)
            named = names[:NAMED] + ["..."] * (len(names) > NAMED)
            log.info(
                "%d quantised matrices are held in the compute type, for no kernel reads them as they are stored: %s",
                len(names),
                ", ".join(named),
            )
        if quantization is not None and quantization.activations:
            log.info(
                "activations stay in the compute type: quantising them, as config.json has it (%s), is not done here",
                quantization.activations,
            )

    def _quantised(self, weight: Matrix, threads: int) -> PackedLinear | None:
        """The weight as it is stored, if all of it is quantised and the backend computes from that."""
        matrices = [self._coded(part) for part in weight.parts]
        quantised = [matrix for matrix in matrices if matrix is not None]
        if len(quantised) < len(matrices):
            return None
        packed = self._ops.pack_quantised(quantised, segments=weight.segments, threads=threads)
        for part in weight.parts:
            for name in self._checkpoint.sources(part.tensor):
                self._checkpoint.done_with(name)
        return packed

    def _coded(self, part: Part) -> QuantizedMatrix | None:
        coded = self._checkpoint.coded(part.tensor)
        return None if coded is None else part.quantised(coded)

    def _compressed(self, weight: Matrix) -> PackedLinear | None:
        """The weight as it is stored, if all of it is compressed and the backend computes from that."""
        if not all(part.is_whole and self._checkpoint.is_plain(part.tensor) for part in weight.parts):
            return None
        matrices = [self._checkpoint.matrix(part.tensor) for part in weight.parts]
        compressed = [matrix for matrix in matrices if matrix is not None]
        if len(compressed) < len(matrices):
            return None
        try:
            return self._ops.pack_compressed(compressed, segments=weight.segments)
        except KernelError as error:
            names = ", ".join(repr(part.tensor) for part in weight.parts)
            where = self._checkpoint.path_of(weight.parts[0].tensor)
            raise ModelError(f"{where}: tensor {names}: damaged, {error}") from error

    def _array(self, part: Part) -> NDArray[Any]:
        coded = self._checkpoint.coded(part.tensor)
        return part.of(self._checkpoint.array(part.tensor)) if coded is None else part.dequantised(coded)


def _numbers(weight: Matrix | Vector) -> int:
    return sum(part.numbers for part in weight.parts)


def _packable(matrix: NDArray[Any]) -> NDArray[Any]:
    """The format allows a tensor to begin at any byte; kernels do not.  Inputs may come first as well as outputs."""
    if matrix.flags.f_contiguous:
        return np.require(matrix.T, requirements=["C", "ALIGNED"]).T
    return _aligned(matrix)


def _aligned(view: NDArray[Any]) -> NDArray[Any]:
    return np.require(view, requirements=["C", "ALIGNED"])
