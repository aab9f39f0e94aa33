"""Pages that are slow to come are computed where they are wanted, when that is predicted to be sooner."""

from __future__ import annotations

from typing import cast

import pytest
from tests.late_pages import LateCarrier

from null.worker_stage import WINDOWED, Stage, StageWorker, expected
from penstock.engine.service.kv_transfer import RecomputeEstimate
from penstock.kv.page_memory import KvLayout
from penstock.kv.transfer.events import HedgeWon
from penstock.types import RequestId, Role

PROMPT = range(100, 170)  # 4 full pages and a part of one


def late(layout: KvLayout | None = None) -> tuple[Stage, StageWorker, LateCarrier]:
    """Everything is computed and told, and no page has come."""
    stage = Stage(carrier=LateCarrier, **({"layout": layout} if layout else {}))
    p, d = stage.worker("p", Role.PREFILL), stage.worker("d", Role.DECODE)
    stage.ask_split(PROMPT, p, d)
    stage.run()
    carrier = cast(LateCarrier, d.carrier)
    assert carrier.flying
    return stage, d, carrier


def figures(stage: Stage) -> dict[str, float]:
    stage.wait(0.5)
    stage.run()
    stage.wait(0.3)
    return stage.reports[stage.workers[1].name].counters


@pytest.mark.parametrize("layout", [None, WINDOWED], ids=["full", "windowed"])
@pytest.mark.parametrize("came", [0, 3])
def test_what_is_slow_to_come_is_computed_here(layout: KvLayout | None, came: int) -> None:
    stage, _, carrier = late(layout)
    carrier.land(came)
    counters = figures(stage)
    assert stage.answer() == expected(len(PROMPT))
    assert counters["hand_overs_outrun"] == 1
    assert counters["transfer_wait_seconds"] > 0
    assert "hand_overs_failed" not in counters
    assert not stage.returned
    if layout is None:  # what has come counts: it was named in the cache
        assert counters["prompt_tokens_computed"] == len(PROMPT) + 1 - 16 * came
    assert not carrier.flying
    stage.assert_idle()


@pytest.mark.parametrize(("layout", "here", "spared"), [(None, 48, 48), (WINDOWED, 32, 0)], ids=["full", "windowed"])
def test_only_what_computing_can_go_on_from_is_predicted_to_be_spared(
    layout: KvLayout | None, here: int, spared: int
) -> None:
    stage, d, carrier = late(layout)
    asked: list[tuple[RequestId, int, int]] = []
    d.receiver.hedge_policy.predict = lambda *what: asked.append(what)
    carrier.land(3)
    stage.wait(0.2)
    request, start, stop = asked[-1]
    pace = RecomputeEstimate(d.scheduler)
    assert start == here
    assert pace.predict(request, start, stop) == pace.predict(request, spared, stop)
    assert (pace.predict(request, start, stop) == pace.predict(request, 0, stop)) == (spared == 0)
    carrier.land(100)
    stage.run()
    stage.assert_idle()


def test_one_prompt_a_turn_is_computed_here() -> None:
    """Each adds to the work that the next would have to wait for."""
    stage, d, _ = late()
    stage.ask_split(range(300, 370), *stage.workers, request=RequestId("other"))
    stage.run()
    d.receiver.hedge_policy.predict = lambda request, start, stop: 0.0
    now = stage.clock.now() + 0.5
    turns = [[effect for effect in d.receiver.tick(now).events if isinstance(effect, HedgeWon)] for _ in range(3)]
    assert [[effect.request for effect in outrun] for outrun in turns] == [["r"], ["other"], []]


def test_a_tenant_pays_once_for_a_prompt_that_was_to_come_and_is_computed_here() -> None:
    stage, d, _ = late()
    charged: list[int] = []
    fair = d.scheduler._table.fair
    admitted = fair.charge_prompt
    d.scheduler._table.fair.charge_prompt = lambda line, tokens, weight: (
        charged.append(tokens),
        admitted(line, tokens, weight),
    )
    figures(stage)
    assert stage.answer() == expected(len(PROMPT))
    assert charged == [0]


def test_what_comes_in_time_is_waited_for() -> None:
    stage, d, carrier = late()
    d.receiver.hedge_policy.predict = lambda request, start, stop: 10.0
    while carrier.flying:
        stage.wait(0.1)
        carrier.land(1)
    counters = figures(stage)
    assert stage.answer() == expected(len(PROMPT))
    assert "hand_overs_outrun" not in counters
    assert counters["transfer_wait_seconds"] > 0.3
    stage.assert_idle()


def test_where_nobody_can_compute_it_it_is_waited_for() -> None:
    stage, d, carrier = late()
    d.receiver.hedge_policy.predict = lambda request, start, stop: None
    stage.wait(0.5)
    assert carrier.flying
    carrier.land(100)
    stage.run()
    assert stage.answer() == expected(len(PROMPT))
    stage.assert_idle()
