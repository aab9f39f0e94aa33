"""A function that runs beside a test, which waits for what it returns or raises."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PATIENCE_S = 20


class InThread:
    """``body`` has begun."""

    def __init__(self, body: Callable[[], Any]) -> None:
        pool = ThreadPoolExecutor(1)
        self._running = pool.submit(body)
        pool.shutdown(wait=False)

    def result(self) -> Any:
        """What it returned.  Raises what it raised, and TimeoutError while it still runs."""
        return self._running.result(PATIENCE_S)
