"""Models that only read, served by real processes: OpenAI's client, a worker killed in the middle, clear refusals."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tiny_models import llama_config
from tiny_readers import bert_config, write_modules, write_reader

from .clients import openai_client
from .examples import run_example
from .one_answer import TRUSTING
from .server import PATIENCE_S, PenstockServer

SCENES = 8
"""How often a worker is killed to hit an answer: on a busy machine it may be over before that."""

WORDS = ["fox", "dog", "cat", "moon", "river", "forest"]
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "max_position_embeddings": 256}


def text(seed: int, length: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, length))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PenstockServer]:
    folder = tmp_path_factory.mktemp("models") / "tiny-bge"
    folder.mkdir()
    write_modules(folder, "cls_token")
    write_reader(folder, bert_config(**WIDE))
    with PenstockServer([str(folder), "--prefill", "2"], config=TRUSTING, folder=folder.parent) as running:
        yield running


@pytest.fixture
def client(server: PenstockServer) -> Iterator[openai.OpenAI]:
    with openai_client(server) as made:
        yield made


def test_openais_client_gets_floats_and_base64(client: openai.OpenAI, server: PenstockServer):
    texts = [text(i, 3 + 7 * i) for i in range(20)]
    asked: dict[str, Any] = {"model": "tiny-bge", "input": texts}
    encoded = client.embeddings.create(**asked)  # the client itself asks for base64
    plain = client.embeddings.create(**asked, encoding_format="float")
    assert [item.embedding for item in encoded.data] == [item.embedding for item in plain.data]
    assert encoded.usage.total_tokens == sum(len(one.split()) + 2 for one in texts)
    for item in plain.data:
        assert len(item.embedding) == 128
        assert np.linalg.norm(item.embedding) == pytest.approx(1, abs=1e-6)
    alone = client.embeddings.create(model="tiny-bge", input=texts[7])
    assert alone.data[0].embedding == plain.data[7].embedding
    short = client.embeddings.create(**asked, dimensions=16)
    assert np.linalg.norm(short.data[3].embedding) == pytest.approx(1, abs=1e-6)
    assert {row["role"] for row in server.workers()} == {"both"}
    server.wait_for(lambda: server.metrics()["penstock:texts_pooled_total"] == 61, PATIENCE_S, "told of 61 texts")
    assert server.metrics()["penstock:generation_tokens_total"] == 0


def test_the_example_runs(server: PenstockServer, tmp_path: Path):
    assert len(run_example("embeddings.py", server.url, tmp_path, "fox river").splitlines()) == 3


def test_a_worker_that_dies_in_the_middle_changes_nothing(client: openai.OpenAI, server: PenstockServer):
    asked: dict[str, Any] = {"model": "tiny-bge", "input": [text(i, 200) for i in range(96)]}
    wanted = [item.embedding for item in client.embeddings.create(**asked).data]
    resubmitted = server.metrics()["penstock:resubmissions_total"]
    with ThreadPoolExecutor(1) as pool:
        for _ in range(SCENES):
            server.wait_all_ready()
            answer = pool.submit(client.embeddings.create, **asked)
            busy: list[int] = []
            while not busy and not answer.done():
                busy = [row["pid"] for row in server.workers() if row["tokens_in_flight"]]
            for pid in busy[:1]:
                os.kill(pid, signal.SIGKILL)
            assert [item.embedding for item in answer.result(PATIENCE_S).data] == wanted
            if server.metrics()["penstock:resubmissions_total"] > resubmitted:
                break
        else:
            pytest.fail("all were read each time before the worker was killed")
    server.wait_all_ready()
    server.wait_idle()


def test_a_client_that_leaves_takes_its_texts_along(server: PenstockServer):
    body = {"model": "tiny-bge", "input": [text(i, 200) for i in range(512)]}
    with httpx.Client(trust_env=False) as leaving, pytest.raises(httpx.ReadTimeout):
        leaving.post(f"{server.url}/v1/embeddings", json=body, timeout=httpx.Timeout(30, read=0.3))
    server.wait_idle()


def test_what_it_does_not_do_is_told(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="generates no text"):
        client.chat.completions.create(model="tiny-bge", messages=[{"role": "user", "content": "Hi"}])
    with pytest.raises(openai.BadRequestError, match="maximum input length is 256 tokens"):
        client.embeddings.create(model="tiny-bge", input=text(1, 300))


@pytest.mark.long
def test_rerank_and_classify(tmp_path: Path):
    labels = {"id2label": {"0": "LABEL_0"}}
    folder = write_reader(
        tmp_path / "judge", bert_config(architectures=["BertForSequenceClassification"], **WIDE, **labels)
    )
    with PenstockServer([str(folder)]) as server:
        documents = [text(i, 20) for i in range(30)]
        ask = {"query": "fox forest", "documents": documents, "top_n": 5}
        ranked = httpx.post(f"{server.url}/v1/rerank", json=ask, timeout=60).json()["results"]
        scores = [item["relevance_score"] for item in ranked]
        assert scores == sorted(scores, reverse=True)
        assert all(0 < score < 1 for score in scores)
        pair = {"text": "fox forest", "text_pair": documents[ranked[0]["index"]]}
        told = httpx.post(f"{server.url}/classify", json={"input": pair}, timeout=60).json()["data"]
        assert told[0]["probs"] == [scores[0]]


@pytest.mark.long
def test_a_decoder_gives_the_same_vector_in_pieces_from_cached_pages_and_through_windows(tmp_path: Path):
    folder = tmp_path / "tiny-e5"
    write_modules(folder, "lasttoken")
    windows = {"sliding_window": 40, "attention_bias": None, "mlp_bias": None}
    write_reader(folder, llama_config(architectures=["MistralModel"], model_type="mistral", **windows))
    texts = [f"{text(0, 100)} {text(i, 5 + 29 * i)}" for i in range(1, 12)]
    with PenstockServer([str(folder), "--max-chunk-tokens", "64"]) as server:

        def vectors(asked: list[str]) -> list[list[float]]:
            body = {"model": "tiny-e5", "input": asked}
            answer = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60)
            return [item["embedding"] for item in answer.json()["data"]]

        together = vectors(texts)
        assert vectors(texts[::-1])[::-1] == together
        assert [vectors([one])[0] for one in texts] == together
        server.wait_for(
            lambda: server.metrics()["penstock:prefix_cache_hits_total"] > 4000, PATIENCE_S, "read from the cache"
        )
        server.wait_idle()
        assert server.metrics()["penstock:kv_pages_leaked"] == 0
