"""Encodes images and sounds between steps, so that long pictures do not hold up answers.

Rows of encoded media are cached by content: kept as long as a request needs them, then until others need the room.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.engine.core.events import AddRequest
from penstock.engine.models.interface import MediaEncoder, MediaEncoding
from penstock.errors import ImageRefused
from penstock.hashing import media_hash
from penstock.kernels.ops import Ops
from penstock.types import MediaInput, PlacedImage, RequestId, RequestStage
from penstock.wire.gateway_messages import PageSource


class EncoderCache:
    """At most ``limit`` bytes, but for rows that requests hold."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._rows: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()  # used longest ago first
        self._held: dict[RequestId, frozenset[bytes]] = {}
        self.nbytes = 0

    def __contains__(self, content: bytes) -> bool:
        return content in self._rows

    def get(self, content: bytes) -> NDArray[np.float32] | None:
        """The image's rows [n, D], if they are here; now they are the ones used last."""
        if content in self._rows:
            self._rows.move_to_end(content)
        return self._rows.get(content)

    def put(self, content: bytes, rows_ND: NDArray[np.float32]) -> None:
        """Keep these rows; unpinned rows make room, these too if no request pins them."""
        if content not in self._rows:
            self._rows[content] = rows_ND
            self.nbytes += rows_ND.nbytes
        self._shrink()

    def pin(self, request: RequestId, contents: Iterable[bytes]) -> None:
        """Keep rows of ``contents`` until ``unpin``, those too that are yet to come."""
        self._held[request] = frozenset(contents)

    def unpin(self, request: RequestId) -> None:
        """The request needs its images no more; one that holds none is no error."""
        if self._held.pop(request, None) is not None:
            self._shrink()

    def pinned_bytes(self, requests: Iterable[RequestId] | None = None) -> int:
        """Bytes of the rows that these requests (by default, any) hold."""
        owners = self._held if requests is None else requests
        held = frozenset[bytes]().union(*(self._held.get(owner, frozenset()) for owner in owners))
        return sum(self._rows[content].nbytes for content in held if content in self._rows)

    @property
    def pinning_requests(self) -> tuple[RequestId, ...]:
        """Requests that hold images."""
        return tuple(self._held)

    def _shrink(self) -> None:
        if self.nbytes <= self.limit:
            return
        held = frozenset[bytes]().union(*self._held.values())
        for content in [content for content in self._rows if content not in held]:
            self.nbytes -= self._rows.pop(content).nbytes
            if self.nbytes <= self.limit:
                return


SLICE_S = 0.02
"""Layers are computed until so much time is spent, one at least."""

PlacedMedia = tuple[tuple[PlacedImage, MediaInput], ...]


class RemoteEncoder(Protocol):
    """Encoders on other workers (``engine.service.remote_encoder.RemoteEncoders``)."""

    def request_rows(self, sources: Sequence[PageSource], image: PlacedImage, picture: MediaInput, width: int) -> bool:
        """Have one of them encode this image into rows of ``width`` numbers; False if none can be reached."""
        ...

    def results(self) -> Iterable[tuple[bytes, NDArray[np.float32] | None]]:
        """What came since the last call, by content; None: it must be encoded here."""
        ...


class NoRemoteEncoder:
    """There are no other encoders."""

    def request_rows(self, sources: Sequence[PageSource], image: PlacedImage, picture: MediaInput, width: int) -> bool:
        return False

    def results(self) -> Iterable[tuple[bytes, NDArray[np.float32] | None]]:
        return ()


@dataclass(frozen=True, slots=True)
class PendingMedia:
    """What a request waits for, and who may be asked for it."""

    pairs: PlacedMedia
    sources: Sequence[PageSource]


@dataclass(slots=True)
class EncoderCounters:
    """Since the start."""

    images: int = 0  # encoded here
    received: int = 0  # encoded by other workers
    slices: int = 0  # turns that encoded something
    seconds: float = 0.0
    queries: int = 0  # images that requests came with and that had to be read
    hits: int = 0  # of those, found encoded


