"""Checkpoint folders to compressed or sliced ones and back: by file, each under a temporary name until it is whole.

A compressed file is written tensor by tensor behind a header of reserved size, with a journal next to it, so that an
interrupted run goes on where it stopped.  Uses threads: not for a process that is about to fork.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from blake3 import blake3

from penstock.errors import ConfigError, ModelError, PenstockError
from penstock.kernels.compressed import AnyCompressed, CompressedMatrix, compress_for_gpu
from penstock.weights import compression_format
from penstock.weights.checkpoint_reader import INDEX, SINGLE, Checkpoint
from penstock.weights.compression_format import (
    COLUMNS,
    GPU,
    TENSORS_KEY,
    VERSION_KEY,
    OriginalTensor,
    SliceEntry,
    compression_metadata,
)
from penstock.weights.files import atomic_write
from penstock.weights.model_files import CONFIG
from penstock.weights.safetensors import SafetensorsFile
from penstock.weights.safetensors_header import LENGTH_BYTES, TensorInfo
from penstock.weights.stored_slices import (
    Cuts,
    encode_slices,
    joined_bytes,
    matrix_of,
    slices_of,
    stored_checksum,
)

PARTIAL = ".partial"
JOURNAL = ".journal"
WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"})
"""Files that are not copied: weights in another form than the one that is converted."""


class ConvertedTensor(msgspec.Struct, frozen=True):
    """One tensor that has been written.  ``begin`` counts from the first tensor's first byte."""

    name: str
    original: OriginalTensor
    original_bytes: int
    begin: int
    nbytes: int

    @property
    def bits_a_weight(self) -> float:
        """Stored bits for each element of the original."""
        return 8 * self.nbytes / max(1, int(np.prod(self.original.shape)))


class JournalHeader(msgspec.Struct, frozen=True):
    """The journal's first line: which file is being converted to what, and where tensors begin in the new one."""

    source: str
    data_start: int
    layout: str = ""
    conversion: str | msgspec.UnsetType = msgspec.UNSET  # ``Conversion.identity``


Report = Callable[[ConvertedTensor], None]


@dataclass(frozen=True, slots=True)
class Conversion:
    """What becomes of tensors: where matrices are cut into slices, and how they are stored."""

    cuts: Cuts = field(default_factory=dict)
    compress: bool = True  # False: matrices stay plain or compressed, as they are
    layout: str = ""  # of those that are compressed: "gpu", or empty for the CPU's

    @property
    def identity(self) -> str | msgspec.UnsetType:
        """Another one for another conversion; none for mere compression."""
        if self.compress and not self.cuts:
            return msgspec.UNSET
        cuts = sorted((name, cut.axis, cut.ends) for name, cut in self.cuts.items())
        return blake3(msgspec.json.encode((cuts, self.compress))).hexdigest()

    def check(self, file: SafetensorsFile, source: Path) -> None:
        """Raises ModelError for a file that is so already, or cannot become so."""
        if self.compress and file.is_compressed and self.layout in file.layouts:
            hint = "" if self.layout or file.is_sliced else "; penstock shard stores it in slices for ranks"
            raise ModelError(f"{source}: is compressed already, for the {(self.layout or 'cpu').upper()}{hint}")
        if not self.compress and file.is_sliced:
            raise ModelError(f"{source}: its matrices are in slices already")
        if not self.compress and GPU in file.layouts:
            raise ModelError(
                f"{source}: is compressed for GPUs, over which models are not divided; penstock compress writes it for "
                "processors, in slices"
            )


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """One tensor, ready to be written."""

    original: OriginalTensor
    sections: list[memoryview]


def check_folders(source: Path, target: Path, *, force: bool) -> None:
    """Raises ConfigError if ``target`` is the source or, unless ``force``, has weights already."""
    if target.exists() and (not target.is_dir() or target.resolve() == source.resolve()):
        raise ConfigError(f"{target}: must be another folder than the model's, or none yet")
    if not force and ((target / SINGLE).exists() or (target / INDEX).exists()):
        raise ConfigError(f"{target}: has a model already; --force replaces it")


