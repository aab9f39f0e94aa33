"""Checksums against damage, not against malice: XXH3 in C++ (cpp/host/xxh3.hpp), at the speed of memory.

https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md.  Knows nothing of what is summed.
"""

from __future__ import annotations

try:
    from penstock.kernels import _native as _sums
except ImportError:  # not built: enough for a GPU
    from penstock.kernels import without_native as _sums  # type: ignore[no-redef]


def xxh3_128(data: bytes | memoryview) -> bytes:
    """XXH3-128 with seed 0 of bytes that lie in one piece: 16 bytes, big-endian.  Others may run Python meanwhile."""
    return _sums.xxh3_128(memoryview(data))


def xxh3_64(data: bytes | memoryview, seed: int) -> int:
    """XXH3-64 of 97 to 128 bytes, with a seed of 64 bits.  Raises ValueError for another length."""
    return _sums.xxh3_64(memoryview(data), seed)
