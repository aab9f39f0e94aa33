"""Hashed blocks in C++: chains of hashes (cpp/host/blake3.hpp), and who holds which block (cpp/host/block_index.hpp).

The hashes are those of ``hashing``; the index knows them by their first bytes, and owners by numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from penstock.types import BlockHash

try:
    from penstock.kernels._native import BlockIndex, hash_chain
    from penstock.kernels._native import hash_blocks as native_hash_blocks
except ImportError:  # not built: enough for a GPU, slowly
    from penstock.kernels.host_ops_fallback import BlockIndex, hash_chain  # type: ignore[assignment]
    from penstock.kernels.host_ops_fallback import hash_blocks as native_hash_blocks

__all__ = ["KEY_BYTES", "BlockIndex", "hash_blocks", "hash_chain", "keys_of"]

KEY_BYTES = 8
"""Of a block's hash in the index and in what workers tell of their caches."""


def hash_blocks(parent: BlockHash, tokens: Sequence[int], first: int, last: int) -> list[BlockHash]:
    """Hashes of the full blocks of the tuple or list ``tokens[first:last]``, as ``hashing.block_hashes`` gives them.

    Raises ValueError for bounds outside ``tokens`` and ids of more than 32 bits, OverflowError for negative ids.
    """
    return cast(list[BlockHash], native_hash_blocks(parent, tokens, first, last))


def keys_of(hashes: Iterable[BlockHash]) -> bytes:
    """What the index takes: the first ``KEY_BYTES`` of each hash, one after the other."""
    return b"".join([block[:KEY_BYTES] for block in hashes])


# MERGED: KV pages as bytes, checked and copied, or taken from a socket, in one pass (C++:
# MERGED: cpp/python/module_pages.cpp).
# MERGED:
# MERGED: Knows nothing of who sends them, or why.

try:
    from penstock.kernels._native import Arrivals, copy_page, seal_page  # noqa: F401
except ImportError:  # not built: enough for a GPU, whose pages stay where they are
    from penstock.kernels.host_ops_fallback import Arrivals, copy_page, seal_page  # type: ignore[assignment]  # noqa: F401


# MERGED: Checksums against damage, not against malice: XXH3 in C++ (cpp/host/xxh3.hpp), at the speed of
# MERGED: memory.
# MERGED:
# MERGED: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md.  Knows nothing of what is summed.

try:
    from penstock.kernels import _native as _sums
except ImportError:  # not built: enough for a GPU
    from penstock.kernels import host_ops_fallback as _sums  # type: ignore[no-redef]


def xxh3_128(data: bytes | memoryview) -> bytes:
    """XXH3-128 with seed 0 of bytes that lie in one piece: 16 bytes, big-endian.  Others may run Python meanwhile."""
    return _sums.xxh3_128(memoryview(data))


def xxh3_64(data: bytes | memoryview, seed: int) -> int:
    """XXH3-64 of 97 to 128 bytes, with a seed of 64 bits.  Raises ValueError for another length."""
    return _sums.xxh3_64(memoryview(data), seed)
