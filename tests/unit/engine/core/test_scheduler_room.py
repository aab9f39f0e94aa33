"""Room: who is admitted, shares, waits, is preempted and comes back, one rule a script."""

from __future__ import annotations

from engine_script import TOO_SMALL_FOR_TWO, check


def test_nobody_overtakes_not_even_the_small() -> None:
    check(
        """
        whole a prompt=30 max=2
        whole b prompt=40 family=1 max=2
        whole c prompt=1 family=2
        step -> a 0+30*
        step -> a 30+1*
        step -> b 0+40*, c 0+1*
        """,
        pages=16,
    )


def test_class_then_arrival() -> None:
    check(
        """
        whole late prompt=4 family=0 max=1 at=2 class=batch
        whole early prompt=4 family=1 max=1 at=1 class=batch
        whole urgent prompt=4 family=2 max=1 at=3
        step -> urgent 0+4*
        step -> early 0+4*
        step -> late 0+4*
        """,
        max_running=1,
    )


def test_what_can_never_fit_is_returned() -> None:
    check(
        """
        whole a prompt=63 max=1
        whole b prompt=64 max=1
        whole c prompt=60 max=200
        prefill d prompt=60 max=200
        step -> a 0+63*, returned b too_long, returned c too_long  | a token 0 length
        """
    )


def test_a_full_queue_returns() -> None:
    check(
        """
        whole a prompt=4 max=2
        prefill b prompt=4
        whole c prompt=4
        step -> a 0+4*, returned c queue_full
        """,
        max_queued=2,
    )


def test_a_cached_prefix_is_not_computed_again() -> None:
    check(
        """
        whole a prompt=10 max=1
        step -> a 0+10*
        whole b prompt=14 max=1
        step -> b 8+6*
        whole c prompt=8 max=2       # one token is always left to compute
        step -> c 4+4*
        cached c 4
        """
    )


def test_prompt_logprobs_need_every_position() -> None:
    world = check(
        """
        whole a prompt=10 max=1
        steps 3
        whole b prompt=10 max=2 plogs
        step -> b 0+4
        step -> b 4+4
        step -> b 8+2*
        """,
        max_chunk_tokens=4,
    )
    assert world.clients["b"].prompt_logprobs == 9


def test_choices_of_one_prompt_compute_it_once() -> None:
    check(
        """
        whole a prompt=22 max=3 seed=1
        whole b prompt=22 max=3 seed=2
        step -> a 0+8
        step -> a 8+8
        step -> a 16+6*             # the block that b still misses
        step -> a 22+1*, b 20+2*
        cached b 20
        """,
        max_chunk_tokens=8,
    )


def test_who_waits_for_a_block_computes_it_when_its_owner_goes() -> None:
    check(
        """
        whole a prompt=22 max=3 seed=1
        whole b prompt=22 max=3 seed=2
        step -> a 0+8
        cancel a
        step -> b 8+8               # what a has finished stays, the rest is b's to compute
        step -> b 16+6*
        cached b 8
        """,
        max_chunk_tokens=8,
    )


def test_nobody_is_admitted_into_the_page_that_another_will_need() -> None:
    check(
        """
        whole a prompt=7 max=6 family=0
        whole b prompt=7 max=6 family=1
        step -> a 0+7*              # b would take the last pages, and a still grows
        steps 5 -> a 11+1*          | a token 5 length
        step -> b 0+7*
        """,
        pages=4,
        max_model_len=16,
    )


def test_preempted_answers_go_on_where_they_were() -> None:
    world = check(
        """
        whole a prompt=6 max=12 family=0
        whole b prompt=6 max=12 family=1
        step -> a 0+6*, b 0+6*
        steps 2 -> a 7+1*, b 7+1*
        step -> a 8+1*, b 8+1*
        steps 3 -> a 11+1*, b 11+1*
        step -> a 12+1*, preempted 1
        load queued=1 running=1
        steps 4 -> a 16+1*          | a token 11 length
        step -> b 8+5*              | b token 7      # its first two pages were not needed by anyone
        cached b 0                  # what it had computed itself is nothing that a cache saved
        """,
        **TOO_SMALL_FOR_TWO,
    )
    assert world.scheduler.preemptions == 1


def test_several_steps_at_once_when_only_answers_are_written() -> None:
    check(
        """
        whole a prompt=1 max=9 family=0
        whole b prompt=1 max=3 family=1
        step -> a 0+1*, b 0+1*
        step -> a 1+1*, b 1+1*, x2
        step -> a 3+1*, x4
        """,
        max_steps=4,
        pages=3,
        max_model_len=12,
    )


def test_several_steps_never_cost_a_preemption() -> None:
    check(
        """
        whole a prompt=3 max=9 family=0
        whole b prompt=3 max=9 family=1
        step -> a 0+3*, b 0+3*
        step -> a 3+1*, b 3+1*      # two steps would take two pages, and there is one
        step -> a 4+1*, preempted 1
        """,
        max_steps=2,
        pages=3,
        max_model_len=12,
    )


def test_what_was_computed_after_a_stop_is_not_cached() -> None:
    world = check(
        """
        whole a prompt=3 max=9 stop=2
        step -> a 0+3*
        step -> a 3+1*, x4   | a token 1+2 stop
        """,
        max_steps=4,
        page_tokens=1,
        pages=64,
    )
    assert len(world.scheduler.memory.prefix) == 5  # the stop token itself was never an input


def test_as_many_requests_run_as_a_step_has_tokens() -> None:
    check(
        """
        whole a prompt=1 max=3
        whole b prompt=1 max=3 family=1
        whole c prompt=1 max=3 family=2
        step -> a 0+1*, b 0+1*
        step -> a 1+1*, b 1+1*
        step -> a 2+1*, b 2+1*
        step -> c 0+1*
        """,
        max_step_tokens=2,
    )


def test_several_steps_that_can_be_stopped_are_granted_whoever_waits() -> None:
    check(
        """
        whole a prompt=1 max=9 family=0
        decode b prompt=4 max=3 family=1
        step -> a 0+1*, reserved b@0
        whole c prompt=8 max=3 family=2       # for whom there is no room
        step -> a 1+1*, x3                    # a fourth would take a page that is b's
        """,
        max_steps=3,
        pages=3,
        max_model_len=12,
        stoppable=True,
        to_the_end=False,
    )
