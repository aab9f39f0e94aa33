"""Models that see compute what transformers computes, both in fp32, and keep law 1 with images in the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from parity_oracle import Oracle, processed
from PIL import Image
from ways import Told, Ways
from whole_rows import check_rows, read_rows, rows_of

from penstock.config.limits import RequestLimits
from penstock.engine.core.request import Request
from penstock.engine.models.vision import Grid, image_patches
from penstock.hashing import media_hash
from penstock.kernels.native.program import RecordedProgram
from penstock.processing.multimodal.image_preprocessing import decode_image, read_image_config
from penstock.processing.multimodal.images import MultimodalPrompt, expand_placeholders
from penstock.types import PAGE_TOKENS, ImageInput, SamplingParams
from penstock.weights.architecture.vision import VisionDecoderConfig
from penstock.weights.model_files import model_files
from runner_bench import RunnerBench
from vision_models import IMAGE_TOKEN, KINDS, VOCAB, encoded, picture, write_vision_model

ANSWER = 4
SIZES = ((149, 90), (61, 230), (30, 30))
"""Width and height: 5 x 3, 2 x 8 and (made larger) 2 x 2 tokens."""


@dataclass(frozen=True)
class Place:
    """A tiny model behind the runner and behind transformers, and a prompt with three images."""

    folder: Path
    bench: RunnerBench
    oracle: Oracle
    images: list[Image.Image]
    prompt: MultimodalPrompt

    def request(self, *, told: bool = False, pictures: Sequence[ImageInput] | None = None) -> Request:
        sampling = SamplingParams(
            seed=3, max_tokens=ANSWER, temperature=0.8, logprobs=VOCAB, prompt_logprobs=VOCAB if told else None
        )
        shown = self.prompt.pictures if pictures is None else pictures
        return self.bench.request(self.prompt.tokens, sampling, images=self.prompt.images, pictures=shown)

    @property
    def ways(self) -> Ways:
        return Ways(self.bench, self.request)


def seen(folder: Path, images: list[Image.Image], words: Sequence[int] = (20, 1, 7, 40)) -> MultimodalPrompt:
    """A prompt with ``words`` of text before, between and after the images."""
    recipe = read_image_config(model_files(folder))
    assert recipe is not None
    assert recipe.token == IMAGE_TOKEN
    rng = np.random.default_rng(5)
    tokens: list[int] = rng.integers(0, 150, words[0]).tolist()
    for count in words[1 : len(images) + 1]:
        tokens += [IMAGE_TOKEN, *rng.integers(0, 150, count).tolist()]
    pictures = [decode_image(encoded(image), recipe, RequestLimits(), "here") for image in images]
    return expand_placeholders(tokens, IMAGE_TOKEN, [(one, media_hash(one)) for one in pictures])


@pytest.fixture(scope="module", params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = write_vision_model(tmp_path_factory.mktemp(request.param), request.param)
    images = [picture(*size, seed=index) for index, size in enumerate(SIZES)]
    bench = RunnerBench(folder)
    if bench.ops.numerics.startswith("cpp"):
        assert isinstance(bench.runner.program, RecordedProgram)
    return Place(folder, bench, Oracle.of(folder), images, seen(folder, images))


def of_transformers(place: Place, seen: MultimodalPrompt, images: list[Image.Image]) -> NDArray[np.float64]:
    """Log-probabilities after every position."""
    return place.oracle.logprobs_TV(seen.tokens, images, IMAGE_TOKEN)


def test_images_are_prepared_as_transformers_prepares_them(place: Place) -> None:
    vision = place.bench.spec.details_as(VisionDecoderConfig).vision
    wanted = processed(place.images)
    grids = [[1, one.rows * 2, one.columns * 2] for one in place.prompt.pictures]
    assert wanted["image_grid_thw"].tolist() == grids
    got = np.concatenate([image_patches(vision, one) for one in place.prompt.pictures])
    np.testing.assert_allclose(got, wanted["pixel_values"].numpy(), atol=1e-5)


def test_log_probabilities_are_those_of_transformers(place: Place) -> None:
    request = place.request(told=True)
    drawn = place.bench.read(request, len(place.prompt.tokens))
    got_TV = rows_of(drawn, VOCAB)
    check_rows(got_TV, of_transformers(place, place.prompt, place.images))
    place.bench.release(request)
    others = [picture(*size, seed=index + 7) for index, size in enumerate(SIZES)]
    same_ids = seen(place.folder, others)
    assert same_ids.tokens == place.prompt.tokens
    assert np.abs(of_transformers(place, same_ids, others) - got_TV).max() > 0.1  # images matter


def test_a_text_without_images_is_that_of_a_model_that_reads_text_only(place: Place) -> None:
    tokens = [token for token in place.prompt.tokens if token != IMAGE_TOKEN]
    check_rows(read_rows(place.bench, tokens, 33), place.oracle.logprobs_TV(tokens))


def test_no_bit_depends_on_the_way(place: Place) -> None:
    ways = place.ways
    want = ways.alone(len(place.prompt.tokens))
    assert ways.alone(7) == want  # chunks begin and end within images
    assert in_company(place) == want
    assert on_cached_pages(place) == want
    assert ways.after_a_preemption() == want


def test_rows_do_not_depend_on_the_memory_for_them(place: Place) -> None:
    forgetful = replace(place, bench=RunnerBench(place.folder, image_cache=1))
    assert forgetful.ways.alone(11) == place.ways.alone(11)


def test_bf16_keeps_law_1(place: Place) -> None:
    narrow = replace(place, bench=RunnerBench(place.folder, "bf16")).ways
    assert narrow.alone(9) == narrow.alone(len(place.prompt.tokens))


def test_windows_hold_all_patches_once(place: Place) -> None:
    vision = place.bench.spec.details_as(VisionDecoderConfig).vision
    for rows, columns in ((1, 1), (3, 5), (4, 4), (2, 9)):
        grid = Grid(vision, rows, columns)
        assert sorted(grid.patches_T) == list(range(4 * rows * columns))
        assert grid.windows_S1[-1] == grid.whole_S1[-1] == 4 * rows * columns
        assert (np.diff(grid.windows_S1) > 0).all()


def in_company(place: Place) -> Told:
    """Beside one that writes after an image of its own, and one that reads text."""
    bench, own = place.bench, seen(place.folder, [picture(120, 60, seed=9)])
    writer = bench.request(own.tokens, SamplingParams(seed=9, max_tokens=60), images=own.images, pictures=own.pictures)
    reader = bench.request([5] * 90, SamplingParams(seed=9, max_tokens=1))
    return place.ways.in_company(writer, reader, chunk=30, others=15)


def on_cached_pages(place: Place) -> Told:
    """They end within an image."""
    image = place.prompt.images[1]
    tokens = (image.end - 1) // PAGE_TOKENS * PAGE_TOKENS
    assert image.at < tokens < image.end
    return place.ways.on_cached_pages(place.request(), tokens)
