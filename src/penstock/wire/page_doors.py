"""Pages that the receiver of a hand-over is to fetch: where, what it proves itself with, and which are there.

They travel over the authenticated and encrypted control channel only, so whoever has a token was given it.  What is
said on the connections that it opens is in ``kv.transfer.tcp_frames``.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.types import MAX_COUNT, Count, PageId, RequestId
from penstock.wire.base import Message

TOKEN_BYTES = 32
MOST_ANNOUNCED = 1024
"""Pages in one message."""
AGENT_BYTES = 64 << 10
"""Most that an agent of NIXL says of itself."""


class PagesAt(Message, frozen=True, kw_only=True, tag="pages_at"):
    """Prefill to decode, before the first ``PageReady``: this hand-over's pages are to be fetched.

    From ``port`` at the host of the sender's mailbox, as ``leg``, by whoever has the ``token``, until the leg is over.
    Said again with everything that is sent again.
    """

    request: Annotated[RequestId, msgspec.Meta(max_length=1024)]
    epoch: Count
    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    leg: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]  # the sender's number of it
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    sealed: bool = False  # the pages come encrypted
    # They may be read by NIXL as well: what to know of the sender's agent, and where its first page lies.
    agent: Annotated[bytes, msgspec.Meta(max_length=AGENT_BYTES)] = b""
    base: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0


class Announced(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One page, with the fields of ``messages.PageReady``."""

    block: Count
    tokens: Count
    page: Annotated[PageId, msgspec.Meta(ge=0, le=MAX_COUNT)]
    generation: Count
    checksum: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class PagesReady(Message, frozen=True, kw_only=True, tag="pages"):
    """Prefill to decode: several pages are finished at once, and none travels beside its announcement."""

    request: Annotated[RequestId, msgspec.Meta(max_length=1024)]
    epoch: Count
    pages: Annotated[tuple[Announced, ...], msgspec.Meta(max_length=MOST_ANNOUNCED)]


OfFetching = PagesAt | PagesReady
"""What is said of pages that are fetched, and of no others."""
