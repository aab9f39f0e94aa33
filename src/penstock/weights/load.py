"""From a checkpoint to packed weights in this process's memory, and the fingerprint of what was read.

::

    file --read--> a piece in a core's cache --checksum--> --pack--> its place in huge pages      all threads, one pass
    file --read--> BLAKE3                                    only where nobody vouches for it    beside it

A backend that has a ``loading`` reads, checks and packs in one pass; any other is given one weight after the other.
What comes as arrays all the same, as compressed weights do on a GPU, is checked by itself before.
The hash of a tensor comes from a compressed file's table or from the manifest of the last load, and then the tensor's
checksum must be the one that stands there too; else it is computed.  Compressed weights stay compressed in memory
where the kernels decode them.  No thread is left when loading ends: the process is about to fork.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from penstock.errors import ModelError
from penstock.kernels.compressed import CompressedMatrix
from penstock.kernels.operands import PackedLinear
from penstock.kernels.ops import Ops
from penstock.kernels.stored import LoadFailed, Loading, StoredTensor, Watch
from penstock.weights.checksum import checksum, checksum_text
from penstock.weights.compressed import Original
from penstock.weights.digests import Hashing
from penstock.weights.family import checkpoint_format
from penstock.weights.fingerprint import Fingerprint
from penstock.weights.header import AGAIN
from penstock.weights.layout import Matrix, Vector, WeightLayout
from penstock.weights.manifest import ACCEPT_FLAG, Manifests, Memory
from penstock.weights.packing import Packing
from penstock.weights.reader import NUMPY_DTYPES, Checkpoint
from penstock.weights.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory: read-only from here on, shared with every process forked later."""

    spec: ModelSpec
    weights: Mapping[str, PackedLinear | Any]  # by the names of the family's layout; vectors are the backend's arrays
    fingerprint: str
    nbytes: int  # of the packed matrices
    weights_hash: str  # of the checkpoint's tensors, whatever computes them


def load_model(
    path: str | Path,
    spec: ModelSpec,
    ops: Ops,
    progress: Watch | None = None,
    *,
    threads: int = 1,
    manifests: Manifests | None = None,
) -> LoadedModel:
    """Read, check and pack every weight.  ``spec`` is what ``inspect_model`` said of the same folder.

    ``threads`` read at once; without ``manifests`` nothing is known of earlier loads, nor remembered of this one.
    Raises ModelError if the files are no longer what they were, or are damaged; and what ``progress`` raises.
    """
    family = checkpoint_format(spec.architecture, str(path))
    with Checkpoint(Path(path), spec.quantization) as checkpoint:
        layout = family.layout(spec).found_in(checkpoint)
        layout.check(checkpoint)
        memory = manifests.open(checkpoint) if manifests is not None else None
        stamps = checkpoint.stamps()
        load = _Load(checkpoint, layout, ops, memory, progress or (lambda done, total: None))
        weights = load.run(threads)
        if checkpoint.stamps() != stamps:
            raise ModelError(f"{checkpoint.folder}: was changed while it was loaded; start again")
        if memory is not None:
            memory.settle(load.found)
        load.tell(spec)
        digest = Fingerprint()
        for name, entry in load.found.items():
            digest.add(checkpoint.info(name), bytes.fromhex(entry.blake3))
    packed = sum(weight.nbytes for weight in weights.values() if isinstance(weight, PackedLinear))
    return LoadedModel(spec, MappingProxyType(weights), digest.hexdigest(spec), packed, digest.weights_hexdigest())


