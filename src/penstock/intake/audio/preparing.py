"""Sounds of requests, beside the event loop and within bounds: from a file to samples, and from a window to what a
prompt begins with.  At most ``THREADS`` are worked at, and so many may wait (``Limits.max_queued_audio``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.config.limits import Limits
from penstock.errors import QueueFull
from penstock.hashing import media_hash, medium_salt
from penstock.intake.audio.features import Features, SoundRecipe
from penstock.intake.audio.resampling import resampled, working_bytes
from penstock.intake.audio.wav import PIECE_BYTES, Recording, samples_of
from penstock.intake.audio.windows import windows
from penstock.intake.memory_budget import MemoryBudget
from penstock.types import AudioInput, PlacedImage

THREADS = 2

T = TypeVar("T")

Span = tuple[int, int]
"""A window: its first sample, and the one behind its last."""


def reading_bytes(recording: Recording, rate: int) -> int:
    """What reading it takes at its peak beside the file: its samples twice, those at ``rate``, and room to work."""
    frames = round(recording.seconds * recording.rate)
    return 8 * frames + 4 * round(recording.seconds * rate) + PIECE_BYTES + working_bytes(recording.rate, rate)


class Room:
    """Seconds of one sound whose samples are held."""

    def __init__(self, sounds: Sounds, seconds: float) -> None:
        self._sounds = sounds
        self._seconds = seconds

    def release(self) -> None:
        """The samples are needed no more.  Harmless when said twice."""
        self._sounds.held_s -= self._seconds
        self._seconds = 0.0


class Sounds:
    """The sounds of one model's requests."""

    def __init__(self, recipe: SoundRecipe, limits: Limits) -> None:
        self.recipe = recipe
        self._features = Features(recipe)
        self._limits = limits
        self._queued = 0
        self._reading = MemoryBudget(limits.max_reading_audio_bytes)
        self.held_s = 0.0  # of all requests
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="sounds")

    def close(self) -> None:
        """Lets the threads end."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def room(self, recording: Recording) -> Room:
        """Room for a sound's samples.  Raises QueueFull, except when there are no others."""
        most = self._limits.max_pending_audio_s
        if self.held_s > 0 and self.held_s + recording.seconds > most:
            raise QueueFull(
                f"{self.held_s:.0f} s of sounds are being heard, at most {most:g} may be (max_pending_audio_s)."
            )
        self.held_s += recording.seconds
        return Room(self, recording.seconds)

    async def read(self, recording: Recording) -> tuple[NDArray[np.float32], list[Span]]:
        """Samples at the model's rate, and the windows they are heard in.  Raises RequestError, or QueueFull."""

        def work() -> tuple[NDArray[np.float32], list[Span]]:
            with self._reading.hold(reading_bytes(recording, self.recipe.rate)):
                samples_N = resampled(samples_of(recording), recording.rate, self.recipe.rate)
            return samples_N, windows(samples_N, self.recipe.samples)

        return await self._beside(work)

    async def hear(self, samples_N: NDArray[np.float32], salt: str = "") -> tuple[PlacedImage, AudioInput]:
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
