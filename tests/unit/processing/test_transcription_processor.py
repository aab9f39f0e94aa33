"""The form of a transcription and what becomes of it: one engine request a window."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.config.limits import RequestLimits
from penstock.errors import ModelError, QueueFull, RequestError, UnknownModel, WrongTask
from penstock.hashing import block_hashes, chain_root, media_hash
from penstock.interfaces import ModelCard, MultipartForm, RequestContext
from penstock.processing.transcription import AudioModelProcessor
from penstock.types import GREEDY, ModelIdentity, RequestId, TokenBatch
from whisper_models import IDS, SUPPRESSED, SUPPRESSED_FIRST, VOCAB, riff, tones, wav, write_whisper

IDENTITY = ModelIdentity(fingerprint="f", numerics="n")
ENVELOPE = RequestContext(id=RequestId("transcript-1"), arrival=1.0, identity=IDENTITY, session="s")
CARD = ModelCard(name="tiny", created=0, max_model_len=104)
BEGIN = 64


@pytest.fixture(scope="module")
def intake(tmp_path_factory: pytest.TempPathFactory) -> AudioModelProcessor:
    return AudioModelProcessor(write_whisper(tmp_path_factory.mktemp("whisper")), CARD, RequestLimits())


def form(file: bytes | None = None, **fields: Any) -> MultipartForm:
    given = {name: [value] if isinstance(value, str) else value for name, value in fields.items()}
    return MultipartForm(fields={"model": ["tiny"]} | given, files={"file": wav(tones(0.7)) if file is None else file})


async def test_a_window_is_a_sound_and_the_words_that_ask(intake: AudioModelProcessor) -> None:
    listening = await intake.prepare(form(language="DE", seed="-1"), ENVELOPE, translates=False)
    assert await listening.language_request() is None
    request, text = await listening.window_request(0)
    own = [IDS[name] for name in ("<|startoftranscript|>", "<|de|>", "<|transcribe|>", "<|notimestamps|>")]
    assert tuple(request.prompt[BEGIN:]) == tuple(own)
    (image,), (sound,) = request.images, request.pictures
    assert (image.at, image.end, image.content) == (0, BEGIN, media_hash(sound))
    root = chain_root(IDENTITY)
    assert request.block_hashes == tuple(block_hashes(root, request.prompt, images=request.images))
    sampling = request.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.seed) == (GREEDY, 104 - 68, (1 << 64) - 1)
    assert (sampling.banned, sampling.banned_first) == (tuple(SUPPRESSED), tuple(SUPPRESSED_FIRST))
    assert sampling.stop_token_ids == (IDS["<|endoftext|>"],)
    piece = text.push(TokenBatch(tokens=(3, IDS["<|en|>"], 4)))
    assert "t3" in piece.text
    assert "en" not in piece.text


async def test_what_was_said_before_is_cut_from_its_beginning(intake: AudioModelProcessor) -> None:
    listening = await intake.prepare(form(language="en", prompt=" t1 <|en|>" + " t7" * 40), ENVELOPE, translates=True)
    request, _ = await listening.window_request(0)
    own = tuple(request.prompt[BEGIN:])
    assert own[:20] == (IDS["<|startofprev|>"], *[7] * 19)
    assert own[20:] == tuple(IDS[f"<|{name}|>"] for name in ("startoftranscript", "en", "translate", "notimestamps"))


async def test_a_language_is_asked_for(intake: AudioModelProcessor) -> None:
    listening = await intake.prepare(form(wav(tones(1.7))), ENVELOPE, translates=False)
    question = await listening.language_request()
    assert question is not None
    assert tuple(question.prompt[BEGIN:]) == (IDS["<|startoftranscript|>"],)
    languages = {IDS[f"<|{name}|>"] for name in ("en", "de", "fr")}
    assert set(question.sampling.banned) == set(range(VOCAB)) - languages
    assert question.sampling.max_tokens == 1
    listening.set_language(IDS["<|fr|>"])
    assert listening.language == "fr"
    requests = [(await listening.window_request(index))[0] for index in range(len(listening.windows))]
    assert len(requests) == 2
    assert requests[0].images == question.images  # its pages are there already
    assert requests[0].images != requests[1].images
    assert len({request.id for request in (question, *requests)}) == 3
    assert listening.seconds == pytest.approx(1.7)


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ({"model": "other"}, "model", "model_not_found"),
        ({"model": ["tiny", "tiny"]}, "model", "invalid_value"),
        ({"language": "xx"}, "language", "invalid_value"),
        ({"response_format": "yaml"}, "response_format", "invalid_value"),
        ({"response_format": "srt", "stream": "true"}, "response_format", "unsupported_value"),
        ({"stream": "maybe"}, "stream", "invalid_type"),
        ({"temperature": "warm"}, "temperature", "invalid_type"),
        ({"temperature": "nan"}, "temperature", "invalid_type"),
        ({"temperature": "3"}, "temperature", "decimal_above_max_value"),
        ({"seed": "1.5"}, "seed", "invalid_type"),
        ({"prompt": "x" * 20_000}, "prompt", "string_above_max_length"),
        ({"timestamp_granularities[]": ["segment", "word"]}, "timestamp_granularities[]", "unsupported_value"),
        ({"include[]": ["logprobs"]}, "include[]", "unsupported_value"),
        ({"chunking_strategy": "server_vad"}, "chunking_strategy", "unsupported_value"),
        ({"best_of": "3"}, None, None),
    ],
)
async def test_refusals_name_field_and_reason(
    intake: AudioModelProcessor, given: dict[str, Any], param: str | None, code: str | None
) -> None:
    with pytest.raises(RequestError) as refused:
        await intake.prepare(form(**given), ENVELOPE, translates=False)
    assert (refused.value.param, refused.value.code) == (param, code)
    assert isinstance(refused.value, UnknownModel) == (code == "model_not_found")


async def test_a_form_needs_a_model_and_a_file(intake: AudioModelProcessor) -> None:
    for sent, param in (
        (MultipartForm(fields={}, files={"file": b""}), "model"),
        (MultipartForm(fields={"model": ["tiny"]}, files={}), "file"),
    ):
        with pytest.raises(RequestError) as refused:
            await intake.prepare(sent, ENVELOPE, translates=False)
        assert (refused.value.param, refused.value.code) == (param, "missing_required_parameter")


async def test_nothing_else_is_asked_of_such_a_model(intake: AudioModelProcessor) -> None:
    for ask in (intake.chat({}, ENVELOPE), intake.completion({}, ENVELOPE), intake.load_adapter({})):
        with pytest.raises(WrongTask, match="/v1/audio/transcriptions"):
            await ask
    told = await intake.tokenize({"model": "tiny", "prompt": "t3 <|en|>"})
    assert told.tokens == [3, IDS["<|en|>"]]


async def test_samples_of_all_requests_have_bounds(tmp_path: Path) -> None:
    tight = AudioModelProcessor(
        write_whisper(tmp_path), CARD, msgspec.structs.replace(RequestLimits(), max_pending_audio_s=1.0)
    )
    first = await tight.prepare(
        form(wav(tones(3.0)), language="en"), ENVELOPE, translates=False
    )  # nobody else is heard
    with pytest.raises(QueueFull, match="max_pending_audio_s"):
        await tight.prepare(form(language="en"), ENVELOPE, translates=False)
    first.close()
    first.close()
    with pytest.raises(RequestError, match="no numbers"):
        await tight.prepare(
            form(riff(3, 32, struct.pack("<f", float("nan"))), language="en"), ENVELOPE, translates=False
        )
    assert tight.sounds.held_s == 0
    (await tight.prepare(form(language="en"), ENVELOPE, translates=False)).close()


async def test_a_model_of_one_language(tmp_path: Path) -> None:
    folder = write_whisper(tmp_path)
    file = folder / "generation_config.json"
    file.write_bytes(msgspec.json.encode(msgspec.json.decode(file.read_bytes()) | {"is_multilingual": False}))
    english = AudioModelProcessor(folder, CARD, RequestLimits())
    listening = await english.prepare(form(), ENVELOPE, translates=False)
    assert await listening.language_request() is None
    request, _ = await listening.window_request(0)
    assert tuple(request.prompt[BEGIN:]) == (IDS["<|startoftranscript|>"], IDS["<|notimestamps|>"])
    with pytest.raises(WrongTask, match="knows English only"):
        await english.prepare(form(), ENVELOPE, translates=True)


def test_what_cannot_be_served_is_said_at_the_start(tmp_path: Path) -> None:
    folder = write_whisper(tmp_path)
    with pytest.raises(ModelError, match="leaves no room for an answer"):
        AudioModelProcessor(folder, msgspec.structs.replace(CARD, max_model_len=80), RequestLimits())
    file = folder / "generation_config.json"
    written = msgspec.json.decode(file.read_bytes())
    file.write_bytes(msgspec.json.encode(written | {"suppress_tokens": [VOCAB]}))
    with pytest.raises(ModelError, match="suppress_tokens must be ids below"):
        AudioModelProcessor(folder, CARD, RequestLimits())
    file.write_bytes(msgspec.json.encode(written))
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|notimestamps|>", "<|untimed|>"))
    with pytest.raises(ModelError, match=r"no special token <\|notimestamps\|>"):
        AudioModelProcessor(folder, CARD, RequestLimits())