class EncoderStage:
    """The images of one worker.  ``encoder`` None: the model reads text only."""

    def __init__(
        self,
        encoder: MediaEncoder | None,
        ops: Ops,
        *,
        cache_bytes: int,
        covered: Callable[[AddRequest], int] = lambda event: 0,
        elsewhere: RemoteEncoder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``covered``: how many tokens of a request's prompt the prefix cache has now.  ``elsewhere``: who else
        encodes; by default no other worker."""
        self.encoder = encoder
        self._ops = ops
        self._covered = covered
        self._clock = clock
        self._store = EncoderCache(cache_bytes)
        self._waiting: dict[RequestId, PendingMedia] = {}
        self._elsewhere = elsewhere or NoRemoteEncoder()
        self._pending_bytes: dict[bytes, int] = {}  # elsewhere: bytes of rows to come
        self._own: set[bytes] = set()  # that could not be had elsewhere
        self._begun: tuple[bytes, MediaEncoding] | None = None
        self.counters = EncoderCounters()

    @property
    def axes(self) -> bool:
        """Whether the model's positions have three axes."""
        return self.encoder is not None and self.encoder.has_axes

    @property
    def _leads(self) -> int:
        """Tokens of the sound that every prompt begins with; 0: none need to."""
        return 0 if self.encoder is None else self.encoder.leading_tokens

    # --- on the way to the scheduler ----------------------------------------------------------------------------------

    def is_ready(self, event: AddRequest) -> bool:
        """Whether this request can go to the scheduler; if not, its images are being encoded.

        Raises ImageRefused for a request whose images are not what it says, or that this model cannot read.
        """
        if not event.images and not self._leads:
            return True
        wanted = self._waiting.get(event.id) or self._want(event)
        if all(image.content in self._store for image, _ in wanted.pairs):
            self._waiting.pop(event.id, None)
            return True
        self._waiting[event.id] = wanted
        return False

    def _want(self, event: AddRequest) -> PendingMedia:
        """What is to be encoded for a request that has just come."""
        self._check(event)
        covered = self._covered(event)
        shown = zip(event.images, event.media, strict=True) if event.stage is not RequestStage.DECODE else ()
        pairs = tuple((image, picture) for image, picture in shown if image.end > covered)
        self._store.pin(event.id, (image.content for image, _ in pairs))
        self.counters.queries += len(pairs)
        self.counters.hits += sum(image.content in self._store for image, _ in pairs)
        return PendingMedia(pairs, event.encoders)

    def encode_for_peer(self, content: bytes, picture: MediaInput) -> NDArray[np.float32] | None:
        """Encode this image for another worker; its rows if they are here, else ``encoded_for_peers`` has them later.

        Raises ImageRefused.
        """
        image = PlacedImage(content, 0, picture.rows, picture.columns)
        self._check_picture(image, picture)
        self.counters.queries += 1
        self.counters.hits += content in self._store
        rows_ND = self._store.get(content)
        if rows_ND is None:
            self._waiting[_served(content)] = PendingMedia(((image, picture),), ())
            self._store.pin(_served(content), [content])
        return rows_ND

    def encoded_for_peers(self, contents: Iterable[bytes]) -> Iterator[tuple[bytes, NDArray[np.float32]]]:
        """The encoded ones of ``contents``, with their rows; they are no longer held."""
        for content in contents:
            rows_ND = self._store.get(content)
            if rows_ND is not None:
                self.remove_request(_served(content))
                yield content, rows_ND

    def remove_request(self, request: RequestId) -> None:
        """The request has left, or no longer needs its images."""
        self._waiting.pop(request, None)
        self._store.unpin(request)

    def encode_slice(self) -> bool:
        """Encode a little of what is waited for; False when there was nothing to do, or no room."""
        begin = self._clock()
        heard = self._collect_remote()
        if self._begun is None and not self._begin():
            return heard
        while self._begun is not None:
            content, encoding = self._begun
            if encoding.advance(self._ops):
                self._begun = None
                self._store_encoding(content, encoding)
            if self._clock() - begin >= SLICE_S:
                break
        self.counters.slices += 1
        self.counters.seconds += self._clock() - begin
        return True

    def _collect_remote(self) -> bool:
        """Take what other encoders have sent."""
        heard = False
        for content, rows_ND in self._elsewhere.results():
            heard = True
            self._pending_bytes.pop(content, None)
            if rows_ND is None:
                self._own.add(content)
            else:
                self.counters.received += 1
                self._store.put(content, rows_ND)
        return heard

    def _begin(self) -> bool:
        """Start with the next image that somebody waits for, unless another encoder can be asked for it.

        Requests that have gone on to the scheduler come first: while they hold images, no more are encoded than there
        is room for.
        """
        for wanted in self._waiting.values():
            for image, picture in wanted.pairs:
                if image.content in self._store or image.content in self._pending_bytes:
                    continue
                if not self._has_room(image):
                    return False
                own = image.content in self._own
                if not own and self._elsewhere.request_rows(wanted.sources, image, picture, self._encoder().width):
                    self._pending_bytes[image.content] = self._nbytes(image)
                    continue
                self._begun = (image.content, self._encoder().begin(self._ops, picture))
                return True
        return False

    def _has_room(self, image: PlacedImage) -> bool:
        gone_on = [owner for owner in self._store.pinning_requests if owner not in self._waiting]
        if not self._store.pinned_bytes(gone_on):
            return True
        return self._store.pinned_bytes() + sum(self._pending_bytes.values()) + self._nbytes(image) <= self._store.limit

    def _store_encoding(self, content: bytes, encoding: MediaEncoding) -> None:
        self.counters.images += 1
        self._own.discard(content)
        self._store.put(content, encoding.rows)

    def _nbytes(self, image: PlacedImage) -> int:
        width = 0 if self.encoder is None else self.encoder.width
        return 4 * width * (image.end - image.at)

    # --- in a step ----------------------------------------------------------------------------------------------------

    def rows(self, image: PlacedImage, pictures: Sequence[MediaInput], index: int) -> NDArray[np.float32]:
        """[tokens, D] of a request's image; encoded here and now if it is not in the store."""
        rows_ND = self._store.get(image.content)
        if rows_ND is not None:
            return rows_ND
        if index >= len(pictures):
            raise ValueError("the image's tokens are to be computed, and its picture is not here")
        encoding = self._encoder().begin(self._ops, pictures[index])
        while not encoding.advance(self._ops):
            pass
        self._store_encoding(image.content, encoding)
        return encoding.rows

    # --- checks -------------------------------------------------------------------------------------------------------

    def _encoder(self) -> MediaEncoder:
        if self.encoder is None:
            raise ImageRefused("this model reads text only")
        return self.encoder

    def _check(self, event: AddRequest) -> None:
        self._encoder()
        leads = self._leads
        if leads and [(image.at, image.end) for image in event.images] != [(0, leads)]:
            raise ImageRefused(f"this model hears: its prompts begin with one sound of {leads} tokens")
        end = 0
        for image in event.images:
            if image.at < end or image.end > len(event.prompt):
                raise ImageRefused("an image is not within the prompt, or stands over another one")
            end = image.end
        if event.stage is RequestStage.DECODE:
            return
        if len(event.media) != len(event.images):
            raise ImageRefused(f"{len(event.images)} images, {len(event.media)} pictures")
        for image, picture in zip(event.images, event.media, strict=True):
            self._check_picture(image, picture)

    def _check_picture(self, image: PlacedImage, picture: MediaInput) -> None:
        if (image.rows, image.columns) != (picture.rows, picture.columns):
            raise ImageRefused("a picture has another size than its place")
        self._encoder().check(picture)
        if media_hash(picture) != image.content:
            raise ImageRefused("a picture is not the one that its hash names: it was damaged on its way")


def _served(content: bytes) -> RequestId:
    """Under which name an image is held that another worker wants; no request has such a one."""
    return RequestId(f"encode {content.hex()}")
