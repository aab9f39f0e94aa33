"""Clients that send request after request with keys, at whichever gateways there are, and go on when one ends."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from .server import PATIENCE_S, PenstockServer
from .streams import AGAIN_S, Answer, BrokenAnswerError, keyed_completion, make_client

BODY = {"model": "storyteller", "prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True}
ANSWER_S = 110.0
"""For a whole answer."""

Identical = dict[str, Any]
"""What must not depend on how an answer was served (``streams.Answer.identical``)."""


class KeyedLoad:
    """Client N streams the answer to ``BODY`` with seed N, again and again, each with a key of its own."""

    def __init__(self, urls: list[str], clients: int, *, headers: Mapping[str, str] | None = None) -> None:
        """``urls``: of the gateways that there are, which may change."""
        self.urls = urls
        self.answers: list[tuple[int, Identical]] = []  # the seed, and what came
        self.failed: list[str] = []
        self.resumed = 0  # streams that went on after they had broken off
        self._clients, self._headers = clients, dict(headers or {})
        self._times: list[list[float]] = []  # of each answer: when it was asked for, then of its events
        self._halves: dict[int, str] = {}  # URLs of gateways, by seed
        self._over = threading.Event()

    def run(self, rounds: int | None = None) -> None:
        """Until ``stop``, or for so many requests of each client."""
        asyncio.run(self._run(rounds))

    def is_streaming(self, url: str) -> bool:
        """Whether a client has a part of a response of this gateway, and not half of it: such a stream is resumed."""
        return url in [*self._halves.values()]

    def stop(self) -> None:
        self._over.set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """In a thread, for the time of the block; then what is asked for is still answered."""
        with ThreadPoolExecutor(1) as pool, ExitStack() as asking:
            asking.callback(self.stop)  # before the pool waits for its thread
            asked = pool.submit(self.run)
            yield
            self.stop()
            asked.result()

    def wait_answers(self, more: int, patience_s: float) -> None:
        """Until so many more have come."""
        wanted = len(self.answers) + more
        PenstockServer.wait_for(lambda: len(self.answers) >= wanted, patience_s, f"{more} more answers")

    def differing(self, wanted: Mapping[int, Identical]) -> int:
        """How many answers are not those."""
        return sum(answer != wanted[seed] for seed, answer in self.answers)

    def longest_wait_s(self, since: float) -> float:
        """For a token, from ``since`` on at the earliest."""
        gaps = (
            later - max(earlier, since)
            for times in self._times
            for earlier, later in itertools.pairwise(times)
            if later > since
        )
        return max(gaps, default=0.0)

    async def _run(self, rounds: int | None) -> None:
        async with make_client(self._headers) as client, asyncio.TaskGroup() as group:
            for seed in range(self._clients):
                group.create_task(self._ask(client, seed, rounds))

    async def _ask(self, client: Any, seed: int, rounds: int | None) -> None:
        number = 0
        while not self._over.is_set() and number != rounds:
            at, key = (seed + number) % len(self.urls), f"{id(self)}-{seed}-{number}"
            order = self.urls[at:] + self.urls[:at]
            asked = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(ANSWER_S):
                    answer = await keyed_completion(
                        client, order, BODY | {"seed": seed}, key=key, on_chunk=partial(self._note_part, seed, order[0])
                    )
            except (BrokenAnswerError, TimeoutError) as error:
                self.failed.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(AGAIN_S)
            else:
                self._times.append([asked, *answer.times])
                self.answers.append((seed, answer.identical))
                self.resumed += answer.resumed > 0
            self._halves.pop(seed, None)
            number += 1

    def _note_part(self, seed: int, first: str, so_far: Answer) -> None:
        """A client has a further part of a response, which it asked ``first`` for."""
        if so_far.resumed == 0 and len(so_far.times) < BODY["max_tokens"] // 2:
            self._halves[seed] = first
        else:
            self._halves.pop(seed, None)


def leave_one_gateway(gateways: Sequence[PenstockServer], load: KeyedLoad) -> None:
    """Kill the last one amid a stream, and stop the others but the first, which clients then have alone."""
    *stopped, killed = gateways[1:]
    killed.wait_for(lambda: load.is_streaming(killed.url), PATIENCE_S, "asked")
    killed.kill()
    for gateway in gateways[1:]:
        load.urls.remove(gateway.url)
    for gateway in stopped:
        gateway.stop()


def undisturbed(server: PenstockServer, clients: int) -> dict[int, Identical]:
    """What ``KeyedLoad`` must get, by seed."""
    alone = KeyedLoad([server.url], clients, headers=server.key_headers())
    alone.run(rounds=1)
    assert not alone.failed, alone.failed
    return dict(alone.answers)
