"""The size of a KV page in bytes, and the name of its layout.

Outside the engine a page is opaque: two workers may exchange pages when their layouts have the same name.  Where layers
have different KV specs, a page holds one group of them (``KvShape.groups``).
"""

from __future__ import annotations

import msgspec

from penstock.errors import ConfigError
from penstock.kernels.operands import KV_TYPES, KvShape
from penstock.kv_spec import TransferOrder
from penstock.types import PAGE_TOKENS


class KvLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of page.  ``name`` covers everything that the meaning of a page's bytes depends on, except the model."""

    name: str
    page_bytes: int
    page_tokens: int
    shape: KvShape
    dtype: str

    @classmethod
    def for_shape(cls, shape: KvShape, dtype: str, *, page_tokens: int = PAGE_TOKENS) -> KvLayout:
        """The layout of pages that hold ``page_tokens`` tokens of this shape.

        Raises ConfigError for a dtype that is not in ``KV_TYPES``, or a size below 1.
        """
        if dtype not in KV_TYPES:
            raise ConfigError(f"KV dtype {dtype!r} is unknown; {', '.join(KV_TYPES)} are known")
        sizes = {"layers": shape.layers, "kv_heads": shape.kv_heads, "page_tokens": page_tokens}
        for field, size in (sizes | {"key_dim": shape.key_dim, "value_dim": shape.value_dim}).items():
            if size < 1:
                raise ConfigError(f"{field} of a KV page must be at least 1, not {size}")
        kind = "latent" if shape.shared else "full"
        sizes_name = f"h{shape.kv_heads}-t{page_tokens}-k{shape.key_dim}-v{shape.value_dim}-{dtype}"
        return cls(
            name=f"{kind}-l{shape.layers}-{sizes_name}{_groups_name(shape)}",
            page_bytes=shape.page_bytes(dtype, page_tokens),
            page_tokens=page_tokens,
            shape=shape,
            dtype=dtype,
        )

    def transfer_order(self, tokens: int, *, ahead: int = 0) -> TransferOrder:
        """The pages that a sequence of ``tokens`` tokens needs to continue, in the order in which they travel, and
        those of ``ahead`` tokens after them."""
        return TransferOrder(self.shape.reaches, tokens, self.page_tokens, ahead=ahead)


def _groups_name(shape: KvShape) -> str:
    """How layers are grouped; empty where one page holds all layers."""
    parts = [
        "+".join(map(str, group.layers)) + f"w{group.spec.window or 0}c{group.spec.chunk or 0}"
        for group in shape.groups
    ]
    return "".join(f"-g{part}" for part in parts)
