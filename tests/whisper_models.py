"""Tiny random models that hear, written as Hugging Face folders without transformers or torch, and sounds for them."""

from __future__ import annotations

import io
import json
import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from penstock.hashing import media_hash
from penstock.processing.multimodal.audio_decode import EXTENSIBLE
from penstock.types import AudioInput, PlacedImage
from penstock.weights.config_json import ConfigFields
from penstock.weights.families.registry import BUILT_IN
from penstock.weights.families.whisper import WhisperConfig
from penstock.weights.inspect import CONFIG
from tiny_models import DTYPES, write_weights

CONFIGS = Path(__file__).parent / "fixtures/configs"
RATE = 16_000
LANGUAGES = ("en", "de", "fr")
SPECIAL = (
    *("<|endoftext|>", "<|startoftranscript|>", *(f"<|{name}|>" for name in LANGUAGES)),
    *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)
WORDS = 149
VOCAB = WORDS + len(SPECIAL)
IDS = {name: WORDS + index for index, name in enumerate(SPECIAL)}
SUPPRESSED, SUPPRESSED_FIRST = [5, 9, IDS["<|startoftranscript|>"]], [7, IDS["<|endoftext|>"]]

SMALL = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 96,
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 80,
    "num_hidden_layers": 2,
    "num_mel_bins": 12,
    "max_source_positions": 50,
    "max_target_positions": 40,
    "decoder_start_token_id": IDS["<|startoftranscript|>"],
    "bos_token_id": IDS["<|endoftext|>"],
    "eos_token_id": IDS["<|endoftext|>"],
    "pad_token_id": IDS["<|endoftext|>"],
}

PREPROCESSOR = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "chunk_length": 1,
    "feature_size": 12,
    "hop_length": 160,
    "n_fft": 400,
    "n_samples": RATE,
    "nb_max_frames": 100,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": False,
    "sampling_rate": RATE,
}

GENERATION = {
    "decoder_start_token_id": IDS["<|startoftranscript|>"],
    "eos_token_id": IDS["<|endoftext|>"],
    "is_multilingual": True,
    "lang_to_id": {f"<|{name}|>": IDS[f"<|{name}|>"] for name in LANGUAGES},
    "task_to_id": {name: IDS[f"<|{name}|>"] for name in ("translate", "transcribe")},
    "no_timestamps_token_id": IDS["<|notimestamps|>"],
    "suppress_tokens": SUPPRESSED,
    "begin_suppress_tokens": SUPPRESSED_FIRST,
}


def whisper_config() -> dict[str, Any]:
    """The published ``config.json`` of whisper-tiny, made small."""
    real: dict[str, Any] = json.loads((CONFIGS / "whisper_tiny.json").read_text())
    return real | SMALL


def write_whisper(folder: Path, *, seed: int = 0, dtype: str = "fp32") -> Path:
    """A folder that can be served: weights under which nothing is trivial, a word-level tokenizer, a generation
    config."""
    folder.mkdir(parents=True, exist_ok=True)
    config = whisper_config()
    for name, values in ((CONFIG, config), ("preprocessor_config.json", PREPROCESSOR)):
        (folder / name).write_text(json.dumps(values))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    family = BUILT_IN[config["architectures"][0]]
    rng = np.random.default_rng(seed)
    shapes = family.layout(family.parse(ConfigFields(config, CONFIG))).shapes
    write_weights(folder, {name: _drawn(rng, name, shape).astype(DTYPES[dtype]) for name, shape in shapes.items()})
    words = {f"t{index}": index for index in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return folder


def _drawn(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
    noise = rng.standard_normal(shape)
    if len(shape) == 1:
        return 0.1 * noise if name.endswith("bias") else 1.0 + 0.2 * noise
    gain = 2.5 if "embed_tokens" in name else 1.5 if "q_proj" in name or "k_proj" in name else 1.0
    return noise * gain / np.prod(shape[1:]) ** 0.5


def sound(whisper: WhisperConfig, seed: int = 0) -> AudioInput:
    """Random features, as loud as those of speech."""
    features_BF = 0.5 * np.random.default_rng(seed).standard_normal((whisper.bands, whisper.frames))
    return AudioInput(whisper.begin, whisper.bands, features_BF.astype("<f4").tobytes())


def placed(one: AudioInput) -> PlacedImage:
    """In front of a prompt."""
    return PlacedImage(media_hash(one), 0, one.rows, one.columns)


def tones(seconds: float, rate: int = RATE, seed: int = 0) -> NDArray[np.float64]:
    """Five tones that rise and fall, from -0.5 to 0.5."""
    rng = np.random.default_rng(seed)
    time_N = np.arange(round(seconds * rate)) / rate
    waves = [np.sin(2 * np.pi * (pitch * time_N + np.sin(3 * time_N))) for pitch in rng.uniform(100, 3500, 5)]
    return np.asarray(0.1 * np.sum(waves, axis=0) * np.abs(np.sin(5 * time_N + rng.uniform(0, 6))))


def wav(samples_N: NDArray[np.float64], rate: int = RATE, channels: int = 1) -> bytes:
    """A file of 16 bits a sample, the same in all channels."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(channels)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(np.repeat(np.round(samples_N * 32767).astype("<i2"), channels).tobytes())
    return file.getvalue()


def riff(
    kind: int, bits: int, data: bytes, *, rate: int = 16_000, channels: int = 1, extensible: bool = False
) -> bytes:
    """A file by hand, with a chunk of odd length before the samples."""
    frame = channels * bits // 8
    head = struct.pack("<HHIIHH", EXTENSIBLE if extensible else kind, channels, rate, rate * frame, frame, bits)
    if extensible:
        head += struct.pack("<HHIH", 22, bits, 0, kind) + bytes.fromhex("000000001000800000aa00389b71")
    chunks = b"".join(
        name + struct.pack("<I", len(own)) + own + b"\0" * (len(own) % 2)
        for name, own in ((b"fmt ", head), (b"LIST", b"odd"), (b"data", data))
    )
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks
