"""From a checkpoint to packed weights in this process's memory, and the fingerprint of what was read.

Compressed weights stay compressed in memory where the kernels decode them; every tensor is decoded once all the same,
a megabyte at a time, since its hash is that of the original.
One weight at a time: the peak is the packed weights plus the largest weight.  Starts no thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from penstock.errors import KernelError, ModelError
from penstock.kernels.ops import Ops, PackedLinear
from penstock.weights.family import checkpoint_format
from penstock.weights.layout import Matrix, Vector
from penstock.weights.manifest import Fingerprint
from penstock.weights.reader import Checkpoint
from penstock.weights.spec import ModelSpec

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) after each weight."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory: read-only from here on, shared with every process forked later."""

    spec: ModelSpec
    weights: Mapping[str, PackedLinear | Any]  # by the names of the family's layout; vectors are the backend's arrays
    fingerprint: str
    nbytes: int  # of the packed matrices


def load_model(path: str | Path, spec: ModelSpec, ops: Ops, progress: Progress | None = None) -> LoadedModel:
    """Read, hash and pack every weight.  ``spec`` is what ``inspect_model`` said of the same folder.

    Raises ModelError if the files are no longer what they were.
    """
    layout = checkpoint_format(spec.architecture, str(path)).layout(spec)
    digest = Fingerprint()
    weights: dict[str, Any] = {}
    with Checkpoint(Path(path)) as checkpoint:
        layout.check(checkpoint)
        meter = _Meter(checkpoint, digest, progress)
        for weight in layout.weights:
            weights[weight.name] = _pack(checkpoint, weight, ops)
            meter.count([part.tensor for part in weight.parts])
        meter.count_rest()
    packed = sum(weight.nbytes for weight in weights.values() if isinstance(weight, PackedLinear))
    return LoadedModel(spec, MappingProxyType(weights), digest.hexdigest(spec), packed)


def _pack(checkpoint: Checkpoint, weight: Matrix | Vector, ops: Ops) -> Any:
    if isinstance(weight, Vector):
        return ops.vector(_aligned(checkpoint.array(weight.part.tensor)))
    packed = _pack_compressed(checkpoint, weight, ops)
    if packed is not None:
        return packed
    parts = [checkpoint.array(part.tensor) for part in weight.parts]
    if len(parts) == 1:
        return ops.pack_linear(_aligned(parts[0]), segments=weight.segments)
    dtypes = {part.dtype for part in parts}
    whole_NK = np.concatenate(parts, dtype=dtypes.pop() if len(dtypes) == 1 else np.float32)
    return ops.pack_linear(whole_NK, segments=weight.segments)


def _pack_compressed(checkpoint: Checkpoint, weight: Matrix, ops: Ops) -> PackedLinear | None:
    """The weight as it is stored, if all of it is compressed and the backend computes from that."""
    matrices = [checkpoint.matrix(part.tensor) for part in weight.parts]
    compressed = [matrix for matrix in matrices if matrix is not None]
    if len(compressed) < len(matrices):
        return None
    try:
        return ops.pack_compressed(compressed, segments=weight.segments)
    except KernelError as error:
        names = ", ".join(repr(part.tensor) for part in weight.parts)
        raise ModelError(f"{checkpoint.path_of(weight.parts[0].tensor)}: tensor {names}: damaged, {error}") from error


def _aligned(view: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
    """The format allows a tensor to begin at any byte; kernels do not."""
    return np.require(view, requirements=["C", "ALIGNED"])


class _Meter:
    """Hashes each tensor once, drops its pages, and reports how far the reading is."""

    def __init__(self, checkpoint: Checkpoint, digest: Fingerprint, progress: Progress | None) -> None:
        self._checkpoint = checkpoint
        self._digest = digest
        self._progress = progress
        self._left = set(checkpoint.names)
        self._total = sum(checkpoint.info(name).nbytes for name in self._left)
        self._done = 0

    def count(self, names: list[str]) -> None:
        """These tensors have been packed."""
        for name in names:
            if name in self._left:
                self._left.remove(name)
                info = self._checkpoint.info(name)
                self._digest.add(info, self._checkpoint.digest(name))
                self._checkpoint.done_with(name)
                self._done += info.nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)

    def count_rest(self) -> None:
        """Tensors that no weight needs are part of the fingerprint all the same."""
        self.count(sorted(self._left))
