"""Images on their way to the scheduler: encoded once, kept while they are needed, refused when they are others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.engine.core.events import AddRequest
from penstock.engine.encoder_stage import EncoderStage
from penstock.engine.models.vision import ImageEncoder
from penstock.errors import ImageRefused
from penstock.hashing import media_hash
from penstock.kernels.ops import Ops
from penstock.types import BlockHash, ImageInput, PlacedImage, RequestId, RequestStage, SamplingParams, WorkerId
from penstock.wire.gateway_messages import PageSource

SIDE, WIDTH, LAYERS = 2, 8, 3
TOKENS = 6
BYTES = TOKENS * WIDTH * 4


class _Encoding:
    def __init__(self, picture: ImageInput) -> None:
        self._left = LAYERS
        self.rows: NDArray[np.float32] = np.full((TOKENS, WIDTH), picture.pixels[0], np.float32)

    def advance(self, ops: Ops) -> bool:
        self._left -= 1
        return self._left == 0


class _Encoder:
    """Its rows are the first tone of the picture."""

    width, has_axes, leading_tokens = WIDTH, True, 0

    def check(self, medium: ImageInput) -> None:
        if len(medium.pixels) != 3 * medium.rows * medium.columns * SIDE**2:
            raise ImageRefused("another number of pixels")

    def begin(self, ops: Ops, picture: ImageInput) -> _Encoding:
        return _Encoding(picture)


class Clock:
    """Every look takes a second: one layer a turn."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


