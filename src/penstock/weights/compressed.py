"""What a compressed safetensors file says of itself: the table of original tensors in its metadata (docs/format.md).

Every tensor of the original has an entry with its type, shape and BLAKE3, and the checksum of its stored bytes.  One
that is stored compressed is a tensor of bytes (``U8``) under its own name, and its entry has the exponent code too.
Knows headers, not files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from penstock.errors import ModelError
from penstock.kernels.compressed_gpu import MAX_BASE
from penstock.weights import codec
from penstock.weights.header import DTYPE_BYTES, MAX_RANK, TensorInfo

VERSION_KEY = "penstock.compression"
TENSORS_KEY = "penstock.tensors"
VERSION = "1"
VERSION_OF_LAYOUTS = "2"
"""Of files with a tensor in another layout than the CPU's: what reads version 1 only must not read them."""

GPU = "gpu"
DIGEST_DIGITS = 64
CHECKSUM_DIGITS = 32


class Original(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One tensor as it was before compression."""

    dtype: str
    shape: tuple[int, ...]
    blake3: str  # hexadecimal, of its bytes
    code: tuple[int, int] | None = None  # (base, step) if it is stored compressed
    checksum: str = ""  # of the stored bytes, see ``checksum``; files of earlier versions have none
    layout: str = ""  # "gpu", or empty for the CPU's


Originals = Mapping[str, Original]


def metadata_of(originals: Originals) -> dict[str, str]:
    """The entries for ``__metadata__``."""
    version = VERSION_OF_LAYOUTS if any(original.layout for original in originals.values()) else VERSION
    return {VERSION_KEY: version, TENSORS_KEY: msgspec.json.encode(originals).decode()}


def parse_originals(metadata: Mapping[str, str], stored: Mapping[str, TensorInfo], where: str) -> Originals | None:
    """The table of original tensors; None if the file is a plain one.

    Raises ModelError unless every tensor of the file has one sound entry that fits it.
    """
    if VERSION_KEY not in metadata and TENSORS_KEY not in metadata:
        return None
    version = metadata.get(VERSION_KEY)
    if version not in (VERSION, VERSION_OF_LAYOUTS):
        known = f"{VERSION!r} and {VERSION_OF_LAYOUTS!r}"
        raise ModelError(f"{where}: compressed in a format of version {version!r}; this reader knows {known}")
    try:
        originals = msgspec.json.decode(metadata.get(TENSORS_KEY, ""), type=dict[str, Original])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ModelError(f"{where}: its table of compressed tensors is damaged ({error})") from error
    if originals.keys() != stored.keys():
        name = min(originals.keys() ^ stored.keys())
        raise ModelError(f"{where}: tensor {name!r} is in its header or its table of originals, but not in both")
    for name, original in originals.items():
        if original.layout not in ("", GPU) or (original.layout and version == VERSION):
            raise ModelError(f"{where}: tensor {name!r} has layout {original.layout!r}; known is {GPU!r}, in version 2")
        _check(original, stored[name], f"{where}: tensor {name!r}")
    with_checksum = [name for name, original in originals.items() if original.checksum]
    if 0 < len(with_checksum) < len(originals):
        name = min(originals.keys() - set(with_checksum))
        raise ModelError(f"{where}: tensor {name!r} has no checksum, others have")
    return originals


def original_info(stored: TensorInfo, original: Original) -> TensorInfo:
    """The tensor as it was, at the place where it is stored."""
    return TensorInfo(stored.name, original.dtype, original.shape, stored.start, stored.stop)


def _check(original: Original, stored: TensorInfo, where: str) -> None:
    if not _is_hex(original.blake3, DIGEST_DIGITS):
        raise ModelError(f"{where}: bad hash {original.blake3!r}")
    if original.checksum and not _is_hex(original.checksum, CHECKSUM_DIGITS):
        raise ModelError(f"{where}: bad checksum {original.checksum!r}")
    if original.dtype not in DTYPE_BYTES or len(original.shape) > MAX_RANK or min(original.shape, default=0) < 0:
        raise ModelError(f"{where}: its original cannot be {original.dtype} {list(original.shape)}")
    if original.code is None:
        if (original.dtype, original.shape) != (stored.dtype, stored.shape) or original.layout:
            raise ModelError(f"{where}: stored as {stored.dtype} {list(stored.shape)}, which its entry denies")
        return
    if original.dtype != "BF16" or len(original.shape) != 2 or min(original.shape) < 1 or not is_code(original):
        raise ModelError(f"{where}: a compressed tensor must be a matrix of BF16 with a sound exponent code")
    if stored.dtype != "U8" or len(stored.shape) != 1 or stored.nbytes >= 2 * math.prod(original.shape):
        raise ModelError(f"{where}: not stored as a compressed tensor, though its entry says so")


def is_code(original: Original) -> bool:
    """Do its codes mean exponents that there are?"""
    base, step = original.code or (-1, 0)
    if original.layout == GPU:
        return step == 1 and 0 <= base <= MAX_BASE
    return codec.is_code(base, step)


def _is_hex(text: str, digits: int) -> bool:
    return len(text) == digits and set(text) <= set("0123456789abcdef")
