"""Messages between workers: KV pages that one fetches from another, and images that one encodes for another.

They travel over the authenticated and encrypted control channel only.  The connections that a ``FetchTicket`` opens are
described in ``kv.connectors.tcp``.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.types import (
    MAX_COUNT,
    Count,
    ImageHash,
    Incarnation,
    MediaInput,
    ModelIdentity,
    Name,
    PageId,
    RequestId,
)
from penstock.wire.gateway_messages import CHECKSUM_BYTES, AnyRequest, Checksum, ReasonText, TokenItem, WireMessage

FETCH_TOKEN_BYTES = 32
MAX_READY_PAGES = 1024
"""Pages in one message."""
MAX_AGENT_BYTES = 64 << 10
"""Most that an agent of NIXL says of itself."""


class FetchTicket(WireMessage, frozen=True, kw_only=True, tag="pages_at", rename={"grant_id": "leg"}):
    """Prefill to decode, before the first ``PageReady``: this hand-over's pages are to be fetched.

    From ``port`` at the host of the sender, as ``grant_id``, by the holder of the ``token``, until the stage ends.
    Repeated with every message that is sent again.
    """

    request: Annotated[RequestId, msgspec.Meta(max_length=1024)]
    epoch: Count
    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    grant_id: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]  # the sender's number of it
    token: Annotated[bytes, msgspec.Meta(min_length=FETCH_TOKEN_BYTES, max_length=FETCH_TOKEN_BYTES)]
    sealed: bool = False  # the pages come encrypted
    # They may be read by NIXL as well: what to know of the sender's agent, and where its first page lies.
    agent: Annotated[bytes, msgspec.Meta(max_length=MAX_AGENT_BYTES)] = b""
    base: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0


class ReadyPage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One page, with the fields of ``PageReady``."""

    index: Count
    tokens: Count
    page: Annotated[PageId, msgspec.Meta(ge=0, le=MAX_COUNT)]
    generation: Count
    checksum: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class PagesReady(WireMessage, frozen=True, kw_only=True, tag="pages"):
    """Prefill to decode: several pages are finished at once, and none travels with its announcement."""

    request: Annotated[RequestId, msgspec.Meta(max_length=1024)]
    epoch: Count
    pages: Annotated[tuple[ReadyPage, ...], msgspec.Meta(max_length=MAX_READY_PAGES)]


FetchMessage = FetchTicket | PagesReady
"""What is said of pages that are fetched, and of no others."""


class PullPages(WireMessage, frozen=True, kw_only=True, tag="pull"):
    """Decode to prefill: I have room for all pages that I need of this request; send those from ``skip_blocks`` on.

    Said again with a higher ``skip_blocks`` it acknowledges the blocks below, and renews the lease in any case.
    Refused (``HandOverFailed``) unless identity, layout and carrier fit.
    """

    request: AnyRequest
    epoch: Count
    skip_blocks: Count
    identity: ModelIdentity
    layout: Name  # kv.page_memory.KvLayout.name
    carrier: Name  # KvConnector.name
    incarnation: Incarnation  # of the sender that is meant
    resend: bool = False  # nothing came for a while: send what was sent from block ``skip_blocks`` on once more
    tokens: Count = 0  # of an answer that is being written: tokens that are computed at the sender, for all we know,
    ahead: Count = 0  # and for how many more there is room


class PageReady(WireMessage, frozen=True, kw_only=True, tag="page"):
    """Prefill to decode: block ``block`` of the request is finished.  With "curve" the page is the frame's payload."""

    request: AnyRequest
    epoch: Count
    index: Count  # position of the page among those that travel: by block, within a block by group of layers
    tokens: Count  # how many tokens of it are filled (16, or fewer in the last)
    page: Annotated[PageId, msgspec.Meta(ge=0, le=MAX_COUNT)]  # where it lies in the sender's memory
    generation: Count  # how often the sender's page had been given out when it was filled
    checksum: Checksum  # XXH3-128 over the page's bytes and (identity, layout, generation); 16 bytes


class PrefillDone(WireMessage, frozen=True, kw_only=True, tag="prefill_done"):
    """Prefill to decode: all ``blocks`` pages were announced, and this was the first token.

    Of an answer that moves, ``first`` has all tokens that were written since it was to move, and may have none.
    """

    request: AnyRequest
    epoch: Count
    blocks: Count
    first: TokenItem


class HandOverAlive(WireMessage, frozen=True, kw_only=True, tag="hand_over_alive"):
    """Prefill to decode: nothing is lost, more will come.  Renews the receiver's lease while the prompt waits."""

    request: AnyRequest
    epoch: Count


class HandOverFailed(WireMessage, frozen=True, kw_only=True, tag="hand_over_failed"):
    """Prefill to decode: nothing (more) will come."""

    request: AnyRequest
    epoch: Count
    reason: ReasonText


class PagesReceived(WireMessage, frozen=True, kw_only=True, tag="pages_received"):
    """Decode to prefill: I have copied everything, or want no more.  Ends the sender's lease.

    Of an answer that moves, a gateway says it, too, when its receiver has gone.
    """

    request: AnyRequest
    epoch: Count
    moved: bool = False  # the answer that was moving goes on here


class EncodeImage(WireMessage, frozen=True, kw_only=True, tag="encode"):
    """A prefill worker to an encoder: encode this image or sound.  Answered in any order."""

    content: ImageHash
    media: MediaInput
    identity: ModelIdentity


class ImageAlive(WireMessage, frozen=True, kw_only=True, tag="image_alive"):
    """An encoder: this image waits or is being encoded."""

    content: ImageHash


class ImageEncoded(WireMessage, frozen=True, kw_only=True, tag="image"):
    """An encoder: the frame's payload is the image's rows, fp32 [tokens, width].  No tokens: it cannot be had here."""

    content: ImageHash
    tokens: Count = 0
    width: Count = 0
    checksum: Annotated[bytes, msgspec.Meta(max_length=CHECKSUM_BYTES)] = b""  # XXH3-128 of the payload, 16 bytes
