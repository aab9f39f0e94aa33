"""Sounds over HTTP: the real edge and intake before streams without workers."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from penstock.config.limits import RequestLimits
from penstock.errors import NoWorkers, WorkerLost
from penstock.interfaces import ModelCard, MultipartForm
from penstock.processing.transcription import AudioModelProcessor
from penstock.telemetry.service_levels import ServiceLevels
from penstock.types import FinishReason, ValidRequest
from whisper_models import IDS, tones, wav, write_whisper

from .http_stage import Stage, check, events_of, stage
from .streams import NullStreams

HEAR, TRANSLATE = "/v1/audio/transcriptions", "/v1/audio/translations"
SOUND = wav(tones(2.6))  # three windows
END = IDS["<|endoftext|>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture
def intake(folder: Path) -> Iterator[AudioModelProcessor]:
    """Afterwards nothing is held."""
    made = AudioModelProcessor(folder, ModelCard(name="tiny", created=1, max_model_len=104), RequestLimits())
    yield made
    assert made.sounds.held_s == 0
    made.close()


def script(request: ValidRequest) -> tuple[tuple[int, ...], FinishReason]:
    """German, and two words a window: its number first."""
    if request.sampling.max_tokens == 1:
        return (IDS["<|de|>"],), FinishReason.LENGTH
    return (10 + request.sampling.choice, 7, END), FinishReason.STOP


async def post(on: Stage, path: str = HEAR, raw: bytes = SOUND, **fields: Any) -> httpx.Response:
    return await on.client.post(path, files={"file": ("a.wav", raw)}, data={"model": "tiny"} | fields)


def words(text: str) -> list[str]:
    return [word for word in text.replace("t", " t").split() if word]


async def test_windows_are_heard_one_after_another(intake: AudioModelProcessor):
    async with stage(NullStreams(script=script), intake=intake) as on:
        answer = await post(on)
        assert answer.status_code == 200, answer.text
        assert words(answer.json()["text"]) == ["t10", "t7", "t11", "t7", "t12", "t7"]
        assert answer.json()["usage"] == {"type": "duration", "seconds": 2.6}
        (seed,) = {request.sampling.seed for request in on.streams.opened[1:]}
        assert answer.json()["penstock"] == {"seed": seed}
        name = answer.headers["x-request-id"]
        assert [request.id for request in on.streams.opened] == [f"{name}/{own}" for own in ("language", 0, 1, 2)]
        assert on.streams.closed == [request.id for request in on.streams.opened]
        assert all(IDS["<|de|>"] in request.prompt for request in on.streams.opened[1:])
        translated = await post(on, TRANSLATE, language="fr", response_format="verbose_json")
        assert translated.json()["task"] == "translate"
        assert translated.json()["language"] == "fr"
        assert [own["tokens"] for own in translated.json()["segments"]] == [[10, 7, END], [11, 7, END], [12, 7, END]]


async def test_what_is_streamed_is_what_is_not(intake: AudioModelProcessor):
    async with stage(NullStreams(script=script), intake=intake) as on:
        whole = (await post(on, language="de")).json()["text"]
        events = events_of((await post(on, language="de", stream="true")).text)
        assert [event.data["type"] for event in events[:-2]] == ["transcript.text.delta"] * (len(events) - 2)
        assert "".join(event.data["delta"] for event in events[:-2]) == whole
        assert (events[-2].data["type"], events[-2].data["text"], events[-1].data) == (
            "transcript.text.done",
            whole,
            "[DONE]",
        )


async def test_a_sound_without_words(intake: AudioModelProcessor):
    async with stage(NullStreams(script=lambda request: ((END,), FinishReason.STOP)), intake=intake) as on:
        assert (await post(on, language="de")).json()["text"] == ""
        assert (await post(on, language="de", response_format="text")).text == "\n"
        (done, end) = events_of((await post(on, language="de", stream="true")).text)
        assert (done.data["text"], end.data) == ("", "[DONE]")


@pytest.mark.parametrize("stream", ["false", "true"])
async def test_an_error_before_the_first_word_has_a_status(intake: AudioModelProcessor, stream: str):
    streams = NullStreams(script=script, fail_at={0: NoWorkers("Nobody is there.")})
    async with stage(streams, intake=intake) as on:
        check(await post(on, stream=stream), 503, "service_unavailable", "Nobody is there")
        assert streams.closed == [request.id for request in streams.opened]


async def test_an_error_in_the_middle_ends_the_stream(intake: AudioModelProcessor):
    streams = NullStreams(script=script, fail_at={1: WorkerLost("It is lost.")}, batch_sizes=lambda rng: 1)
    registry = CollectorRegistry()
    async with stage(streams, intake=intake, levels=ServiceLevels(registry)) as on:
        events = events_of((await post(on, language="de", stream="true")).text)
        assert events[0].data["type"] == "transcript.text.delta"
        assert "error" in events[-1].data
        check(await post(on, language="de"), 503, "service_unavailable", "It is lost")
    text = generate_latest(registry).decode()
    assert "tokens_total{" in text, "what came was computed"
    assert "goodput_total{" not in text, "and is no good answer"


async def test_a_client_that_leaves_frees_everything(intake: AudioModelProcessor):
    streams = NullStreams(script=script, gate=asyncio.Event())
    async with stage(streams, intake=intake) as on:
        asked = asyncio.create_task(post(on, language="de"))
        while not streams.opened:
            await streams.changed.wait()
        assert intake.sounds.held_s == 2.6
        gc.collect()
        forms = [one for one in gc.get_objects() if type(one) is MultipartForm]
        assert not forms, "a file is not held while it is heard"
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert streams.closed == [request.id for request in streams.opened]


async def test_refusals(intake: AudioModelProcessor):
    async with stage(NullStreams(script=script), RequestLimits(max_audio_bytes=1000), intake=intake) as on:
        check(await post(on, raw=bytes(200_000)), 413, "body_too_large", "66536 bytes")
        check(await post(on, raw=b"OggS"), 400, "invalid_audio", "it is Ogg", "file")
        check(await on.post(HEAR, {"model": "tiny"}), 415, "unsupported_media_type", "multipart/form-data")
        broken = await on.client.post(HEAR, content=b"--x", headers={"content-type": "multipart/form-data; boundary=x"})
        check(broken, 400, "invalid_form", "no whole form")
        check(await on.chat(model="tiny"), 400, "wrong_task", "transcribes audio", "model")
        check(await on.post("/v1/embeddings", {"model": "tiny", "input": "a"}), 400, "wrong_task", HEAR, "model")
    async with stage() as on:
        check(await post(on), 400, "wrong_task", "does not transcribe audio. Use /v1/chat/completions", "model")
