"""Audio of requests, outside the event loop and within bounds: files to samples, windows, log-mel features.

The features are those of transformers' WhisperFeatureExtractor (arXiv:2212.04356, section 2.2), as
``preprocessor_config.json`` sets them: the logarithm of the energy in bands of the mel scale, frame by frame.  Long
recordings are split into windows at quiet places.  At most ``THREADS`` run at a time;
``RequestLimits.max_queued_audio`` bounds the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from penstock.config.limits import RequestLimits
from penstock.errors import ModelError, QueueFull
from penstock.hashing import media_hash, medium_salt
from penstock.processing.multimodal.audio_decode import PIECE_BYTES, WavFile, decode_samples, resample, resampling_bytes
from penstock.processing.multimodal.memory import ByteSemaphore
from penstock.types import AudioInput, PlacedImage
from penstock.weights.config_json import ConfigFields
from penstock.weights.families.whisper import WhisperConfig
from penstock.weights.model_files import ModelFiles, load_json

PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"  # where newer releases have it, under "feature_extractor"

HIGHEST = 8_000.0
"""Hertz, of the last band."""

MOST_RATE = 48_000
MOST_SECONDS = 120
MOST_FFT = 1 << 14

LEAST = 1e-10
DYNAMIC = 8.0
"""Powers of ten below the maximum at which values are clipped."""


class AudioFeatureConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a sound becomes features."""

    rate: int  # samples a second
    seconds: int  # of a window
    fft: int  # samples of a frame
    hop: int  # between two frames
    bands: int
    tokens: int  # that stand for a window

    @property
    def samples(self) -> int:
        """Samples of a window."""
        return self.rate * self.seconds

    @property
    def frames(self) -> int:
        """Frames of a window."""
        return self.samples // self.hop


def read_audio_config(files: ModelFiles, whisper: WhisperConfig) -> AudioFeatureConfig:
    """Raises ModelError if the files ask for what is not done here, or for something else than the model hears."""
    config = _extractor(files)
    recipe = AudioFeatureConfig(
        rate=config.positive_int("sampling_rate", 16_000),
        seconds=config.positive_int("chunk_length", 30),
        fft=config.positive_int("n_fft", 400),
        hop=config.positive_int("hop_length", 160),
        bands=config.positive_int("feature_size", 80),
        tokens=whisper.begin,
    )
    if config.get("do_normalize", bool, False) or config.values.get("dither"):
        raise config.error("do_normalize and dither change what is heard; only models without can be served")
    if recipe.rate > MOST_RATE or recipe.seconds > MOST_SECONDS or not 2 <= recipe.fft <= MOST_FFT:
        raise config.error(
            f"sampling_rate may be at most {MOST_RATE}, chunk_length {MOST_SECONDS}, n_fft from 2 to {MOST_FFT}"
        )
    if (recipe.frames, recipe.bands) != (whisper.frames, whisper.bands):
        raise config.error(
            f"makes {recipe.frames} frames of {recipe.bands} bands, by config.json the model hears {whisper.frames} "
            f"of {whisper.bands}"
        )
    return recipe


def _extractor(files: ModelFiles) -> ConfigFields:
    own = load_json(files, PREPROCESSOR)
    if own is not None:
        return ConfigFields(own, files.path_of(PREPROCESSOR))
    inner = (load_json(files, PROCESSOR) or {}).get("feature_extractor")
    if not isinstance(inner, dict):
        raise ModelError(
            f"{files.path_of(PREPROCESSOR)} is missing: it says how the model's sounds are prepared. It is part of the "
            "model's release"
        )
    return ConfigFields(inner, f"{files.path_of(PROCESSOR)}: feature_extractor")


