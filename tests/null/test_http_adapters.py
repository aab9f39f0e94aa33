"""Adapters at the HTTP face: their names, what a request for one carries, loading and unloading, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.config.limits import RequestLimits
from penstock.config.schema import InputFeatures, LoraConfig
from penstock.hashing import chain_root
from penstock.interfaces import JsonObject, PreparedGeneration, RequestContext
from penstock.processing.lora import SharedAdapterNames
from penstock.processing.service import GenerationProcessor
from penstock.types import ValidRequest
from tiny_adapters import write_adapter

from .http_stage import MODEL, STORYTELLER, TEXT, Stage, check, events_of, stage
from .streams import NullStreams

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class Noting(NullStreams):
    """Remembers the requests."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[ValidRequest] = []

    def stream(self, request: ValidRequest) -> Any:
        self.seen.append(request)
        return super().stream(request)


def intake_of(
    *, shared: SharedAdapterNames | None = None, kind: type[GenerationProcessor] = GenerationProcessor, **options: Any
) -> GenerationProcessor:
    offers = InputFeatures(lora=LoraConfig(**{"allow_updating": True, **options}))
    return kind(
        STORYTELLER, name=MODEL, max_model_len=2048, limits=RequestLimits(), created=1, offers=offers, adapters=shared
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("adapters")
    return [write_adapter(base / str(seed), STORYTELLER, ("q_proj", "v_proj"), rank=2, seed=seed) for seed in range(3)]


async def load(on: Stage, name: str, folder: Path, **fields: Any) -> Any:
    return await on.post(LOAD, {"lora_name": name, "lora_path": str(folder)} | fields)


async def listed(on: Stage) -> list[tuple[str, str | None]]:
    answer = await on.client.get("/v1/models")
    return [(one["id"], one.get("parent")) for one in answer.json()["data"]]


async def test_an_adapter_is_a_model_from_loading_to_unloading(folders: list[Path]) -> None:
    streams = Noting()
    async with stage(streams, intake=intake_of()) as on:
        check(await on.chat(model="fox"), 404, "model_not_found", "'fox'", "model")
        assert (await load(on, "fox", folders[0])).json() == {"id": "fox", "object": "lora_adapter", "loaded": True}
        assert await listed(on) == [(MODEL, None), ("fox", MODEL)]
        assert (await on.client.get("/v1/models/fox")).json()["parent"] == MODEL
        assert (await on.chat(model="fox")).json()["model"] == "fox"
        assert (await on.text(model="fox")).json()["model"] == "fox"
        assert (await on.text()).json()["model"] == MODEL
        assert (await on.post("/tokenize", {"model": "fox", "prompt": "Once"})).status_code == 200
        assert (await on.post(UNLOAD, {"lora_name": "fox"})).json()["loaded"] is False
        check(await on.chat(model="fox"), 404, "model_not_found", "'fox'", "model")
        check(await on.post(UNLOAD, {"lora_name": "fox"}), 404, "model_not_found", "'fox'", "model")
    refs = [request.adapter for request in streams.seen]
    assert refs[0] is not None
    assert refs == [refs[0], refs[0], None]
    assert refs[0].folder == str(folders[0])


async def test_pages_are_those_of_the_content_whatever_its_name(folders: list[Path]) -> None:
    streams = Noting()
    long: dict[str, Any] = {"prompt": list(range(5, 60)), "max_tokens": 1}
    async with stage(streams, intake=intake_of()) as on:
        await load(on, "a", folders[0])
        await load(on, "b", folders[0])
        for name in ("a", "b", MODEL):
            await on.text(model=name, **long)
        await load(on, "a", folders[1], load_inplace=True)
        await on.text(model="a", **long)
    a, b, plain, other = streams.seen
    assert len(a.block_hashes) == 3
    assert a.block_hashes == b.block_hashes
    assert len({a.block_hashes[0], plain.block_hashes[0], other.block_hashes[0]}) == 3


KEYED: dict[str, Any] = {"model": "fox", "prompt": "Once", "max_tokens": 8, "seed": 1, "stream": True}
KEY = {"Idempotency-Key": "6f1c2d1e-order-7"}


async def test_a_stream_goes_on_with_the_adapter_that_it_was_begun_with_or_not_at_all(folders: list[Path]) -> None:
    async with stage(intake=intake_of()) as one, stage(intake=intake_of()) as other:
        for on in (one, other):
            await load(on, "fox", folders[0])
        begun = events_of((await one.post(TEXT, KEYED, headers=KEY)).text)
        resumed = KEY | {"Last-Event-ID": begun[1].id}
        rest = events_of((await other.post(TEXT, KEYED, headers=resumed)).text)
        assert [event.id for event in rest] == [event.id for event in begun[2:]], "another gateway has the same adapter"
        for on in (one, other):
            await load(on, "fox", folders[1], load_inplace=True)
            for headers in (KEY, resumed):
                refused = await on.post(TEXT, KEYED, headers=headers)
                check(refused, 422, "idempotency_key_reused", "version of the model or adapter")
            await on.post(UNLOAD, {"lora_name": "fox"})
            check(await on.post(TEXT, KEYED, headers=resumed), 404, "model_not_found", "'fox'", "model")


async def test_a_name_that_changes_while_a_request_is_parsed_stands_for_what_computes_it(folders: list[Path]) -> None:
    class Replacing(GenerationProcessor):
        """Another gateway replaces the adapter after the headers of a request were read."""

        async def completion(self, body: JsonObject, envelope: RequestContext) -> PreparedGeneration:
            await self.load_adapter({"lora_name": "fox", "lora_path": str(folders[1]), "load_inplace": True})
            return await super().completion(body, envelope)

    async with stage(intake=intake_of(kind=Replacing)) as one, stage(intake=intake_of()) as other:
        await load(one, "fox", folders[0])
        await load(other, "fox", folders[1])
        begun = events_of((await one.post(TEXT, KEYED, headers=KEY)).text)
        resumed = await other.post(TEXT, KEYED, headers=KEY | {"Last-Event-ID": begun[1].id})
        assert [event.id for event in events_of(resumed.text)] == [event.id for event in begun[2:]]


def test_the_root_names_the_adapter() -> None:
    identity = NullStreams().identity()
    assert identity is not None
    assert chain_root(identity, adapter="x") != chain_root(identity) != chain_root(identity, tenant_salt="x")


async def test_refusals(folders: list[Path], tmp_path: Path) -> None:
    async with stage(intake=intake_of(max_adapters=2)) as on:
        check(await load(on, "x", tmp_path), 400, "invalid_adapter", "adapter_config.json", "lora_path")
        check(await load(on, MODEL, folders[0]), 400, "invalid_value", "another name", "lora_name")
        check(await load(on, "x", Path("relative")), 400, "invalid_value", "an absolute path", "lora_path")
        check(await on.post(LOAD, {"lora_name": "x"}), 400, "missing_required_parameter", "lora_path", "lora_path")
        await load(on, "a", folders[0])
        check(await load(on, "a", folders[1]), 400, "adapter_exists", "load_inplace", "lora_name")
        await load(on, "b", folders[1])
        check(await load(on, "c", folders[2]), 400, "too_many_adapters", "--max-loras")
    nbytes = (folders[0] / "adapter_model.safetensors").stat().st_size
    async with stage(intake=intake_of(max_bytes=nbytes + 1)) as on:
        await load(on, "a", folders[0])
        check(await load(on, "b", folders[1]), 400, "lora_memory_full", "--lora-memory", "lora_path")
    async with stage(intake=intake_of(allow_updating=False)) as on:
        check(await load(on, "a", folders[0]), 403, "lora_updating_off", "--allow-lora-updating")
        check(await on.post(UNLOAD, {"lora_name": "a"}), 403, "lora_updating_off", "--allow-lora-updating")
