"""Images of chats: from fields to a prompt in which each stands for as many tokens as it has."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.config.limits import RequestLimits
from penstock.errors import QueueFull, RequestError
from penstock.hashing import block_hashes, chain_root, media_hash
from penstock.interfaces import Caller, RequestContext
from penstock.processing.multimodal import image_preprocessing
from penstock.processing.service import GenerationProcessor
from penstock.types import ModelIdentity, RequestId, ValidRequest
from vision_models import IMAGE_TOKEN, data_url, image_part, write_vision_model

STORYTELLER = Path(image_preprocessing.__file__).parents[2] / "bundled/storyteller"
IDENTITY = ModelIdentity(fingerprint="f", numerics="n")
TEXT = {"type": "text", "text": "t3 t4"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("vision"))


def intake_of(folder: Path, **limits: Any) -> GenerationProcessor:
    return GenerationProcessor(folder, name="m", max_model_len=1024, limits=RequestLimits(**limits), created=7)


async def ask(intake: GenerationProcessor, content: Any, role: str = "user") -> ValidRequest:
    body = {"model": "m", "messages": [{"role": role, "content": content}], "max_tokens": 4}
    envelope = RequestContext(id=RequestId("x"), arrival=1.0, identity=IDENTITY)
    return (await intake.chat(body, envelope)).requests[0]


async def test_an_image_takes_the_place_of_its_tokens(folder: Path):
    got = await ask(intake_of(folder), [TEXT, image_part(90, 60), TEXT, TEXT, image_part(56, 56, seed=1)])
    first, second = got.images
    assert (first.rows, first.columns, second.rows, second.columns) == (2, 3, 2, 2)
    for image in got.images:
        assert set(got.prompt[image.at : image.end]) == {IMAGE_TOKEN}
        assert (got.prompt[image.at - 1], got.prompt[image.end]) == (IMAGE_TOKEN - 1, IMAGE_TOKEN + 1)
    assert tuple(got.prompt).count(IMAGE_TOKEN) == 6 + 4
    assert [(one.rows, one.columns) for one in got.pictures] == [(2, 3), (2, 2)]
    assert got.block_hashes == tuple(block_hashes(chain_root(IDENTITY), got.prompt, images=got.images))


async def test_two_images_of_one_size_are_told_apart(folder: Path):
    intake = intake_of(folder)
    words = [{"type": "text", "text": "t3 " * 40}]
    one, other, again = [await ask(intake, [*words, image_part(90, 60, seed), *words]) for seed in (1, 2, 1)]
    assert one.prompt == other.prompt
    assert one.block_hashes == again.block_hashes
    before = one.images[0].at // 16
    assert one.block_hashes[:before] == other.block_hashes[:before]  # the text before is shared
    assert before > 0
    assert not set(one.block_hashes[before:]) & set(other.block_hashes[before:])


async def test_tokenize_counts_them(folder: Path):
    intake = intake_of(folder)
    messages = [{"role": "user", "content": [image_part(90, 60)]}]
    counted = await intake.tokenize({"model": "m", "messages": messages})
    assert counted.tokens == list((await ask(intake, [image_part(90, 60)])).prompt)


async def test_text_that_spells_the_token_is_text(folder: Path):
    got = await ask(intake_of(folder), [{"type": "text", "text": "t3 <|image_pad|> t4"}, image_part(56, 56)])
    assert tuple(got.prompt).count(IMAGE_TOKEN) == 4


@pytest.mark.parametrize(
    ("part", "why", "code"),
    [
        ({"type": "image_url"}, "image_url", None),
        ({"type": "image_url", "image_url": {"url": 7}}, "url", None),
        ({"type": "image_url", "image_url": {"url": "x", "size": 2}}, "Unrecognized field", "unknown_parameter"),
        ({"type": "image_url", "image_url": {"url": "x", "detail": "huge"}}, "detail", "invalid_value"),
        ({"type": "image_url", "image_url": {"url": "data:text/html;base64,xx"}}, "must begin with", "invalid_image"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@"}}, "not base64", "invalid_image"),
        ({"type": "image_url", "image_url": {"url": data_url(b"hello")}}, "none of PNG", "invalid_image"),
        (
            {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
            "fetches no images",
            "invalid_image",
        ),
        ({"type": "video_url", "video_url": {"url": "x"}}, "films", "unsupported_value"),
    ],
)
async def test_what_is_no_image_is_refused(folder: Path, part: dict[str, Any], why: str, code: str | None):
    with pytest.raises(RequestError, match=why) as told:
        await ask(intake_of(folder), [TEXT, part])
    assert code is None or told.value.code == code
    assert (told.value.param or "").startswith("messages[0].content[1]")


async def test_limits(folder: Path):
    with pytest.raises(RequestError, match="at most 2 are allowed"):
        await ask(intake_of(folder, max_images=2), [image_part(30, 30)] * 3)
    with pytest.raises(RequestError, match="max_image_bytes"):
        await ask(intake_of(folder, max_image_bytes=1000), [image_part(300, 300)])
    with pytest.raises(RequestError, match="maximum context length"):
        await ask(intake_of(folder), [image_part(900, 900)])
    assert len((await ask(intake_of(folder, max_image_tokens=50), [image_part(900, 900)])).prompt) < 80
    with pytest.raises(QueueFull, match="at most 1 may"):
        await ask(intake_of(folder, max_queued_images=1), [image_part(30, 30)] * 2)


async def test_the_queue_is_left_whatever_happens(folder: Path):
    intake = intake_of(folder, max_queued_images=2)
    bad = {"type": "image_url", "image_url": {"url": data_url(b"hello")}}
    for _ in range(3):
        with pytest.raises(RequestError, match="none of PNG"):
            await ask(intake, [image_part(30, 30), bad])
    assert (await ask(intake, [image_part(30, 30)] * 2)).images
    both = await asyncio.gather(*(ask(intake, [image_part(30, 30)]) for _ in range(2)))
    assert both[0].images == both[1].images


async def test_only_the_user_shows_images(folder: Path):
    with pytest.raises(RequestError, match="of the user only"):
        await ask(intake_of(folder), [TEXT, image_part(30, 30)], role="system")


async def test_a_model_that_reads_text_says_so():
    with pytest.raises(RequestError, match="reads text only") as told:
        await ask(intake_of(STORYTELLER), [TEXT, image_part(30, 30)])
    assert told.value.code == "unsupported_value"


async def test_without_pillow_only_images_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    intake = intake_of(folder)
    monkeypatch.setattr("penstock.processing.service.pillow_installed", lambda: False)
    assert (await ask(intake, [TEXT])).prompt
    with pytest.raises(RequestError, match=r"pip install 'penstock\[vision\]'"):
        await ask(intake, [image_part(30, 30)])


async def test_a_template_that_shows_no_images_is_named(folder: Path, tmp_path: Path):
    other = write_vision_model(tmp_path / "blind")
    (other / "tokenizer_config.json").write_text('{"chat_template": "{% for m in messages %}t3 {% endfor %}"}')
    with pytest.raises(RequestError, match="shows 0 of 1 images"):
        await ask(intake_of(other), [image_part(30, 30)])


async def test_tenants_share_nothing_of_an_image(folder: Path):
    intake = intake_of(folder)
    body = {"model": "m", "messages": [{"role": "user", "content": [TEXT, image_part(90, 60)]}], "max_tokens": 4}
    images = {}
    for salt, more in (("", {}), ("a", {}), ("b", {}), ("", {"cache_salt": "a"})):
        envelope = RequestContext(id=RequestId("x"), arrival=1.0, identity=IDENTITY, caller=Caller(salt=salt))
        request = (await intake.chat(body | more, envelope)).requests[0]
        assert media_hash(request.pictures[0]) == request.images[0].content, "as the worker looks at it"
        images[salt, *more] = request.images[0].content
    assert len(set(images.values())) == 4, "a tenant's salt and one of a request are two things"
