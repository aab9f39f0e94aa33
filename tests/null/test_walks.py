"""The four walks of ARCHITECTURE.md are what happens: calls of the real objects are compared with the page.

A walk is the set of files whose functions run because of it.  What an idle system calls is left out, and so are the
packages that everything uses (``SUPPORTS``).  Requests go through the null model; a decode step is one of the bundled
model.  What a supervisor calls when a worker dies is compared in ``tests/cluster/test_walks.py``.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType

import httpx
import pytest
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
SUPPORTS = ("config/", "telemetry/", "types.py", "clock.py", "errors.py", "hashing.py", "interfaces.py", "kv_spec.py")
STAND_INS = {"wire/in_memory.py": "", "kv/page_memory.py": "KvMemory.", "kernels/operands.py": "KvShape."}
"""File and beginning of functions: the transport of these tests, and what their runner calls to look at pages."""

WORKERS_PART = ("engine/", "kv/", "kernels/")
GATEWAYS_PART = ("api/", "processing/", "router/", "wire/")
WALKS = {"A chat": 66, "A KV page": 17, "A decode step": 22, "A worker dies": 18}
"""Title of each walk in ARCHITECTURE.md, and the most files that it may touch."""

TURNS = 3000

Calls = set[tuple[str, str]]
"""Pairs of a file and the qualified name of a function in it."""


class Recording:
    """Functions of the package that are called while it is entered."""

    def __init__(self) -> None:
        self._calls: Calls = set()

    def __enter__(self) -> Calls:
        self._before = sys.getprofile()
        sys.setprofile(self._record)
        return self._calls

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)

    def _record(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name != "<module>":
            file = code.co_filename.removeprefix(PACKAGE)
            stand_in = file in STAND_INS and code.co_qualname.startswith(STAND_INS[file])
            if not file.startswith(SUPPORTS) and not stand_in:
                self._calls.add((file, code.co_qualname.replace(".<locals>", "")))


class Service:
    """The application before a router and workers of the null model."""

    def __init__(self, town: Town, client: httpx.AsyncClient) -> None:
        self.town, self._client = town, client

    def ask(self, words: str) -> asyncio.Task[None]:
        """Begins a streamed chat; the task ends with its last event."""
        return asyncio.get_running_loop().create_task(self._ask(words))

    async def _ask(self, words: str) -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": words}], "stream": True, "seed": 1}
        answer = await self._client.post(CHAT, json=body | {"max_tokens": 20, "ignore_eos": True})
        assert answer.status_code == 200, answer.text
        assert answer.text.endswith("data: [DONE]\n\n")

    async def until(self, condition: Callable[[], object]) -> None:
        """Turn every worker and the clock until it is so."""
        for _ in range(TURNS):
            await self.town.turn()
            if condition():
                return
        raise AssertionError(f"not so after {TURNS} turns")

    async def finish(self, *chats: asyncio.Task[None]) -> None:
        await self.until(lambda: all(chat.done() for chat in chats))
        for chat in chats:
            chat.result()


@asynccontextmanager
async def service(*workers: str) -> AsyncIterator[Service]:
    async with Town(*workers) as town:
        limits = RequestLimits()
        app = make_app(
            AppServices(
                streams=town.router,
                processor=GenerationProcessor(STORYTELLER, name=MODEL, max_model_len=256, limits=limits, created=1),
                limits=limits,
                clock=town.clock,
                metrics=lambda: lambda: b"# no metrics\n",
            )
        )
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://penstock") as client:
            yield Service(town, client)


async def calls_when_idle(*workers: str) -> Calls:
    """In half a second without a request, after one."""
    async with service(*workers) as on:
        await on.finish(on.ask("The king"))
        with Recording() as calls:
            await on.town.wait(0.5)
    return calls


async def calls_of_a_chat(*workers: str) -> Calls:
    """Of a chat that is not the first of its service."""
    async with service(*workers) as on:
        await on.finish(on.ask("The king"))
        with Recording() as calls:
            await on.finish(on.ask("Tell me a story about the queen, please"))
    return calls


async def calls_of_many_chats(*workers: str) -> Calls:
    """From the start of a service on, for chats of several lengths at once."""
    with Recording() as calls:
        async with service(*workers) as on:
            await on.finish(*(on.ask("Tell me a story " * count) for count in range(1, 6)))
    return calls


async def calls_of_a_death() -> Calls:
    """Of a chat whose decode worker dies."""
    async with service("prefill-0", "decode-0", "decode-1") as on:

        def decoding() -> list[str]:
            return [name for name in ("decode-0", "decode-1") if on.town.worker(name).scheduler.load().running]

        await on.finish(on.ask("The king"))
        with Recording() as calls:
            chat = on.ask("Tell me a story about the queen, please")
            await on.until(decoding)
            on.town.kill(*decoding())
            await on.finish(chat)
    return calls


def calls_of_a_decode_step() -> Calls:
    """Of one step that decodes for two requests of the bundled model, and completes no page."""
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


async def service_walks() -> dict[str, Calls]:
    idle = await calls_when_idle(*WHOLE) | await calls_when_idle(*SPLIT)
    chat, split = await calls_of_a_chat(*WHOLE), await calls_of_a_chat(*SPLIT)
    whole = await calls_of_many_chats(*WHOLE)
    several = await calls_of_many_chats("prefill-0", "decode-0", "decode-1")
    death = await calls_of_a_death()
    return {
        "A chat": chat - idle,
        "A KV page": {call for call in split - chat - idle - whole if call[0].startswith(WORKERS_PART)},
        "A worker dies": {call for call in death - split - several - whole - idle if call[0].startswith(GATEWAYS_PART)},
    }


@pytest.fixture(scope="module")
def walks() -> dict[str, Calls]:
    step = {call for call in calls_of_a_decode_step() if call[0].startswith(("engine/", "kernels/"))}
    return asyncio.run(service_walks()) | {"A decode step": step}


def listed(title: str) -> Calls:
    """What ARCHITECTURE.md lists of a walk."""
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    _, found, rest = page.partition(f"\n### {title}\n")
    assert found, f"ARCHITECTURE.md has no walk {title!r}"
    section = re.split(r"^##", rest, maxsplit=1, flags=re.MULTILINE)[0]
    return set(re.findall(r"`([\w/]+\.py): ([\w.]+)`", section))


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_is_the_one_of_the_page(walks: dict[str, Calls], title: str) -> None:
    calls = walks[title]
    pairs = {pair for pair in listed(title) if not pair[0].startswith("launch/")}
    assert sorted(pairs - calls) == [], "listed and not called"
    assert sorted({file for file, _ in calls} - {file for file, _ in pairs}) == [], "called and not listed"


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_grows_no_longer(title: str) -> None:
    assert len({file for file, _ in listed(title)}) <= WALKS[title]
