"""Embeddings, reranking and classification over HTTP: the real edge and intake before streams without workers."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from penstock.config.limits import RequestLimits
from penstock.errors import WorkerLost
from penstock.interfaces import ModelCard
from penstock.processing.pooling import PoolingModelProcessor, ServedPoolingModel
from penstock.types import Task
from tiny_readers import bert_config, word_pieces

from .http_stage import MODEL, check, stage
from .streams import NullStreams, vector_of

EMBED, RANK, CLASSES = "/v1/embeddings", "/rerank", "/classify"
FOX = "the quick fox"
FOX_IDS = [2, *[word_pieces().token_to_id(word) for word in FOX.split()], 3]
PROMPTS = {"prompts": {"query": "find: ", "document": ""}, "default_prompt_name": None}
LABELS = {"0": "no", "1": "yes", "2": "perhaps"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("reader")
    (made / "config.json").write_text(json.dumps(bert_config(id2label=LABELS)))
    (made / "config_sentence_transformers.json").write_text(json.dumps(PROMPTS))
    word_pieces().save(str(made / "tokenizer.json"))
    return made


def intake(folder: Path, task: Task = Task.EMBED, width: int = 4, **limits: Any) -> PoolingModelProcessor:
    card = ModelCard(name="bge", created=1, max_model_len=12)
    return PoolingModelProcessor(folder, ServedPoolingModel(card=card, task=task, width=width), RequestLimits(**limits))


async def test_embeddings_of_strings_and_tokens(folder: Path):
    async with stage(intake=intake(folder)) as on:
        answer = await on.post(EMBED, {"model": "bge", "input": [FOX, "a cat"]})
        body = answer.json()
        assert answer.status_code == 200, body
        assert [tuple(request.prompt) for request in on.streams.opened] == [tuple(FOX_IDS), (2, 5, 8, 3)]
        assert body["object"] == "list"
        assert body["model"] == "bge"
        assert body["id"] == answer.headers["x-request-id"]
        assert body["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
        wanted = [struct.unpack("<4f", vector_of(request, 4)) for request in on.streams.opened]
        assert [item["embedding"] for item in body["data"]] == [list(vector) for vector in wanted]
        assert [(item["index"], item["object"]) for item in body["data"]] == [(0, "embedding"), (1, "embedding")]
        for same in (FOX, [FOX], FOX_IDS, [FOX_IDS]):
            again = (await on.post(EMBED, {"model": "bge", "input": same, "encoding_format": "base64"})).json()
            (item,) = again["data"]
            assert struct.unpack("<4f", base64.b64decode(item["embedding"])) == wanted[0]
        (item,) = (await on.post(EMBED, {"model": "bge", "input": FOX, "dimensions": 2, "user": "u"})).json()["data"]
        assert len(item["embedding"]) == 2


async def test_prompts_by_name(folder: Path):
    async with stage(intake=intake(folder)) as on:
        for field, value in ((None, None), ("prompt_name", "query"), ("input_type", "document")):
            fields = {} if field is None else {field: value}
            assert (await on.post(EMBED, {"model": "bge", "input": FOX, **fields})).status_code == 200
        plain, query, document = (tuple(request.prompt) for request in on.streams.opened)
        assert plain == document == tuple(FOX_IDS)
        assert len(query) > len(plain)
        assert query[-4:] == plain[-4:]
        ask = {"model": "bge", "input": FOX_IDS, "prompt_name": "query"}
        check(await on.post(EMBED, ask), 400, "invalid_value", "inputs that are text", "prompt_name")
        ask = {"model": "bge", "input": FOX, "prompt_name": "other"}
        check(await on.post(EMBED, ask), 400, "invalid_value", "'query', 'document'", "prompt_name")


@pytest.mark.parametrize(
    ("fields", "code", "words", "param"),
    [
        ({"input": None}, "missing_required_parameter", "input", "input"),
        ({"input": []}, "empty_array", "array of token ids", "input"),
        ({"input": [[]]}, "empty_array", "at least one token id", "input[0]"),
        ({"input": [FOX, 5]}, "invalid_type", "a string or an array", "input[1]"),
        ({"input": [[1, 128]]}, "invalid_value", "token ids from 0 to 127", "input[0]"),
        ({"input": [FOX] * 5}, "array_above_max_length", "at most 4 inputs", "input"),
        ({"input": "fox " * 11}, "context_length_exceeded", "12 tokens, and 'input' has 13", "input"),
        ({"input": [FOX, list(range(13))]}, "context_length_exceeded", "'input[1]' has 13", "input[1]"),
        ({"input": [FOX_IDS] * 4, "encoding_format": "base64"}, "max_tokens_per_request", "the limit is 19", "input"),
        ({"encoding_format": "int8"}, "invalid_value", "'float' or 'base64'", "encoding_format"),
        ({"dimensions": 5}, "integer_above_max_value", "<= 4", "dimensions"),
        ({"truncate_prompt_tokens": 13}, "integer_above_max_value", "<= 12", "truncate_prompt_tokens"),
        ({"normalize": 1}, "invalid_type", "a boolean", "normalize"),
        ({"model": "other"}, "model_not_found", "This server has 'bge'", "model"),
        ({"stream": True}, None, "Unrecognized request argument supplied: stream", None),
    ],
)
async def test_refused(folder: Path, fields: dict[str, Any], code: str | None, words: str, param: str | None):
    async with stage(intake=intake(folder, max_inputs=4, max_input_tokens=19)) as on:
        answer = await on.post(EMBED, {"model": "bge", "input": FOX} | fields)
        check(answer, 404 if code == "model_not_found" else 400, code, words, param)
        assert on.streams.opened == []


async def test_texts_are_cut_only_when_asked(folder: Path):
    async with stage(intake=intake(folder)) as on:
        for cut, tokens in ((-1, 12), (7, 7), (2, 2)):
            ask = {"model": "bge", "input": ["fox " * 50, list(range(2, 60))], "truncate_prompt_tokens": cut}
            answer = await on.post(EMBED, ask)
            assert answer.json()["usage"]["total_tokens"] == 2 * tokens, answer.text
            text, ids = (tuple(request.prompt) for request in on.streams.opened[-2:])
            assert (text[0], text[-1], len(text)) == (2, 3, tokens)
            assert ids == tuple(range(2, 2 + tokens))


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_reranking(folder: Path, path: str):
    documents: list[Any] = ["a cat", "the dog", {"text": "fox " * 30}]
    streams = NullStreams(width=1)
    async with stage(streams, intake=intake(folder, Task.CLASSIFY, 1)) as on:
        ask = {"query": FOX, "documents": documents}
        body = (await on.post(path, ask)).json()
        pairs = [(tuple(request.prompt), request.pooling) for request in on.streams.opened]
        assert pairs[0][0] == (*FOX_IDS, 5, 8, 3)
        assert all(pooling is not None and pooling.second == len(FOX_IDS) for _, pooling in pairs)
        assert [len(prompt) for prompt, _ in pairs] == [8, 8, 12]  # the last one was cut to what fits
        scores = [struct.unpack("<f", vector_of(request, 1))[0] for request in on.streams.opened]
        told = [(item["index"], item["relevance_score"]) for item in body["results"]]
        assert told == sorted(enumerate(scores), key=lambda pair: -pair[1])
        assert "document" not in body["results"][0]
        assert body["usage"]["total_tokens"] == 28
        ask |= {"model": "bge", "top_n": 1, "return_documents": True, "max_tokens_per_doc": 3}
        (best,) = (await on.post(path, ask)).json()["results"]
        assert best["document"]["text"] == ["a cat", "the dog", "fox " * 30][best["index"]]
        assert len(on.streams.opened[-1].prompt) == 9
        check(await on.post(path, ask | {"query": "fox " * 9}), 400, "context_length_exceeded", "'query'", "query")
        check(await on.post(path, ask | {"documents": []}), 400, "empty_array", "one document", "documents")
        check(await on.post(path, ask | {"documents": [1]}), 400, "invalid_type", "'text'", "documents[0]")


async def test_classification(folder: Path):
    async with stage(NullStreams(width=3), intake=intake(folder, Task.CLASSIFY, 3)) as on:
        body = (await on.post(CLASSES, {"input": [FOX, FOX_IDS]})).json()
        scores = list(struct.unpack("<3f", vector_of(on.streams.opened[0], 3)))
        label = list(LABELS.values())[scores.index(max(scores))]
        for index, item in enumerate(body["data"]):
            assert item == {"index": index, "label": label, "probs": scores, "num_classes": 3}
        pair = {"text": FOX, "text_pair": "a cat"}
        assert (await on.post(CLASSES, {"input": pair})).status_code == 200
        assert tuple(on.streams.opened[-1].prompt) == (*FOX_IDS, 5, 8, 3)
        bad = await on.post(CLASSES, {"input": [pair, FOX]})
        check(bad, 400, "invalid_type", "'text' and 'text_pair'", "input[1]")
        long = {"text": FOX, "text_pair": "fox " * 9}
        check(await on.post(CLASSES, {"input": long}), 400, "context_length_exceeded", "'input[0]' has 15", "input[0]")
        check(await on.post(RANK, {"query": "a", "documents": ["b"]}), 400, "wrong_task", "Use /classify", "model")


async def test_a_model_is_asked_only_for_what_it_does(folder: Path):
    async with stage(intake=intake(folder)) as on:
        for answer in (await on.chat(model="bge"), await on.text(model="bge"), await on.post(RANK, {"query": "a"})):
            check(answer, 400, "wrong_task", "The model 'bge'", "model")
            assert "Use /v1/embeddings." in answer.json()["error"]["message"]
    async with stage() as on:
        for path in (EMBED, RANK, CLASSES):
            answer = await on.post(path, {"model": "storyteller", "input": FOX})
            check(answer, 400, "wrong_task", "Use /v1/chat/completions or /v1/completions", "model")


async def test_tokens_can_be_looked_at(folder: Path):
    async with stage(intake=intake(folder)) as on:
        told = (await on.post("/tokenize", {"prompt": FOX, "return_token_strs": True})).json()
        assert told["tokens"] == FOX_IDS
        assert told["token_strs"] == ["[CLS]", "the", "quick", "fox", "[SEP]"]
        assert (await on.post("/detokenize", {"tokens": FOX_IDS[1:-1]})).json()["prompt"].strip() == FOX


async def test_many_texts_wait_for_their_turn_and_leave_with_their_client(folder: Path):
    gate = asyncio.Event()
    streams = NullStreams(gate=gate)
    async with stage(streams, intake=intake(folder), limits=RequestLimits(max_inputs_at_once=3)) as on:
        asking = asyncio.create_task(on.post(EMBED, {"model": "bge", "input": [FOX] * 10}))
        await streams.until(opened=3)
        assert len(streams.open) == 3
        gate.set()
        assert len((await asking).json()["data"]) == 10
        assert len(streams.opened) == 10
        gate.clear()
        leaving = asyncio.create_task(on.post(EMBED, {"model": "bge", "input": [FOX] * 10}))
        await streams.until(opened=13)
        leaving.cancel()
        await streams.until(none_open=True)
        assert len(streams.opened) == 13


async def test_a_text_that_fails_fails_the_request(folder: Path):
    streams = NullStreams(fail_at={0: WorkerLost("All workers are gone.")})
    async with stage(streams, intake=intake(folder)) as on:
        answer = await on.post(EMBED, {"model": "bge", "input": [FOX] * 100})
        check(answer, 503, "service_unavailable", "All workers are gone.", says_param=False)
        assert not streams.open


async def test_a_model_that_generates_text_says_what_it_has_not():
    async with stage() as on:
        answer = await on.post("/v1/embeddings", {"model": MODEL, "input": "x"})
    words = "'storyteller' generates text; it has no embeddings, rerank or classify. Use /v1/chat/completions or"
    check(answer, 400, "wrong_task", words, "model")
