"""Who may read the metrics, and what that costs the streams beside it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from penstock.api.admin import MetricsPage
from penstock.api.auth import Tenant
from penstock.clock import VirtualClock
from penstock.telemetry.registry import Metrics

from .http_stage import check, stage
from .test_http_classes import key, ring


async def test_without_keys_anybody_on_the_host_may_read_them() -> None:
    async with stage() as on:
        assert (await on.client.get("/metrics")).text == "# no metrics\n"


async def test_with_keys_they_are_for_operators() -> None:
    """They count each tenant's tokens: polled, that is the length of every request."""
    tenants = ring(ann=Tenant(id="a1"), root=Tenant(id="r0", operator=True))
    async with stage(ring=tenants) as on:
        check(await on.client.get("/metrics"), 401, "missing_api_key", "API key")
        check(await on.client.get("/metrics", **key("ann")), 403, "not_an_operator", "operator")
        assert (await on.client.get("/metrics", **key("root"))).status_code == 200
    async with stage(None, None, "a-key") as on:
        assert (await on.client.get("/metrics", headers={"authorization": "Bearer a-key"})).status_code == 200


class Pages:
    """Counts what is looked at and made, and on which threads."""

    def __init__(self) -> None:
        self.seen = 0
        self.made_on: list[int] = []
        self.clock = VirtualClock(100.0)
        self.page = MetricsPage(self._take, self.clock, cache_s=1.0)

    def _take(self):  # type: ignore[no-untyped-def]
        self.seen += 1
        name = b"page %d" % self.seen

        def make() -> bytes:
            self.made_on.append(threading.get_ident())
            return name

        return make


async def test_many_scrapes_a_second_cost_one_and_none_on_the_loop() -> None:
    pages = Pages()
    assert set(await asyncio.gather(*(pages.page.get() for _ in range(10)))) == {b"page 1"}
    pages.clock.advance(0.9)
    assert await pages.page.get() == b"page 1"
    pages.clock.advance(0.2)
    assert set(await asyncio.gather(*(pages.page.get() for _ in range(10)))) == {b"page 2"}
    assert pages.seen == len(pages.made_on) == 2
    assert threading.get_ident() not in pages.made_on


async def test_who_leaves_takes_the_page_from_nobody() -> None:
    pages = Pages()
    leaving, staying = (asyncio.create_task(pages.page.get()) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying == b"page 1"
    with pytest.raises(asyncio.CancelledError):
        await leaving


async def test_a_page_that_could_not_be_made_is_made_anew() -> None:
    results: list[bytes | Exception] = [RuntimeError("no"), b"yes"]

    def make() -> bytes:
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    page = MetricsPage(lambda: make, VirtualClock(100.0), cache_s=1.0)
    with pytest.raises(RuntimeError):
        await page.get()
    assert await page.get() == b"yes"


def test_a_page_tells_of_the_moment_that_it_was_asked_for() -> None:
    """It is made on a thread, while reports come in."""
    metrics = Metrics(model_name="m")
    metrics.on_worker_report("w", 1, {"steps": 5.0})
    metrics.open_requests = lambda: 3
    make = metrics.snapshot()
    metrics.on_worker_report("w", 1, {"steps": 6.0})
    metrics.on_worker_report("x", 1, {"steps": 6.0})
    metrics.open_requests = lambda: 4
    page = make().decode()
    assert 'steps_total{model_name="m",worker="w"} 5.0' in page
    assert 'worker="x"' not in page
    assert 'requests_open{model_name="m"} 3.0' in page
