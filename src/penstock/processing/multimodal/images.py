"""The images of a chat: from URLs to pixels, and into the prompt.

At most ``THREADS`` images are decoded at a time, in bounded memory; ``RequestLimits.max_queued_images``
bounds the queue.
"""

from __future__ import annotations

import asyncio
import binascii
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from penstock.config.limits import RequestLimits
from penstock.errors import QueueFull, RequestError
from penstock.hashing import media_hash, medium_salt
from penstock.processing.multimodal.image_fetch import ImageFetcher
from penstock.processing.multimodal.image_preprocessing import (
    ImagePreprocessorConfig,
    bad_image,
    decode_image,
    decoding_bytes,
)
from penstock.processing.multimodal.memory import ByteSemaphore
from penstock.processing.requests.messages import ImageUrl
from penstock.types import ImageInput, PlacedImage

THREADS = 2
MAX_PICTURE_BYTES = 24 << 20
"""Pixels of one request, all its images together: what fits into one message to a worker."""

_DATA = re.compile(r"data:image/(png|jpeg|jpg|webp);base64,", re.IGNORECASE)
_SHOWN = 64
_PIECE = 1 << 20
"""Characters of base64 that are decoded at once, a multiple of 4."""


class MultimodalPrompt(msgspec.Struct, frozen=True):
    """A prompt as its model reads it: the tokens, and what some of them stand for."""

    tokens: tuple[int, ...]
    images: tuple[PlacedImage, ...] = ()
    pictures: tuple[ImageInput, ...] = ()


class ImagePipeline:
    """The images of one model's chats."""

    def __init__(self, recipe: ImagePreprocessorConfig, limits: RequestLimits, remote: ImageFetcher | None) -> None:
        """``remote`` None: images come within the request only."""
        self.recipe = recipe
        self._limits = limits
        self._remote = remote
        self._queued = 0
        self._decoding = ByteSemaphore(limits.max_decoding_image_bytes)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="images")

    def close(self) -> None:
        """Lets the threads end."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def process(self, tokens: tuple[int, ...], urls: Sequence[ImageUrl], salt: str = "") -> MultimodalPrompt:
        """The prompt with these images, in which the template wrote one token for each.  Who has another ``salt``
        shares nothing of them.  Raises RequestError, or QueueFull."""
        shown = tokens.count(self.recipe.token)
        if shown != len(urls):
            raise RequestError(
                f"The model's chat template shows {shown} of {len(urls)} images.",
                param="messages",
                code="template_error",
            )
        if not urls:
            return MultimodalPrompt(tokens)
        if self._queued + len(urls) > self._limits.max_queued_images:
            raise QueueFull(f"{self._queued} images wait to be decoded, at most {self._limits.max_queued_images} may.")
        self._queued += len(urls)
        try:
            return expand_placeholders(tokens, self.recipe.token, await self._pictures(urls, medium_salt(salt)))
        finally:
            self._queued -= len(urls)

    async def _pictures(self, urls: Sequence[ImageUrl], salt: bytes) -> list[tuple[ImageInput, bytes]]:
        """Pictures with their hashes, one after another: what is refused early costs nothing later."""
        made: list[tuple[ImageInput, bytes]] = []
        for image in urls:
            raw = None if image.url[:5].lower() == "data:" else await self._fetch(image)
            loop = asyncio.get_running_loop()
            made.append(await loop.run_in_executor(self._pool, self._picture, image, raw, salt))
            if sum(len(picture.pixels) for picture, _ in made) > MAX_PICTURE_BYTES:
                raise bad_image(image.where, f"all images together have more than {MAX_PICTURE_BYTES} bytes of pixels.")
        return made

    async def _fetch(self, image: ImageUrl) -> bytes:
        if self._remote is None:
            raise bad_image(
                image.where,
                "this server fetches no images; send it as a data: URL (data:image/png;base64,...). Nothing was "
                "fetched.",
            )
        return await self._remote.fetch(image.url, image.where)

    def _picture(self, image: ImageUrl, raw: bytes | None, salt: bytes) -> tuple[ImageInput, bytes]:
        """On a thread."""
        if raw is None:
            raw = decode_data_url(image, self._limits.max_image_bytes)
        with self._decoding.acquire(decoding_bytes(raw, image.where, self._limits)):
            picture = decode_image(raw, self.recipe, self._limits, image.where)
        picture = msgspec.structs.replace(picture, salt=salt) if salt else picture
        return picture, media_hash(picture)


def decode_data_url(image: ImageUrl, max_bytes: int) -> bytes:
    """The bytes in a data: URL (RFC 2397).  Raises RequestError."""
    head = _DATA.match(image.url)
    if head is None:
        shown = image.url[:_SHOWN].partition(",")[0]
        raise bad_image(
            image.where, f"a data: URL must begin with data:image/png;base64, (or jpeg, webp), got {shown!r}."
        )
    if (len(image.url) - head.end()) // 4 * 3 > max_bytes + 3:
        raise bad_image(image.where, f"it is larger than {max_bytes} bytes (max_image_bytes).")
    raw = b"".join(_decoded(image, head.end()))
    if len(raw) > max_bytes:
        raise bad_image(image.where, f"it is larger than {max_bytes} bytes (max_image_bytes).")
    return raw


def _decoded(image: ImageUrl, begin: int) -> Iterator[bytes]:
    """Piece by piece: others get the interpreter's lock in between."""
    url = image.url
    if url.find("=", begin, len(url) - 2) >= 0:
        raise bad_image(image.where, "its data is not base64.")
    for at in range(begin, len(url), _PIECE):
        try:
            yield binascii.a2b_base64(url[at : at + _PIECE], strict_mode=True)
        except ValueError:  # binascii.Error, or characters beyond ASCII
            raise bad_image(image.where, "its data is not base64.") from None


def expand_placeholders(
    tokens: Sequence[int], token: int, pictures: Sequence[tuple[ImageInput, bytes]]
) -> MultimodalPrompt:
    """``tokens`` with each ``token`` repeated as often as its picture has rows and columns."""
    expanded: list[int] = []
    images: list[PlacedImage] = []
    begin = 0
    for picture, content in pictures:
        at = tokens.index(token, begin)
        expanded += tokens[begin:at]
        images.append(PlacedImage(content, len(expanded), picture.rows, picture.columns))
        expanded += [token] * (picture.rows * picture.columns)
        begin = at + 1
    expanded += tokens[begin:]
    return MultimodalPrompt(tuple(expanded), tuple(images), tuple(picture for picture, _ in pictures))
