"""Adapters that are loaded at one gateway are known at all, and one that is unloaded is gone everywhere."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.router.service import RouterService
from tiny_adapters import write_adapter

from .http_stage import MODEL, STORYTELLER, Stage, check, stage
from .test_http_adapters import LOAD, UNLOAD, intake_of
from .test_idempotency_homes import Town2


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("adapters")
    return [write_adapter(base / str(seed), STORYTELLER, ("q_proj",), rank=2, seed=seed) for seed in range(3)]


class Gateway:
    """The HTTP application of one router of a town."""

    def __init__(self, town: Town2, router: RouterService, **options: Any) -> None:
        self.town = town
        self.intake = intake_of(**options, shared=router.adapters)

    async def post(self, path: str, **body: Any) -> httpx.Response:
        """Time goes on meanwhile."""
        async with self.scene_of() as on:
            task = asyncio.create_task(on.post(path, body))
            await self.town.until(task.done, seconds=0.01)
            return task.result()

    def scene_of(self) -> Any:
        return stage(intake=self.intake)

    async def load(self, name: str, folder: Path, **more: Any) -> httpx.Response:
        return await self.post(LOAD, lora_name=name, lora_path=str(folder), **more)

    async def unload(self, name: str) -> httpx.Response:
        return await self.post(UNLOAD, lora_name=name)

    def folder(self, name: str) -> str | None:
        found = self.intake._adapters.find(name)
        return None if found is None else found.folder


async def gateways(town: Town2, number: int, **options: Any) -> list[Gateway]:
    routers = [town.router, *(town.add_gateway(f"host-{i}") for i in range(1, number))]
    made = [Gateway(town, router, **options) for router in routers]
    for router in routers:
        await town.until(router.ready, seconds=0.1)
    return made


async def test_loaded_here_and_unloaded_there(folders: list[Path]) -> None:
    async with Town2("both-0", "both-1", "both-2") as town:
        a, b, c = await gateways(town, 3)
        assert (await a.load("fox", folders[0])).status_code == 200
        await town.until(lambda: b.folder("fox") == c.folder("fox") == str(folders[0]), seconds=0.05)
        check(await b.load("fox", folders[1]), 400, "adapter_exists", str(folders[0]), "lora_name")
        assert (await b.load("fox", folders[0])).status_code == 200, "it is the same"
        assert (await b.load("fox", folders[1], load_inplace=True)).status_code == 200
        await town.until(lambda: a.folder("fox") == c.folder("fox") == str(folders[1]), seconds=0.05)
        assert (await c.unload("fox")).status_code == 200
        await town.until(lambda: a.folder("fox") is None and b.folder("fox") is None, seconds=0.05)
        check(await a.unload("fox"), 404, "model_not_found", "'fox'", "model")
        assert (await a.load("fox", folders[2])).status_code == 200
        await town.until(lambda: b.folder("fox") == c.folder("fox") == str(folders[2]), seconds=0.05)


async def test_of_two_at_the_same_time_one_is_refused(folders: list[Path]) -> None:
    async with Town2("both-0", "both-1") as town:
        a, b = await gateways(town, 2)
        async with a.scene_of() as at_a, b.scene_of() as at_b:
            tasks = [
                asyncio.create_task(on.post(LOAD, {"lora_name": "fox", "lora_path": str(folder)}))
                for on, folder in ((at_a, folders[0]), (at_b, folders[1]))
            ]
            await town.until(lambda: all(task.done() for task in tasks), seconds=0.01)
        answers = sorted((task.result() for task in tasks), key=lambda answer: answer.status_code)
        assert answers[0].status_code == 200
        check(answers[1], 400, "adapter_exists", "already, of /", "lora_name")
        await town.turn(1.0)
        won = 0 if tasks[0].result().status_code == 200 else 1
        assert a.folder("fox") == b.folder("fox") == str(folders[won])


async def test_gateways_and_workers_that_come_later_know_them_too(folders: list[Path]) -> None:
    async with Town2("both-0") as town:
        a, b = await gateways(town, 2)
        await a.load("fox", folders[0])
        await a.load("owl", folders[1])
        await a.unload("owl")
        town.kill("both-0")
        town.fork("both-0")
        town.others[0].on_supervisor(town.worker_up("both-0"))
        await town.until(lambda: len(town.worker("both-0").mailbox.exchange.adapters) == 2, seconds=0.1)
        late = Gateway(town, town.add_gateway("late"))
        await town.until(lambda: late.folder("fox") == str(folders[0]), seconds=0.1)
        assert late.folder("owl") is None
        assert b.folder("fox") == str(folders[0])


async def test_what_a_gateway_was_started_with_is_known_to_others(folders: list[Path]) -> None:
    start = intake_of()
    await start.load_adapter({"lora_name": "fox", "lora_path": str(folders[0])})
    (named,) = start._adapters._by_name.values()
    async with Town2("both-0") as town:
        other = town.add_gateway("other")
        a = Gateway(town, town.router, adapters=(named,))
        b = Gateway(town, other)
        await town.until(lambda: town.router.ready() and other.ready(), seconds=0.1)
        town.router.adapters.on_ready(town.worker("both-0").name)  # it was ready before the gateway had an application
        await town.until(lambda: b.folder("fox") == str(folders[0]), seconds=0.05)
        check(await b.load("fox", folders[1]), 400, "adapter_exists", str(folders[0]), "lora_name")
        assert (await b.unload("fox")).status_code == 200
        await town.until(lambda: a.folder("fox") is None, seconds=0.05)


async def test_of_gateways_that_are_started_with_different_adapters_the_last_counts(folders: list[Path]) -> None:
    """So a new version comes to all by restarting gateways; what was loaded or unloaded while serving stays."""
    start = intake_of()
    named = []
    for folder in folders[:2]:
        await start.load_adapter({"lora_name": "fox", "lora_path": str(folder), "load_inplace": True})
        named.append(start._adapters._by_name["fox"])
    async with Town2("both-0") as town:
        old = Gateway(town, town.add_gateway("old"), adapters=named[:1])
        await town.until(lambda: len(town.worker("both-0").mailbox.exchange.adapters) == 1, seconds=0.1)
        new = Gateway(town, town.add_gateway("new"), adapters=named[1:])
        await town.until(lambda: old.folder("fox") == new.folder("fox") == str(folders[1]), seconds=0.1)
        assert (await old.load("fox", folders[2], load_inplace=True)).status_code == 200
        again = Gateway(town, town.add_gateway("again"), adapters=named[:1])
        await town.until(lambda: again.folder("fox") == str(folders[2]), seconds=0.1)
        await town.turn(1.0)
        assert [gateway.folder("fox") for gateway in (old, new, again)] == [str(folders[2])] * 3


async def test_a_gateway_without_room_or_permission_has_none_of_it(
    folders: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    async with Town2("both-0") as town:
        (a,) = await gateways(town, 1)
        closed = Gateway(town, town.add_gateway("closed"), allow_updating=False)
        small = Gateway(town, town.add_gateway("small"), max_adapters=1)
        low = Gateway(town, town.add_gateway("low"), max_rank=1)
        for router in town.others:
            await town.until(router.ready, seconds=0.1)
        await a.load("fox", folders[0])
        await a.load("owl", folders[1])
        await town.turn(1.0)
        for gateway, wanted in ((closed, []), (small, ["fox"]), (low, []), (a, ["fox", "owl"])):
            async with gateway.scene_of() as on:
                assert await listed(on) == [MODEL, *wanted]
        assert "as many as --max-loras allows" in caplog.text
        assert "above --max-lora-rank" in caplog.text


async def listed(on: Stage) -> list[str]:
    return [one["id"] for one in (await on.client.get("/v1/models")).json()["data"]]


async def test_without_a_home_a_name_is_taken_here_and_shared_when_a_worker_is_there(folders: list[Path]) -> None:
    async with Town2() as town:
        a = Gateway(town, town.router)
        b = Gateway(town, town.add_gateway("b"))
        assert (await a.load("fox", folders[0])).status_code == 200
        assert b.folder("fox") is None
        town.fork("both-0")
        town.others[0].on_supervisor(town.worker_up("both-0"))
        await town.until(lambda: b.folder("fox") == str(folders[0]), seconds=0.1)
