"""Whose turn it is goes round, and small work does not wait for large."""

from __future__ import annotations

import asyncio
import threading

import pytest

from penstock.api.http import FairThreads

SMALL, LARGE = 10, 1000


class Threads:
    """Work that notes that it was done, and whose first piece lasts until ``release``."""

    def __init__(self) -> None:
        self.threads = FairThreads("test", 100)
        self.order: list[str] = []
        self._release = threading.Event()

    async def blocked(self) -> asyncio.Task[None]:
        """The large thread is taken from now on."""
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        def hold() -> None:
            loop.call_soon_threadsafe(begun.set)
            self._release.wait(60)

        task = asyncio.create_task(self.threads.run("holder", LARGE, hold))
        await begun.wait()
        return task

    def release(self) -> None:
        self._release.set()

    async def add(self, tenant: str, name: str, size: int = LARGE) -> asyncio.Task[None]:
        """Work that waits in its place when this returns."""
        task = asyncio.create_task(self.threads.run(tenant, size, lambda: self.order.append(name)))
        await asyncio.sleep(0)
        return task


async def test_tenants_take_turns() -> None:
    on = Threads()
    held = await on.blocked()
    tasks = [await on.add("a", f"a{i}") for i in range(5)]
    tasks += [await on.add("b", "b0"), await on.add("c", "c0"), await on.add("b", "b1")]
    on.release()
    await asyncio.gather(held, *tasks)
    assert on.order == ["a0", "b0", "c0", "a1", "b1", "a2", "a3", "a4"]


async def test_small_work_passes_large() -> None:
    on = Threads()
    held = await on.blocked()
    large = [await on.add("a", f"large{i}") for i in range(3)]
    await (await on.add("a", "small", SMALL))
    assert on.order == ["small"]
    on.release()
    await asyncio.gather(held, *large)


async def test_who_leaves_gives_up_its_place_and_its_turn() -> None:
    on = Threads()
    held = await on.blocked()
    tasks = [await on.add("a", f"a{i}") for i in range(4)]
    tasks[1].cancel()
    held.cancel()  # its work goes on, and the thread is not the next one's before it ends
    await asyncio.sleep(0)
    assert on.order == []
    on.release()
    await asyncio.gather(tasks[0], tasks[2], tasks[3])
    assert on.order == ["a0", "a2", "a3"]
    await (await on.add("a", "later"))
    assert on.order[-1] == "later"


async def test_what_fails_frees_the_thread() -> None:
    on = Threads()
    with pytest.raises(ZeroDivisionError):
        await on.threads.run("a", LARGE, lambda: 1 // 0)
    await (await on.add("a", "next"))
    assert on.order == ["next"]
