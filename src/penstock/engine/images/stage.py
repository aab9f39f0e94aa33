"""Encoding as a stage of its own: a request that brings images waits here until they are encoded.

::

    Arrive --ready?--> waiting --work, a layer at a time, between two steps--> store --> scheduler
                          |                                                      ^
                          images that the prefix cache covers are passed over    rows(): a step puts them in

Who writes answers meanwhile is kept waiting for a layer of the encoder, not for an image.  Rows are a function of the
picture alone: whatever the store has lost (after a preemption, say) is encoded anew, and has the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.engine.core.plan import Arrive
from penstock.engine.images.store import ImageStore
from penstock.engine.models.vision import Encoding, ImageEncoder
from penstock.errors import ImageRefused
from penstock.hashing import picture_hash
from penstock.kernels.ops import Ops
from penstock.types import Leg, Picture, PlacedImage, RequestId

SLICE_S = 0.02
"""Layers are computed until so much time is spent, one at least."""

Wanted = tuple[tuple[PlacedImage, Picture], ...]


@dataclass(slots=True)
class Counters:
    """Since the start."""

    images: int = 0  # encoded
    slices: int = 0  # turns that encoded something
    seconds: float = 0.0
    queries: int = 0  # images that requests came with and that had to be read
    hits: int = 0  # of those, found encoded


class ImageStage:
    """The images of one worker.  ``encoder`` None: the model reads text only."""

    def __init__(
        self,
        encoder: ImageEncoder | None,
        ops: Ops,
        *,
        cache_bytes: int,
        covered: Callable[[Arrive], int] = lambda event: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``covered``: how many tokens of a request's prompt the prefix cache has now."""
        self.encoder = encoder
        self._ops = ops
        self._covered = covered
        self._clock = clock
        self._store = ImageStore(cache_bytes)
        self._waiting: dict[RequestId, Wanted] = {}
        self._begun: tuple[bytes, Encoding] | None = None
        self.counters = Counters()

    @property
    def axes(self) -> bool:
        """Have the model's positions three axes?"""
        return self.encoder is not None and self.encoder.axes

    # --- on the way to the scheduler ----------------------------------------------------------------------------------

    def ready(self, event: Arrive) -> bool:
        """Can this request go on to the scheduler?  If not, its images are being encoded.

        Raises ImageRefused for a request whose images are not what it says, or that this model cannot read.
        """
        if not event.images:
            return True
        wanted = self._waiting.get(event.id)
        if wanted is None:
            self._check(event)
            covered = self._covered(event)
            pairs = zip(event.images, event.pictures, strict=True) if event.leg is not Leg.DECODE else ()
            wanted = tuple((image, picture) for image, picture in pairs if image.end > covered)
            self._store.hold(event.id, (image.content for image, _ in wanted))
            self.counters.queries += len(wanted)
            self.counters.hits += sum(image.content in self._store for image, _ in wanted)
        if all(image.content in self._store for image, _ in wanted):
            self._waiting.pop(event.id, None)
            return True
        self._waiting[event.id] = wanted
        return False

    def forget(self, request: RequestId) -> None:
        """Nobody waits for this request any more, or it needs its images no longer."""
        self._waiting.pop(request, None)
        self._store.release(request)

    def work(self) -> bool:
        """Encode a little of what is waited for; False when there was nothing to do, or no room."""
        begin = self._clock()
        if self._begun is None and not self._begin():
            return False
        while self._begun is not None:
            content, encoding = self._begun
            if encoding.advance(self._ops):
                self._begun = None
                self._keep(content, encoding)
            if self._clock() - begin >= SLICE_S:
                break
        self.counters.slices += 1
        self.counters.seconds += self._clock() - begin
        return True

    def _begin(self) -> bool:
        """Start with the next image that somebody waits for.

        Requests that have gone on to the scheduler come first: while they hold images, no more are encoded than there
        is room for.
        """
        for wanted in self._waiting.values():
            for image, picture in wanted:
                if image.content in self._store:
                    continue
                gone_on = [owner for owner in self._store.holders if owner not in self._waiting]
                needed = self._store.held_bytes() + self._nbytes(image)
                if self._store.held_bytes(gone_on) and needed > self._store.limit:
                    return False
                self._begun = (image.content, self._encoder().begin(self._ops, picture))
                return True
        return False

    def _keep(self, content: bytes, encoding: Encoding) -> None:
        self.counters.images += 1
        self._store.put(content, encoding.rows)

    def _nbytes(self, image: PlacedImage) -> int:
        width = 0 if self.encoder is None else self.encoder.width
        return 4 * width * (image.end - image.at)

    # --- in a step ----------------------------------------------------------------------------------------------------

    def rows(self, image: PlacedImage, pictures: Sequence[Picture], index: int) -> NDArray[np.float32]:
        """[tokens, D] of a request's image; encoded here and now if it is not in the store."""
        rows_ND = self._store.get(image.content)
        if rows_ND is not None:
            return rows_ND
        if index >= len(pictures):
            raise ValueError("the image's tokens are to be computed, and its picture is not here")
        encoding = self._encoder().begin(self._ops, pictures[index])
        while not encoding.advance(self._ops):
            pass
        self._keep(image.content, encoding)
        return encoding.rows

    # --- checks -------------------------------------------------------------------------------------------------------

    def _encoder(self) -> ImageEncoder:
        if self.encoder is None:
            raise ImageRefused("this model reads text only")
        return self.encoder

    def _check(self, event: Arrive) -> None:
        encoder = self._encoder()
        end = 0
        for image in event.images:
            if image.at < end or image.end > len(event.prompt):
                raise ImageRefused("an image is not within the prompt, or stands over another one")
            end = image.end
        if event.leg is Leg.DECODE:
            return
        if len(event.pictures) != len(event.images):
            raise ImageRefused(f"{len(event.images)} images, {len(event.pictures)} pictures")
        for image, picture in zip(event.images, event.pictures, strict=True):
            if (image.rows, image.columns) != (picture.rows, picture.columns):
                raise ImageRefused("a picture has another size than its place")
            if len(picture.pixels) != 3 * picture.rows * picture.columns * encoder.token_side**2:
                raise ImageRefused("a picture has another number of pixels than its size says")
            if picture_hash(picture) != image.content:
                raise ImageRefused("a picture is not the one that its hash names: it was damaged on its way")
