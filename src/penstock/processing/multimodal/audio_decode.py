"""WAV files (RIFF/WAVE) to one channel of samples at the rate that a model reads.

Supported are integers of 8, 16, 24 and 32 bits and floats of 32 and 64, also in the extensible form.  Other containers
are recognized by their first bytes, so that the error can name them.  Sizes are checked before any sample is read.

Resampling is band-limited interpolation by a windowed sinc (J. O. Smith, "Digital Audio Resampling"): each output
sample is a sum over its neighbors within ``ZEROS`` zero crossings, under a Kaiser window.  Sums are in float64 and
rounded once, so that hardly a bit depends on the order of the library's sums.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from penstock.config.limits import RequestLimits
from penstock.errors import RequestError

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
_GUID_TAIL = bytes.fromhex("000000001000800000aa00389b71")
"""Of the extensible form's kinds, behind the two bytes that say which."""

_KINDS = ((PCM, (8, 16, 24, 32)), (FLOAT, (32, 64)))
MAX_CHANNELS = 32
MIN_RATE = 4_000
_UNKNOWN_SIZES = (0, 0xFFFFFFFF)
"""What writers that cannot go back leave in the size of the samples."""

_OTHERS: tuple[tuple[int, bytes, str], ...] = (
    (0, b"ID3", "MP3"),
    (0, b"fLaC", "FLAC"),
    (0, b"OggS", "Ogg (Vorbis or Opus)"),
    (4, b"ftyp", "MP4 (M4A)"),
    (0, b"\x1a\x45\xdf\xa3", "WebM or Matroska"),
    (0, b"FORM", "AIFF"),
    (0, b"caff", "Core Audio"),
    (0, b"#!AMR", "AMR"),
    (0, b".snd", "AU"),
    (0, b"RF64", "RF64"),
)
WAY_OUT = "WAV is read here: ffmpeg -i FILE -ac 1 -ar 16000 FILE.wav makes it of any other."


def bad_audio(why: str) -> RequestError:
    """The refusal of a file."""
    return RequestError(f"Invalid 'file': {why}", param="file", code="invalid_audio")


class WavFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file whose head was understood."""

    kind: int
    bits: int
    channels: int
    rate: int  # frames a second
    data: memoryview  # whole frames

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return len(self.data) / (self.channels * self.bits // 8) / self.rate


def read_wav(raw: bytes, limits: RequestLimits) -> WavFile:
    """The head of a file.  Raises RequestError, which names what is wrong or which limit is passed."""
    if len(raw) > limits.max_audio_bytes:
        raise bad_audio(f"it has {len(raw)} bytes, at most {limits.max_audio_bytes} are allowed (max_audio_bytes).")
    if raw[:4] != b"RIFF" or raw[8:12] != b"WAVE":
        raise bad_audio(f"it is {_container(raw)}. {WAY_OUT}")
    head, data = _chunks(raw)
    recording = _recording(head, data)
    if not MIN_RATE <= recording.rate <= limits.max_audio_rate:
        raise bad_audio(
            f"it has {recording.rate} samples a second; from {MIN_RATE} to {limits.max_audio_rate} are allowed "
            "(max_audio_rate)."
        )
    if recording.seconds > limits.max_audio_s:
        raise bad_audio(
            f"it lasts {recording.seconds:.1f} s, at most {limits.max_audio_s:g} are allowed (max_audio_s)."
        )
    if not recording.data:
        raise bad_audio("it has no samples.")
    return recording


def _container(raw: bytes) -> str:
    for at, magic, name in _OTHERS:
        if raw[at : at + len(magic)] == magic:
            return name
    if len(raw) > 1 and raw[0] == 0xFF and raw[1] & 0xE0 == 0xE0:
        return "MP3 or AAC"
    return "no sound that is known here" if raw else "empty"


def _chunks(raw: bytes) -> tuple[bytes, memoryview]:
    """What the file says of its samples, and the samples."""
    at, head = 12, b""
    while at + 8 <= len(raw):
        name, size = struct.unpack_from("<4sI", raw, at)
        at += 8
        if name == b"data":
            if not head:
                raise bad_audio("its samples stand before it says what they are.")
            end = len(raw) if size in _UNKNOWN_SIZES else at + size
            if end > len(raw):
                raise bad_audio(f"it is cut off: {size} bytes of samples were meant, {len(raw) - at} are there.")
            return head, memoryview(raw)[at:end]
        if name == b"fmt ":
            head = raw[at : at + size]
        at += size + size % 2
    raise bad_audio("it has no samples.")


def _recording(head: bytes, data: memoryview) -> WavFile:
    if len(head) < 16:
        raise bad_audio("it does not say what its samples are.")
    kind, channels, rate, _, frame, bits = struct.unpack_from("<HHIIHH", head)
    if kind == EXTENSIBLE:
        if len(head) < 40 or head[26:40] != _GUID_TAIL:
            raise bad_audio("its extensible form is not known here.")
        (kind,) = struct.unpack_from("<H", head, 24)
    if not any(kind == known and bits in sizes for known, sizes in _KINDS):
        raise bad_audio(
            f"its samples are of kind {kind} with {bits} bits; whole numbers of 8, 16, 24 or 32 bits and floating "
            f"point of 32 or 64 are read. {WAY_OUT}"
        )
    if not 1 <= channels <= MAX_CHANNELS or frame != channels * bits // 8:
        raise bad_audio(f"{channels} channels of {bits} bits in {frame} bytes cannot be.")
    return WavFile(kind=kind, bits=bits, channels=channels, rate=rate, data=data[: len(data) // frame * frame])


_PIECE_SAMPLES = 1 << 20
PIECE_BYTES = 16 * _PIECE_SAMPLES
"""What samples take that are made into numbers at a time."""


def decode_samples(recording: WavFile) -> NDArray[np.float32]:
    """[N] from -1 to 1: all channels on average.  Raises RequestError for numbers that are none."""
    frame = recording.channels * recording.bits // 8
    mono_N = np.empty(len(recording.data) // frame, np.float32)
    step = _PIECE_SAMPLES // recording.channels
    for begin in range(0, len(mono_N), step):
        piece = recording.data[begin * frame : (begin + step) * frame]
        wide = _NUMBERS[recording.kind, recording.bits](piece)
        if recording.kind == FLOAT and not np.isfinite(wide).all():
            raise bad_audio("it has samples that are no numbers.")
        mono_N[begin : begin + step] = wide.reshape(-1, recording.channels).mean(axis=1, dtype=np.float32)
    return mono_N


def _whole(kind: str, bits: int) -> Callable[[memoryview], NDArray[np.float32]]:
    return lambda data: np.frombuffer(data, kind).astype(np.float32) / np.float32(1 << (bits - 1))


def _bytes(data: memoryview) -> NDArray[np.float32]:
    """8 bits are counted from 0 to 255."""
    return (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / np.float32(128)


def _three_bytes(data: memoryview) -> NDArray[np.float32]:
    low, middle, high = np.frombuffer(data, np.uint8).reshape(-1, 3).T
    numbers = low.astype(np.int32) | middle.astype(np.int32) << 8 | high.view(np.int8).astype(np.int32) << 16
    return numbers.astype(np.float32) / np.float32(1 << 23)


def _floating(kind: str) -> Callable[[memoryview], NDArray[np.float32]]:
    return lambda data: np.frombuffer(data, kind).astype(np.float32)


_NUMBERS: Mapping[tuple[int, int], Callable[[memoryview], NDArray[Any]]] = MappingProxyType(
    {
        (PCM, 8): _bytes,
        (PCM, 16): _whole("<i2", 16),
        (PCM, 24): _three_bytes,
        (PCM, 32): _whole("<i4", 32),
        (FLOAT, 32): _floating("<f4"),
        (FLOAT, 64): _floating("<f8"),
    }
)


ZEROS = 64
"""Zero crossings of the sinc on either side."""

ROLL_OFF = 0.945
"""Where half of a tone is left, of the lower rate's half: below 89 % of that nothing is lost, and above it, where it
would fold, nothing is left."""

BETA = 11.16
"""Of the Kaiser window: side lobes are 110 dB below."""

_AT_A_TIME = 4096
"""Samples of one phase that are made together: bounds the memory for their neighbors."""

_PHASES_AT_A_TIME = 64
"""Whose weights are made together."""


def resampling_bytes(rate: int, wanted: int) -> int:
    """What ``resample`` takes at its peak, without its samples and a copy of them: neighbors in float64."""
    if rate == wanted:
        return 0
    scale = min(1.0, wanted / rate) * ROLL_OFF
    return 8 * _AT_A_TIME * 2 * math.ceil(ZEROS / scale)


def resample(samples_N: NDArray[np.float32], rate: int, wanted: int) -> NDArray[np.float32]:
    """The same sound with ``wanted`` samples a second instead of ``rate``."""
    if rate == wanted:
        return samples_N
    shared = math.gcd(rate, wanted)
    up, down = wanted // shared, rate // shared
    scale = min(1.0, up / down) * ROLL_OFF
    half = math.ceil(ZEROS / scale)
    count = -(-len(samples_N) * up // down)
    padded_N = np.pad(samples_N, (half - 1, half + down))
    near_N2 = sliding_window_view(padded_N, 2 * half)
    out = np.empty(count, np.float32)
    for first in range(0, min(up, count), _PHASES_AT_A_TIME):
        phases_P = np.arange(first, min(first + _PHASES_AT_A_TIME, up, count))
        begins_P, left_P = np.divmod(phases_P * down, up)
        for phase, begin, weights_K in zip(phases_P, begins_P, _weights(left_P / up, scale, half), strict=True):
            own = out[phase::up]
            for at in range(0, len(own), _AT_A_TIME):
                stop = min(len(own), at + _AT_A_TIME)
                near = near_N2[begin + at * down : begin + (stop - 1) * down + 1 : down]
                own[at:stop] = near.astype(np.float64) @ weights_K
    return out


def _weights(fractions_P: NDArray[np.float64], scale: float, half: int) -> NDArray[np.float64]:
    """[P, 2 half] of the neighbors from ``half - 1`` before to ``half`` behind places so far behind a sample."""
    away_PK = np.arange(1 - half, half + 1) - fractions_P[:, None]
    window_PK = np.i0(BETA * np.sqrt(np.clip(1 - (away_PK / half) ** 2, 0, 1))) / np.i0(BETA)
    return np.asarray(scale * np.sinc(scale * away_PK) * window_PK)
