"""Where a model's tensors are cut in files, so that every rank of every plan reads whole slices of them.

The ends are those of all ranks of two, four and eight: of heads and columns for rows of ``qkv`` and ``gate_up``, of the
segments of the tree for columns of ``out`` and ``down``.  Whole experts and layers need no cut.  Ends inside a panel of
16 rows, or a chunk of 32 columns of compressed weights, are left out: a rank then reads some more than its share.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.config.mesh import TENSOR_WAYS, Mesh
from penstock.errors import ConfigError
from penstock.kernels.compressed import PANEL_ROWS
from penstock.kernels.compressed_cuts import CHUNK_COLUMNS
from penstock.parallel.shard import shard_model
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.architecture.tensor_layout import TensorPart, WeightLayout
from penstock.weights.checkpoint_reader import Checkpoint
from penstock.weights.compression_format import COLUMNS, ROWS
from penstock.weights.families.registry import checkpoint_format
from penstock.weights.inspect import inspect_model
from penstock.weights.stored_slices import TensorCut

UNITS = {ROWS: PANEL_ROWS, COLUMNS: CHUNK_COLUMNS}


def folder_cuts(folder: Path) -> dict[str, TensorCut]:
    """``tensor_cuts`` of the model in a folder.  Raises ConfigError, and ModelError if it cannot be served."""
    spec = inspect_model(folder)
    with Checkpoint(folder, spec.quantization) as checkpoint:
        layout = checkpoint_format(spec.architecture, str(folder)).layout(spec).found_in(checkpoint)
    return tensor_cuts(spec, layout)


def tensor_cuts(spec: ModelSpec, layout: WeightLayout) -> dict[str, TensorCut]:
    """The cuts of a model's matrices by tensor.

    Raises ConfigError for a model that cannot be divided over two ranks: one line with the reason.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    ends: dict[str, dict[str, set[int]]] = {}
    for part in _parts_of_ranks(spec, layout):
        if not part.is_matrix:
            continue
        shapes[part.tensor] = part.shape
        for axis, (first, stop) in zip((ROWS, COLUMNS), part.stored_edges, strict=True):
            ends.setdefault(part.tensor, {}).setdefault(axis, set()).update((first, stop))
    cuts: dict[str, TensorCut] = {}
    for tensor, found in ends.items():
        for axis, length in zip((ROWS, COLUMNS), shapes[tensor], strict=True):
            inner = sorted(end for end in found[axis] if 0 < end < length and end % UNITS[axis] == 0)
            if inner and tensor not in cuts:
                cuts[tensor] = TensorCut(axis, (*inner, length))
    return cuts


def _parts_of_ranks(spec: ModelSpec, layout: WeightLayout) -> Iterator[TensorPart]:
    """What each rank has of tensors, over as many ranks as the model can be divided over."""
    for ways in TENSOR_WAYS[1:]:
        try:
            shards = [shard_model(spec, Mesh(tensor=ways), rank) for rank in range(ways)]
        except ConfigError:
            if ways == 2:
                raise
            return
        for shard in shards:
            yield from shard.layout(layout).parts