def compress_folder(
    source: Path, target: Path, *, threads: int, report: Report, layout: str = "", cuts: Cuts | None = None
) -> list[ConvertedTensor]:
    """Writes ``target`` and returns what became of every tensor, in the order of the files.

    ``layout``: "gpu", or empty for the CPU's; a source in the other one is converted.  ``cuts``: which matrices are
    stored in slices; none of those in the layout for GPUs.  Goes on with what an interrupted run has left there.
    Raises ModelError for a source that cannot be read or is in that layout already, PenstockError if ``target`` cannot
    be written.
    """
    conversion = Conversion({} if layout == GPU else cuts or {}, layout=layout)
    return _convert_folder(source, target, conversion, threads, report)


def shard_folder(source: Path, target: Path, *, threads: int, report: Report, cuts: Cuts) -> list[ConvertedTensor]:
    """The same for matrices that stay as they are, plain or compressed, but for slices."""
    return _convert_folder(source, target, Conversion(cuts, compress=False), threads, report)


def _convert_folder(
    source: Path, target: Path, conversion: Conversion, threads: int, report: Report
) -> list[ConvertedTensor]:
    done: list[ConvertedTensor] = []
    with Checkpoint(source) as checkpoint, _OutputFolder(target):
        for file in checkpoint.files:
            conversion.check(file, source)
        for file in checkpoint.files:
            done += _convert_file(file, target / file.path.name, threads, report, conversion)
        _copy_others(source, target)
    return done


def decompress_folder(source: Path, target: Path, *, report: Report) -> list[ConvertedTensor]:
    """Writes the original's tensors as plain files; the same errors."""
    done: list[ConvertedTensor] = []
    with Checkpoint(source) as checkpoint, _OutputFolder(target):
        if not any(file.is_compressed for file in checkpoint.files):
            raise ModelError(f"{source}: is not compressed")
        for file in checkpoint.files:
            done += _decompress_file(file, target / file.path.name, report)
        _copy_others(source, target)
    return done


def verify_folder(source: Path, target: Path) -> int:
    """Compares both folders tensor by tensor: type, shape and BLAKE3 of every byte.  Returns the number of tensors.

    Raises ModelError, naming the first tensor that differs.
    """
    with Checkpoint(source) as ours, Checkpoint(target) as theirs:
        if ours.names != theirs.names:
            raise ModelError(f"{target}: has other tensors than {source}")
        for name in ours.names:
            one, other = ours.info(name), theirs.info(name)
            same = (one.dtype, one.shape) == (other.dtype, other.shape) and ours.digest(name) == theirs.digest(name)
            if not same or not _is_intact(theirs, name):
                raise ModelError(f"{theirs.path_of(name)}: tensor {name!r} differs from {ours.path_of(name)}")
            ours.drop_pages(name)
            theirs.drop_pages(name)
        return len(ours.names)


def _is_intact(checkpoint: Checkpoint, name: str) -> bool:
    """Whether the tensor has the checksum in its file, if the file has one."""
    original = checkpoint.original(name)
    if original is None or not original.checksum:
        return True
    return stored_checksum(name, original, checkpoint.stored(name)) == original.checksum


# --- one file ---------------------------------------------------------------------------------------------------------


