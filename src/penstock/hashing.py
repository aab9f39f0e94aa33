"""THE block-chain hash: what a full KV page contains, as 32 bytes.

A page's hash covers its tokens, all tokens before it, and everything else that its bits depend on or that must
keep tenants apart (the root).  Two pages with one hash hold the same bits.  BLAKE3 (https://github.com/BLAKE3-team).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from blake3 import blake3

from penstock.types import PAGE_TOKENS, BlockHash, ModelIdentity


def chain_root(identity: ModelIdentity, *, adapter: str = "", image_hash: str = "", tenant_salt: str = "") -> BlockHash:
    """The parent of a prompt's first block.  Fields are length-prefixed, so no two sets of fields collide."""
    hasher = blake3(b"penstock/root/1")
    for field in (identity.fingerprint, identity.numerics, adapter, image_hash, tenant_salt):
        raw = field.encode()
        hasher.update(len(raw).to_bytes(4, "little"))
        hasher.update(raw)
    return BlockHash(hasher.digest())


def block_hash(parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
    """Hash of one full block of ``PAGE_TOKENS`` token ids after ``parent``."""
    return BlockHash(blake3(parent + array("I", tokens).tobytes()).digest())


def block_hashes(root: BlockHash, tokens: Sequence[int], *, page_tokens: int = PAGE_TOKENS) -> Iterator[BlockHash]:
    """Hashes of the full blocks of ``tokens``, in order; a last partial block has none."""
    parent = root
    for start in range(0, len(tokens) - page_tokens + 1, page_tokens):
        parent = block_hash(parent, tokens[start : start + page_tokens])
        yield parent
