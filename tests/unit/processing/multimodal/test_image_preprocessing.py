"""Files of images: what is read, and what is refused before it costs anything."""

from __future__ import annotations

import contextlib
import json
import struct
import zlib

import pytest
from PIL import Image

from penstock.config.limits import RequestLimits
from penstock.errors import ModelError, RequestError
from penstock.processing.multimodal import image_preprocessing
from penstock.processing.multimodal.image_preprocessing import (
    ImagePreprocessorConfig,
    decode_image,
    decoding_bytes,
    has_more_scans,
    read_image_config,
)
from penstock.types import ImageInput
from penstock.weights.model_files import ModelFiles
from vision_models import PREPROCESSOR, encoded, picture, vision_config

RECIPE = ImagePreprocessorConfig(
    side=28,
    min_pixels=3136,
    max_pixels=12_845_056,
    scale=1 / 255,
    mean=(0.0, 0.0, 0.0),
    deviation=(1.0, 1.0, 1.0),
    token=7,
)


def read(raw: bytes, **limits: int) -> ImageInput:
    return decode_image(raw, RECIPE, RequestLimits(**limits), "here")


def bomb(width: int, height: int) -> bytes:
    """A PNG of so many pixels in a few bytes: its head is true, its data would be."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1 << 20), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("form", "options"), [("PNG", {}), ("JPEG", {"quality": 90}), ("WEBP", {"lossless": True})])
def test_three_formats_are_read(form: str, options: dict[str, int]):
    got = read(encoded(picture(60, 90), form, **options))
    assert (got.rows, got.columns) == (3, 2)
    assert len(got.pixels) == 3 * 84 * 56


def test_every_kind_of_colour_becomes_red_green_blue():
    for mode in ("L", "1", "P", "LA", "RGBA", "I;16"):
        image = (
            picture(56, 56).convert("L").convert("I").convert(mode) if mode == "I;16" else picture(56, 56).convert(mode)
        )
        assert len(read(encoded(image)).pixels) == 3 * 56 * 56
    assert len(read(encoded(picture(56, 56).convert("CMYK"), "JPEG")).pixels) == 3 * 56 * 56


def test_a_photograph_stands_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # held on its side
    lying = read(encoded(picture(112, 56), "JPEG", exif=exif))
    assert (lying.rows, lying.columns) == (4, 2)


def test_of_a_moving_image_the_first_frame_is_read():
    frames = [picture(56, 56, seed) for seed in range(3)]
    assert read(encoded(frames[0], "PNG", save_all=True, append_images=frames[1:])) == read(encoded(frames[0]))


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (bomb(20_000, 20_000), "max_image_pixels"),
        (bomb(9_900, 9_900), "max_image_pixels"),
        (bomb(4_000, 4_000), "damaged"),
        (bomb(4_000, 10), "200 times"),
        (b"", "none of PNG"),
        (b"hello", "none of PNG"),
        (encoded(picture(40, 40), "GIF"), "none of PNG"),
        (encoded(picture(40, 40), "TIFF"), "none of PNG"),
        (encoded(picture(400, 400))[:900], "damaged"),
        (encoded(picture(400, 400), "JPEG")[:900], "damaged"),
        (encoded(picture(400, 400), "WEBP")[:900], "damaged"),
    ],
)
def test_what_cannot_be_read_is_refused(raw: bytes, why: str):
    with pytest.raises(RequestError, match=why) as told:
        read(raw)
    assert told.value.param == "here"
    assert told.value.code == "invalid_image"


def test_every_byte_may_be_wrong():
    """Nothing but a refusal comes of a damaged file."""
    for form in ("PNG", "JPEG", "WEBP"):
        raw = bytearray(encoded(picture(40, 40), form))
        for place in range(0, len(raw), max(1, len(raw) // 60)):
            damaged = bytes(raw[:place]) + bytes([raw[place] ^ 0xA5]) + bytes(raw[place + 1 :])
            with contextlib.suppress(RequestError):
                assert read(damaged, max_image_pixels=10_000).pixels


def test_a_large_image_is_made_smaller_and_keeps_its_shape():
    got = read(encoded(picture(840, 420)), max_image_tokens=100)
    assert (got.rows, got.columns) == (7, 14)
    with pytest.raises(RequestError, match="max_image_tokens"):
        read(encoded(picture(5_600, 28)), max_image_tokens=100)


class Files:
    """Small files in memory."""

    def __init__(self, **files: str) -> None:
        self._files = files

    def read(self, name: str) -> bytes | None:
        text = self._files.get(name.replace(".", "_"))
        return None if text is None else text.encode()

    def path_of(self, name: str) -> str:
        return name


def recipe_of(text: str | None, **more: str) -> ImagePreprocessorConfig | None:
    own = {} if text is None else {"preprocessor_config_json": text}
    files: ModelFiles = Files(config_json=json.dumps(vision_config()), **own, **more)
    return read_image_config(files)


def test_a_recipe_is_read_in_both_dialects():
    old = recipe_of(json.dumps(PREPROCESSOR))
    assert old is not None
    assert (old.side, old.min_pixels, old.max_pixels, old.scale) == (28, 3136, 12845056, 1 / 255)
    own = {name: value for name, value in PREPROCESSOR.items() if not name.endswith("pixels")}
    own["size"] = {"shortest_edge": 3136, "longest_edge": 12845056}
    assert recipe_of(None, processor_config_json=json.dumps({"image_processor": own})) == old


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"do_normalize": False}, "do_normalize is false"),
        ({"resample": 2}, "bicubic"),
        ({"patch_size": 16}, "28 pixels a side"),
        ({"image_mean": [1, 2]}, "three numbers"),
        ({"image_std": [0.1, 0.0, 0.1]}, "above 0"),
        ({"min_pixels": 10, "max_pixels": 9}, "above max_pixels"),
    ],
)
def test_a_recipe_that_cannot_be_followed_is_refused(change: dict[str, object], why: str):
    with pytest.raises(ModelError, match=why):
        recipe_of(json.dumps(PREPROCESSOR | change))
    with pytest.raises(ModelError, match=r"preprocessor_config\.json is missing"):
        recipe_of(None)


def test_a_model_of_text_has_no_recipe():
    assert read_image_config(Files(config_json='{"architectures": ["LlamaForCausalLM"]}')) is None


def many_scans(count: int) -> bytes:
    """A progressive JPEG with so many more scans that say nothing new: 10 bytes and a pass over all pixels each."""
    raw = encoded(picture(64, 64), "JPEG", progressive=True)
    scan = b"\xff\xda\x00\x08\x01\x01\x00\x01\x3f\x00"
    return raw[:-2] + scan * count + raw[-2:]


def test_a_jpeg_of_many_passes_is_refused_before_the_first_of_them(monkeypatch: pytest.MonkeyPatch):
    assert not has_more_scans(encoded(picture(64, 64), "JPEG", progressive=True), 12)
    assert has_more_scans(many_scans(64), 64)
    assert has_more_scans(b"\xff\xd8" + b"\xff\xe0\x00\x02" * 100_000, 64), "a file of nothing but markers"
    noise = b"\xff\x00\xff\xd0\xff\xff" * 100_000
    assert not has_more_scans(b"\xff\xd8\xff\xda\x00\x02" + noise + b"\xff\xd9" + b"\xff\xda\x00\x02" * 999, 64)
    monkeypatch.setattr(image_preprocessing, "_prepared", lambda *_: pytest.fail("it was decoded"))
    with pytest.raises(RequestError, match="more than 64 scans"):
        read(many_scans(4000))


def test_what_decoding_takes_is_known_from_the_head():
    assert decoding_bytes(bomb(4000, 3000), "here", RequestLimits()) == 4000 * 3000 * 12
    assert decoding_bytes(b"nothing", "here", RequestLimits()) == 0
    with pytest.raises(RequestError, match="max_image_pixels"):
        decoding_bytes(bomb(8000, 8000), "here", RequestLimits())