class _OutputFolder:
    """Makes the folder, and words what the system says when it cannot be written."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __enter__(self) -> None:
        try:
            self._target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{self._target}: cannot be made ({error.strerror or error})") from error

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            where = error.filename or self._target
            raise PenstockError(
                f"{where}: cannot be written ({error.strerror or error}); "
                "what is finished is kept, run it again to go on"
            ) from error


def _convert_file(
    file: SafetensorsFile, target: Path, threads: int, report: Report, conversion: Conversion
) -> list[ConvertedTensor]:
    infos = list(file.tensors.values())
    partial, journal = _beside(target, PARTIAL), _beside(target, JOURNAL)
    data_start = LENGTH_BYTES + _reserved_header(file, infos, conversion)
    started = JournalHeader(_identity(file), data_start, conversion.layout, conversion.identity)
    done = _resume(partial, journal, started, infos)
    for one in done:
        report(one)
    end = done[-1].begin + done[-1].nbytes if done else 0
    with atomic_write(target, partial, go_on=bool(done)) as out, journal.open("ab" if done else "wb") as log:
        out.truncate(started.data_start + end)
        out.seek(started.data_start + end)
        if not done:
            _log(out, log, started)
        for info, packed in _in_order(file, infos[len(done) :], threads, conversion):
            for section in packed.sections:
                out.write(section)
            nbytes = sum(section.nbytes for section in packed.sections)
            done.append(ConvertedTensor(info.name, packed.original, file.original_bytes(info), end, nbytes))
            end += nbytes
            _log(out, log, done[-1])
            file.drop(info)
            report(done[-1])
        out.seek(0)
        out.write(_header(file.metadata, done, started.data_start - LENGTH_BYTES))
    journal.unlink()
    return done


def _in_order(
    file: SafetensorsFile, infos: list[TensorInfo], threads: int, conversion: Conversion
) -> Iterator[tuple[TensorInfo, EncodedTensor]]:
    """Tensors packed by several threads, some ahead of the one that is wanted next."""
    with ThreadPoolExecutor(threads) as pool:
        waiting: list[tuple[TensorInfo, Future[EncodedTensor]]] = []
        for info in infos:
            waiting.append((info, pool.submit(_pack, file, info, conversion)))
            if len(waiting) > threads:
                first, packed = waiting.pop(0)
                yield first, packed.result()
        for info, packed in waiting:
            yield info, packed.result()


def _pack(file: SafetensorsFile, info: TensorInfo, conversion: Conversion) -> EncodedTensor:
    original, content = _coded(file, info, conversion)
    entry, written = encode_slices(info.name, original, content, conversion.cuts.get(info.name))
    if original.code is not None and sum(section.nbytes for section in written) >= file.original_bytes(info):
        entry, written = encode_slices(info.name, original, content, None)  # more tables than it saves
    return EncodedTensor(entry, written)


def _coded(
    file: SafetensorsFile, info: TensorInfo, conversion: Conversion
) -> tuple[OriginalTensor, memoryview | AnyCompressed]:
    """The tensor as it will be stored, but for slices and checksums; plain ones are their bytes."""
    if not conversion.compress and (stored := file.compressed_matrix(info)) is not None:
        original = OriginalTensor(dtype=info.dtype, shape=info.shape, blake3=file.digest(info).hex())
        return _with_code(original, stored), stored
    raw = file.raw(info)
    original = OriginalTensor(dtype=info.dtype, shape=info.shape, blake3=blake3(raw).hexdigest())
    if conversion.compress and info.dtype == "BF16" and len(info.shape) == 2:
        weight = np.require(np.frombuffer(raw, np.uint16).reshape(info.shape), requirements=["C", "ALIGNED"])
        gpu = conversion.layout == GPU
        matrix = compress_for_gpu(weight) if gpu else compression_format.compress_matrix(weight)
        if matrix is not None:
            return _with_code(original, matrix), matrix
    return original, raw


def _with_code(original: OriginalTensor, matrix: AnyCompressed) -> OriginalTensor:
    if isinstance(matrix, CompressedMatrix):
        return msgspec.structs.replace(original, code=(matrix.base, matrix.step))
    return msgspec.structs.replace(original, code=(matrix.base, 1), layout=GPU)


def _decompress_file(file: SafetensorsFile, target: Path, report: Report) -> list[ConvertedTensor]:
    metadata = {key: text for key, text in file.metadata.items() if key not in (VERSION_KEY, TENSORS_KEY)}
    done: list[ConvertedTensor] = []
    end = 0
    with atomic_write(target, _beside(target, PARTIAL)) as out:
        infos = list(file.tensors.values())
        table: dict[str, object] = {"__metadata__": metadata} if metadata else {}
        for info in infos:
            nbytes = file.original_bytes(info)
            table[info.name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": [end, end + nbytes]}
            end += nbytes
        out.write(_framed(msgspec.json.encode(table)))
        begin = 0
        for info in infos:
            raw = file.raw(info)
            out.write(raw)
            original = OriginalTensor(dtype=info.dtype, shape=info.shape, blake3=file.digest(info).hex())
            done.append(ConvertedTensor(info.name, original, raw.nbytes, begin, info.nbytes))
            begin += raw.nbytes
            file.drop(info)
            report(done[-1])
    return done


# --- headers and journals ---------------------------------------------------------------------------------------------


def _header(metadata: dict[str, str], done: list[ConvertedTensor], length: int) -> bytes:
    """The header, padded with blanks to ``length``."""
    table: dict[str, object] = {
        "__metadata__": {**metadata, **compression_metadata({one.name: one.original for one in done})}
    }
    for one in done:
        in_order = one.original.code is None and one.original.axis != COLUMNS
        table[one.name] = {
            "dtype": one.original.dtype if in_order else "U8",
            "shape": one.original.shape if in_order else [one.nbytes],
            "data_offsets": [one.begin, one.begin + one.nbytes],
        }
    return _framed(msgspec.json.encode(table), length)


def _framed(header: bytes, length: int | None = None) -> bytes:
    length = length or -(-len(header) // 8) * 8
    return length.to_bytes(LENGTH_BYTES, "little") + header.ljust(length)


def _reserved_header(file: SafetensorsFile, infos: list[TensorInfo], conversion: Conversion) -> int:
    """Bytes that no header of this file exceeds: everything in it that is not known yet is as long as can be."""
    end = sum(file.original_bytes(info) for info in infos)
    worst = []
    for info in infos:
        code = (255, -1) if info.dtype == "BF16" and len(info.shape) == 2 else None
        original = OriginalTensor(dtype=info.dtype, shape=info.shape, blake3="0" * 64, code=code, checksum="0" * 32)
        original = msgspec.structs.replace(original, layout=conversion.layout if code else "")
        cut = conversion.cuts.get(info.name)
        if cut is not None:
            longest = tuple(SliceEntry(stop, file.original_bytes(info), "0" * 32) for stop in cut.ends)
            original = msgspec.structs.replace(original, axis=cut.axis, slices=longest)
        worst.append(ConvertedTensor(info.name, original, file.original_bytes(info), end, end))
    return len(_header(file.metadata, worst, 0)) - LENGTH_BYTES + 7 & -8


def _identity(file: SafetensorsFile) -> str:
    """Changes when the file does, as far as can be seen without reading it."""
    facts = file.path.stat()
    names = [(info.name, info.dtype, info.shape, info.start) for info in file.tensors.values()]
    return blake3(msgspec.json.encode((facts.st_size, facts.st_mtime_ns, names))).hexdigest()


def _resume(partial: Path, journal: Path, started: JournalHeader, infos: list[TensorInfo]) -> list[ConvertedTensor]:
    """Tensors that an interrupted run has written, up to the first of which any doubt is left."""
    done: list[ConvertedTensor] = []
    try:
        lines = journal.read_bytes().split(b"\n")
        if msgspec.json.decode(lines[0], type=JournalHeader) != started:
            return []
        with partial.open("rb") as file:
            for info, line in zip(infos, lines[1:], strict=False):
                one = msgspec.json.decode(line, type=ConvertedTensor)
                if one.name != info.name or not _is_written(file.fileno(), started.data_start, one):
                    break
                done.append(one)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError):
        return done
    return done


def _is_written(file: int, data_start: int, one: ConvertedTensor) -> bool:
    """Whether the tensor in the file decodes to the bytes of the original."""
    raw = memoryview(os.pread(file, one.nbytes, data_start + one.begin))
    if raw.nbytes != one.nbytes:
        return False
    hasher = blake3()
    try:
        matrix = matrix_of(one.original, raw, one.name)
        if matrix is None:
            hasher.update(joined_bytes(slices_of(one.name, one.original, raw.nbytes), raw))
        else:
            for part in compression_format.decode_parts(matrix, one.name):
                hasher.update(part.data.cast("B"))
    except ModelError:
        return False
    intact = stored_checksum(one.name, one.original, raw) == one.original.checksum
    return intact and hasher.hexdigest() == one.original.blake3


def _log(out: BinaryIO, log: BinaryIO, line: msgspec.Struct) -> None:
    """Data before the line that vouches for it."""
    out.flush()
    log.write(msgspec.json.encode(line) + b"\n")
    log.flush()


def _beside(target: Path, suffix: str) -> Path:
    return target.with_name(target.name + suffix)


def _copy_others(source: Path, target: Path) -> None:
    """Configuration, tokenizer, index and the like; of folders in it, what says how texts are pooled."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix not in WEIGHT_SUFFIXES:
            shutil.copyfile(path, target / path.name)
        elif (path / CONFIG).is_file():
            (target / path.name).mkdir(exist_ok=True)
            shutil.copyfile(path / CONFIG, target / path.name / CONFIG)
