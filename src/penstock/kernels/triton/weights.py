"""Weights from files to the device: threads read pieces into pinned buffers, streams carry them over, nothing waits.

::

    file --read--> pinned buffer --checksum--> --copy on the thread's stream--> the tensor's place on the device
                                                            |--> a buffer there --round--> |      if it has another type

Every thread has two buffers: it reads into one while the other is on its way.  A file in the page cache is read at the
speed of memory; one that is not, at the drive's.  The threads have ended when ``run`` returns.  A matrix of another
type than the compute type is rounded chunk by chunk as it arrives, so a checkpoint in fp32 takes no more room than one
in bf16.  At most one weight is there twice, while it is brought into the kernels' layout.

Knows where bytes lie, not what the files are.  This module imports torch.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.compressed import PANEL_ROWS, CompressedMatrix
from penstock.kernels.host_ops import xxh3_128
from penstock.kernels.operands import PackedLinear
from penstock.kernels.weight_source import PIECE_BYTES, LoadFailed, ProgressCallback, StoredTensor, WeightLoading

CHUNK_BYTES = 16 << 20
"""Read, checked and sent at once: long enough for the bus, short enough that reading and sending overlap."""

_Type: TypeAlias = torch.dtype  # classes below have a field of that name

BUFFERS = 2

MOST_THREADS = 8
"""That read at once: their buffers are pinned, 32 MiB a thread, and as many fill any bus."""

WATCH_EVERY_S = 0.05
"""Interval of progress callbacks."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Pack = Callable[[Tensor, tuple[int, ...] | None], PackedLinear]
"""A matrix [N, K] of the compute type on the device to the kernels' layout; it may keep the memory."""


