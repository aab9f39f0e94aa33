"""From files of sounds to what a model hears: containers, rates, windows, features."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import WhisperFeatureExtractor

from penstock.config.limits import RequestLimits
from penstock.errors import ModelError, RequestError
from penstock.processing.multimodal.audio import (
    AudioFeatureConfig,
    LogMelExtractor,
    decoding_memory,
    read_audio_config,
    split_windows,
)
from penstock.processing.multimodal.audio_decode import FLOAT, PCM, decode_samples, read_wav, resample
from penstock.weights.config_json import ConfigFields
from penstock.weights.families.whisper import WhisperConfig, parse_whisper
from penstock.weights.model_files import model_files
from whisper_models import riff, tones, wav, whisper_config, write_whisper

REAL = AudioFeatureConfig(rate=16_000, seconds=30, fft=400, hop=160, bands=80, tokens=1504)


def read(raw: bytes) -> NDArray[np.float32]:
    return decode_samples(read_wav(raw, RequestLimits()))


WAVE = np.array([0.0, 0.5, -0.5, -1.0, 0.25])


@pytest.mark.parametrize("extensible", [False, True])
@pytest.mark.parametrize(
    ("kind", "bits", "data"),
    [
        (PCM, 8, (WAVE * 128 + 128).astype(np.uint8).tobytes()),
        (PCM, 16, (WAVE * 32768).astype("<i2").tobytes()),
        (PCM, 24, b"".join(int(x * 8388608).to_bytes(3, "little", signed=True) for x in WAVE)),
        (PCM, 32, (WAVE * 2147483648).astype("<i4").tobytes()),
        (FLOAT, 32, WAVE.astype("<f4").tobytes()),
        (FLOAT, 64, WAVE.astype("<f8").tobytes()),
    ],
)
def test_every_kind_of_samples_is_read(kind: int, bits: int, data: bytes, extensible: bool) -> None:
    np.testing.assert_array_equal(read(riff(kind, bits, data, extensible=extensible)), WAVE.astype(np.float32))
    size = bits // 8
    twice = b"".join(data[at : at + size] * 2 for at in range(0, len(data), size))
    np.testing.assert_array_equal(read(riff(kind, bits, twice, channels=2)), WAVE.astype(np.float32))


def test_channels_count_equally_and_a_stream_may_not_know_its_size() -> None:
    left_right = np.array([[0.5, 0.0], [1.0, -1.0]], "<f4")
    np.testing.assert_array_equal(read(riff(FLOAT, 32, left_right.tobytes(), channels=2)), [0.25, 0.0])
    raw = riff(PCM, 16, b"\0\x40" * 9)
    for size in (0, 0xFFFFFFFF):
        streamed = raw.replace(b"data" + struct.pack("<I", 18), b"data" + struct.pack("<I", size))
        assert len(read(streamed)) == 9


SHORT = riff(PCM, 16, b"\0\0" * 100)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "it is empty"),
        (b"ID3\x04" + bytes(60), "it is MP3. WAV is read here: ffmpeg"),
        (b"\xff\xfb\x90" + bytes(60), "it is MP3 or AAC"),
        (b"fLaC" + bytes(60), "it is FLAC"),
        (b"OggS" + bytes(60), "it is Ogg"),
        (bytes(4) + b"ftypM4A " + bytes(60), "it is MP4"),
        (b"\x1a\x45\xdf\xa3" + bytes(60), "it is WebM"),
        (b"hello" * 9, "no sound that is known"),
        (SHORT[:-10], "cut off: 200 bytes of samples were meant, 190 are there"),
        (SHORT[:40], "has no samples"),
        (riff(PCM, 16, b""), "has no samples"),
        (riff(2, 4, b"\0" * 64), "kind 2 with 4 bits"),
        (riff(FLOAT, 16, b"\0" * 64), "kind 3 with 16 bits"),
        (riff(PCM, 16, b"\0" * 64, channels=0), "0 channels"),
        (riff(PCM, 16, b"\0" * 66, channels=33), "33 channels"),
        (riff(PCM, 16, b"\0" * 64, rate=0), "0 samples a second"),
        (riff(PCM, 16, b"\0" * 64, rate=400_000), "max_audio_rate"),
        (riff(PCM, 8, b"\0" * 4_000 * 1801, rate=4_000), "1801.0 s, at most 1800 are allowed (max_audio_s)"),
        (riff(FLOAT, 32, struct.pack("<f", float("nan"))), "no numbers"),
        (SHORT[:12] + SHORT[SHORT.index(b"data") :], "before it says what they are"),
    ],
)
def test_refusals_say_what_came(raw: bytes, why: str) -> None:
    with pytest.raises(RequestError) as refused:
        read(raw)
    assert why in refused.value.message
    assert (refused.value.param, refused.value.code) == ("file", "invalid_audio")


def test_a_file_that_is_too_large_is_not_looked_at() -> None:
    with pytest.raises(RequestError, match="max_audio_bytes"):
        read_wav(SHORT, msgspec.structs.replace(RequestLimits(), max_audio_bytes=100))


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 15_999])
def test_another_rate_is_the_same_sound(rate: int) -> None:
    """Tones below what both rates hold come out as if they had been sampled so; those above are gone."""
    seconds = 1.0

    def tone(pitch: float, per_s: int) -> NDArray[np.float64]:
        return 0.5 * np.sin(2 * np.pi * pitch * np.arange(round(seconds * per_s)) / per_s)

    got = resample(tone(440, rate).astype(np.float32), rate, 16_000)
    assert got.shape == (16_000,)
    inside = slice(800, -800)
    np.testing.assert_allclose(got[inside], tone(440, 16_000)[inside], atol=1e-5)
    if rate > 20_000:
        high = resample(tone(7_100, rate).astype(np.float32), rate, 16_000)
        np.testing.assert_allclose(high[inside], tone(7_100, 16_000)[inside], atol=1e-5)
        for pitch in (8_050, 9_000):  # would fold
            assert np.abs(resample(tone(pitch, rate).astype(np.float32), rate, 16_000)[inside]).max() < 5e-6
    assert resample(got, 16_000, 16_000) is got


@pytest.mark.parametrize(("bands", "seconds"), [(80, 7.3), (128, 31.0)])
def test_features_are_those_of_transformers(bands: int, seconds: float) -> None:
    samples_N = (tones(seconds) + 1e-3 * np.random.default_rng(1).standard_normal(round(seconds * 16_000))).astype("f4")
    got_BT = LogMelExtractor(msgspec.structs.replace(REAL, bands=bands)).of(samples_N)
    extractor = WhisperFeatureExtractor(feature_size=bands)
    assert got_BT.dtype == np.float32
    # In fp32, as with torch, it is off by up to 1e-4, which depends on the processor; in fp64, as without, it is not.
    np.testing.assert_allclose(got_BT, extractor(samples_N, sampling_rate=16_000).input_features[0], atol=1e-3)
    window_N = np.zeros(30 * 16_000)
    heard_N = samples_N[: len(window_N)]
    window_N[: len(heard_N)] = heard_N
    (want_BT,) = extractor._np_extract_fbank_features(window_N[None], "cpu")
    np.testing.assert_allclose(got_BT, want_BT, atol=1e-6)


def test_silence_is_heard() -> None:
    got_BT = LogMelExtractor(REAL).of(np.zeros(0, np.float32))
    np.testing.assert_array_equal(got_BT, np.full((80, 3000), -1.5, np.float32))


def test_windows_end_at_quiet_places() -> None:
    samples_N = tones(70).astype(np.float32)
    samples_N[27 * 16_000 : 28 * 16_000] = 0
    spans = split_windows(samples_N, 30 * 16_000)
    assert [begin for begin, _ in spans[1:]] == [end for _, end in spans[:-1]]
    assert spans[0][0] == 0
    assert spans[-1][1] == len(samples_N)
    assert 27 * 16_000 < spans[0][1] < 28 * 16_000
    assert all(0 < end - begin <= 30 * 16_000 for begin, end in spans)
    assert split_windows(samples_N[:480_000], 480_000) == [(0, 480_000)]
    assert all(0 < end - begin <= 3 for begin, end in split_windows(samples_N[:50], 3))


def test_the_recipe_is_the_models(tmp_path: Path) -> None:
    whisper = parse_whisper(ConfigFields(whisper_config(), "config.json")).details_as(WhisperConfig)
    folder = write_whisper(tmp_path)
    recipe = read_audio_config(model_files(folder), whisper)
    assert (recipe.samples, recipe.frames, recipe.bands, recipe.tokens) == (16_000, 100, 12, 64)
    file = folder / "preprocessor_config.json"
    written = msgspec.json.decode(file.read_bytes())
    for change, why in (
        ({"chunk_length": 2}, "200 frames of 12 bands, by config.json the model hears 100"),
        ({"do_normalize": True}, "do_normalize"),
        ({"n_fft": 1 << 20}, "n_fft"),
    ):
        file.write_bytes(msgspec.json.encode(written | change))
        with pytest.raises(ModelError, match=why):
            read_audio_config(model_files(folder), whisper)
    file.unlink()
    with pytest.raises(ModelError, match=r"preprocessor_config.json is missing"):
        read_audio_config(model_files(folder), whisper)
    (folder / "processor_config.json").write_bytes(msgspec.json.encode({"feature_extractor": written}))
    assert read_audio_config(model_files(folder), whisper) == recipe


def test_a_written_file_is_what_was_written() -> None:
    samples_N = tones(0.5)
    np.testing.assert_allclose(read(wav(samples_N, channels=2)), samples_N, atol=4e-5)


def test_a_sound_is_read_in_bounded_memory() -> None:
    """Beside the file no more than what is counted for its samples."""
    raw = riff(PCM, 8, bytes(4_000_000), rate=192_000)
    recording = read_wav(raw, RequestLimits())
    tracemalloc.start()
    try:
        samples_N = resample(decode_samples(recording), recording.rate, 16_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(samples_N) == 333_334
    assert peak <= decoding_memory(recording, 16_000) + (4 << 20)
