"""The intake of models that hear: from the form of a transcription to one engine request a window.

Windows are prepared one after another, as they are asked for.  Knows nothing about HTTP or workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.config.limits import Limits
from penstock.config.schema import RequestConfig
from penstock.errors import ModelError, PromptTooLong, RequestError
from penstock.hashing import block_hashes, chain_root
from penstock.intake.answer import ChoiceText, Wanted
from penstock.intake.audio.features import read_sound_recipe
from penstock.intake.audio.fields import Asked, parse_form
from penstock.intake.audio.preparing import Room, Sounds, Span
from penstock.intake.audio.wav import read_wav
from penstock.intake.audio.words import ENGLISH, read_words
from penstock.intake.sampling_fields import ModelFacts
from penstock.intake.single_task import Purpose, SingleTaskIntake
from penstock.intake.tokenizer import TextTokenizer
from penstock.types import GREEDY, AudioInput, PlacedImage, RequestId, SamplingParams, ValidRequest, pack_token_ids
from penstock.weights.config_json import ConfigFields
from penstock.weights.families.registry import TRANSCRIBERS
from penstock.weights.families.whisper import WhisperConfig
from penstock.weights.model_files import CONFIG, TOKENIZER_CONFIG, load_json, model_files
from penstock.wire.ports import AnswerText, Envelope, Form, ModelCard

HEARING = Purpose(
    text="transcribes audio and generates no other text", paths="/v1/audio/transcriptions or /v1/audio/translations"
)
_UINT64_MASK = (1 << 64) - 1

Heard = tuple[PlacedImage, AudioInput]


class ListeningIntake(SingleTaskIntake):
    """``wire.ports.Intake`` and ``wire.ports.Hears`` for one model folder."""

    def __init__(self, folder: Path, card: ModelCard, limits: Limits, requests: RequestConfig | None = None) -> None:
        """Reads tokenizer, control tokens, and how sounds are prepared.  Raises ModelError."""
        files = model_files(folder)
        config = ConfigFields(load_json(files, CONFIG) or {}, files.path_of(CONFIG))
        whisper = TRANSCRIBERS[config.get("architectures", list)[0]].parse(config).details_as(WhisperConfig)
        tokenizer = TextTokenizer(folder, config=load_json(files, TOKENIZER_CONFIG) or {})
        self.words = read_words(files, tokenizer)
        self.sounds = Sounds(read_sound_recipe(files, whisper), limits)
        self.most_before = max(0, whisper.target // 2 - 1)  # tokens of what was said before
        room = card.max_model_len - whisper.begin - self.most_before - 1 - len(self.words.prompt(ENGLISH, "translate"))
        if room < 1:
            raise ModelError(
                f"{config.where}: a context of {card.max_model_len} tokens leaves no room for an answer beside a "
                f"sound's {whisper.begin} and a prompt's {self.most_before}; "
                f"the model has {whisper.begin + whisper.target}"
            )
        facts = ModelFacts(
            name=card.name,
            max_model_len=card.max_model_len,
            vocabulary=self.words.vocabulary,
            end_tokens=self.words.ends,
            requests=requests or RequestConfig(),
        )
        super().__init__(card, HEARING, tokenizer, facts, limits)

    def close(self) -> None:
        """Lets the threads end."""
        super().close()
        self.sounds.close()

    async def encoded(self, text: str, *, special: bool) -> Sequence[int]:
        """See ``SingleTaskIntake``."""
        return await self.tokenizer.run(len(text), lambda: self.tokenizer.encode(text, add_special_tokens=special))

    async def listen(self, form: Form, envelope: Envelope, *, translates: bool) -> Listening:
        """See ``wire.ports.Hears``."""
        languages = self.words.languages or {ENGLISH: 0}
        asked = parse_form(form, self.limits, self.facts, languages)
        if translates and not self.words.tasks:
            self.refuse("knows English only, and does not translate")
        before = self._before(asked.prompt)
        recording = read_wav(asked.raw, self.limits)
        room = self.sounds.room(recording)
        try:
            read = await self.sounds.read(recording)
        except BaseException:
            room.release()
            raise
        heard = msgspec.structs.replace(asked, raw=b"")  # the file is needed no more
        return Listening(self, (heard, envelope, translates), before, read, room)

    def _before(self, prompt: str) -> tuple[int, ...]:
        """The end of what was said before, as the model reads it."""
        text = prompt.strip()
        if not text:
            return ()
        try:
            tokens = self.tokenizer.encode_guarded(f" {text}")
        except RequestError as error:
            raise RequestError(error.message, param="prompt", code=error.code) from None
        return (self.words.before, *tokens[-self.most_before :])


class Listening:
    """``wire.ports.Listening``: one sound, window by window."""

    def __init__(
        self,
        intake: ListeningIntake,
        asked: tuple[Asked, Envelope, bool],
        before: tuple[int, ...],
        read: tuple[NDArray[np.float32], list[Span]],
        room: Room,
    ) -> None:
        """``before``: tokens in front of every window's own.  ``room``: for the samples that were read."""
        self._intake = intake
        self._asked, self._envelope, translates = asked
        self._salt = self._envelope.caller.cache_salt(self._asked.cache_salt)
        self._before = before
        self._samples_N, self._spans = read
        self._room = room
        self._heard: tuple[int, Heard] | None = None  # the latest window
        self.task = "translate" if translates else "transcribe"
        self.model = intake.facts.name
        self.language = self._asked.language or ""
        self.form, self.stream = self._asked.form, self._asked.stream
        self.temperature = self._asked.temperature
        self.seed = self._asked.seed
        self.tokens = intake.sounds.recipe.tokens

    def close(self) -> None:
        """See ``wire.ports.Listening``."""
        self._room.release()

    @property
    def seconds(self) -> float:
        """See ``wire.ports.Listening``."""
        return len(self._samples_N) / self._intake.sounds.recipe.rate

    @property
    def windows(self) -> Sequence[tuple[float, float]]:
        """See ``wire.ports.Listening``."""
        rate = self._intake.sounds.recipe.rate
        return [(begin / rate, end / rate) for begin, end in self._spans]

    async def asks_language(self) -> ValidRequest | None:
        """See ``wire.ports.Listening``."""
        words = self._intake.words
        if self.language or not words.languages:
            return None
        sampling = SamplingParams(seed=0, max_tokens=1, temperature=GREEDY, banned=words.all_but_languages())
        return await self._request("language", 0, (words.start,), sampling)

    def tell_language(self, token: int) -> None:
        """See ``wire.ports.Listening``."""
        self.language = self._intake.words.language_of(token)

    async def window(self, index: int) -> tuple[ValidRequest, AnswerText]:
        """See ``wire.ports.Listening``."""
        intake, words = self._intake, self._intake.words
        own = (*self._before, *words.prompt(self.language or ENGLISH, self.task))
        room = intake.facts.max_model_len - intake.sounds.recipe.tokens - len(own)
        if room < 1:
            raise PromptTooLong(prompt_tokens=len(own), max_tokens=1, limit=len(own) + room, param="prompt")
        sampling = SamplingParams(
            seed=self.seed & _UINT64_MASK,
            max_tokens=room,
            choice=index,
            temperature=self.temperature,
            stop_token_ids=words.ends,
            logprobs=0 if self.form == "verbose_json" else None,
            banned=words.banned,
            banned_first=words.banned_first,
        )
        request = await self._request(str(index), index, own, sampling)
        wanted = Wanted(stop_token_ids=frozenset(words.ends), logprobs=sampling.logprobs is not None, token_ids=True)
        return request, ChoiceText(intake.tokenizer.table, wanted, identity=request.id)

    async def _request(self, name: str, index: int, own: tuple[int, ...], sampling: SamplingParams) -> ValidRequest:
        """``own`` tokens after a window."""
        place, sound = await self._hear(index)
        prompt = (self._intake.words.start,) * sound.columns + own
        caller = self._envelope.caller
        salt = caller.cache_salt(self._asked.cache_salt)
        root = chain_root(self._envelope.identity, tenant_salt=salt)
        return ValidRequest(
            id=RequestId(f"{self._envelope.id}/{name}"),
            prompt=pack_token_ids(prompt),
            block_hashes=tuple(block_hashes(root, prompt, images=(place,))),
            sampling=sampling,
            open_ended=sampling.max_tokens > 1,  # as long as what is heard: nobody names a length
            arrival=self._envelope.arrival,
            images=(place,),
            pictures=(sound,),
            session=self._envelope.session,
            cache_salt=salt,
            claim=caller.claim(),
        )

    async def _hear(self, index: int) -> Heard:
        if self._heard is None or self._heard[0] != index:
            begin, end = self._spans[index]
            self._heard = (index, await self._intake.sounds.hear(self._samples_N[begin:end], self._salt))
        return self._heard[1]
