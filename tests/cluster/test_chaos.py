"""Nothing lost: clients come and go, busy workers are killed and stopped, and answers are as if nothing had been.

Half a minute by default, five with ``--long``; a machine that is too slow for the least numbers gets three times that.
"""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from .chaos import Record, client_loop, disturb_loop
from .server import PenstockServer
from .streams import all_answers, make_client
from .varied import varied_requests

CLIENTS = 16
LEAST_ANSWERS = 200
LEAST_KILLS = 10
LEAST_STOPS = 5


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seconds", [25.0, pytest.param(300.0, marks=pytest.mark.long)])
def test_answers_survive_kills_stops_and_disconnects(seconds: float):
    with PenstockServer(["--prefill", "2", "--decode", "2"]) as server:
        record = asyncio.run(disturb(server, seconds))
        print(record)
        server.wait_all_ready(30.0)
        server.wait_idle(10.0)
        assert record.wrong == []
        assert record.complete >= LEAST_ANSWERS
        assert record.hung_up > 0
        assert record.kills >= LEAST_KILLS
        assert record.stops >= LEAST_STOPS
        assert all(worker["kv_pages_leaked"] == 0 for worker in server.workers())
        assert all(worker["kv_pages_used"] == 0 for worker in server.workers())
    server.assert_nothing_left()


async def disturb(server: PenstockServer, seconds: float) -> Record:
    """The undisturbed answers first, then everything at once."""
    bodies = varied_requests(max_tokens=40)
    undisturbed = await all_answers(server.url, bodies, together=False)
    work = list(zip(bodies, undisturbed, strict=True))
    record = Record()
    began = time.monotonic()

    def troubled() -> bool:
        return record.kills >= LEAST_KILLS and record.stops >= LEAST_STOPS

    def going(spare_s: float = 0.0) -> bool:
        enough = troubled() and record.complete >= LEAST_ANSWERS
        return time.monotonic() - began < (seconds if enough else 3 * seconds) - spare_s

    def troubling() -> bool:
        """The last seconds belong to the answers."""
        return time.monotonic() - began < seconds - 5 or (not troubled() and going(5.0))

    async def workers():
        return await asyncio.to_thread(server.workers)

    async with make_client() as client, asyncio.TaskGroup() as tasks:
        for number in range(CLIENTS):
            tasks.create_task(client_loop(client, server.url, work, record, dice=random.Random(number), going=going))
        tasks.create_task(
            disturb_loop(workers, record, dice=random.Random(99), going=troubling, pause_s=(1.0, 3.0), stop_every=3)
        )
    return record
