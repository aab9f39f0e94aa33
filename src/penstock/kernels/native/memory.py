"""Where arrays of the native kernels live: an arena for weights, a pool for the results of a step.

Knows nothing about models or threads.
"""

from __future__ import annotations

import mmap
import sys
import threading
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

HUGE_PAGE = 2 << 20
ARENA_BYTES = 32 << 20
ALIGNMENT = 64
POOLED_FROM_BYTES = 64 << 10


class WeightArena:
    """Private anonymous memory with huge pages: it keeps them over a fork, which shared memory and files do not.

    Many small weights share one huge page, so arrays are cut from large regions.  Nothing is ever given back.
    Threads may ask at once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._region: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._used = 0

    def reserve(self, nbytes: int) -> None:
        """Reserve one region for ``nbytes`` of later requests, so that no huge page is wasted between them."""
        if self._used + nbytes > self._region.nbytes:
            self._region, self._used = _huge_region(nbytes), 0

    def cells(self, count: int) -> NDArray[np.uint32]:
        """Zeroed memory for ``count`` cells of 32 bits, 64-byte aligned."""
        nbytes = -(-count * 4 // ALIGNMENT) * ALIGNMENT
        with self._lock:
            if self._used + nbytes > self._region.nbytes:
                self._region = _huge_region(max(nbytes, ARENA_BYTES))
                self._used = 0
            region, start = self._region, self._used
            self._used += nbytes
        return region[start : start + count * 4].view(np.uint32)

    def bytes(self, count: int) -> NDArray[np.uint8]:
        """The same as ``count`` bytes."""
        return self.cells(-(-count // 4)).view(np.uint8)[:count]


def _huge_region(nbytes: int) -> NDArray[np.uint8]:
    nbytes = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    region = np.frombuffer(memory, np.uint8)
    skipped = -region.ctypes.data % HUGE_PAGE
    return region[skipped : skipped + nbytes]


class StepBuffers:
    """Memory for results: large arrays come from reused buffers, so a step faults in no fresh pages.

    A buffer is reused only when no array over it is alive, so a caller may keep any result.  Liveness is CPython's
    reference count of the buffer: every array over it, and every view of such an array, holds one reference.
    """

    def __init__(self) -> None:
        self._by_size: dict[int, list[NDArray[np.uint8]]] = {}
        probe = [np.empty(0, np.uint8)]
        self._idle_count = sys.getrefcount(probe[0])

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An array with undefined content."""
        wanted = np.dtype(dtype)
        nbytes = wanted.itemsize
        for extent in shape:
            nbytes *= extent
        if nbytes < POOLED_FROM_BYTES:
            return np.empty(shape, wanted)
        return self._buffer(1 << (nbytes - 1).bit_length())[:nbytes].view(wanted).reshape(shape)

    def _buffer(self, size: int) -> NDArray[np.uint8]:
        buffers = self._by_size.setdefault(size, [])
        for i in range(len(buffers)):
            if sys.getrefcount(buffers[i]) == self._idle_count:
                return buffers[i]
        buffers.append(np.empty(size, np.uint8))
        return buffers[-1]
