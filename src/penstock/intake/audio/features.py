"""What a model hears: the logarithm of its sound's energy in bands of the mel scale, frame by frame.

The steps are those of transformers' WhisperFeatureExtractor (arXiv:2212.04356, section 2.2), as
``preprocessor_config.json`` parametrises them.  Knows nothing about files of sounds.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from penstock.errors import ModelError
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
"""What is quieter than the loudest by more than so many powers of ten counts as just that."""


class SoundRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """How a sound becomes features."""

    rate: int  # samples a second
    seconds: int  # of a window
    fft: int  # samples of a frame
    hop: int  # between two frames
    bands: int
    tokens: int  # that stand for a window

    @property
    def samples(self) -> int:
        """Of a window."""
        return self.rate * self.seconds

    @property
    def frames(self) -> int:
        """Of a window."""
        return self.samples // self.hop


def read_sound_recipe(files: ModelFiles, whisper: WhisperConfig) -> SoundRecipe:
    """Raises ModelError if the files ask for what is not done here, or for something else than the model hears."""
    config = _extractor(files)
    recipe = SoundRecipe(
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


class Features:
    """Makes features of windows; what does not depend on the sound is made once."""

    def __init__(self, recipe: SoundRecipe) -> None:
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


def mel_filters(recipe: SoundRecipe) -> NDArray[np.float64]:
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
