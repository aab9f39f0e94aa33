"""Sounds through a real service, by the ``openai`` client: split and aggregated, cached, streamed, refused."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from whisper_models import tones, wav, write_whisper

from .clients import openai_client
from .examples import run_example
from .one_answer import CROWDS, TRUSTING
from .server import PenstockServer

MODEL = "tiny-whisper"
FLAGS = ["--served-model-name", MODEL, "--kv-memory", "16MiB", "--max-chunk-tokens", "32"]
PREEMPTIONS = "penstock:num_preemptions_total"
LONG = wav(tones(2.6, 22_050), 22_050)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whisper(tmp_path_factory.mktemp("whisper"), dtype="bf16")


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PenstockServer]:
    own = tmp_path_factory.mktemp("server")
    with PenstockServer([str(folder), *FLAGS], config=TRUSTING, folder=own) as running:
        yield running


def heard(client: openai.OpenAI, raw: bytes = LONG, **fields: Any) -> Any:
    return client.audio.transcriptions.create(model=MODEL, file=("sound.wav", raw), **fields)


def test_a_sound_is_written_down(server: PenstockServer):
    with openai_client(server) as client:
        told = heard(client)
        assert told.text
        assert told.usage.seconds == pytest.approx(2.6, abs=1e-3)
        events = list(heard(client, stream=True))
        assert [event.type for event in events[:-1]] == ["transcript.text.delta"] * (len(events) - 1)
        assert "".join(event.delta for event in events[:-1]) == events[-1].text == told.text
        assert heard(client, response_format="text") == f"{told.text}\n"
        verbose = heard(client, response_format="verbose_json")
        assert verbose.text == told.text
        assert verbose.language in ("en", "de", "fr")
        assert "".join(own.text for own in verbose.segments).strip() == told.text
        assert [own.start for own in verbose.segments[1:]] == [own.end for own in verbose.segments[:-1]]
        assert all(own.avg_logprob < 0 and own.tokens for own in verbose.segments)
        named = heard(client, language=verbose.language, temperature=0)
        assert named.text == told.text
        assert heard(client, response_format="srt").startswith("1\n00:00:00,000 --> 00:00:0")
        assert heard(client, response_format="vtt").startswith("WEBVTT\n\n00:00:00.000 --> ")
        with pytest.warns(DeprecationWarning, match="deprecated"):  # the client says so of the whole route
            other = client.audio.translations.create(model=MODEL, file=("sound.wav", LONG), prompt="t3 t4")
        assert other.text != told.text
        drawn = [heard(client, temperature=0.9, extra_body={"seed": seed}).text for seed in (5, 5, 6)]
        assert drawn[0] == drawn[1] != drawn[2]
    server.wait_idle()
    server.wait_counted("prefix_cache_hits_total", above=64 * 10 - 1)  # a window's pages serve every question
    windows = len(verbose.segments)
    assert (
        windows <= server.metrics()["penstock:images_encoded_total"] <= 2 * windows
    )  # once in a worker, whoever asked


def test_refusals_name_the_field(server: PenstockServer):
    with openai_client(server) as client:
        for fields, raw, param, code in (
            ({}, b"ID3" + bytes(99), "file", "invalid_audio"),
            ({"language": "klingon"}, LONG, "language", "invalid_value"),
            ({"temperature": 7}, LONG, "temperature", "decimal_above_max_value"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                heard(client, raw, **fields)
            assert (refused.value.param, refused.value.code) == (param, code)
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "t3"}])
        assert refused.value.code == "wrong_task"
    url = f"{server.url}/v1/audio/transcriptions"
    answer = httpx.post(url, json={"model": MODEL}, timeout=20, trust_env=False)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    answer = httpx.post(url, files={"file": ("a.wav", LONG)}, timeout=20, trust_env=False)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")


@pytest.mark.long
def test_the_example_runs(server: PenstockServer, tmp_path: Path):
    (tmp_path / "sound.wav").write_bytes(LONG)
    assert run_example("transcribe.py", server.url, tmp_path, str(tmp_path / "sound.wav"))


def bits(server: PenstockServer, raw: bytes, **fields: str) -> str:
    """Text, tokens and the bits of what they were likely."""
    data = {"model": MODEL, "response_format": "verbose_json", "temperature": "0.7", "seed": "3"} | fields
    url = f"{server.url}/v1/audio/transcriptions"
    answer = httpx.post(url, files={"file": ("a.wav", raw)}, data=data, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    return json.dumps(answer.json(), sort_keys=True)


@pytest.mark.long
def test_one_answer_whatever_serves_it(server: PenstockServer, folder: Path):
    """Split, aggregated, by TCP, with encode workers, with little memory, in a crowd, and when workers die."""
    sounds = [wav(tones(1.7, seed=seed)) for seed in range(6)]
    want = [bits(server, raw) for raw in sounds]
    assert [bits(server, raw) for raw in sounds] == want  # cached
    for role in ("prefill", "decode"):
        with ThreadPoolExecutor(len(sounds)) as pool:
            asked = [pool.submit(bits, server, raw, cache_salt=role) for raw in sounds]
            for worker in server.workers():
                if worker["role"] == role:
                    os.kill(worker["pid"], signal.SIGKILL)
            assert [one.result() for one in asked] == want
        server.wait_all_ready()
    for flags in (
        ["--aggregated", "--speculate", "lookup"],
        ["--transfer", "tcp"],
        ["--encode-workers", "1"],
        ["--aggregated", "--kv-memory", "144KiB", "--image-cache", "1"],
    ):
        with PenstockServer([str(folder), *FLAGS, *flags]) as other, ThreadPoolExecutor(len(sounds)) as pool:
            for _ in range(CROWDS):
                assert list(pool.map(lambda raw, other=other: bits(other, raw), sounds)) == want
                other.wait_idle()
                if "--image-cache" not in flags or other.metrics()[PREEMPTIONS] > 0:
                    break
            if "--image-cache" in flags:
                other.wait_counted("num_preemptions_total")


@pytest.mark.long
def test_a_catalogue_passes_sounds_on(folder: Path, tmp_path: Path):
    file = tmp_path / "models.toml"
    file.write_text(
        f'[[model]]\nname = "whisper"\npath = "{folder}"\nkv_memory = {4 << 20}\naggregated = true\nthreads = 1\n'
        f'aliases = ["{MODEL}"]\n'
    )
    with PenstockServer(["--catalogue", str(file)]) as server, openai_client(server) as client:
        told = heard(client)
        assert told.text
        assert "".join(event.delta for event in heard(client, stream=True) if hasattr(event, "delta")) == told.text
        with pytest.raises(openai.NotFoundError):
            client.audio.transcriptions.create(model="other", file=("a.wav", LONG))
        with pytest.raises(openai.BadRequestError) as refused:
            heard(client, b"fLaC" + bytes(9))
        assert refused.value.code == "invalid_audio"
