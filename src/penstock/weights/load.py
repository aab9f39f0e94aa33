"""Loading: from a checkpoint to packed weights in this process's memory, and the fingerprint of what was read.

::

    file --read--> a piece in a core's cache --checksum--> --pack--> its place in huge pages      all threads, one pass
    file --read--> BLAKE3                                    only where its hash is unknown       other threads

A backend with ``loading`` reads, checks and packs in one pass; any other backend gets one weight after the other.
Weights made of arrays (quantized ones, parts of stacks, compressed ones on a GPU) are checked on their own; small ones
are packed in parallel, large ones one after another by all threads where they can be cut.

The hash of a tensor comes from a compressed file's table or from the manifest of the last load, and then its checksum
must match that entry; otherwise it is computed, in the order of loading, so that each byte comes from the drive once.
Compressed weights stay compressed in memory where the kernels decode them; elsewhere each piece is decoded as it is
read.  No thread is left when loading ends: the
process is about to fork.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from penstock.errors import KernelError, ModelError
from penstock.kernels.compressed import PANEL_ROWS, AnyCompressed, CompressedMatrix
from penstock.kernels.compressed_cuts import ends_units
from penstock.kernels.operands import INT8, GatheredNorm, PackedLinear
from penstock.kernels.ops import Ops
from penstock.kernels.quantization import QuantizedMatrix
from penstock.kernels.weight_source import LoadFailed, ProgressCallback, StoredTensor, WeightLoading
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.architecture.tensor_layout import Matrix, TensorPart, Vector, WeightLayout
from penstock.weights.checkpoint_reader import NUMPY_DTYPES, Checkpoint
from penstock.weights.compression_format import ROWS, OriginalTensor, checksum, checksum_text
from penstock.weights.families.registry import checkpoint_format
from penstock.weights.fingerprint import Fingerprint
from penstock.weights.manifest import ACCEPT_FLAG, FolderManifest, ManifestStore
from penstock.weights.quantization.config import Quantization
from penstock.weights.safetensors_header import AGAIN
from penstock.weights.stored_slices import TensorSlice

LARGE = 1 << 25
"""Numbers of a weight from which on it is worth all threads."""

NAMED = 3
"""Weights that a line of the log names."""

log = logging.getLogger(__name__)


class WeightPacker:
    """Packs the weights of one checkpoint for one backend."""

    def __init__(self, checkpoint: Checkpoint, ops: Ops) -> None:
        self._checkpoint = checkpoint
        self._ops = ops
        self._dequantized: dict[str, int] = {}  # bytes in memory

    def pack_all(self, weights: Sequence[Matrix | Vector], threads: int, progress: ProgressCallback) -> dict[str, Any]:
        """All weights packed, by name.  Raises ModelError, and what ``progress`` raises; then packing stops."""
        packed: dict[str, Any] = {}
        small = [weight for weight in weights if _numbers(weight) < LARGE]
        if threads < 2:
            small = []
        with ThreadPoolExecutor(max(1, threads)) as pool:
            jobs = {pool.submit(self.pack_one, weight): weight.name for weight in small}
            try:
                for job in as_completed(jobs):
                    packed[jobs[job]] = job.result()
                    progress(len(packed), len(weights))
            finally:
                pool.shutdown(cancel_futures=True)
        for weight in weights:
            if weight.name not in packed:
                packed[weight.name] = self.pack_one(weight, threads)
                progress(len(packed), len(weights))
        return packed

    def pack_one(self, weight: Matrix | Vector, threads: int = 1) -> Any:
        """One weight, packed.  Raises ModelError."""
        if isinstance(weight, Vector):
            vector = self._ops.vector(_aligned(weight.of([self._array(part) for part in weight.parts])))
            return vector if weight.heads is None else GatheredNorm(vector, weight.heads)
        return _as_told(weight, self._matrix(weight, threads))

    def _matrix(self, weight: Matrix, threads: int) -> PackedLinear:
        packed = self._quantized(weight, threads) or self._compressed(weight)
        if packed is not None:
            return packed
        parts = [self._array(part) for part in weight.parts]
        if len(parts) == 1:
            packed = self._ops.pack_linear(_packable(parts[0]), segments=weight.segments)
        else:
            dtypes = {part.dtype for part in parts}
            whole_NK = np.concatenate(parts, dtype=dtypes.pop() if len(dtypes) == 1 else np.float32)
            packed = self._ops.pack_linear(whole_NK, segments=weight.segments)
        if any(self._is_coded(part.tensor) for part in weight.parts):
            self._dequantized[weight.name] = packed.nbytes
        return packed

    def log_summary(self, quantization: Quantization | None) -> None:
        """Log which weights were dequantized, and which quantization of activations is ignored."""
        if self._dequantized:
            names = sorted(self._dequantized)
            named = names[:NAMED] + ["..."] * (len(names) > NAMED)
            log.info(
                "%d quantized matrices are held in the compute type (%.1f MiB), for no kernel reads them as they are "
                "stored: %s",
                len(names),
                sum(self._dequantized.values()) / 2**20,
                ", ".join(named),
            )
        if quantization is not None and quantization.activations and self._ops.activation_dtype != INT8:
            log.info(
                "activations stay in the compute type: quantizing them, as config.json has it (%s), is not done here",
                quantization.activations,
            )

    def _quantized(self, weight: Matrix, threads: int) -> PackedLinear | None:
        """The weight as it is stored, if all of it is quantized and the backend computes from that."""
        matrices = [self._coded(part) for part in weight.parts]
        quantized = [matrix for matrix in matrices if matrix is not None]
        if len(quantized) < len(matrices):
            return None
        packed = self._ops.pack_quantized(quantized, segments=weight.segments, threads=threads)
        for part in weight.parts:
            for name in self._checkpoint.sources(part.tensor):
                self._checkpoint.drop_pages(name)
        return packed

    def _coded(self, part: TensorPart) -> QuantizedMatrix | None:
        coded = self._checkpoint.quantized_tensor(part.tensor)
        return None if coded is None else part.quantized(coded)

    def _compressed(self, weight: Matrix) -> PackedLinear | None:
        """The weight as it is stored, if all of it is compressed and the backend computes from that."""
        if not all(self._checkpoint.is_plain(part.tensor) for part in weight.parts):
            return None
        try:
            matrices = [self._compressed_part(part) for part in weight.parts]
            compressed = [matrix for matrix in matrices if matrix is not None]
            if len(compressed) < len(matrices):
                return None
            return self._ops.pack_compressed(compressed, segments=weight.segments)
        except KernelError as error:
            names = ", ".join(repr(part.tensor) for part in weight.parts)
            where = self._checkpoint.path_of(weight.parts[0].tensor)
            raise ModelError(f"{where}: tensor {names}: damaged, {error}") from error

    def _compressed_part(self, part: TensorPart) -> AnyCompressed | None:
        narrowed, slices = needed_slices(self._checkpoint, part)
        matrix = self._checkpoint.joined_matrix(slices)
        return None if matrix is None else narrowed.compressed(matrix)

    def _is_coded(self, name: str) -> bool:
        """Whether the tensor, or one that it is computed of, is stored as codes."""
        computed = self._checkpoint.computed_tensor(name)
        if computed is not None:
            return computed.quantized
        return self._checkpoint.quantized_tensor(name) is not None

    def _array(self, part: TensorPart) -> NDArray[Any]:
        computed = self._checkpoint.computed_tensor(part.tensor)
        if computed is not None:
            return part.computed(computed)
        coded = self._checkpoint.quantized_tensor(part.tensor)
        if coded is not None:
            return part.dequantized(coded)
        narrowed, slices = needed_slices(self._checkpoint, part)
        if slices[0].axis:
            return narrowed.of(self._checkpoint.joined_array(slices))
        return part.of(self._checkpoint.array(part.tensor))


def needed_slices(checkpoint: Checkpoint, part: TensorPart) -> tuple[TensorPart, tuple[TensorSlice, ...]]:
    """The slices of a plain tensor that hold a part, and what the part is of them; all of a tensor that has none."""
    slices = checkpoint.slices(part.tensor)
    if not slices[0].axis or not part.is_matrix:
        return part, slices
    by_rows = slices[0].axis == ROWS
    edges = list(part.stored_edges)
    first, stop = edges[0 if by_rows else 1]
    own = tuple(one for one in slices if one.first < stop and first < one.stop)
    run, (n, k) = (own[0].first, own[-1].stop), checkpoint.info(part.tensor).shape
    return (part.within(run, (0, k)) if by_rows else part.within((0, n), run)), own


def _as_told(weight: Matrix | Vector, packed: Any) -> Any:
    """What was packed of the weight; ``partial`` if it is one rank's segments."""
    return replace(packed, partial=True) if isinstance(weight, Matrix) and weight.partial else packed