class _Load:
    """One load: ``found`` says afterwards what every tensor of the checkpoint is."""

    def __init__(
        self, checkpoint: Checkpoint, layout: WeightLayout, ops: Ops, memory: Memory | None, progress: Watch
    ) -> None:
        self._checkpoint = checkpoint
        self._weights = layout.weights
        self._ops = ops
        self._packing = Packing(checkpoint, ops)
        self._progress = progress
        self._tensors = [name for part in layout.parts for name in checkpoint.sources(part.tensor)]
        self._unread = sorted(set(checkpoint.names) - set(self._tensors))
        originals = {name: checkpoint.original(name) for name in checkpoint.names}
        self._vouched = {name: entry for name, entry in originals.items() if entry is not None and entry.checksum}
        self._known = self._vouched | (memory.known() if memory is not None else {})
        self.found: dict[str, Original] = {}

    def run(self, threads: int) -> dict[str, Any]:
        """All weights by name."""
        loading = self._ops.loading(sum(self._checkpoint.info(name).nbytes for name in set(self._tensors)))
        if loading is None:
            return self._one_by_one()
        begun = [weight for weight in self._weights if _begin(self._checkpoint, weight, loading)]
        checked = {part.tensor for weight in begun for part in weight.parts}
        known = {
            name: entry
            for name, entry in self._known.items()
            if name in self._unread or (name in checked and entry.checksum)
        }
        told = [name for name in dict.fromkeys(self._tensors) if name in self._vouched and name not in checked]
        known |= {name: self._vouched[name] for name in told}
        to_hash = [name for name in dict.fromkeys([*self._tensors, *self._unread]) if name not in known]
        with Hashing(self._checkpoint, to_hash) as hashing:
            hashing.start(threads)
            loaded = self._read(loading, threads)
            digests = hashing.join(lambda: self._progress(hashing.done, hashing.done))
        for name, digest in digests.items():
            entry = self._entry(name, digest)
            if name in checked:
                entry = msgspec.structs.replace(entry, checksum=loading.checksum(name, checksum_text(name, entry)))
            self.found[name] = entry
        for name, entry in known.items():
            if name in checked:
                self._check(name, entry, loading.checksum(name, checksum_text(name, entry)))
            self.found[name] = entry
        self._check_arrays(told)
        loaded |= self._packing.all([w for w in self._weights if w.name not in loaded], threads, self._progress)
        return {weight.name: loaded[weight.name] for weight in self._weights}

    def tell(self, spec: ModelSpec) -> None:
        """To the log: what was not taken as it is stored."""
        self._packing.tell(spec.quantization)

    def _read(self, loading: Loading, threads: int) -> dict[str, Any]:
        try:
            return loading.run(threads, self._progress)
        except LoadFailed as error:
            tensors = [error.name]
            for weight in self._weights:
                if weight.name == error.name:
                    tensors = [part.tensor for part in weight.parts]
            names = ", ".join(map(repr, tensors))
            raise ModelError(f"{self._checkpoint.path_of(tensors[0])}: tensor {names}: {error.reason}") from error

    def _check_arrays(self, names: list[str]) -> None:
        """Tensors that come as arrays, and whose file says what their stored bytes are: nothing is decoded."""
        for done, name in enumerate(names, 1):
            with self._checkpoint.stored(name) as stored:
                self._check(name, self._vouched[name], checksum(name, self._vouched[name], [stored]))
            self._progress(done, done)

    def _check(self, name: str, entry: Original, found: str) -> None:
        """The tensor just read, whose checksum was ``found``, must be the one that was hashed."""
        if found == entry.checksum:
            return
        where = f"{self._checkpoint.path_of(name)}: tensor {name!r}"
        if name in self._vouched:
            raise ModelError(f"{where}: damaged, its bytes are not those that were compressed; {AGAIN}")
        raise ModelError(
            f"{where}: damaged, its bytes are not those that were hashed at an earlier load, though size and times of "
            f"the file are the same: the drive or the memory has lost some. Should they be meant, touch the file and "
            f"start once with {ACCEPT_FLAG}"
        )

    def _entry(self, name: str, digest: bytes) -> Original:
        info, original = self._checkpoint.info(name), self._checkpoint.original(name)
        code = original.code if original is not None else None
        return Original(dtype=info.dtype, shape=info.shape, blake3=digest.hex(), code=code)

    # --- backends that take arrays ------------------------------------------------------------------------------------

    def _one_by_one(self) -> dict[str, Any]:
        """The peak is the packed weights plus the largest weight."""
        meter = _Meter(self, self._checkpoint, self._progress)
        weights = {}
        for weight in self._weights:
            weights[weight.name] = self._packing.one(weight)
            meter.count(name for part in weight.parts for name in self._checkpoint.sources(part.tensor))
        meter.count(self._unread)
        return weights

    def hash(self, name: str) -> None:
        """The tensor has been packed: what is it?"""
        self.found[name] = self._entry(name, self._checkpoint.digest(name))


class _Meter:
    """Hashes each tensor once, drops its pages, and reports how far the reading is."""

    def __init__(self, load: _Load, checkpoint: Checkpoint, progress: Watch) -> None:
        self._load = load
        self._checkpoint = checkpoint
        self._progress = progress
        self._total = sum(checkpoint.info(name).nbytes for name in checkpoint.names)
        self._done = 0

    def count(self, names: Iterable[str]) -> None:
        """These tensors have been packed."""
        for name in names:
            if name not in self._load.found:
                self._load.hash(name)
                self._checkpoint.done_with(name)
                self._done += self._checkpoint.info(name).nbytes
        self._progress(self._done, self._total)


def _begin(checkpoint: Checkpoint, weight: Matrix | Vector, loading: Loading) -> bool:
    """Name the weight's parts to the backend; False if it must be made of arrays."""
    if not all(part.is_whole and checkpoint.is_plain(part.tensor) for part in weight.parts):
        return False
    places = [_stored(checkpoint, part.tensor) for part in weight.parts]
    if isinstance(weight, Vector):
        tensor = weight.parts[0].tensor
        if len(weight.parts) > 1 or weight.offset or checkpoint.matrix(tensor) is not None:
            return False
        loading.vector(weight.name, places[0], NUMPY_DTYPES[checkpoint.info(tensor).dtype])
        return True
    matrices = [checkpoint.matrix(part.tensor) for part in weight.parts]
    compressed = [pair for pair in zip(places, matrices, strict=True) if pair[1] is not None]
    if not compressed:
        loading.matrix(weight.name, places, weight.segments)
        return True
    own = [(place, matrix) for place, matrix in compressed if isinstance(matrix, CompressedMatrix)]
    if len(own) < len(places):
        return False  # some are plain, or in a layout that must be converted
    return loading.compressed(weight.name, own, weight.segments)


def _stored(checkpoint: Checkpoint, name: str) -> StoredTensor:
    place, info = checkpoint.place(name), checkpoint.info(name)
    rows, columns = info.shape if len(info.shape) == 2 else (1, *info.shape)
    return StoredTensor(name, place.file, place.offset, rows, columns, checkpoint.weight_dtype(name))
