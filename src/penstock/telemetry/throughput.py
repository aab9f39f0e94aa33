"""A line in the log every ten seconds while a gateway is busy: how many requests are open, how fast tokens come.

Knows nothing about whose requests they are.
"""

from __future__ import annotations

import asyncio
import logging

from penstock.clock import Clock
from penstock.telemetry.log import log_event
from penstock.telemetry.registry import Metrics

log = logging.getLogger("penstock.gateway")

INTERVAL_S = 10.0


class ThroughputLog:
    """Logs the throughput of one gateway."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._at = clock.now()
        self._prompt, self._answers = metrics.token_totals()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.write_line()

    def write_line(self) -> None:
        """Write the line, unless nothing has happened since the last look and nothing is open."""
        now, (prompt, answers) = self._clock.now(), self._metrics.token_totals()
        seconds = max(now - self._at, 1e-9)
        read, written = prompt - self._prompt, answers - self._answers
        self._at, self._prompt, self._answers = now, prompt, answers
        requests = self._metrics.open_requests()
        if not (read or written or requests):
            return
        rows = self._metrics.worker_rows()
        log_event(
            log,
            logging.INFO,
            "throughput",
            open_requests=requests,
            running=sum(row["running"] for row in rows),
            queued=sum(row["queued"] for row in rows),
            prompt_tokens_per_s=round(read / seconds, 1),
            generation_tokens_per_s=round(written / seconds, 1),
        )