def _numbers(weight: Matrix | Vector) -> int:
    return sum(part.numbers for part in weight.parts)


def _packable(matrix: NDArray[Any]) -> NDArray[Any]:
    """The format allows a tensor to begin at any byte; kernels do not.  Inputs may come first as well as outputs."""
    if matrix.flags.f_contiguous:
        return np.require(matrix.T, requirements=["C", "ALIGNED"]).T
    return _aligned(matrix)


def _aligned(view: NDArray[Any]) -> NDArray[Any]:
    return np.require(view, requirements=["C", "ALIGNED"])


READ_BYTES = 1 << 20
JOIN_S = 0.05
"""How often the caller hears of a long hashing."""


class TensorHasher:
    """``start``, then ``join``; use as a context manager, so that no thread is left whatever happens."""

    def __init__(self, checkpoint: Checkpoint, names: list[str]) -> None:
        self._checkpoint = checkpoint
        self._waiting = names[::-1]
        self._digests: dict[str, bytes] = {}
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._stopped = False
        self._lock = threading.Lock()
        self.done = 0  # bytes in files

    def start(self, threads: int) -> None:
        """Begin; ``threads`` at most."""
        for _ in range(min(threads, len(self._waiting))):
            thread = threading.Thread(target=self._work)
            thread.start()
            self._threads.append(thread)

    def join(self, watch: Callable[[], None]) -> dict[str, bytes]:
        """All digests by name; ``watch`` is called meanwhile.  Raises ModelError, and what ``watch`` raises."""
        for thread in self._threads:
            while thread.is_alive():
                thread.join(JOIN_S)
                watch()
        self._threads.clear()
        if self._error is not None:
            raise self._error
        return self._digests

    def __enter__(self) -> TensorHasher:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        buffer = bytearray(READ_BYTES)
        try:
            while self._waiting and not self._stopped:
                name = self._waiting.pop()
                self._digests[name] = self._digest(name, buffer)
        except IndexError:
            return  # another thread took the last one
        except BaseException as error:  # noqa: BLE001 - raised again by ``join``
            self._error = error
            self._stopped = True

    def _digest(self, name: str, buffer: bytearray) -> bytes:
        place = self._checkpoint.file_range(name)
        if self._checkpoint.compressed_matrix(name) is not None:
            digest = self._checkpoint.digest(name)
            self._count(place.nbytes)
            return digest
        hasher = blake3()
        view = memoryview(buffer)
        done = 0
        while done < place.nbytes and not self._stopped:
            got = os.preadv(place.file, [view[: place.nbytes - done]], place.offset + done)
            if got == 0:
                raise ModelError(f"{self._checkpoint.path_of(name)}: tensor {name!r}: it ends before its time")
            hasher.update(view[:got])
            done += got
            self._count(got)
        return hasher.digest()

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory: read-only from here on, shared with every process forked later."""

    spec: ModelSpec
    weights: Mapping[str, PackedLinear | Any]  # by the names of the family's layout; vectors are the backend's arrays
    fingerprint: str
    nbytes: int  # of the packed matrices
    weights_hash: str  # of the checkpoint's tensors, whatever computes them
    read_bytes: int = 0  # of tensors in files, each byte counted once, for all parts that were loaded together


def load_model(
    path: str | Path,
    spec: ModelSpec,
    ops: Ops,
    progress: ProgressCallback | None = None,
    *,
    threads: int = 1,
    manifests: ManifestStore | None = None,
    select: Callable[[WeightLayout], WeightLayout] | None = None,
) -> LoadedModel:
    """Read, check and pack every weight.  ``spec`` is what ``inspect_model`` said of the same folder.

    ``threads`` read at once; without ``manifests`` nothing is known of earlier loads, nor remembered of this one.
    ``select``: the weights that are held of the model's (``parallel.shard.ModelShard.layout``).  The fingerprint is the
    whole model's all the same: files with a table of all hashes (``penstock compress``, ``penstock shard``) are read
    where these weights lie, and proved by checksums; others, and all for a backend that takes arrays, altogether.
    Raises ModelError if the files are no longer what they were, or are damaged; and what ``progress`` raises.
    """
    (loaded,) = load_parts(path, spec, ops, [select], progress, threads=threads, manifests=manifests)
    return loaded


def load_parts(
    path: str | Path,
    spec: ModelSpec,
    ops: Ops,
    selects: Sequence[Callable[[WeightLayout], WeightLayout] | None],
    progress: ProgressCallback | None = None,
    *,
    threads: int = 1,
    manifests: ManifestStore | None = None,
) -> list[LoadedModel]:
    """``load_model`` for several ranks at once: files are read and hashed once, and what several ranks have in common
    is in memory once.  Raises what it raises."""
    family = checkpoint_format(spec.architecture, str(path))
    with Checkpoint(Path(path), spec.quantization) as checkpoint:
        layout = family.layout(spec).found_in(checkpoint)
        layout.check(checkpoint)
        parts = [layout if select is None else select(layout) for select in selects]
        for part in parts:
            _refuse_cut_codes(checkpoint, part)
        layout, names = _merged(parts)
        layout, contained = _without_contained(layout)
        memory = manifests.open(checkpoint) if manifests is not None else None
        stamps = checkpoint.stamps()
        load = _ModelLoader(checkpoint, layout, ops, memory, progress or (lambda done, total: None))
        weights = load.run(threads)
        for own in contained:
            weights[own.weight.name] = ops.packed_rows(weights[own.whole], own.rows) or load.pack(own.weight)
        if checkpoint.stamps() != stamps:
            raise ModelError(f"{checkpoint.folder}: was changed while it was loaded; start again")
        if memory is not None:
            memory.verify_and_save(load.found)
        load.log_summary(spec)
        digest = Fingerprint()
        for name, entry in load.found.items():
            digest.add(checkpoint.info(name), bytes.fromhex(entry.blake3))
    found = [{name: weights[unique] for name, unique in own.items()} for own in names]
    hashes = digest.hexdigest(spec), digest.weights_hexdigest()
    return [
        LoadedModel(spec, MappingProxyType(own), hashes[0], _packed_bytes(own), hashes[1], load.read_bytes)
        for own in found
    ]


def _packed_bytes(weights: Mapping[str, Any]) -> int:
    return sum(weight.nbytes for weight in weights.values() if isinstance(weight, PackedLinear))


def _merged(layouts: Sequence[WeightLayout]) -> tuple[WeightLayout, list[dict[str, str]]]:
    """One layout with the weights of all, those that are the same only once; and the names that each has them by."""
    if len(layouts) == 1:
        return layouts[0], [{weight.name: weight.name for weight in layouts[0].weights}]
    unique: dict[Matrix | Vector, str] = {}
    names: list[dict[str, str]] = []
    for number, layout in enumerate(layouts):
        own = {weight.name: replace(weight, name="") for weight in layout.weights}
        names.append({name: unique.setdefault(weight, f"{number}/{name}") for name, weight in own.items()})
    weights = tuple(replace(weight, name=name) for weight, name in unique.items())
    return WeightLayout(weights, layouts[0].ignored), names


@dataclass(frozen=True, slots=True)
class _Contained:
    """A weight that is rows of another one, which is loaded whole: a rank's part of a head that is the embedding."""

    weight: Matrix
    whole: str
    rows: range


