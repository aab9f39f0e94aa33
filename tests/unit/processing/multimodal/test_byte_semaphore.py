"""Memory that threads share: never more than the limit, but for who is alone, and nobody waits for ever."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from penstock.processing.multimodal.memory import ByteSemaphore


def test_never_more_than_the_limit_and_who_wants_more_than_all_has_it_alone() -> None:
    budget = ByteSemaphore(100)
    most: list[int] = []
    lock = threading.Lock()

    def work(nbytes: int) -> None:
        with budget.acquire(nbytes), lock:
            most.append(budget.held)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, [30, 70, 250, 40, 60, 100, 10] * 20))
    assert len(most) == 140
    assert all(held <= 100 or held == 250 for held in most)
    assert budget.held == 0
