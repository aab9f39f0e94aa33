"""The request processor of audio models: a transcription form to one engine request per window.

Windows are prepared one after another, on demand.  ``WhisperTokens`` are the model's control tokens and the tokens
that it may not produce, from its tokenizer and generation config.  Knows nothing about HTTP or workers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.config.limits import RequestLimits
from penstock.config.schema import RequestConfig
from penstock.errors import BadField, ModelError, PromptTooLong, RequestError
from penstock.hashing import block_hashes, chain_root
from penstock.interfaces import ModelCard, MultipartForm, OutputDetokenizer, RequestContext
from penstock.processing.detokenizer import IncrementalDetokenizer, OutputOptions
from penstock.processing.multimodal.audio import AudioPipeline, SampleReservation, Span, read_audio_config
from penstock.processing.multimodal.audio_decode import read_wav
from penstock.processing.requests.fields import BodyFields, refuse_unknown, string, unsupported
from penstock.processing.requests.generation import parse_model
from penstock.processing.requests.sampling import ModelProperties, parse_seed, parse_temperature
from penstock.processing.single_task import SingleTaskProcessor, TaskDescription
from penstock.processing.tokenizer.tokenizer import TextTokenizer
from penstock.types import GREEDY, AudioInput, PlacedImage, RequestId, SamplingParams, ValidRequest, pack_token_ids
from penstock.weights.config_json import ConfigFields
from penstock.weights.families.registry import TRANSCRIBERS
from penstock.weights.families.whisper import WhisperConfig
from penstock.weights.model_files import CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG, ModelFiles, load_json, model_files

_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")

MULTILINGUAL_FROM = 51_865
"""The smallest vocabulary of a multilingual model, where nothing else says so (openai/whisper, ``is_multilingual``)."""

ENGLISH = "en"


class WhisperTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids."""

    start: int
    previous_text: int  # stands in front of what was said before
    no_timestamps: int  # asks for a text without times
    tasks: dict[str, int]
    languages: dict[str, int]  # none: the model knows English only, and no tasks
    end_tokens: tuple[int, ...]
    banned: tuple[int, ...]
    banned_first: tuple[int, ...]
    vocabulary: int

    def prompt(self, language: str, task: str) -> tuple[int, ...]:
        """What an answer in this language begins with."""
        if not self.languages:
            return (self.start, self.no_timestamps)
        return (self.start, self.languages[language], self.tasks[task], self.no_timestamps)

    def all_but_languages(self) -> tuple[int, ...]:
        """What is not drawn where only a language is asked for."""
        kept = set(self.languages.values())
        return tuple(token for token in range(self.vocabulary) if token not in kept)

    def language_of(self, token: int) -> str:
        """The language that a token stands for."""
        return next((name for name, own in self.languages.items() if own == token), ENGLISH)


def read_whisper_tokens(files: ModelFiles, tokenizer: TextTokenizer) -> WhisperTokens:
    """Raises ModelError where the tokenizer lacks one of them, or a list names what is no token."""
    config = ConfigFields(load_json(files, CONFIG) or {}, files.path_of(CONFIG))
    generation = ConfigFields(load_json(files, GENERATION_CONFIG) or {}, files.path_of(GENERATION_CONFIG))
    vocabulary = config.positive_int("vocab_size")
    several = generation.get("is_multilingual", bool, vocabulary >= MULTILINGUAL_FROM)

    def token(name: str) -> int:
        found = tokenizer.special_id(name)
        if found is None or found >= vocabulary:
            raise ModelError(f"{config.where}: its tokenizer has no special token {name}, which transcription needs")
        return found

    tokens = sorted(own for own in tokenizer.table.special if own < vocabulary)
    names = zip(tokenizer.token_strings(tokens), tokens, strict=True)
    languages = {found[1]: own for name, own in names if (found := _LANGUAGE.fullmatch(name))} if several else {}
    if several and not languages:
        raise ModelError(f"{config.where}: its tokenizer has no language tokens, such as <|{ENGLISH}|>")
    source = generation if generation.has("eos_token_id") else config
    banned, first = (
        _ids(generation, config, name, vocabulary) for name in ("suppress_tokens", "begin_suppress_tokens")
    )
    return WhisperTokens(
        start=token("<|startoftranscript|>"),
        previous_text=token("<|startofprev|>"),
        no_timestamps=token("<|notimestamps|>"),
        tasks={name: token(f"<|{name}|>") for name in ("transcribe", "translate")} if several else {},
        languages=languages,
        end_tokens=source.token_ids("eos_token_id"),
        banned=banned,
        banned_first=first,
        vocabulary=vocabulary,
    )