def _without_contained(layout: WeightLayout) -> tuple[WeightLayout, list[_Contained]]:
    """The weights that must be loaded, and those that need no memory of their own."""
    single = [own for own in layout.weights if isinstance(own, Matrix) and len(own.parts) == 1 and not own.partial]
    wholes = {(own.parts[0].tensor, own.segments): own for own in single if own.parts[0].is_whole}
    contained = []
    for weight in single:
        rows, whole = weight.parts[0].run_of_rows, wholes.get((weight.parts[0].tensor, weight.segments))
        if rows is None or whole is None:
            continue
        if ends_units(rows.start, rows.stop, whole.parts[0].outputs, PANEL_ROWS):
            contained.append(_Contained(weight, whole.name, rows))
    names = {own.weight.name for own in contained}
    return replace(layout, weights=tuple(own for own in layout.weights if own.name not in names)), contained


def _refuse_cut_codes(checkpoint: Checkpoint, layout: WeightLayout) -> None:
    """Raises ModelError for a quantized matrix whose columns are divided."""
    for part in layout.parts:
        if part.columns is not None and checkpoint.quantized_tensor(part.tensor) is not None:
            raise ModelError(
                f"{checkpoint.path_of(part.tensor)}: tensor {part.tensor!r} is quantized, and columns of codes cannot "
                "be divided over ranks yet; serve it without a plan"
            )