class Others:
    """Encoders on other workers: asked for everything, they answer what they are told to."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.answer: list[tuple[bytes, NDArray[np.float32] | None]] = []

    def request_rows(self, sources: Sequence[PageSource], image: PlacedImage, picture: ImageInput, width: int) -> bool:
        if sources:
            self.asked.append(image.content)
        return bool(sources)

    def results(self) -> list[tuple[bytes, NDArray[np.float32] | None]]:
        told, self.answer = self.answer, []
        return told


def stage(limit: int = 1 << 20, covered: int = 0, others: Others | None = None) -> EncoderStage:
    encoder = cast(ImageEncoder, _Encoder())
    return EncoderStage(
        encoder,
        cast(Ops, None),
        cache_bytes=limit,
        covered=lambda event: covered,
        elsewhere=others,
        clock=Clock(),
    )


def shown(tone: int) -> ImageInput:
    pixels = bytes([tone] * (3 * TOKENS * SIDE**2))
    return ImageInput(2, 3, pixels, 1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def arrive(name: str, tones: Sequence[int], leg: RequestStage = RequestStage.WHOLE) -> AddRequest:
    pictures = [shown(tone) for tone in tones]
    images = [PlacedImage(media_hash(one), index * TOKENS, one.rows, one.columns) for index, one in enumerate(pictures)]
    return AddRequest(
        id=RequestId(name), epoch=1, stage=leg, prompt=(5,) * 40, sampling=SamplingParams(seed=1, max_tokens=4),
        arrival=0.0, root=BlockHash(bytes(32)), images=images, media=() if leg is RequestStage.DECODE else pictures,
    )  # fmt: skip


def rows(stage: EncoderStage, event: AddRequest, index: int = 0) -> float:
    return float(stage.rows(event.images[index], event.media, index)[0, 0])


def test_a_request_waits_for_its_images_layer_by_layer():
    own, event = stage(), arrive("a", [7, 9])
    turns = 0
    while not own.is_ready(event):
        assert own.encode_slice()
        turns += 1
    assert turns == 2 * LAYERS
    assert not own.encode_slice()
    assert [rows(own, event, index) for index in (0, 1)] == [7, 9]
    assert own.counters.images == 2
    assert own.counters.slices == turns


def test_an_image_is_encoded_once():
    own = stage()
    finish(own, arrive("a", [7]))
    assert own.is_ready(arrive("b", [7]))
    assert (own.counters.images, own.counters.queries, own.counters.hits) == (1, 2, 1)


def test_the_prefix_cache_spares_encoding():
    own = stage(covered=2 * TOKENS)
    assert own.is_ready(arrive("a", [7, 9]))
    assert not own.is_ready(arrive("b", [7, 9, 11]))
    assert finish(own, arrive("b", [7, 9, 11])) == LAYERS


def test_whoever_only_writes_the_answer_waits_for_nothing():
    assert stage().is_ready(arrive("a", [7], RequestStage.DECODE))


def test_rows_held_stay_and_others_go_by_age():
    own = stage(limit=2 * BYTES)
    for name, tone in (("a", 1), ("b", 2)):
        finish(own, arrive(name, [tone]))
    own.remove_request(RequestId("a"))
    own.remove_request(RequestId("b"))
    finish(own, arrive("c", [3]))
    assert own.counters.images == 3
    assert own.is_ready(arrive("b2", [2]))
    assert not own.is_ready(arrive("a2", [1]))  # used longest ago


def test_no_more_is_encoded_ahead_than_there_is_room_for():
    own = stage(limit=2 * BYTES)
    first, second = arrive("a", [1, 2]), arrive("b", [3])
    finish(own, first)
    assert not own.is_ready(second)
    assert not own.encode_slice()  # until somebody has read what there is
    own.remove_request(first.id)
    finish(own, second)


def test_more_than_the_room_is_encoded_for_one_request():
    own = stage(limit=BYTES)
    event = arrive("a", [1, 2, 3])
    finish(own, event)
    assert [rows(own, event, index) for index in range(3)] == [1, 2, 3]
    assert own.counters.images == 3


def test_what_was_lost_is_encoded_anew_in_a_step():
    own, event = stage(limit=1), arrive("a", [7])
    finish(own, event)
    own.remove_request(event.id)
    assert rows(own, event) == 7
    assert own.counters.images == 2
    with pytest.raises(ValueError, match="picture is not here"):
        own.rows(arrive("b", [8]).images[0], (), 0)


def test_a_request_that_goes_leaves_nothing_to_do():
    own, event = stage(), arrive("a", [7])
    assert not own.is_ready(event)
    own.remove_request(event.id)
    assert not own.encode_slice()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"images": [PlacedImage(bytes(32), 38, 2, 3)]}, "within the prompt"),
        ({"images": [PlacedImage(bytes(32), 0, 2, 3), PlacedImage(bytes(32), 5, 2, 3)]}, "over another"),
        ({"media": []}, "1 images, 0 pictures"),
        ({"media": [msgspec.structs.replace(shown(7), rows=3)]}, "another size"),
        ({"media": [msgspec.structs.replace(shown(7), pixels=b"x")]}, "number of pixels"),
        ({"media": [shown(8)]}, "damaged"),
    ],
)
def test_what_is_not_itself_is_refused(change: dict[str, Any], why: str):
    event = arrive("a", [7])
    fields = {name: getattr(event, name) for name in AddRequest.__dataclass_fields__}
    with pytest.raises(ImageRefused, match=why):
        stage().is_ready(AddRequest(**fields | change))


class _Listener(_Encoder):
    """Its prompts begin with one."""

    leading_tokens = TOKENS


@pytest.mark.parametrize("images", [[], [PlacedImage(bytes(32), 1, 2, 3)], [PlacedImage(bytes(32), 0, 2, 2)]])
def test_a_model_that_hears_wants_its_sound_first(images: list[PlacedImage]):
    own = EncoderStage(cast(Any, _Listener()), cast(Ops, None), cache_bytes=1 << 20)
    with pytest.raises(ImageRefused, match="begin with one sound of 6 tokens"):
        own.is_ready(replace(arrive("a", [7]), images=images))


SOURCE = PageSource(worker=WorkerId("encode-0"), incarnation=1, endpoint="memory://e")


def test_another_worker_encodes_while_this_one_waits():
    others = Others()
    own, event = stage(others=others), replace(arrive("a", [7, 9]), encoders=(SOURCE,))
    assert not own.is_ready(event)
    assert not own.encode_slice()  # nothing to do here
    assert others.asked == [image.content for image in event.images]
    assert not own.encode_slice()
    assert len(others.asked) == 2  # nobody is asked twice
    first, second = event.images
    others.answer = [(second.content, np.full((TOKENS, WIDTH), 5, np.float32)), (first.content, None)]
    while not own.is_ready(event):
        assert own.encode_slice()
    assert [rows(own, event, index) for index in (0, 1)] == [7, 5]  # what could not be had was encoded here
    assert (own.counters.images, own.counters.received) == (1, 1)


def test_an_encoder_serves_each_image_once_it_has_it():
    own, picture = stage(), shown(7)
    content = media_hash(picture)
    assert own.encode_for_peer(content, picture) is None
    assert list(own.encoded_for_peers([content])) == []
    while own.encode_slice():
        pass
    ((name, rows_ND),) = own.encoded_for_peers([content])
    assert (name, rows_ND[0, 0]) == (content, 7)
    again = own.encode_for_peer(content, picture)
    assert again is not None
    assert again is rows_ND
    with pytest.raises(ImageRefused, match="damaged"):
        own.encode_for_peer(bytes(32), picture)


def test_a_model_that_reads_text_refuses_images():
    blind = EncoderStage(None, cast(Ops, None), cache_bytes=1)
    assert blind.is_ready(arrive("a", []))
    with pytest.raises(ImageRefused, match="text only"):
        blind.is_ready(arrive("a", [7]))


def finish(stage: EncoderStage, event: AddRequest) -> int:
    """Until the request may go on; how many turns that took."""
    turns = 0
    while not stage.is_ready(event):
        assert stage.encode_slice()
        turns += 1
    return turns
