"""Nothing lost: clients come and go, busy workers are killed and stopped, and answers are as if nothing had been.

Some seconds by default, five minutes with ``--long``; a machine that is too slow for the least numbers gets
more, but not for ever.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass

import pytest

from .chaos import Record, client_loop, disturb_loop
from .server import PenstockServer
from .streams import all_answers, make_client
from .varied import varied_requests

CLIENTS = 16
MOST_S = 600.0
"""However slow the machine is."""


@dataclass(frozen=True)
class Trouble:
    """How long, how much at least, and how long between two blows."""

    seconds: float
    kills: int
    stops: int
    pause_s: tuple[float, float]
    answers: int = 200


BRIEF = Trouble(seconds=5.0, kills=3, stops=1, pause_s=(0.4, 0.9), answers=60)
SHORT = Trouble(seconds=16.0, kills=6, stops=3, pause_s=(0.8, 2.0))
LONG = Trouble(seconds=300.0, kills=10, stops=5, pause_s=(1.0, 3.0))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param(BRIEF, id="brief"),
        pytest.param(SHORT, id="short", marks=pytest.mark.long),
        pytest.param(LONG, id="long", marks=pytest.mark.long),
    ],
)
def test_answers_survive_kills_stops_and_disconnects(trouble: Trouble):
    with PenstockServer(["--prefill", "2", "--decode", "2"]) as server:
        record = asyncio.run(disturb(server, trouble))
        print(record)
        server.wait_all_ready()
        server.wait_idle()
        assert record.wrong == []
        assert record.complete >= trouble.answers
        assert record.hung_up > 0
        assert record.kills >= trouble.kills
        assert record.stops >= trouble.stops
        assert all(worker["kv_pages_leaked"] == 0 for worker in server.workers())
        assert all(worker["kv_pages_used"] == 0 for worker in server.workers())
    server.assert_nothing_left()


async def disturb(server: PenstockServer, trouble: Trouble) -> Record:
    """The undisturbed answers first, then everything at once."""
    bodies = varied_requests(max_tokens=40)
    undisturbed = await all_answers(server.url, bodies, together=False)
    work = list(zip(bodies, undisturbed, strict=True))
    record = Record()
    began = time.monotonic()

    def troubled() -> bool:
        return record.kills >= trouble.kills and record.stops >= trouble.stops

    def going(spare_s: float = 0.0) -> bool:
        enough = troubled() and record.complete >= trouble.answers
        return time.monotonic() - began < (trouble.seconds if enough else MOST_S) - spare_s

    def troubling() -> bool:
        """The last seconds belong to the answers."""
        return time.monotonic() - began < trouble.seconds - 5 or (not troubled() and going(5.0))

    async def workers():
        return await asyncio.to_thread(server.workers)

    async with make_client() as client, asyncio.TaskGroup() as tasks:
        for number in range(CLIENTS):
            tasks.create_task(client_loop(client, server.url, work, record, dice=random.Random(number), going=going))
        tasks.create_task(
            disturb_loop(
                workers, record, dice=random.Random(99), going=troubling, pause_s=trouble.pause_s, stop_every=3
            )
        )
    return record