def _ids(generation: ConfigFields, config: ConfigFields, name: str, vocabulary: int) -> tuple[int, ...]:
    """The list in the generation config, or, of older releases, in the configuration."""
    source = generation if generation.has(name) else config
    values: list[Any] = source.get(name, list, [])
    if not all(type(own) is int and own < vocabulary for own in values):
        raise source.error(f"{name} must be ids below {vocabulary}, got {values!r:.80}")
    return tuple(own for own in values if own >= 0)


FORMS = ("json", "text", "verbose_json", "srt", "vtt")

TRANSCRIPTION_FIELDS = frozenset(
    {
        *("file", "model", "language", "prompt", "response_format", "temperature", "stream", "seed", "cache_salt"),
        *("timestamp_granularities[]", "include[]", "chunking_strategy"),
    }
)
MAX_SALT_CHARS = 256


class TranscriptionFields(msgspec.Struct, frozen=True, kw_only=True):
    """A checked form."""

    model: str  # as it is named
    raw: bytes  # the file
    language: str | None  # None: it is to be heard
    prompt: str
    form: str  # of the answer
    temperature: float
    seed: int
    stream: bool
    cache_salt: str


def parse_transcription(
    form: MultipartForm, limits: RequestLimits, facts: ModelProperties, languages: Collection[str]
) -> TranscriptionFields:
    """Raises RequestError.  ``languages``: that can be named; of one alone none need be."""
    refuse_unknown({**form.fields, **form.files}, TRANSCRIPTION_FIELDS, facts.requests)
    single = {name: _single(name, values) for name, values in form.fields.items() if not name.endswith("[]")}
    parse_model(BodyFields(single), facts, required=True)
    if "file" not in form.files:
        raise RequestError(
            "Missing required parameter: 'file', as a part with a file name.",
            param="file",
            code="missing_required_parameter",
        )
    answer, stream = single.get("response_format", "json"), _boolean("stream", single.get("stream"))
    if answer not in FORMS:
        raise BadField("response_format", got=answer, want=f"one of {', '.join(FORMS)}")
    if stream and answer not in ("json", "text"):
        raise unsupported("response_format", f"{answer} cannot be streamed; json and text can.")
    _refuse_others(form, single)
    numbers = BodyFields({"temperature": _number(single.get("temperature", "0")), "seed": _whole(single.get("seed"))})
    return TranscriptionFields(
        model=single["model"],
        raw=form.files["file"],
        language=_language(single.get("language"), languages),
        prompt=string("prompt", single.get("prompt", ""), max_chars=limits.max_audio_prompt_chars),
        form=answer,
        temperature=parse_temperature(numbers, facts.sampling),
        seed=parse_seed(numbers),
        stream=stream,
        cache_salt=string("cache_salt", single.get("cache_salt", ""), max_chars=MAX_SALT_CHARS),
    )


def _single(name: str, values: Sequence[str]) -> str:
    if len(values) > 1:
        raise BadField(name, got=f"{len(values)} values", want="one value")
    return values[0]


def _language(given: str | None, languages: Collection[str]) -> str | None:
    if not given:
        return next(iter(languages)) if len(languages) == 1 else None
    if given.lower() not in languages:
        raise BadField("language", got=given, want=f"one of {', '.join(sorted(languages))}")
    return given.lower()


def _refuse_others(form: MultipartForm, single: dict[str, str]) -> None:
    """What OpenAI has and this server does not; what asks for nothing passes."""
    for wanted in form.fields.get("timestamp_granularities[]", ()):
        if wanted != "segment":
            raise unsupported("timestamp_granularities[]", "timestamps are given per segment only ('segment').")
    if form.fields.get("include[]"):
        raise unsupported("include[]", "nothing can be included; verbose_json tells avg_logprob of every segment.")
    if single.get("chunking_strategy", "auto") != "auto":
        raise unsupported("chunking_strategy", "long sounds are cut at quiet places ('auto').")


