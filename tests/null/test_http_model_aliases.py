"""Aliases of models over HTTP: served by every route, named as asked, listed where they have no wildcard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config.limits import RequestLimits
from penstock.config.schema import InputFeatures, LoraConfig, RequestConfig
from penstock.interfaces import ModelCard, MultipartForm, RequestContext
from penstock.processing.pooling import PoolingModelProcessor, ServedPoolingModel
from penstock.processing.service import GenerationProcessor
from penstock.processing.transcription import AudioModelProcessor
from penstock.types import ModelIdentity, RequestId, Task
from tiny_adapters import write_adapter
from tiny_readers import bert_config, write_reader
from whisper_models import tones, wav, write_whisper

from .http_stage import HELLO, MODEL, STORYTELLER, check, stage

ALIASES = (f"claude-*={MODEL}", f"gpt={MODEL}")


@pytest.fixture(scope="module")
def aliased() -> Iterator[GenerationProcessor]:
    requests = RequestConfig(model_alias=ALIASES)
    intake = GenerationProcessor(
        STORYTELLER, name=MODEL, max_model_len=2048, limits=RequestLimits(), created=1, requests=requests
    )
    yield intake
    intake.close()


CHAT = {"messages": HELLO, "max_tokens": 2}


@pytest.mark.parametrize("name", ["claude-sonnet-5", "gpt", MODEL])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "Once", "max_tokens": 2}),
        ("/v1/messages", CHAT),
        ("/v1/responses", {"input": "Once", "max_output_tokens": 2}),
    ],
)
async def test_a_response_bears_the_name_that_was_asked_for(
    aliased: GenerationProcessor, path: str, body: dict[str, Any], name: str
) -> None:
    async with stage(intake=aliased) as on:
        answer = await on.post(path, body | {"model": name})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == name


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})])
async def test_small_routes_know_them_too(aliased: GenerationProcessor, path: str, body: dict[str, Any]) -> None:
    async with stage(intake=aliased) as on:
        assert (await on.post(path, body | {"model": "claude-x"})).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_an_adapter_is_reached_by_an_alias(tmp_path: Path, stream: bool) -> None:
    folder = write_adapter(tmp_path / "fox", STORYTELLER, ("q_proj",), rank=2, seed=1)
    intake = GenerationProcessor(
        STORYTELLER,
        name=MODEL,
        max_model_len=2048,
        limits=RequestLimits(),
        created=1,
        offers=InputFeatures(lora=LoraConfig(allow_updating=True)),
        requests=RequestConfig(model_alias=("claude-haiku*=fox", f"claude-*={MODEL}")),
    )
    async with stage(intake=intake) as on:
        body = CHAT | {"model": "claude-haiku-5", "stream": stream}
        check(await on.post("/v1/chat/completions", body), 404, "model_not_found", f"'{MODEL}'", "model")
        await on.post("/v1/load_lora_adapter", {"lora_name": "fox", "lora_path": str(folder)})
        answer = await on.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        adapter = on.streams.opened[-1].adapter
        assert adapter is not None
        assert adapter.folder == str(folder)
        assert '"model":"claude-haiku-5"' in answer.text
        assert (await on.post("/v1/chat/completions", body | {"model": "claude-opus-5"})).status_code == 200
        assert on.streams.opened[-1].adapter is None
        told = (await on.client.get("/v1/models/claude-haiku-5")).json()
        assert (told["id"], told["parent"]) == ("claude-haiku-5", "fox")
        refused = (await on.post("/v1/chat/completions", CHAT | {"model": "gpt-9"})).json()["error"]["message"]
        assert f"This server has '{MODEL}', 'fox'." in refused
        gone = await on.post("/v1/unload_lora_adapter", {"lora_name": "owl"})
        assert "--model-alias" not in gone.json()["error"]["message"]
    intake.close()


async def test_models_that_read_texts_have_aliases_too(tmp_path: Path) -> None:
    write_reader(tmp_path, bert_config())
    served = ServedPoolingModel(
        card=ModelCard(name="bge", created=1, max_model_len=12),
        task=Task.EMBED,
        width=4,
        requests=RequestConfig(model_alias=("text-embedding-*=bge", "ada=bge")),
    )
    intake = PoolingModelProcessor(tmp_path, served, RequestLimits())
    async with stage(intake=intake) as on:
        for name in ("text-embedding-3-small", "ada", "bge"):
            answer = await on.post("/v1/embeddings", {"model": name, "input": "the fox"})
            assert (answer.status_code, answer.json()["model"]) == (200, name)
            assert (await on.post("/tokenize", {"model": name, "prompt": "the fox"})).status_code == 200
            assert (await on.client.get(f"/v1/models/{name}")).json()["context_length"] == 12
        listed = (await on.client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["bge", "ada"]
        refused = await on.post("/v1/embeddings", {"model": "gpt", "input": "a"})
        check(refused, 404, "model_not_found", "'bge', 'ada'", "model")
    intake.close()


async def test_so_has_a_model_that_hears(tmp_path: Path) -> None:
    card = ModelCard(name="tiny", created=0, max_model_len=104)
    requests = RequestConfig(model_alias=("whisper-*=tiny",))
    intake = AudioModelProcessor(write_whisper(tmp_path), card, RequestLimits(), requests)
    context = RequestContext(
        id=RequestId("transcript-1"), arrival=1.0, identity=ModelIdentity(fingerprint="f", numerics="n")
    )
    for name in ("whisper-1", "tiny"):
        form = MultipartForm(fields={"model": [name]}, files={"file": wav(tones(0.7))})
        heard = await intake.prepare(form, context, translates=False)
        assert heard.model == name
        heard.close()
    intake.close()


async def test_other_names_are_refused_with_what_there_is_and_what_helps(aliased: GenerationProcessor) -> None:
    async with stage(intake=aliased) as on:
        answer = await on.post("/v1/chat/completions", CHAT | {"model": "llama"})
        check(answer, 404, "model_not_found", MODEL, "model")
        assert "--model-alias" in answer.json()["error"]["message"]


async def test_aliases_without_wildcards_are_listed(aliased: GenerationProcessor) -> None:
    async with stage(intake=aliased) as on:
        listed = (await on.client.get("/v1/models")).json()
        assert [(model["id"], model.get("parent")) for model in listed["data"]] == [(MODEL, None), ("gpt", MODEL)]
        assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, MODEL, "gpt")
        assert (await on.client.get("/v1/models/gpt")).json()["max_model_len"] == 2048
        told = (await on.client.get("/v1/models/claude-sonnet-5")).json()
        assert (told["id"], told["parent"], told["context_length"]) == ("claude-sonnet-5", MODEL, 2048)
        check(await on.client.get("/v1/models/llama"), 404, "model_not_found", f"'{MODEL}', 'gpt'", "model")
        assert (await on.client.get("/props")).json()["default_generation_settings"]["n_ctx"] == 2048