class LogMelExtractor:
    """Makes features of windows; what does not depend on the sound is made once."""

    def __init__(self, recipe: AudioFeatureConfig) -> None:
        self.recipe = recipe
        self._window_K = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(recipe.fft) / recipe.fft)
        self._filters_BF = mel_filters(recipe)

    def of(self, samples_N: NDArray[np.float32]) -> NDArray[np.float32]:
        """[bands, frames] of a window, which is filled up with silence."""
        recipe = self.recipe
        filled_N = np.zeros(recipe.samples)
        filled_N[: min(len(samples_N), recipe.samples)] = samples_N[: recipe.samples]
        mirrored_N = np.pad(filled_N, recipe.fft // 2, mode="reflect")
        frames_TK = sliding_window_view(mirrored_N, recipe.fft)[:: recipe.hop][: recipe.frames]
        energy_TF = np.abs(np.fft.rfft(frames_TK * self._window_K)) ** 2
        logs_BT = np.log10(np.maximum(self._filters_BF @ energy_TF.T, LEAST))
        return np.asarray((np.maximum(logs_BT, logs_BT.max() - DYNAMIC) + 4) / 4, np.float32)


def mel_filters(recipe: AudioFeatureConfig) -> NDArray[np.float64]:
    """[bands, frequencies]: triangles of equal area, evenly spaced on the mel scale of Slaney's Auditory Toolbox."""
    heard = np.linspace(0, recipe.rate / 2, recipe.fft // 2 + 1)
    edges = _hertz(np.linspace(0, float(_mel(HIGHEST)), recipe.bands + 2))
    low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising, falling = (heard - low) / (middle - low), (high - heard) / (high - middle)
    return np.asarray(np.maximum(0, np.minimum(rising, falling)) * 2 / (high - low))


_BREAK, _LINEAR, _STEP = 1000.0, 200 / 3, np.log(6.4) / 27
"""Hertz up to which the scale is linear; hertz a mel there; and its logarithmic step above."""


def _mel(hertz: float) -> float:
    if hertz < _BREAK:
        return hertz / _LINEAR
    return float(_BREAK / _LINEAR + np.log(hertz / _BREAK) / _STEP)


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    first = _BREAK / _LINEAR
    return np.where(mels < first, mels * _LINEAR, _BREAK * np.exp(_STEP * (np.maximum(mels, first) - first)))


SEARCHED = 6
"""A window may end within the last sixth of its greatest length: five seconds of thirty."""

PIECES = 50
"""Pieces of that whose loudness is compared: a tenth of a second each."""


def split_windows(samples_N: NDArray[np.float32], longest: int) -> list[tuple[int, int]]:
    """(begin, end) of windows of at most ``longest`` samples, one after another; each but the last ends in the middle
    of the quietest piece of its end."""
    found: list[tuple[int, int]] = []
    begin, searched = 0, max(1, longest // SEARCHED)
    piece = max(1, searched // PIECES)
    while len(samples_N) - begin > longest:
        first = begin + longest - searched
        pieces = samples_N[first : first + searched // piece * piece].reshape(-1, piece)
        loudness = np.square(pieces, dtype=np.float64).sum(axis=1)
        quietest = len(loudness) - 1 - int(loudness[::-1].argmin())  # of equals the last
        end = first + quietest * piece + piece // 2
        found.append((begin, max(end, begin + 1)))
        begin = found[-1][1]
    return [*found, (begin, len(samples_N))]


THREADS = 2

T = TypeVar("T")

Span = tuple[int, int]
"""A window: its first sample, and the one behind its last."""


def decoding_memory(recording: WavFile, rate: int) -> int:
    """What reading it takes at its peak, without the file: its samples twice, those at ``rate``, and room to work."""
    frames = round(recording.seconds * recording.rate)
    return 8 * frames + 4 * round(recording.seconds * rate) + PIECE_BYTES + resampling_bytes(recording.rate, rate)


class SampleReservation:
    """Seconds of one sound whose samples are held."""

    def __init__(self, sounds: AudioPipeline, seconds: float) -> None:
        self._sounds = sounds
        self._seconds = seconds

    def release(self) -> None:
        """The samples are needed no more.  Harmless when said twice."""
        self._sounds.held_s -= self._seconds
        self._seconds = 0.0


class AudioPipeline:
    """The sounds of one model's requests."""

    def __init__(self, recipe: AudioFeatureConfig, limits: RequestLimits) -> None:
        self.recipe = recipe
        self._features = LogMelExtractor(recipe)
        self._limits = limits
        self._queued = 0
        self._reading = ByteSemaphore(limits.max_reading_audio_bytes)
        self.held_s = 0.0  # of all requests
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="sounds")

    def close(self) -> None:
        """Lets the threads end."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def reserve(self, recording: WavFile) -> SampleReservation:
        """Room for a sound's samples.  Raises QueueFull, except when there are no others."""
        most = self._limits.max_pending_audio_s
        if self.held_s > 0 and self.held_s + recording.seconds > most:
            raise QueueFull(
                f"{self.held_s:.0f} s of sounds are being heard, at most {most:g} may be (max_pending_audio_s)."
            )
        self.held_s += recording.seconds
        return SampleReservation(self, recording.seconds)

    async def decode(self, recording: WavFile) -> tuple[NDArray[np.float32], list[Span]]:
        """Samples at the model's rate, and the windows they are heard in.  Raises RequestError, or QueueFull."""

        def work() -> tuple[NDArray[np.float32], list[Span]]:
            with self._reading.acquire(decoding_memory(recording, self.recipe.rate)):
                samples_N = resample(decode_samples(recording), recording.rate, self.recipe.rate)
            return samples_N, split_windows(samples_N, self.recipe.samples)

        return await self._beside(work)

    async def extract_features(self, samples_N: NDArray[np.float32], salt: str = "") -> tuple[PlacedImage, AudioInput]:
        """One window, in front of a prompt.  Who has another ``salt`` shares nothing of it.  Raises QueueFull."""

        def work() -> tuple[PlacedImage, AudioInput]:
            features_BT = self._features.of(samples_N).astype("<f4", copy=False)
            sound = AudioInput(self.recipe.tokens, self.recipe.bands, features_BT.tobytes(), medium_salt(salt))
            return PlacedImage(media_hash(sound), 0, sound.rows, sound.columns), sound

        return await self._beside(work)

    async def _beside(self, work: Callable[[], T]) -> T:
        if self._queued >= self._limits.max_queued_audio:
            raise QueueFull(f"{self._queued} sounds wait to be read, at most {self._limits.max_queued_audio} may.")
        self._queued += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._queued -= 1