def _boolean(name: str, given: str | None) -> bool:
    if given is None:
        return False
    if given.lower() not in ("true", "false"):
        raise BadField(name, got=given, want="true or false", code="invalid_type")
    return given.lower() == "true"


def _number(given: str) -> Any:
    """The number that a text says; the text itself where it says none, to be refused."""
    try:
        number = float(given)
    except ValueError:
        return given
    return number if math.isfinite(number) else given


def _whole(given: str | None) -> Any:
    return int(given) if given is not None and given.removeprefix("-").isdecimal() and len(given) < 21 else given


TRANSCRIPTION_TASK = TaskDescription(
    text="transcribes audio and generates no other text", paths="/v1/audio/transcriptions or /v1/audio/translations"
)
_UINT64_MASK = (1 << 64) - 1

WindowAudio = tuple[PlacedImage, AudioInput]


class AudioModelProcessor(SingleTaskProcessor):
    """The request processor of one audio model's folder."""

    def __init__(
        self, folder: Path, card: ModelCard, limits: RequestLimits, requests: RequestConfig | None = None
    ) -> None:
        """Reads tokenizer, control tokens, and how sounds are prepared.  Raises ModelError."""
        files = model_files(folder)
        config = ConfigFields(load_json(files, CONFIG) or {}, files.path_of(CONFIG))
        whisper = TRANSCRIBERS[config.get("architectures", list)[0]].parse(config).details_as(WhisperConfig)
        tokenizer = TextTokenizer(folder, config=load_json(files, TOKENIZER_CONFIG) or {})
        self.words = read_whisper_tokens(files, tokenizer)
        self.sounds = AudioPipeline(read_audio_config(files, whisper), limits)
        self.most_before = max(0, whisper.target // 2 - 1)  # tokens of what was said before
        room = card.max_model_len - whisper.begin - self.most_before - 1 - len(self.words.prompt(ENGLISH, "translate"))
        if room < 1:
            raise ModelError(
                f"{config.where}: a context of {card.max_model_len} tokens leaves no room for an answer after "
                f"{whisper.begin} tokens of audio and {self.most_before} of a prompt; "
                f"the model has {whisper.begin + whisper.target}"
            )
        facts = ModelProperties(
            name=card.name,
            max_model_len=card.max_model_len,
            vocabulary=self.words.vocabulary,
            end_tokens=self.words.end_tokens,
            requests=requests or RequestConfig(),
        )
        super().__init__(card, TRANSCRIPTION_TASK, tokenizer, facts, limits)

    def close(self) -> None:
        """Lets the threads end."""
        super().close()
        self.sounds.close()

    async def encoded(self, text: str, *, special: bool) -> Sequence[int]:
        return await self.tokenizer.run_sized(
            len(text), lambda: self.tokenizer.encode(text, add_special_tokens=special)
        )

    async def prepare(
        self, form: MultipartForm, envelope: RequestContext, *, translates: bool
    ) -> WindowedTranscription:
        languages = self.words.languages or {ENGLISH: 0}
        asked = parse_transcription(form, self.limits, self.facts, languages)
        if translates and not self.words.tasks:
            self.refuse("knows English only, and does not translate")
        before = self._before(asked.prompt)
        recording = read_wav(asked.raw, self.limits)
        room = self.sounds.reserve(recording)
        try:
            samples_N, spans = await self.sounds.decode(recording)
        except BaseException:
            room.release()
            raise
        heard = msgspec.structs.replace(asked, raw=b"")  # the file is needed no more
        return WindowedTranscription(
            self, heard, envelope, translates=translates, before=before, samples_N=samples_N, spans=spans, room=room
        )

    def _before(self, prompt: str) -> tuple[int, ...]:
        """The end of what was said before, as the model reads it."""
        text = prompt.strip()
        if not text:
            return ()
        try:
            tokens = self.tokenizer.encode_guarded(f" {text}")
        except RequestError as error:
            raise RequestError(error.message, param="prompt", code=error.code) from None
        return (self.words.previous_text, *tokens[-self.most_before :])


class WindowedTranscription:
    """One recording, window by window."""

    def __init__(
        self,
        processor: AudioModelProcessor,
        fields: TranscriptionFields,
        context: RequestContext,
        *,
        translates: bool,
        before: tuple[int, ...],
        samples_N: NDArray[np.float32],
        spans: list[Span],
        room: SampleReservation,
    ) -> None:
        """``before``: tokens in front of every window's own.  ``room``: the reservation of ``samples_N``."""
        self._processor = processor
        self._fields, self._context = fields, context
        self._salt = self._context.caller.cache_salt(self._fields.cache_salt)
        self._before = before
        self._samples_N, self._spans = samples_N, spans
        self._room = room
        self._heard: tuple[int, WindowAudio] | None = None  # the latest window
        self.task = "translate" if translates else "transcribe"
        self.model = self._fields.model
        self.language = self._fields.language or ""
        self.response_format, self.stream = self._fields.form, self._fields.stream
        self.temperature = self._fields.temperature
        self.seed = self._fields.seed
        self.tokens = processor.sounds.recipe.tokens

    def close(self) -> None:
        self._room.release()

    @property
    def seconds(self) -> float:
        return len(self._samples_N) / self._processor.sounds.recipe.rate

    @property
    def windows(self) -> Sequence[tuple[float, float]]:
        rate = self._processor.sounds.recipe.rate
        return [(begin / rate, end / rate) for begin, end in self._spans]

    async def language_request(self) -> ValidRequest | None:
        words = self._processor.words
        if self.language or not words.languages:
            return None
        sampling = SamplingParams(seed=0, max_tokens=1, temperature=GREEDY, banned=words.all_but_languages())
        return await self._request("language", 0, (words.start,), sampling)

    def set_language(self, token: int) -> None:
        self.language = self._processor.words.language_of(token)

    async def window_request(self, index: int) -> tuple[ValidRequest, OutputDetokenizer]:
        processor, words = self._processor, self._processor.words
        own = (*self._before, *words.prompt(self.language or ENGLISH, self.task))
        room = processor.facts.max_model_len - processor.sounds.recipe.tokens - len(own)
        if room < 1:
            raise PromptTooLong(prompt_tokens=len(own), max_tokens=1, limit=len(own) + room, param="prompt", cuts=False)
        sampling = SamplingParams(
            seed=self.seed & _UINT64_MASK,
            max_tokens=room,
            choice=index,
            temperature=self.temperature,
            stop_token_ids=words.end_tokens,
            logprobs=0 if self.response_format == "verbose_json" else None,
            banned=words.banned,
            banned_first=words.banned_first,
        )
        request = await self._request(str(index), index, own, sampling)
        wanted = OutputOptions(
            stop_token_ids=frozenset(words.end_tokens), logprobs=sampling.logprobs is not None, token_ids=True
        )
        return request, IncrementalDetokenizer(processor.tokenizer.table, wanted, identity=request.id)

    async def _request(self, name: str, index: int, own: tuple[int, ...], sampling: SamplingParams) -> ValidRequest:
        """``own`` tokens after a window."""
        place, sound = await self._hear(index)
        prompt = (self._processor.words.start,) * sound.columns + own
        caller = self._context.caller
        salt = caller.cache_salt(self._fields.cache_salt)
        root = chain_root(self._context.identity, tenant_salt=salt)
        return ValidRequest(
            id=RequestId(f"{self._context.id}/{name}"),
            prompt=pack_token_ids(prompt),
            block_hashes=tuple(block_hashes(root, prompt, images=(place,))),
            sampling=sampling,
            open_ended=sampling.max_tokens > 1,  # as long as the audio: the request names no length
            arrival=self._context.arrival,
            images=(place,),
            pictures=(sound,),
            session=self._context.session,
            cache_salt=salt,
            qos=caller.qos(),
        )

    async def _hear(self, index: int) -> WindowAudio:
        if self._heard is None or self._heard[0] != index:
            begin, end = self._spans[index]
            self._heard = (index, await self._processor.sounds.extract_features(self._samples_N[begin:end], self._salt))
        return self._heard[1]
