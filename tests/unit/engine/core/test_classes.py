"""Classes and deadlines: who fills, who yields, who is promoted, who expires, one rule a script."""

from __future__ import annotations

from engine_script import check

ONE_ROW = {"step_budget_ms": 1.4, "prefill_step_budget_ms": 2.1}
"""Before anything is measured a step takes 1 ms, a token 1/4, a draw 1/16: time for one answer, or a short prompt."""


def test_batch_work_yields_with_the_next_step() -> None:
    world = check(
        """
        whole b prompt=4 max=9 class=batch
        step -> b 0+4*
        step -> b 4+1*
        whole a prompt=4 max=3 family=1
        step -> a 0+4*
        step -> a 4+1*
        step -> a 5+1*      | a token 2 length
        step -> b 5+1*
        """,
        **ONE_ROW,
    )
    assert world.scheduler.rows_skipped == 3
    assert world.scheduler.preemptions == 0


def test_batch_work_fills_what_is_left() -> None:
    check(
        """
        whole b prompt=4 max=9 class=batch
        step -> b 0+4*
        whole c prompt=4 max=9 class=batch family=2
        step -> b 4+1*, c 0+4*
        whole a prompt=4 max=3 family=1
        step -> b 5+1*, a 0+4*      # 2.4 ms, and c would be too much
        step -> a 4+1*, b 6+1*, c 4+1*
        """,
        step_budget_ms=2.1,
        prefill_step_budget_ms=2.5,
    )


def test_batch_prompts_wait_for_interactive_ones() -> None:
    check(
        """
        whole b prompt=24 max=2 class=batch
        step -> b 0+8
        whole a prompt=16 max=2 family=1
        step -> a 0+8
        step -> a 8+8*
        step -> a 16+1*, b 8+4
        step -> b 12+8
        """,
        max_step_tokens=8,
    )


def test_batch_work_gives_its_pages_to_interactive_requests() -> None:
    world = check(
        """
        whole b prompt=6 max=12 class=batch
        step -> b 0+6*
        whole a prompt=24 max=2 family=1
        step -> a 0+24*, preempted 1
        load queued=1 running=1
        step -> a 24+1*     | a token 1 length
        step -> b 0+7*
        """,
        pages=7,
        max_model_len=26,
    )
    assert world.scheduler.yields == 1
    assert world.clients["b"].finish is not None


def test_nobody_is_preempted_in_vain() -> None:
    world = check(
        """
        prefill p prompt=12 max=2 family=2
        grant p
        step -> p 0+12*     # its pages are held for a receiver
        whole b prompt=4 max=2 class=batch
        step -> b 0+4*
        whole a prompt=24 max=2 family=1
        step -> b 4+1*
        release p
        step -> a 0+24*
        """,
        pages=7,
        max_model_len=26,
    )
    assert world.scheduler.yields == 0


def test_a_decode_leg_that_yields_goes_back_to_its_gateway() -> None:
    check(
        """
        decode b prompt=8 max=9 class=batch
        step -> reserved b@0
        whole a prompt=24 max=2 family=1
        step -> a 0+24*, returned b yielded, preempted 1
        """,
        pages=7,
        max_model_len=26,
    )


def test_batch_work_that_is_left_out_goes_on_as_interactive_in_the_end() -> None:
    world = check(
        """
        whole b prompt=4 max=3 class=batch
        step -> b 0+4*
        whole a prompt=4 max=12 family=1
        step -> a 0+4*
        step -> a 4+1*
        step -> a 5+1*
        step -> b 4+1*, a 6+1*      # three seconds without a token
        step -> b 5+1*, a 7+1*      | b token 2 length, a token 4
        """,
        batch_patience_s=3.0,
        clock_s=1.0,
        **ONE_ROW,
    )
    assert world.find("b") is None


def test_one_request_of_a_class_is_promoted_each_time_it_was_left_out_for_so_long() -> None:
    check(
        """
        whole b prompt=4 max=9 class=batch
        step -> b 0+4*
        whole c prompt=4 max=9 class=batch family=2
        step -> b 4+1*, c 0+4*
        whole d prompt=4 max=9 class=batch family=3
        step -> b 5+1*, c 4+1*, d 0+4*
        whole a prompt=4 max=16 family=1
        step -> a 0+4*
        steps 3 -> b 6+1*, a 6+1*               # three seconds without a token
        steps 3 -> b 9+1*, c 5+1*, a 9+1*       # and three more
        steps 3 -> c 8+1*, d 4+1*, a 12+1*
        """,
        batch_patience_s=3.0,
        clock_s=1.0,
        **ONE_ROW,
    )


def test_one_place_is_lent_to_batch_work_and_given_back_to_it() -> None:
    check(
        """
        whole b prompt=4 max=1 class=batch
        whole a prompt=4 max=2 family=1
        whole c prompt=4 max=2 family=2
        step -> a 0+4*
        step -> a 4+1*
        step -> c 0+4*
        step -> c 4+1*
        whole d prompt=4 max=2 family=2
        step -> b 0+4*              # promoted, and it came before d
        step -> d 0+4*
        """,
        max_running=1,
        clock_s=1.0,
        batch_patience_s=4.0,
    )


def test_who_has_waited_for_as_long_as_it_may_is_not_computed() -> None:
    world = check(
        """
        whole a prompt=4 max=3
        whole b prompt=4 family=1 wait=1.5
        whole c prompt=4 family=2 max=1
        step -> a 0+4*
        step -> a 4+1*
        step -> a 5+1*, returned b deadline
        step -> c 0+4*
        """,
        max_running=1,
        clock_s=1.0,
    )
    assert world.scheduler.expired == 1


def test_an_answer_that_has_begun_has_no_deadline() -> None:
    check(
        """
        whole a prompt=6 max=12 family=0
        whole b prompt=6 max=12 family=1 wait=2
        step -> a 0+6*, b 0+6*
        steps 7 -> a 12+1*, preempted 1
        steps 4 -> a 16+1*
        step -> b 8+5*
        """,
        pages=7,
        max_model_len=20,
        clock_s=1.0,
    )
