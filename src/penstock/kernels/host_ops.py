"""What services need of the C++ extension besides kernels: hashes, the block index, pages, checksums.

Without the extension (a host whose GPU computes), ``host_ops_fallback`` gives the same results, many times slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from penstock.types import BlockHash

try:
    from penstock.kernels import _native as _host
    from penstock.kernels._native import AdvancingPages, Arrivals, BlockIndex, copy_page, hash_chain, seal_page
except ImportError:  # not built: enough for a GPU
    from penstock.kernels import host_ops_fallback as _host  # type: ignore[no-redef]
    from penstock.kernels.host_ops_fallback import (  # type: ignore[assignment]
        AdvancingPages,
        Arrivals,
        BlockIndex,
        copy_page,
        hash_chain,
        seal_page,
    )

__all__ = [
    "KEY_BYTES",
    "AdvancingPages",
    "Arrivals",
    "BlockIndex",
    "copy_page",
    "hash_blocks",
    "hash_chain",
    "keys_of",
    "seal_page",
    "xxh3_64",
    "xxh3_128",
]

KEY_BYTES = 8
"""Bytes of a block's hash in the block index and in KV events."""


def hash_blocks(parent: BlockHash, tokens: Sequence[int], first: int, last: int) -> list[BlockHash]:
    """Hashes of the full blocks of the tuple or list ``tokens[first:last]``, equal to ``hashing.block_hashes``
    (cpp/host/blake3.hpp).

    Raises ValueError for bounds outside ``tokens`` and ids of more than 32 bits, OverflowError for negative ids.
    """
    return cast(list[BlockHash], _host.hash_blocks(parent, tokens, first, last))


def keys_of(hashes: Iterable[BlockHash]) -> bytes:
    """The index's keys: the first ``KEY_BYTES`` of each hash, one after the other."""
    return b"".join([block[:KEY_BYTES] for block in hashes])


def xxh3_128(data: bytes | memoryview) -> bytes:
    """XXH3-128 with seed 0 of contiguous bytes: 16 bytes, big-endian.  Releases the interpreter's lock.

    A checksum against damage, not against malice (cpp/host/xxh3.hpp,
    https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md).
    """
    return _host.xxh3_128(memoryview(data))


def xxh3_64(data: bytes | memoryview, seed: int) -> int:
    """XXH3-64 of 97 to 128 bytes, with a seed of 64 bits.  Raises ValueError for another length."""
    return _host.xxh3_64(memoryview(data), seed)
