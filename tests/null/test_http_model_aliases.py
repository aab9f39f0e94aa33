"""Aliases of models over HTTP: served by every route, named as asked, listed where they have no wildcard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.config.limits import RequestLimits
from penstock.config.schema import RequestConfig
from penstock.processing.service import GenerationProcessor

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
        assert (await on.client.get("/props")).json()["default_generation_settings"]["n_ctx"] == 2048
