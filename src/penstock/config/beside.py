"""What is loaded beside a model's own weights, as bytes: draft heads, draft models, LoRA adapters.

Pure numbers, for whoever divides memory; what they are made of is ``launch.beside``'s to know.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.config.base import Config


class Beside(Config, frozen=True, kw_only=True):
    """One of them.  Bytes are those of numbers of 2 bytes, as bf16 has them."""

    name: str  # as "draft head"
    shared_bytes: int  # once in a process that workers are forked from, or on a device
    worker_bytes: int = 0  # in each worker besides
    why: str  # the arithmetic in words

    def bytes(self, workers: int, number_bytes: int = 2) -> int:
        """All of it, for so many workers and numbers of this size."""
        return (self.shared_bytes + workers * self.worker_bytes) * number_bytes // 2


def beside_bytes(all_of: Sequence[Beside], workers: int, number_bytes: int = 2) -> int:
    """Of several together."""
    return sum(own.bytes(workers, number_bytes) for own in all_of)
