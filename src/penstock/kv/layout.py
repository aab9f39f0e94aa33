"""How many bytes a KV page has, and the name of what is in them.

Outside the engine a page is opaque: two workers may exchange pages when their layouts have the same name, and nobody
here looks inside.
"""

from __future__ import annotations

import msgspec

from penstock.errors import ConfigError
from penstock.types import PAGE_TOKENS

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


class KvLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of page.  ``name`` covers everything that the meaning of a page's bytes depends on, the model apart."""

    name: str
    page_bytes: int
    page_tokens: int
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str

    @classmethod
    def full(cls, *, layers: int, kv_heads: int, head_dim: int, dtype: str, page_tokens: int = PAGE_TOKENS) -> KvLayout:
        """Keys and values of full attention: ``layers * 2 * kv_heads * page_tokens * head_dim`` numbers.

        Raises ConfigError for an unknown dtype ("bf16", "fp16", "fp32") or a size below 1.
        """
        if dtype not in DTYPE_BYTES:
            raise ConfigError(f"KV dtype {dtype!r} is unknown; {', '.join(DTYPE_BYTES)} are known")
        sizes = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim, "page_tokens": page_tokens}
        for field, size in sizes.items():
            if size < 1:
                raise ConfigError(f"{field} of a KV page must be at least 1, not {size}")
        return cls(
            name=f"full-l{layers}-h{kv_heads}-t{page_tokens}-d{head_dim}-{dtype}",
            page_bytes=layers * 2 * kv_heads * page_tokens * head_dim * DTYPE_BYTES[dtype],
            page_tokens=page_tokens,
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
        )