class _ModelLoader:
    """One load; afterwards ``found`` has the entry of every tensor of the checkpoint, and ``read_bytes`` those read."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: WeightLayout,
        ops: Ops,
        memory: FolderManifest | None,
        progress: ProgressCallback,
    ) -> None:
        self._checkpoint = checkpoint
        self._weights = layout.weights
        self._ops = ops
        self._packing = WeightPacker(checkpoint, ops)
        self._progress = progress
        self._needed = _needed(checkpoint, layout)
        self._tensors = list(dict.fromkeys(own.tensor for own in self._needed.values()))
        self._unread = sorted(set(checkpoint.names) - set(self._tensors))
        originals = {name: checkpoint.original(name) for name in checkpoint.names}
        self._vouched = {name: entry for name, entry in originals.items() if entry is not None and entry.checksum}
        self._known = self._vouched | (memory.known_tensors() if memory is not None else {})
        self.found: dict[str, OriginalTensor] = {}
        self.read_bytes = 0

    def run(self, threads: int) -> dict[str, Any]:
        """All weights by name."""
        loading = self._ops.loading(sum(own.nbytes for own in self._needed.values()))
        if loading is None:
            self.read_bytes = sum(self._checkpoint.info(name).nbytes for name in self._checkpoint.names)
            return self._one_by_one()
        checked: set[str] = set()  # tensors, or slices of them, that are read and checked at once
        for weight in self._weights:
            checked.update(_begin(self._checkpoint, weight, loading))
        known = {
            name: entry
            for name, entry in self._known.items()
            if name in self._vouched or name in self._unread or (name in checked and entry.checksum)
        }
        to_hash = [name for name in [*self._tensors, *self._unread] if name not in known]
        read = {own.name: own.nbytes for own in self._needed.values()}
        self.read_bytes = sum((read | {name: self._checkpoint.info(name).nbytes for name in to_hash}).values())
        with TensorHasher(self._checkpoint, to_hash) as hashing:
            hashing.start(threads)
            loaded = self._read(loading, threads)
            digests = hashing.join(lambda: self._progress(hashing.done, hashing.done))
        for name, digest in digests.items():
            entry = self._entry(name, digest)
            if name in checked:
                entry = msgspec.structs.replace(entry, checksum=loading.checksum(name, checksum_text(name, entry)))
            self.found[name] = entry
        for name, entry in known.items():
            if name in checked and name not in self._vouched:
                self._check(name, entry, loading.checksum(name, checksum_text(name, entry)))
            self.found[name] = msgspec.structs.replace(entry, axis="", slices=())
        self._check_vouched(loading, checked)
        loaded |= self._packing.pack_all([w for w in self._weights if w.name not in loaded], threads, self._progress)
        return {weight.name: _as_told(weight, loaded[weight.name]) for weight in self._weights}

    def pack(self, weight: Matrix) -> PackedLinear:
        """One weight more, of tensors that have been read and checked."""
        packed: PackedLinear = self._packing.pack_one(weight)
        return packed

    def log_summary(self, spec: ModelSpec) -> None:
        """Log what was not loaded in its stored form."""
        self._packing.log_summary(spec.quantization)

    def _read(self, loading: WeightLoading, threads: int) -> dict[str, Any]:
        try:
            return loading.run(threads, self._progress)
        except LoadFailed as error:
            tensors = [error.name]
            for weight in self._weights:
                if weight.name == error.name:
                    tensors = [part.tensor for part in weight.parts]
            names = ", ".join(map(repr, tensors))
            raise ModelError(f"{self._checkpoint.path_of(tensors[0])}: tensor {names}: {error.reason}") from error

    def _check_vouched(self, loading: WeightLoading, checked: set[str]) -> None:
        """Compare what was read with what its file says of it; nothing is decoded for that."""
        for done, own in enumerate(self._needed.values(), 1):
            if own.tensor not in self._vouched or own.entry is None:
                continue
            if own.name in checked:
                found = loading.checksum(own.name, checksum_text(own.name, own.entry))
            else:
                with self._checkpoint.stored(own.tensor) as stored:
                    found = checksum(own.name, own.entry, [stored[own.begin : own.begin + own.nbytes]])
                self._progress(done, done)
            self._check(own.tensor, own.entry, found)

    def _check(self, name: str, entry: OriginalTensor, found: str) -> None:
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

    def _entry(self, name: str, digest: bytes) -> OriginalTensor:
        info, original = self._checkpoint.info(name), self._checkpoint.original(name)
        code = original.code if original is not None else None
        return OriginalTensor(dtype=info.dtype, shape=info.shape, blake3=digest.hex(), code=code)

    # --- backends that take arrays ------------------------------------------------------------------------------------

    def _one_by_one(self) -> dict[str, Any]:
        """Packs weight after weight: peak memory is the packed weights plus the largest weight."""
        meter = _LoadMeter(self, self._checkpoint, self._progress)
        weights = {}
        for weight in self._weights:
            weights[weight.name] = self._packing.pack_one(weight)
            meter.count(name for part in weight.parts for name in self._checkpoint.sources(part.tensor))
        meter.count(self._unread)
        return weights

    def hash(self, name: str) -> None:
        """Hash a tensor that has been packed, and note its entry."""
        self.found[name] = self._entry(name, self._checkpoint.digest(name))


class _LoadMeter:
    """Hashes each tensor once, drops its pages, and reports the progress of loading."""

    def __init__(self, load: _ModelLoader, checkpoint: Checkpoint, progress: ProgressCallback) -> None:
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
                self._checkpoint.drop_pages(name)
                self._done += self._checkpoint.info(name).nbytes
        self._progress(self._done, self._total)


def _needed(checkpoint: Checkpoint, layout: WeightLayout) -> dict[str, TensorSlice]:
    """What must be read for a layout, in its order: tensors, or slices of them, by name."""
    found: dict[str, TensorSlice] = {}
    for part in layout.parts:
        for name in checkpoint.sources(part.tensor):
            slices = needed_slices(checkpoint, part)[1] if name == part.tensor else checkpoint.slices(name)
            found |= {own.name: own for own in slices}
    return found


def _begin(checkpoint: Checkpoint, weight: Matrix | Vector, loading: WeightLoading) -> list[str]:
    """Name the weight's tensors, or slices of them, to the backend and return their names; none if it must be made of
    arrays."""
    if not all(checkpoint.is_plain(part.tensor) for part in weight.parts):
        return []
    if isinstance(weight, Vector) and weight.heads is not None:
        return []
    needed = [needed_slices(checkpoint, part) for part in weight.parts]
    if not all(part.is_whole for part, _ in needed):
        return []
    slices = [own for _, several in needed for own in several]
    places = [_stored(checkpoint, own, several[0].first) for _, several in needed for own in several]
    if isinstance(weight, Vector):
        tensor = weight.parts[0].tensor
        if len(weight.parts) > 1 or weight.offset or checkpoint.compressed_matrix(tensor) is not None:
            return []
        loading.add_vector(weight.name, places[0], NUMPY_DTYPES[checkpoint.info(tensor).dtype])
        return [tensor]
    matrices = [checkpoint.joined_matrix([own]) for own in slices]
    compressed = [pair for pair in zip(places, matrices, strict=True) if pair[1] is not None]
    if compressed:
        own = [(place, matrix) for place, matrix in compressed if isinstance(matrix, CompressedMatrix)]
        # some may be plain, or in a layout that must be converted
        if len(own) < len(places) or not loading.add_compressed(weight.name, own, weight.segments):
            return []
    elif any(place.column for place in places):
        return []
    else:
        loading.add_matrix(weight.name, places, weight.segments)
    return [own.name for own in slices]


def _stored(checkpoint: Checkpoint, own: TensorSlice, first: int) -> StoredTensor:
    """Where a slice lies; ``first``: row or column of its tensor at which the part of the weight begins."""
    place, info = checkpoint.file_range(own.tensor), checkpoint.info(own.tensor)
    shape = info.shape if own.entry is None else own.entry.shape
    rows, columns = shape if len(shape) == 2 else (1, *shape)
    return StoredTensor(
        name=own.name,
        file=place.file,
        offset=place.offset + own.begin,
        rows=rows,
        columns=columns,
        dtype=checkpoint.weight_dtype(own.tensor),
        column=0 if own.axis == ROWS else own.first - first,
    )
