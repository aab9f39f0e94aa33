"""What keys and values are kept in: the compute type, or codes of 8 bits.

Codes (``fp8_e4m3``) are the E4M3 numbers of the OCP standard, with one power of two for each token and key-value head
of a layer, for its key and for its value: the least with which the row's largest number does not exceed 448.

::

    a layer in a page | keys [G, 16, C] | values [G, 16, value_dim] | exponents of keys [G, 16] | of values [G, 16] |

A byte e of the exponents, 20 to 253, says that a code c stands for E4M3(c) * 2^(e - 135); 255 that the row has
something in it that is no number, or one beyond 1.75 * 2^126, and is NaN to whoever reads it.  Codes and scale follow
from that row alone, which is what law 1 asks for, and no number is ever cut off.  As scales are powers of two, a code's
value is exact in the compute type, and it makes no difference to any bit whether keys are scaled or their scores,
values or their weights.  Where values are the beginning of their keys (latent attention), there is one exponent for
both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from penstock.types import FP8_E4M3

LEAST_EXPONENT: Final = 20
"""So that the smallest code is a normal number in bf16."""

MOST_EXPONENT: Final = 253
NO_NUMBER: Final = 255


@dataclass(frozen=True, slots=True)
class KvType:
    """Bytes of one number, and of what a token's row of them has beside."""

    number_bytes: int
    row_bytes: int = 0


KV_TYPES: Mapping[str, KvType] = MappingProxyType(
    {"bf16": KvType(2), "fp16": KvType(2), "fp32": KvType(4), FP8_E4M3: KvType(1, row_bytes=1)}
)


def numerics_with(numerics: str, kv_dtype: str | None) -> str:
    """The numerics class of a backend that keeps keys and values in this; None: in its compute type."""
    return numerics if kv_dtype is None else f"{numerics}-kv_{kv_dtype}"
