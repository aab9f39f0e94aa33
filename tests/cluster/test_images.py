"""Images through a real service, by the ``openai`` client: split and aggregated, cached, refused, and with deaths."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from penstock.wire.curve_keys import CurveKeys
from vision_models import IMAGE_TOKEN, data_url, image_part, picture, write_vision_model

from .clients import openai_client
from .examples import run_example
from .one_answer import CROWDS, TRUSTING
from .server import PATIENCE_S, PenstockServer, PenstockWorker

MODEL = "tiny-vision"
FLAGS = ["--served-model-name", MODEL, "--kv-memory", "16MiB", "--max-chunk-tokens", "32"]
WORDS = {"type": "text", "text": "t3 t4 t5 t6 " * 5}
SEEN = [WORDS, image_part(150, 90), WORDS, image_part(61, 230, seed=1), WORDS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("vision"), dtype="bf16")


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PenstockServer]:
    own = tmp_path_factory.mktemp("server")
    with PenstockServer([str(folder), *FLAGS], config=TRUSTING, folder=own) as running:
        yield running


def ask(client: openai.OpenAI, content: Any, **fields: Any) -> Any:
    wanted = {"max_tokens": 24, "seed": 3, "temperature": 0.8, "logprobs": True, "extra_body": {"ignore_eos": True}}
    messages: Any = [{"role": "user", "content": content}]
    return client.chat.completions.create(model=MODEL, messages=messages, **(wanted | fields))


def tokens_of(server: PenstockServer, content: Any) -> list[int]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
    return httpx.post(f"{server.url}/tokenize", json=body, timeout=20, trust_env=False).json()["tokens"]


def told(answer: Any) -> list[tuple[str, float]]:
    """Tokens with the bits of their log-probabilities."""
    return [(one.token, one.logprob) for one in answer.choices[0].logprobs.content]


def test_images_are_read_streamed_counted_and_cached(server: PenstockServer):
    with openai_client(server) as client:
        first = ask(client, SEEN)
        counted = tokens_of(server, SEEN)
        assert first.usage.prompt_tokens == len(counted)
        assert counted.count(IMAGE_TOKEN) == 3 * 5 + 8 * 2
        chunks = list(ask(client, SEEN, stream=True))
        pieces = [one for chunk in chunks if chunk.choices and chunk.choices[0].logprobs
                  for one in chunk.choices[0].logprobs.content]  # fmt: skip
        assert [(one.token, one.logprob) for one in pieces] == told(first)
        again = ask(client, SEEN)
        assert told(again) == told(first)
        assert again.usage.prompt_tokens_details.cached_tokens > 60
        other = ask(client, [WORDS, image_part(150, 90, seed=5), WORDS, *SEEN[3:]])
        assert other.usage.prompt_tokens == first.usage.prompt_tokens
        assert told(other) != told(first)
        assert other.usage.prompt_tokens_details.cached_tokens < 40  # the text before, and nothing behind
    # The second image of the last chat was there.
    server.wait_for(lambda: server.metrics()["penstock:images_encoded_total"] == 3, PATIENCE_S, "three images encoded")


def test_refusals_name_the_field(server: PenstockServer):
    with openai_client(server) as client:
        for part, code in (
            ({"type": "image_url", "image_url": {"url": data_url(b"no image")}}, "invalid_image"),
            ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}, "invalid_image"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                ask(client, [WORDS, part])
            assert refused.value.code == code
            assert refused.value.param == "messages[0].content[1].image_url.url"
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, [image_part(30, 30)] * 9)
        assert refused.value.code == "too_many_images"


def test_the_example_runs(server: PenstockServer, tmp_path: Path):
    picture(90, 60).save(tmp_path / "picture.png")
    assert run_example("image.py", server.url, tmp_path, str(tmp_path / "picture.png"), "t3 t4")


@pytest.mark.long
def test_one_answer_whatever_serves_it(server: PenstockServer, folder: Path):
    """Split, aggregated, in company, and when workers die while images are encoded or the answer is written."""
    with openai_client(server) as client:
        want = told(ask(client, SEEN, max_tokens=400))
        for role, first in (("prefill", 0), ("decode", 40), ("prefill", 1), ("decode", 3)):
            after = first
            stream = ask(client, SEEN, max_tokens=400, stream=True, extra_body=salted(f"{role}{after}"))
            if not after:
                kill(server, role)
            got: list[tuple[str, float]] = []
            for chunk in stream:
                if chunk.choices and chunk.choices[0].logprobs:
                    got += [(one.token, one.logprob) for one in chunk.choices[0].logprobs.content]
                if after and len(got) >= after:
                    kill(server, role)
                    after = 0
            assert got == want
            server.wait_all_ready()
    for flags in (
        ["--aggregated", "--speculate", "lookup"],
        ["--transfer", "tcp"],
        ["--aggregated", "--image-cache", "1"],
    ):
        with PenstockServer([str(folder), *FLAGS, *flags]) as other, openai_client(other) as client:
            assert told(ask(client, SEEN, max_tokens=400)) == want
            assert told(ask(client, SEEN, max_tokens=400, extra_body=salted("x"))) == want


@pytest.mark.long
@pytest.mark.parametrize("flags", [["--aggregated"], []], ids=["aggregated", "split"])
def test_a_crowd_with_images_in_too_little_memory(server: PenstockServer, folder: Path, flags: list[str]):
    """Answers are interrupted, their pages given away, their images encoded anew: nobody notices."""
    chats = [[WORDS, image_part(150, 90 + 30 * one, seed=one), *SEEN[2:]] for one in range(6)]
    with openai_client(server) as client:
        want = [told(ask(client, chat, max_tokens=400)) for chat in chats]
    tight = [str(folder), *FLAGS, *flags, "--kv-memory", "512KiB", "--image-cache", "1"]
    with PenstockServer(tight) as crowded, openai_client(crowded) as client, ThreadPoolExecutor(len(chats)) as pool:
        for _ in range(CROWDS):
            assert list(pool.map(lambda chat: told(ask(client, chat, max_tokens=400)), chats)) == want
            crowded.wait_idle()
            if crowded.metrics()["penstock:num_preemptions_total"] > 0:
                break
        crowded.wait_counted("num_preemptions_total")


@pytest.mark.long
def test_encoders_on_workers_of_their_own_may_die(server: PenstockServer, folder: Path):
    with openai_client(server) as client:
        want = told(ask(client, SEEN, max_tokens=100))
    with PenstockServer([str(folder), *FLAGS, "--encode-workers", "2"]) as own, openai_client(own) as client:
        assert told(ask(client, SEEN, max_tokens=100)) == want
        for name in ("received", "encoded"):
            counter = f"penstock:images_{name}_total"
            own.wait_for(lambda counter=counter: own.metrics()[counter] == 2, PATIENCE_S, f"two images {name}")
        for worker in own.workers():
            if worker["role"] == "encode":
                os.kill(worker["pid"], signal.SIGSTOP)  # silent, but there
        other = [WORDS, image_part(150, 90, seed=8), *SEEN[2:]]
        alone = told(ask(client, other, max_tokens=100))
        own.wait_all_ready()  # they were killed and replaced
        assert told(ask(client, other, max_tokens=100, extra_body=salted("again"))) == alone


@pytest.mark.long
def test_encoders_on_other_hosts(server: PenstockServer, folder: Path, tmp_path: Path):
    keys = str(tmp_path / "keys")
    CurveKeys.ephemeral().save(tmp_path / "keys")
    with openai_client(server) as client:
        want = told(ask(client, SEEN, max_tokens=100))
    with ExitStack() as stack:
        words: list[str] = []
        for role in ("prefill", "decode", "encode"):
            flags = [str(folder), "--role", role, "--keys", keys, "--name", role, "--kv-memory", "16MiB"]
            words += ["--join", stack.enter_context(PenstockWorker(flags)).endpoint]
        joined = [str(folder), "--served-model-name", MODEL, "--keys", keys, *words]
        fleet = stack.enter_context(PenstockServer(joined))
        with openai_client(fleet) as client:
            assert told(ask(client, SEEN, max_tokens=100)) == want
        counter = "penstock:images_received_total"
        fleet.wait_for(lambda: fleet.metrics()[counter] == 2, PATIENCE_S, "rows from the encode worker")


def salted(salt: str) -> dict[str, Any]:
    """Nothing of it is in a prefix cache."""
    return {"ignore_eos": True, "cache_salt": salt}


def kill(server: PenstockServer, role: str) -> None:
    for worker in server.workers():
        if worker["role"] == role:
            os.kill(worker["pid"], signal.SIGKILL)
