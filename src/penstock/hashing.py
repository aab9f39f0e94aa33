"""THE block-chain hash: what a full KV page contains, as 32 bytes.

A page's hash covers its tokens, the images that they stand for, all tokens before it, and everything else that its bits
depend on or that must keep tenants apart (the root).  Two pages with one hash hold the same bits.  BLAKE3
(https://github.com/BLAKE3-team) in its keyed mode, the parent's hash as the key: 16 token ids are one block of 64
bytes, so a page of text costs one compression.  ``kernels.host_ops`` hashes long texts, and gives the same.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence

import msgspec
from blake3 import blake3

from penstock.types import PAGE_TOKENS, AudioInput, BlockHash, MediaInput, ModelIdentity, PlacedImage


def chain_root(identity: ModelIdentity, *, adapter: str = "", tenant_salt: str = "") -> BlockHash:
    """The parent of a prompt's first block.  Fields are length-prefixed, so no two sets of fields collide."""
    hasher = blake3(b"penstock/root/1")
    for field in (identity.fingerprint, identity.numerics, adapter, "", tenant_salt):
        raw = field.encode()
        hasher.update(len(raw).to_bytes(4, "little"))
        hasher.update(raw)
    return BlockHash(hasher.digest())


def medium_salt(salt: str) -> bytes:
    """The hash of a tenant's salt that travels with its images and audio; empty without a salt."""
    return blake3(b"penstock/salt/1" + salt.encode("utf-8", "surrogatepass")).digest() if salt else b""


def media_hash(picture: MediaInput) -> bytes:
    """Identifies an image (pixels, their arrangement and their scaling) or audio.

    Tenants with different salts (``medium_salt``) get different hashes for the same content, and share nothing of it.
    """
    if picture.salt:
        plain = media_hash(msgspec.structs.replace(picture, salt=b""))
        return blake3(b"penstock/salted/1" + picture.salt + plain).digest()
    if isinstance(picture, AudioInput):
        head = struct.pack("<2I", picture.columns, picture.bands)
        return blake3(b"penstock/sound/1" + head).update(picture.features).digest()
    tones = (picture.scale, *picture.mean, *picture.deviation)
    head = struct.pack("<2I7d", picture.rows, picture.columns, *tones)
    return blake3(b"penstock/image/1" + head).update(picture.pixels).digest()


def image_block_marks(images: Sequence[PlacedImage], start: int, stop: int) -> bytes:
    """What identifies the images in tokens ``[start, stop)`` of a prompt: their hashes, and where each begins."""
    shown = (image for image in images if image.at < stop and start < image.end)
    return b"".join(struct.pack("<Q", image.at) + image.content for image in shown)


def block_hash(parent: BlockHash, tokens: Sequence[int], marks: bytes = b"") -> BlockHash:
    """Hash of one full block of ``PAGE_TOKENS`` token ids after ``parent`` (32 bytes); ``marks`` of images it shows."""
    return BlockHash(blake3(array("I", tokens).tobytes() + marks, key=parent).digest())


def block_hashes(
    root: BlockHash,
    tokens: Sequence[int],
    *,
    page_tokens: int = PAGE_TOKENS,
    images: Sequence[PlacedImage] = (),
) -> Iterator[BlockHash]:
    """Hashes of the full blocks of ``tokens``, in order; a last partial block has none."""
    parent = root
    for start in range(0, len(tokens) - page_tokens + 1, page_tokens):
        marks = image_block_marks(images, start, start + page_tokens) if images else b""
        parent = block_hash(parent, tokens[start : start + page_tokens], marks)
        yield parent
