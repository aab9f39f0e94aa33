"""The four walks of ARCHITECTURE.md are what happens: calls of the real objects are compared with the page.

A walk is the set of files whose functions run because of it.  What an idle system runs is left out, and so are the
packages that everything uses (``SUPPORTS``).  The model is the null model; a decode step is one of the bundled model, too.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType

import httpx
from tests.runner_bench import RunnerBench

from penstock.api.app import make_app
from penstock.api.endpoints import AppServices
from penstock.config.limits import RequestLimits
from penstock.engine.loop import EngineLoop
from penstock.kv.page_memory import KvLayout
from penstock.processing.service import GenerationProcessor
from penstock.types import RequestId, Role
from penstock.weights.inspect import inspect_model

from .http_stage import CHAT, MODEL, STORYTELLER
from .router_town import SPLIT, WHOLE, Town
from .worker_stage import Stage

ROOT = Path(__file__).parents[2]
PACKAGE = str(ROOT / "src" / "penstock") + "/"
SUPPORTS = frozenset(
    ("config", "telemetry", "types.py", "clock.py", "errors.py", "hashing.py", "interfaces.py", "kv_spec.py")
)

WALKS = {"A chat": 57, "A KV page": 19, "A decode step": 22, "A worker dies": 19}
"""Title of each walk in ARCHITECTURE.md, and the most files that it may touch."""

TURNS = 3000

Calls = set[tuple[str, str]]  # (file, function)


class Recording:
    """Functions of the package that are called while it is entered."""

    def __init__(self) -> None:
        self.calls: Calls = set()

    def __enter__(self) -> Calls:
        self._before = sys.getprofile()
        sys.setprofile(self._record)
        return self.calls

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)

    def _record(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            self.calls.add((code.co_filename.removeprefix(PACKAGE), code.co_qualname))


def files_of(calls: Calls, *without: Calls) -> dict[str, set[str]]:
    """File -> functions of a walk."""
    files: dict[str, set[str]] = {}
    for file, function in calls.difference(*without):
        if file.split("/")[0] not in SUPPORTS and function != "<module>":
            files.setdefault(file, set()).add(function)
    return files


class Service:
    """The application before a router and workers of the null model."""

    def __init__(self, town: Town, client: httpx.AsyncClient) -> None:
        self.town, self._client = town, client

    async def ask(self, words: str, tokens: int) -> None:
        """A streamed chat, while others turn the clock."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": words}], "stream": True, "seed": 1}
        answer = await self._client.post(CHAT, json=body | {"max_tokens": tokens, "ignore_eos": True})
        assert answer.status_code == 200, answer.text
        assert answer.text.endswith("data: [DONE]\n\n")

    async def chat(self, words: str, tokens: int) -> None:
        task = asyncio.ensure_future(self.ask(words, tokens))
        await self.until(task.done)
        task.result()

    async def until(self, condition: Callable[[], object]) -> None:
        """Turn until it is so; text is made by a thread, whose time is no turn's."""
        for _ in range(TURNS):
            await self.town.turn()
            if condition():
                return
        raise AssertionError("not so")


@asynccontextmanager
async def service(*workers: str) -> AsyncIterator[Service]:
    async with Town(*workers) as town:
        limits = RequestLimits()
        processor = GenerationProcessor(STORYTELLER, name=MODEL, max_model_len=256, limits=limits, created=1)
        app = make_app(
            AppServices(
                streams=town.router,
                processor=processor,
                limits=limits,
                clock=town.clock,
                metrics=lambda: lambda: b"# none\n",
            )
        )
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://penstock") as client:
            yield Service(town, client)


async def an_idle_service(*workers: str) -> Calls:
    """What is called in half a second without a request, after some."""
    async with service(*workers) as on:
        await on.chat("The king", 4)
        with Recording() as calls:
            await on.town.wait(0.5)
    return calls


async def a_chat(*workers: str) -> Calls:
    """What is called for a chat, not the first of its service."""
    async with service(*workers) as on:
        await on.chat("The king", 4)
        with Recording() as calls:
            await on.chat("Tell me a story about the queen, please", 20)
    return calls


async def chats(*workers: str) -> Calls:
    """What is called when several chats come and go, the first of a service, short and long."""
    with Recording() as calls:
        async with service(*workers) as on:
            tasks = [
                asyncio.ensure_future(on.ask(f"{number} Tell me a story " * (1 + number), 20)) for number in range(5)
            ]
            await on.until(lambda: all(task.done() for task in tasks))
            for task in tasks:
                task.result()
    return calls


async def a_death() -> Calls:
    """What is called for a chat whose decode worker dies."""
    async with service("prefill-0", "decode-0", "decode-1") as on:
        town = on.town
        await on.chat("The king", 4)

        def writing():
            return [name for name in ("decode-0", "decode-1") if town.worker(name).scheduler.load().running]

        with Recording() as calls:
            chat = asyncio.ensure_future(on.ask("Tell me a story about the queen, please", 20))
            await on.until(writing)
            town.kill(*writing())
            await on.until(chat.done)
            chat.result()
    return calls


def a_decode_step() -> Calls:
    """What one step calls that decodes for two requests of the bundled model, and completes no page."""
    stage = Stage(layout=KvLayout.for_shape(inspect_model(STORYTELLER).kv, "fp32"))
    worker = stage.worker("both-0", Role.BOTH)
    bench = RunnerBench(STORYTELLER, pages=worker.memory.pages, memory=worker.memory.buffer, max_model_len=256)
    loop = EngineLoop(worker.mailbox, worker.scheduler, bench.runner, stage.clock)
    for name in "ab":
        stage.ask(range(5, 25), to=worker, request=RequestId(name), max_tokens=60)
    for _ in range(8):
        loop.step()
        stage.clock.advance(0.001)
    assert worker.scheduler.load().running == 2
    with Recording() as calls:
        loop.step()
    return calls


async def main() -> None:
    idle = await an_idle_service(*WHOLE) | await an_idle_service(*SPLIT)
    chat = await a_chat(*WHOLE)
    split = await a_chat(*SPLIT)
    many = await chats("prefill-0", "decode-0", "decode-1") | await chats(*WHOLE)
    died = await a_death()
    out = {}
    out["chat"] = files_of(chat, idle)
    out["page"] = files_of(split, chat, idle, await chats(*WHOLE))
    out["death"] = files_of(died, many, chat, split, idle)
    out["step"] = files_of(a_decode_step())
    for k, v in out.items():
        print("##", k, len(v))
        for f, n in sorted(v.items()):
            if k != "chat":
                print("   ", f, ":", ", ".join(sorted(x.replace(".<locals>", "") for x in n))[:200])


if __name__ == "__main__":
    asyncio.run(main())
