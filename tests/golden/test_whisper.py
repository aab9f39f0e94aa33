"""A model that hears computes what transformers computes, both in fp32, and keeps law 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import WhisperForConditionalGeneration
from ways import Told, Ways
from whole_rows import check_rows, rows_of

from penstock.engine.core.request import Request
from penstock.errors import ImageRefused, ModelError
from penstock.kernels.native.program import RecordedProgram
from penstock.kernels.ops import DirectProgram
from penstock.types import PAGE_TOKENS, AudioInput, SamplingParams
from penstock.weights.compression_convert import compress_folder
from penstock.weights.config_json import ConfigFields
from penstock.weights.families.registry import BUILT_IN
from penstock.weights.families.whisper import WhisperConfig
from penstock.weights.inspect import CONFIG
from runner_bench import RunnerBench
from whisper_models import IDS, VOCAB, WORDS, placed, sound, whisper_config, write_whisper

ANSWER = 6


@dataclass(frozen=True)
class Place:
    """A tiny model behind the runner, and transformers' model of it."""

    folder: Path
    bench: RunnerBench
    oracle: WhisperForConditionalGeneration

    @property
    def whisper(self) -> WhisperConfig:
        return self.bench.spec.details_as(WhisperConfig)

    def request(self, tokens: Sequence[int], heard: AudioInput, *, told: bool = False, answer: int = ANSWER) -> Request:
        """The decoder's ``tokens`` after a sound."""
        sampling = SamplingParams(
            seed=3, max_tokens=answer, temperature=0.8, logprobs=VOCAB, prompt_logprobs=VOCAB if told else None
        )
        prompt = (*[IDS["<|endoftext|>"]] * self.whisper.begin, *tokens)
        return self.bench.request(prompt, sampling, images=(placed(heard),), pictures=(heard,))

    def ways(self, heard: AudioInput) -> Ways:
        return Ways(self.bench, lambda: self.request(TOKENS, heard))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = write_whisper(tmp_path_factory.mktemp("whisper"))
    bench = RunnerBench(folder)
    if bench.ops.numerics.startswith("cpp"):
        assert isinstance(bench.runner.program, RecordedProgram)
    oracle = WhisperForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return Place(folder, bench, oracle)


TOKENS = tuple(np.random.default_rng(1).integers(0, WORDS, 21).tolist())


def of_transformers(place: Place, tokens: Sequence[int], heard: AudioInput) -> NDArray[np.float64]:
    """Log-probabilities after every position of the decoder."""
    features_BF = np.frombuffer(heard.features, "<f4").reshape(heard.bands, -1).copy()
    torch.set_num_threads(1)
    with torch.inference_mode():
        logits_TV = place.oracle(
            input_features=torch.from_numpy(features_BF)[None], decoder_input_ids=torch.tensor([list(tokens)])
        ).logits[0]
    return torch.log_softmax(logits_TV.double(), dim=-1).numpy()


def test_log_probabilities_are_those_of_transformers(place: Place) -> None:
    rows = []
    for seed in (0, 1):
        heard = sound(place.whisper, seed)
        request = place.request(TOKENS, heard, told=True)
        drawn = place.bench.read(request, len(request.prompt))
        rows.append(rows_of(drawn, VOCAB))
        check_rows(rows[-1], of_transformers(place, TOKENS, heard))
        place.bench.release(request)
    assert np.abs(rows[0] - rows[1]).max() > 0.1  # what is heard matters


def test_the_encoder_gives_the_rows_of_transformers(place: Place) -> None:
    heard = sound(place.whisper)
    encoding = place.bench.model.encoder.begin(place.bench.ops, heard)
    while not encoding.advance(place.bench.ops):
        pass
    features_BF = np.frombuffer(heard.features, "<f4").reshape(heard.bands, -1).copy()
    with torch.inference_mode():
        want_ND = place.oracle.model.encoder(torch.from_numpy(features_BF)[None]).last_hidden_state[0].numpy()
    np.testing.assert_allclose(encoding.rows[: place.whisper.source], want_ND, atol=1e-3)
    assert not encoding.rows[place.whisper.source :].any()


def test_no_bit_depends_on_the_way(place: Place) -> None:
    heard = sound(place.whisper)
    ways = place.ways(heard)
    want = ways.alone(200)
    for chunk in (1, 7, 64, 66):  # chunks begin and end within the sound, at its end, and behind it
        assert ways.alone(chunk) == want
    assert in_company(place, heard) == want
    for tokens in (place.whisper.begin, place.whisper.begin - PAGE_TOKENS):  # all of the sound's pages, all but one
        assert ways.on_cached_pages(place.request(TOKENS[::-1], heard), tokens) == want
    assert ways.after_a_preemption() == want
    forgetful = replace(place, bench=RunnerBench(place.folder, image_cache=1))
    assert forgetful.ways(heard).alone(30) == want
    direct = replace(place, bench=RunnerBench(place.folder, direct=True))
    assert isinstance(direct.bench.runner.program, DirectProgram)
    assert direct.ways(heard).alone(30) == want


def test_bf16_weights_keep_law_1_plain_and_compressed(place: Place, tmp_path: Path) -> None:
    folder, heard = write_whisper(tmp_path / "bf16", dtype="bf16"), sound(place.whisper)
    compress_folder(folder, tmp_path / "compressed", threads=1, report=lambda _: None)
    plain, compressed = (
        replace(place, bench=RunnerBench(tmp_path / own, "bf16")).ways(heard) for own in ("bf16", "compressed")
    )
    want = plain.alone(200)
    assert plain.alone(9) == want
    assert compressed.alone(70) == want


def test_what_is_no_sound_of_this_model_is_refused(place: Place) -> None:
    encoder, heard = place.bench.model.encoder, sound(place.whisper)
    for wrong, why in (
        (AudioInput(heard.columns, heard.bands, heard.features[:-4]), "100 frames"),
        (AudioInput(heard.columns, heard.bands + 1, heard.features), "12 bands"),
        (AudioInput(heard.columns - 16, heard.bands, heard.features), "64 tokens"),
    ):
        with pytest.raises(ImageRefused, match=why):
            encoder.check(wrong)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"scale_embedding": True}, "scale_embedding is true"),
        ({"max_target_positions": 60}, "max_target_positions"),
        ({"max_source_positions": 8}, "max_source_positions"),
        ({"decoder_attention_heads": 5}, "decoder_attention_heads"),
        ({"activation_function": "mish"}, "activation_function"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"model_type": "whisper2"}, "model_type"),
    ],
)
def test_a_configuration_that_means_something_else_is_refused(change: dict[str, object], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        BUILT_IN["WhisperForConditionalGeneration"].parse(ConfigFields(whisper_config() | change, CONFIG))


def in_company(place: Place, heard: AudioInput) -> Told:
    """Beside one that writes about another sound and one that reads a third."""
    writer = place.request((3, 4), sound(place.whisper, 5), answer=3 * ANSWER)
    reader = place.request(TOKENS[::-1], sound(place.whisper, 6))
    return place.ways(heard).in_company(writer, reader, chunk=30, others=9)
