"""Checkpoint folders to compressed ones and back: file by file, each under a temporary name until it is whole.

A compressed file is written tensor by tensor behind a header of reserved size, with a journal next to it, so that an
interrupted run goes on where it stopped.  Uses threads: not for a process that is about to fork.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
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
    GPU,
    TENSORS_KEY,
    VERSION_KEY,
    OriginalTensor,
    checksum,
    compression_metadata,
)
from penstock.weights.files import atomic_write
from penstock.weights.model_files import CONFIG
from penstock.weights.safetensors import SafetensorsFile
from penstock.weights.safetensors_header import LENGTH_BYTES, TensorInfo

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
    """The journal's first line: which file is being compressed, and where tensors begin in the new one."""

    source: str
    data_start: int
    layout: str = ""


Report = Callable[[ConvertedTensor], None]


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
    source: Path, target: Path, *, threads: int, report: Report, layout: str = ""
) -> list[ConvertedTensor]:
    """Writes ``target`` and returns what became of every tensor, in the order of the files.

    ``layout``: "gpu", or empty for the CPU's; a source in the other one is converted.  Goes on with what an interrupted
    run has left there.  Raises ModelError for a source that cannot be read or is in that layout already, PenstockError
    if ``target`` cannot be written.
    """
    done: list[ConvertedTensor] = []
    with Checkpoint(source) as checkpoint, _OutputFolder(target):
        if any(file.is_compressed and layout in file.layouts for file in checkpoint.files):
            raise ModelError(f"{source}: is compressed already, for the {(layout or 'cpu').upper()}")
        for file in checkpoint.files:
            done += _compress_file(file, target / file.path.name, threads, report, layout)
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
    return checksum(name, original, [checkpoint.stored(name)]) == original.checksum


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


def _compress_file(
    file: SafetensorsFile, target: Path, threads: int, report: Report, layout: str
) -> list[ConvertedTensor]:
    infos = list(file.tensors.values())
    partial, journal = _beside(target, PARTIAL), _beside(target, JOURNAL)
    started = JournalHeader(_identity(file), LENGTH_BYTES + _reserved_header(file, infos, layout), layout)
    done = _resume(partial, journal, started, infos)
    for one in done:
        report(one)
    end = done[-1].begin + done[-1].nbytes if done else 0
    with atomic_write(target, partial, go_on=bool(done)) as out, journal.open("ab" if done else "wb") as log:
        out.truncate(started.data_start + end)
        out.seek(started.data_start + end)
        if not done:
            _log(out, log, started)
        for info, packed in _in_order(file, infos[len(done) :], threads, layout):
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
    file: SafetensorsFile, infos: list[TensorInfo], threads: int, layout: str
) -> Iterator[tuple[TensorInfo, EncodedTensor]]:
    """Tensors packed by several threads, some ahead of the one that is wanted next."""
    with ThreadPoolExecutor(threads) as pool:
        waiting: list[tuple[TensorInfo, Future[EncodedTensor]]] = []
        for info in infos:
            waiting.append((info, pool.submit(_pack, file, info, layout)))
            if len(waiting) > threads:
                first, packed = waiting.pop(0)
                yield first, packed.result()
        for info, packed in waiting:
            yield info, packed.result()


def _pack(file: SafetensorsFile, info: TensorInfo, layout: str) -> EncodedTensor:
    raw = file.raw(info)
    digest = blake3(raw).hexdigest()
    if info.dtype == "BF16" and len(info.shape) == 2:
        weight = np.require(np.frombuffer(raw, np.uint16).reshape(info.shape), requirements=["C", "ALIGNED"])
        matrix = compress_for_gpu(weight) if layout == GPU else compression_format.compress_matrix(weight)
        if matrix is not None:
            code = (matrix.base, matrix.step if isinstance(matrix, CompressedMatrix) else 1)
            original = OriginalTensor(dtype=info.dtype, shape=info.shape, blake3=digest, code=code, layout=layout)
            sections = compression_format.sections(matrix)
            return EncodedTensor(_with_checksum(info.name, original, sections), sections)
    plain = OriginalTensor(dtype=info.dtype, shape=info.shape, blake3=digest)
    return EncodedTensor(_with_checksum(info.name, plain, [raw]), [raw])


def _with_checksum(name: str, original: OriginalTensor, sections: list[memoryview]) -> OriginalTensor:
    return msgspec.structs.replace(original, checksum=checksum(name, original, sections))


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
        whole = one.original.code is None
        table[one.name] = {
            "dtype": one.original.dtype if whole else "U8",
            "shape": one.original.shape if whole else [one.nbytes],
            "data_offsets": [one.begin, one.begin + one.nbytes],
        }
    return _framed(msgspec.json.encode(table), length)


def _framed(header: bytes, length: int | None = None) -> bytes:
    length = length or -(-len(header) // 8) * 8
    return length.to_bytes(LENGTH_BYTES, "little") + header.ljust(length)


def _reserved_header(file: SafetensorsFile, infos: list[TensorInfo], layout: str) -> int:
    """Bytes that no header of this file exceeds: everything in it that is not known yet is as long as can be."""
    end = sum(file.original_bytes(info) for info in infos)
    worst = []
    for info in infos:
        code = (255, -1) if info.dtype == "BF16" and len(info.shape) == 2 else None
        original = OriginalTensor(dtype=info.dtype, shape=info.shape, blake3="0" * 64, code=code, checksum="0" * 32)
        original = msgspec.structs.replace(original, layout=layout if code else "")
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
    if one.original.code is None:
        hasher.update(raw)
    else:
        n, k = one.original.shape
        try:
            if one.original.layout == GPU:
                matrix: AnyCompressed = compression_format.gpu_sections_of(raw, (n, k), one.original.code[0], one.name)
            else:
                matrix = compression_format.sections_of(raw, (n, k), one.original.code, one.name)
            for part in compression_format.decode_parts(matrix, one.name):
                hasher.update(part.data.cast("B"))
        except ModelError:
            return False
    intact = checksum(one.name, one.original, [raw]) == one.original.checksum
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
