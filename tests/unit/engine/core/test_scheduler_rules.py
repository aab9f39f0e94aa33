"""Steps: what is granted, cut, drawn and ended, one rule a script."""

from __future__ import annotations

import pytest
from engine_script import check, event_of, shown_outcome

from penstock.config.schema import SchedulerConfig
from penstock.engine.core.scheduler import Scheduler
from penstock.errors import ConfigError


def test_a_prompt_then_its_answer() -> None:
    check(
        """
        whole a prompt=6 max=3
        load queued=1 running=0 tokens_in_flight=9 pages_used=0 pages_free=32
        step -> a 0+6*  | a token 0
        load queued=0 running=1 tokens_in_flight=3 pages_used=2 pages_free=30
        step -> a 6+1*  | a token 1
        step -> a 7+1*  | a token 2 length
        load queued=0 running=0 tokens_in_flight=0 pages_used=0 pages_free=32
        step ->         |
        """
    )


def test_chunks_end_with_pages_and_answers_go_first() -> None:
    check(
        """
        whole a prompt=3 max=9
        step -> a 0+3*
        whole b prompt=22 family=1 max=2
        step -> a 3+1*, b 0+8
        step -> a 4+1*, b 8+8
        step -> a 5+1*, b 16+6*
        step -> a 6+1*, b 22+1*
        """,
        max_chunk_tokens=10,
    )


def test_the_token_budget_is_shared_oldest_prompt_first() -> None:
    check(
        """
        whole a prompt=9 family=0
        whole b prompt=9 family=1
        whole c prompt=9 family=2
        step -> a 0+9*, b 0+4
        load queued=1 running=2     # who would get nothing is not let in
        step -> a 9+1*, b 4+5*, c 0+8
        step -> a 10+1*, b 9+1*, c 8+1*
        """,
        max_step_tokens=14,
    )


def test_a_step_budget_below_a_page_still_moves() -> None:
    check(
        """
        whole a prompt=6 max=2
        step -> a 0+3
        step -> a 3+3*
        step -> a 6+1*
        """,
        max_step_tokens=3,
    )


def test_predicted_time_cuts_chunks_but_never_to_nothing() -> None:
    check(
        """
        whole a prompt=30 max=9
        step -> a 0+12       # a quarter millisecond a token before anything is measured, and a millisecond a step
        step -> a 12+12
        step -> a 24+6*
        whole b prompt=9 family=1
        step -> a 30+1*, b 0+4
        step -> a 31+1*, b 4+4
        step -> a 32+1*, b 8+1*
        """,
        prefill_step_budget_ms=4.5,
        step_budget_ms=0.1,
    )


@pytest.mark.parametrize("leg", ["whole", "decode"])
def test_an_answer_that_the_context_has_no_room_for_is_refused_and_not_cut_short(leg: str) -> None:
    check(
        f"""
        {leg} a prompt=6 max=3
        {leg} b prompt=6 max=2
        step -> {"b 0+6*" if leg == "whole" else "reserved b@0"}, returned a too_long
        """,
        max_model_len=8,
        to_the_end=False,
    )


def test_an_answer_of_no_named_length_is_given_back_where_the_context_ends() -> None:
    check(
        """
        whole a prompt=6 max=5 expected=4
        step -> a 0+6*  | a token 0
        load tokens_in_flight=2
        step -> a 6+1*  | a token 1
        step -> returned a too_long
        load pages_used=0
        """,
        max_model_len=8,
        to_the_end=False,
    )


def test_what_an_answer_may_become_counts_as_what_is_expected() -> None:
    check(
        """
        whole a prompt=6 max=50 expected=4
        load tokens_in_flight=10
        whole b prompt=6 max=50
        load tokens_in_flight=66
        """,
        to_the_end=False,
    )


def test_a_stop_token_ends_the_answer() -> None:
    check(
        """
        whole a prompt=6 max=9 stop=2 seed=3
        step -> a 0+6*  | a token 0
        steps 2         -> a 7+1*  | a token 2 stop
        load pages_used=0
        """
    )


def test_emitted_tokens_count_as_output() -> None:
    check(
        """
        whole a prompt=6 max=5 emitted=3
        step -> a 0+9*   | a token 3
        step -> a 9+1*   | a token 4 length
        """
    )


def test_a_request_that_goes_during_a_step_is_dropped_from_it() -> None:
    world = check("whole a prompt=9 max=4", to_the_end=False)
    world.arrive(event_of(world, "whole", "b", {"prompt": "9", "family": "1"}))
    world.step(cancel_in_flight="a")
    assert shown_outcome(world) == "b token 0"
    assert world.scheduler.load().pages_used == 3
    world.run_to_completion()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"pages": 15}, "needs 16 KV pages of 4 tokens"),
        ({"max_running": 0}, "max_running must be at least 1"),
        ({"page_tokens": 0}, "page_tokens must be at least 1"),
    ],
)
def test_settings_that_cannot_be(wrong: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Scheduler(SchedulerConfig(**({"pages": 16, "page_tokens": 4, "max_model_len": 64} | wrong)))


def test_plan_and_commit_alternate() -> None:
    scheduler = Scheduler(SchedulerConfig(pages=128))
    plan = scheduler.plan(0.0)
    with pytest.raises(RuntimeError, match="not been committed"):
        scheduler.plan(0.0)
    scheduler.commit(plan, (), 0.0)
    with pytest.raises(RuntimeError, match="not the plan in flight"):
        scheduler.commit(plan, (), 0.0)