@dataclass(slots=True)
class _Source:
    """One tensor in a file, and its numbers on the device."""

    stored: StoredTensor
    into: Tensor  # [N]; empty once they have arrived, so that the memory can be freed
    piece: int  # bytes of the file, whole numbers; the last may be shorter
    size: int = 0  # bytes of the file
    digests: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.size = len(self.into) * self.dtype.itemsize
        self.digests = [b""] * -(-self.size // self.piece)

    @property
    def dtype(self) -> _Type:
        """Type of the numbers in the file."""
        return _DTYPES[self.stored.dtype]

    def chunks(self) -> Iterator[_Chunk]:
        """The file's bytes, in whole pieces."""
        step = max(1, CHUNK_BYTES // self.piece) * self.piece
        for begin in range(0, self.size, step):
            yield _Chunk(self, begin, min(begin + step, self.size))


@dataclass(frozen=True, slots=True)
class _Chunk:
    source: _Source
    begin: int
    end: int

    def read(self, buffer: memoryview) -> None:
        """Raises LoadFailed where the file is too short or cannot be read."""
        stored, done = self.source.stored, 0
        wanted = self.end - self.begin
        while done < wanted:
            try:
                count = os.preadv(stored.file, [buffer[done:wanted]], stored.offset + self.begin + done)
            except OSError as error:
                raise LoadFailed(stored.name, f"cannot be read: {error.strerror}") from error
            if count == 0:
                raise LoadFailed(stored.name, "the file is too short")
            done += count

    def send(self, buffer: Tensor, landing: Tensor | None) -> None:
        """From uint8 ``buffer`` to the tensor's place; numbers of another type are rounded there, and land before that
        in uint8 ``landing`` on the device, if there is any."""
        source, width = self.source, self.source.dtype.itemsize
        into, numbers = source.into[self.begin // width : self.end // width], buffer[: self.end - self.begin]
        if landing is not None and into.dtype != source.dtype:
            numbers = landing[: len(numbers)].copy_(numbers, non_blocking=True)
        into.copy_(numbers.view(source.dtype), non_blocking=True)

    def check(self, buffer: memoryview) -> None:
        """Remember the checksum of each piece."""
        piece = self.source.piece
        for begin in range(self.begin, self.end, piece):
            own = buffer[begin - self.begin : min(begin + piece, self.end) - self.begin]
            self.source.digests[begin // piece] = xxh3_128(own)


class DeviceWeightLoading(WeightLoading):
    """Loads weights to the device through pinned buffers."""

    def __init__(self, device: torch.device, dtype: _Type, pack: Pack) -> None:
        """``dtype``: the compute type, which matrices arrive in."""
        self._device = device
        self._dtype = dtype
        self._pack = pack
        self._sources: list[_Source] = []
        self._by_tensor: dict[str, _Source] = {}
        self._finish: dict[str, Callable[[], Any]] = {}

    def add_vector(self, name: str, tensor: StoredTensor, dtype: np.dtype[Any]) -> None:
        numbers_N = self._empty(tensor.columns, torch.float32)
        self._add(tensor, numbers_N, PIECE_BYTES)
        self._finish[name] = lambda: numbers_N

    def add_matrix(self, name: str, parts: list[StoredTensor], segments: tuple[int, ...] | None) -> None:
        rows, begin = sum(part.rows for part in parts), 0
        whole_N = self._empty(rows * parts[0].columns, self._dtype)
        for part in parts:
            row, end = _row_bytes(part), begin + part.rows * part.columns
            self._add(part, whole_N[begin:end], max(PANEL_ROWS, PIECE_BYTES // row // PANEL_ROWS * PANEL_ROWS) * row)
            begin = end
        self._finish[name] = lambda: self._pack(whole_N.view(rows, -1), segments)

    def add_compressed(
        self, name: str, parts: list[tuple[StoredTensor, CompressedMatrix]], segments: tuple[int, ...] | None
    ) -> bool:
        """They come as arrays (``Ops.pack_compressed``)."""
        return False

    def run(self, threads: int, watch: ProgressCallback) -> dict[str, Any]:
        total = sum(source.size for source in self._sources)
        work = _Work(deque(chunk for source in self._sources for chunk in source.chunks()))
        count = min(max(1, threads), MOST_THREADS)
        # The tensors were had on this thread's stream: what it still does to their memory comes first.
        before = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        words = self._device, before
        readers = [threading.Thread(target=work.do, args=words, name="weights") for _ in range(count)]
        for reader in readers:
            reader.start()
        try:
            for reader in readers:
                while reader.is_alive():
                    reader.join(WATCH_EVERY_S)
                    watch(work.done, total)
        finally:
            work.left.clear()
            for reader in readers:
                reader.join()
        if work.failed is not None:
            raise work.failed
        if work.landing_bytes:
            torch.cuda.empty_cache()  # the buffers that numbers landed in: no other stream would use them again
        watch(total, total)
        for source in self._sources:
            source.into = source.into[:0].clone()
        made = {}
        for name in list(self._finish):
            made[name] = self._finish.pop(name)()  # what it was made of goes with its closure
        return made

    def checksum(self, tensor: str, text: str) -> str:
        return xxh3_128(b"".join((text.encode(), *self._by_tensor[tensor].digests))).hex()

    def _empty(self, count: int, dtype: _Type) -> Tensor:
        return torch.empty(count, dtype=dtype, device=self._device)

    def _add(self, stored: StoredTensor, into: Tensor, piece: int) -> None:
        source = _Source(stored, into, piece)
        self._sources.append(source)
        self._by_tensor.setdefault(stored.name, source)


def _row_bytes(part: StoredTensor) -> int:
    return part.columns * _DTYPES[part.dtype].itemsize


class _Work:
    """Chunks that are left, and what came of the others."""

    def __init__(self, left: deque[_Chunk]) -> None:
        self.left = left
        self.done = 0  # bytes
        self.failed: Exception | None = None
        self._lock = threading.Lock()
        self._largest = max((chunk.end - chunk.begin for chunk in left), default=0)
        others = (chunk for chunk in left if chunk.source.into.dtype != chunk.source.dtype)
        self.landing_bytes = max((chunk.end - chunk.begin for chunk in others), default=0)

    def do(self, device: torch.device, before: torch.cuda.Stream | None) -> None:
        """Runs until no work is left or a chunk failed, in its own thread."""
        try:
            if before is not None:
                stream = torch.cuda.Stream(device)
                stream.wait_stream(before)
                with torch.cuda.stream(stream):
                    self._send(device)
                stream.synchronize()
            else:
                self._send(None)
        except Exception as error:  # noqa: BLE001 - it is raised again where the load was begun
            self.failed = error
            self.left.clear()

    def _send(self, device: torch.device | None) -> None:
        """``device``: where copies go by themselves, from pinned memory."""
        pinned = device is not None
        landing = torch.empty(self.landing_bytes, dtype=torch.uint8, device=device) if pinned else None
        buffers = [torch.empty(self._largest, dtype=torch.uint8, pin_memory=pinned) for _ in range(BUFFERS)]
        sent: list[Any] = [torch.cuda.Event() if pinned else None for _ in range(BUFFERS)]
        turn = 0
        while True:
            try:
                chunk = self.left.popleft()
            except IndexError:
                return
            turn = (turn + 1) % BUFFERS
            if sent[turn] is not None:
                sent[turn].synchronize()
            size = chunk.end - chunk.begin
            view = memoryview(cast(Any, buffers[turn].numpy()))
            chunk.read(view)
            chunk.check(view)
            chunk.send(buffers[turn], landing)
            if sent[turn] is not None:
                sent[turn].record()
            with self._lock:
                self.done += size
