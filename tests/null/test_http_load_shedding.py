"""The gate learns from workers how long requests wait, not from what is told out of a memory."""

from __future__ import annotations

import pytest

from penstock.api.admission import Admission
from penstock.api.auth import StaticApiKeys
from penstock.api.http import HttpExchange
from penstock.api.load_shedding import LoadShedder
from penstock.clock import VirtualClock
from penstock.config.limits import RequestLimits, SchedulingConfig
from penstock.errors import Overloaded
from penstock.interfaces import TtftForecast
from penstock.telemetry.service_levels import ServiceLevels
from penstock.types import Qos

from .streams import NullStreams


async def test_a_token_that_no_worker_made_ends_no_wait():
    clock, limits = VirtualClock(), RequestLimits()
    admission = Admission(limits, clock)
    gate = LoadShedder(
        admission,
        NullStreams(),
        ServiceLevels(),
        limits=limits,
        scheduling=SchedulingConfig(),
        keys=StaticApiKeys(),
    )
    with await gate.admit(_nobody(), Qos(), [10, 0]) as visit:
        visit.on_token(0, computed=False)
        visit.on_token(1, computed=False)
        assert (admission.requests, admission.usual_wait_s(0)) == (2, 1.0)
        visit.on_finished(1, 3)
        assert (admission.requests, admission.usual_wait_s(0)) == (1, 1.0)
        clock.advance(60.0)
        visit.on_token(0)
        assert admission.requests == 0
        assert admission.usual_wait_s(0) > 1.0


async def test_long_prompts_that_are_read_gently_say_nothing_of_others():
    clock, limits, streams = VirtualClock(), RequestLimits(), NullStreams()
    gate = LoadShedder(
        Admission(limits, clock),
        streams,
        ServiceLevels(),
        limits=limits,
        scheduling=SchedulingConfig(),
        keys=StaticApiKeys(),
    )
    for _ in range(20):
        streams.foreseen = TtftForecast(wait_s=0.0, prefill_s=5.0)
        with await gate.admit(_nobody(), Qos(), [50_000]) as visit:
            clock.advance(40.0)
            visit.on_token(0)
    with pytest.raises(Overloaded), await gate.admit(_nobody(), Qos(max_wait_s=20.0), [50_000]):
        pass
    streams.foreseen = TtftForecast(wait_s=0.0, prefill_s=0.5)
    with await gate.admit(_nobody(), Qos(max_wait_s=0.6), [5000]) as visit:
        visit.on_token(0)


def _nobody() -> HttpExchange:
    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        del message

    return HttpExchange({"type": "http", "headers": []}, receive, send)
