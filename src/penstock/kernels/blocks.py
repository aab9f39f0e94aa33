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
    from penstock.kernels.without_native import BlockIndex, hash_chain  # type: ignore[assignment]
    from penstock.kernels.without_native import hash_blocks as native_hash_blocks

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
