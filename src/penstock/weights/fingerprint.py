"""The model's fingerprint: BLAKE3 of everything that the bits of its answers depend on.

The same weights give the same fingerprint however they were sharded and in whatever order the files hold them.
Starts no thread.
"""

from __future__ import annotations

from typing import Any

import msgspec
from blake3 import blake3

from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.checkpoint_reader import Checkpoint
from penstock.weights.safetensors_header import TensorInfo

VERSION = 2
"""Part of the hash: a change of what is hashed makes all fingerprints new."""


class Fingerprint:
    """Collects tensors in any order, each as it is read."""

    def __init__(self) -> None:
        self._digests: dict[str, tuple[TensorInfo, bytes]] = {}

    def add(self, info: TensorInfo, digest: bytes) -> None:
        """One tensor and the BLAKE3 of its bytes."""
        self._digests[info.name] = (info, digest)

    def hexdigest(self, spec: ModelSpec) -> str:
        """64 hexadecimal digits over ``spec`` and all tensors added."""
        return self._over(_canonical(spec))

    def weights_hexdigest(self) -> str:
        """64 hexadecimal digits over all tensors added and nothing else: what a draft head was trained for."""
        return self._over(b"")

    def _over(self, first: bytes) -> str:
        hasher = blake3(first)
        for name in sorted(self._digests):
            info, digest = self._digests[name]
            hasher.update(msgspec.json.encode((name, info.dtype, info.shape)))
            hasher.update(digest)
        return hasher.hexdigest()


def fingerprint(checkpoint: Checkpoint, spec: ModelSpec) -> str:
    """The fingerprint of a checkpoint as it lies on disk, without loading it."""
    result = Fingerprint()
    for name in checkpoint.names:
        result.add(checkpoint.info(name), checkpoint.digest(name))
        checkpoint.drop_pages(name)
    return result.hexdigest(spec)


def _canonical(spec: ModelSpec) -> bytes:
    """What of the configuration changes the bits.  End tokens, suggestions and the context's length do not."""
    fields: dict[str, Any] = {
        "version": VERSION,
        "architecture": spec.architecture,
        "vocab": spec.vocab,
        "hidden": spec.hidden,
        "layers": spec.layers,
        "tied": spec.tied,
        "details": spec.details,
    }
    if spec.quantization is not None:
        fields["quantization"] = spec.quantization.groups
    if spec.pooler is not None:
        fields["pooler"] = spec.pooler
    if spec.sparse is not None:
        fields["sparse"] = spec.sparse
    return msgspec.json.encode(fields, order="sorted")
