"""The client of encoders on workers of their own: one is chosen by an image's content, so that the same image finds its
rows there again.

An encoder that says nothing for a while has died or is overwhelmed: then the image is encoded here.  Nothing else comes
of it, for its rows have the same bits wherever they are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from penstock.clock import Clock
from penstock.engine.service.peer_links import PeerLinks
from penstock.engine.service.readiness import ImageReadiness
from penstock.errors import ImageRefused
from penstock.kernels.host_ops import xxh3_128
from penstock.types import MediaInput, ModelIdentity, PlacedImage
from penstock.wire.codec import MAX_PAYLOAD_BYTES
from penstock.wire.gateway_messages import PageSource
from penstock.wire.transfer_messages import EncodeImage, ImageAlive, ImageEncoded
from penstock.wire.transport import Link, Received

SILENCE_S = 3.0
"""An encoder tells of every image that waits there several times in so long."""

EncodedRows = tuple[bytes, NDArray[np.float32] | None]
"""An image's content and its rows; None: they cannot be had."""


def rows_checksum(payload: memoryview | bytes) -> bytes:
    """XXH3-128 of the bytes of an image's rows."""
    return xxh3_128(payload)


SendToPeer = Callable[[bytes, ImageAlive | ImageEncoded, memoryview | None], bool]
"""To a peer, with a payload."""


@dataclass(slots=True)
class _Asked:
    source: PageSource
    shape: tuple[int, int]  # tokens, width
    until: float


class RemoteEncoders:
    """See above."""

    def __init__(self, peers: PeerLinks, identity: ModelIdentity, clock: Clock) -> None:
        self._peers = peers
        self._identity = identity
        self._clock = clock
        self._asked: dict[bytes, _Asked] = {}

    def request_rows(self, sources: Sequence[PageSource], image: PlacedImage, picture: MediaInput, width: int) -> bool:
        """Have one of them encode this image into rows of ``width`` numbers; False if none can be reached."""
        if not sources:
            return False
        now = self._clock.now()
        source = max(sources, key=lambda one: blake3(image.content + one.worker.encode()).digest())
        if not self._peers.connect(source, now):
            return False
        message = EncodeImage(content=image.content, media=picture, identity=self._identity)
        self._peers.send(source, message, now)
        self._asked[image.content] = _Asked(source, (image.end - image.at, width), now + SILENCE_S)
        return True

    def results(self) -> Iterator[EncodedRows]:
        """What has come, and what is waited for no longer."""
        now = self._clock.now()
        for source, received in self._peers.messages():
            message = received.message
            if not isinstance(message, ImageAlive | ImageEncoded):
                continue
            asked = self._asked.get(message.content)
            if asked is None or asked.source != source:
                continue
            if isinstance(message, ImageAlive):
                asked.until = now + SILENCE_S
                continue
            del self._asked[message.content]
            yield message.content, self._rows(message, received, asked)
        for content in [content for content, asked in self._asked.items() if asked.until <= now]:
            del self._asked[content]
            yield content, None
        if not self._asked:
            self._peers.close_idle(now)

    def links(self) -> list[Link]:
        """What to wait for."""
        return self._peers.links()

    def _rows(self, message: ImageEncoded, received: Received, asked: _Asked) -> NDArray[np.float32] | None:
        payload = received.payload
        if (message.tokens, message.width) != asked.shape or payload is None:
            return None
        if payload.nbytes != 4 * message.tokens * message.width or rows_checksum(payload) != message.checksum:
            return None
        return np.frombuffer(payload, np.float32).reshape(asked.shape).copy()


class EncodeRequests:
    """What other workers want encoded here, and the words to them."""

    def __init__(self, identity: ModelIdentity, say: SendToPeer) -> None:
        """``say`` sends to a peer."""
        self._identity = identity
        self._say = say
        self._peers: dict[bytes, list[bytes]] = {}  # by content

    @property
    def contents(self) -> Sequence[bytes]:
        """Images that are waited for."""
        return tuple(self._peers)

    def add(self, peer: bytes, message: EncodeImage) -> bool:
        """Whether this image is to be encoded and was not requested before."""
        if message.identity != self._identity:
            self._say(peer, ImageEncoded(content=message.content), None)
            return False
        known = self._peers.setdefault(message.content, [])
        if peer not in known:
            known.append(peer)
        return len(known) == 1

    def encode(self, peer: bytes, message: EncodeImage, images: ImageReadiness) -> None:
        """Begin, or be done at once, for another worker, which reads the image's prompt."""
        if not self.add(peer, message):
            return
        try:
            rows_ND = images.encode_for_peer(message.content, message.media)
        except Exception as error:
            self.send_rows(message.content, None)
            if not isinstance(error, ImageRefused):
                raise
            return
        if rows_ND is not None:
            self.send_rows(message.content, rows_ND)

    def send_alive(self) -> None:
        """Tell the workers that wait that their images are still being encoded."""
        for content, peers in self._peers.items():
            for peer in peers:
                self._say(peer, ImageAlive(content=content), None)

    def send_rows(self, content: bytes, rows_ND: NDArray[np.float32] | None) -> None:
        """Here it is; None: it cannot be had."""
        for peer in self._peers.pop(content, ()):
            if rows_ND is None or rows_ND.nbytes > MAX_PAYLOAD_BYTES:
                self._say(peer, ImageEncoded(content=content), None)
                continue
            payload = np.ascontiguousarray(rows_ND).data.cast("B")
            tokens, width = rows_ND.shape
            message = ImageEncoded(content=content, tokens=tokens, width=width, checksum=rows_checksum(payload))
            self._say(peer, message, payload)
