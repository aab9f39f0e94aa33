"""FP8 as DeepSeek-V3 and Qwen3 have it (arXiv:2412.19437): ``weight`` in E4M3, ``weight_scale_inv`` for each block of
128 by 128 (which it is multiplied by, whatever its name); or one scale a tensor; and FBGEMM's, one a row.
"""

from __future__ import annotations

from penstock.weights.fields import Fields
from penstock.weights.formats.coded import Scheme
from penstock.weights.formats.eight_bits import EightBits

MAX_BLOCK = 1 << 16


def parse(stored: Fields) -> tuple[Scheme, str]:
    """The scheme, and what is not done to activations.  Raises ModelError."""
    if stored.get("fmt", str, "e4m3").lower() != "e4m3":
        raise stored.refuse(f"fmt is {stored.values['fmt']!r}; 'e4m3' can be served")
    if stored.get("expert_dtype", str, "fp8") != "fp8":
        raise stored.refuse(f"expert_dtype is {stored.values['expert_dtype']!r}; 'fp8' can be served")
    return EightBits(block=_block(stored)), f"{stored.get('activation_scheme', str, 'dynamic')} FP8"


def parse_fbgemm(stored: Fields) -> tuple[Scheme, str]:
    """The same for ``fbgemm_fp8``: a scale a row."""
    return EightBits(), "dynamic FP8"


def _block(stored: Fields) -> tuple[int, int] | None:
    sizes = stored.get("weight_block_size", list, [])
    if not sizes:
        return None
    if len(sizes) != 2 or not all(type(size) is int and 1 <= size <= MAX_BLOCK for size in sizes):
        raise stored.refuse(f"weight_block_size must be rows and columns, got {sizes!r}")
    return sizes[0], sizes[1]
