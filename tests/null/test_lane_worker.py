"""A worker with two lanes as its gateways see it: the same answers, and nothing is held for whom nobody waits."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engine.core.plan import Lane
from penstock.engine.lane_loop import LaneLoop
from penstock.engine.runner.null import NullLanes
from penstock.engine.service.moves import Moves
from penstock.types import Duty, Leg, Role
from penstock.wire.messages import Cancel

from .router_town import WIDE, Town
from .worker_stage import Stage, StageWorker, expected

CHUNK_S, STEP_S = 0.004, 0.001


def lane_worker(stage: Stage, **scheduler: int) -> StageWorker:
    return with_lanes(stage, stage.worker("w", Role.BOTH, **scheduler))


def with_lanes(stage: Stage, worker: StageWorker, step_s: float = STEP_S) -> StageWorker:
    runner = NullLanes(stage.clock, lambda plan: CHUNK_S if plan.lane is Lane.READING else step_s, vocab=1000)
    loop = LaneLoop(worker.mailbox, worker.scheduler, runner, stage.clock)
    loop.on_plan = worker.mailbox.planned
    worker.loop = loop  # type: ignore[assignment]
    return worker


@pytest.mark.parametrize("pages", [64, 20])
def test_answers_are_those_of_any_worker(pages: int) -> None:
    stage = Stage()
    worker = lane_worker(stage, pages=pages, max_chunk_tokens=32)
    lengths = {f"r{n}": 1 + 61 * n % 240 for n in range(8)}
    for name, length in lengths.items():
        stage.ask([i % 50 for i in range(length)], to=worker, request=name)
        stage.turn()
    stage.run()
    for name, length in lengths.items():
        assert stage.answer(name) == expected(length)
    stage.assert_idle()
    counters = stage.reports[worker.name].counters
    assert counters["generation_tokens"] == 8 * len(lengths)
    assert 0 < counters["step_seconds"] < 2 * stage.clock.now()


@pytest.mark.parametrize("turns", [1, 2, 3, 5, 9])
def test_who_cancels_at_any_time_is_forgotten_with_the_lane(turns: int) -> None:
    stage = Stage()
    worker = lane_worker(stage, max_chunk_tokens=32)
    stage.ask([1] * 100, to=worker, request="gone")
    stage.ask([2] * 20, to=worker, request="stays", seed=3)
    for _ in range(turns):
        stage.turn()
    worker.link.send(Cancel(request="gone", epoch=1))  # type: ignore[arg-type]
    stage.run()
    assert len(stage.answer("stays")) == 8
    stage.assert_idle()


def test_a_worker_that_stops_gives_back_what_is_under_way() -> None:
    stage = Stage()
    worker = lane_worker(stage, max_chunk_tokens=32)
    for name in ("a", "b"):
        stage.ask([len(name)] * 60, to=worker, request=name, leg=Leg.WHOLE)
    for _ in range(3):
        stage.turn()
    worker.mailbox.drain_out()
    stage.run()
    assert {returned.request for _, returned in stage.returned} == {"a", "b"}
    stage.assert_idle()


@pytest.mark.parametrize("turns", [1, 2, 3])
async def test_an_answer_that_moves_is_handed_over_behind_its_lane(monkeypatch: pytest.MonkeyPatch, turns: int) -> None:
    """Its last page is written to until then."""
    told: list[bool] = []
    tell = Moves._tell

    def telling(self: Moves, move: Any, *rest: Any) -> None:
        told.append(move.request.under_way)
        tell(self, move, *rest)

    monkeypatch.setattr(Moves, "_tell", telling)
    async with Town(*WIDE, pages=256) as town:
        for name in ("decode-0", "decode-1"):
            with_lanes(town.stage, town.worker(name), step_s=0.004)
        clients = [town.ask(f"r{i}", prompt=tuple(range(i, i + 40 + 7 * i)), max_tokens=60) for i in range(3)]
        await town.until(lambda: all(len(client.tokens) > 3 for client in clients))
        for _ in range(turns):
            await town.turn()
        await town.tell("decode-0", duty=Duty.DRAIN)
        await town.finish(*clients)
        for client in clients:
            client.assert_true_answer()
        await town.assert_idle()
    assert told
    assert not any(told)
