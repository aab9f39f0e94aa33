"""What KV pages keep keys and values in, decided from given facts: ``--kv-dtype``.  Pure."""

from __future__ import annotations

from penstock.config.gpu import TRITON
from penstock.errors import ConfigError
from penstock.types import FP8_E4M3

KEEPERS = (TRITON, "reference")
"""Kernel families that have codes of keys and values."""


def kv_dtype(asked: str, compute: str, family: str, *, recurrent: str = "", note: str = "") -> str:
    """The type: the compute type unless another was asked for.

    ``recurrent``: the model's name, if it has recurrent layers.  ``note``: why no GPU is used, if there is a reason.
    Raises ConfigError where the asked one cannot be had.
    """
    if asked == "auto":
        return compute
    if recurrent:
        raise ConfigError(
            f"--kv-dtype {FP8_E4M3}: {recurrent} has recurrent layers, whose states are in fp32 and lie in the same "
            "pages; leave it out"
        )
    if family not in KEEPERS:
        why = f" ({note})" if note else ""
        raise ConfigError(
            f"--kv-dtype {FP8_E4M3}: the kernels of processors ({family}) keep KV pages in the compute type; it takes "
            f"a GPU{why}, or, to try it slowly, --kernels reference; else leave it out"
        )
    return asked
