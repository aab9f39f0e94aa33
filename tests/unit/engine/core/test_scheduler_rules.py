"""Each rule of the scheduler as a short script.

A script's line is an event or ``step``; after ``->`` stands what the step must grant, as ``name start+count`` with
``*`` where it draws, and after ``|`` what must come of it.  Tests know nothing else of the scheduler's API.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from engine_world import ROOT, World, answer, prompt_of

from penstock.config.schema import SchedulerConfig
from penstock.engine.core.plan import Arrive
from penstock.engine.core.scheduler import Scheduler
from penstock.errors import ConfigError
from penstock.types import Leg, RequestId, SamplingParams


def shown_plan(world: World) -> str:
    plan = world.plan
    parts = [f"{row.request.id} {row.start}+{row.count}{'*' * row.samples}" for row in plan.rows]
    parts += [f"x{plan.steps}"] * (plan.steps > 1)
    parts += [f"reserved {request.id}@{request.computed}" for request in plan.reserved]
    parts += [f"returned {returned.id} {returned.reason}" for returned in plan.returned]
    parts += [f"preempted {plan.preempted}"] * bool(plan.preempted)
    return ", ".join(parts)


def shown_outcome(world: World) -> str:
    parts = [f"{p.request.id} page {p.block}:{p.tokens}" for p in world.outcome.pages_done]
    parts += [
        f"{p.request.id} token {p.index}" + f"+{len(p.tokens)}" * (len(p.tokens) > 1) + f" {p.finish}" * bool(p.finish)
        for p in world.outcome.progress
    ]
    return ", ".join(parts)


def event_of(world: World, leg: str, name: str, options: dict[str, str]) -> Arrive:
    prompt = prompt_of(int(options.get("family", "0")), int(options["prompt"]))
    stop = options.get("stop")
    sampling = SamplingParams(
        seed=int(options.get("seed", "0")),
        max_tokens=int(options.get("max", "4")),
        prompt_logprobs=0 if "plogs" in options else None,
    )
    event = Arrive(
        id=RequestId(name),
        epoch=int(options.get("epoch", "0")),
        leg=Leg(leg),
        prompt=prompt,
        sampling=sampling,
        arrival=float(options.get("at", len(world.clients))),
        root=ROOT,
        priority=int(options.get("priority", "0")),
    )
    if stop is not None:  # the answer's token at this index is a stop token
        event = retold(world, event, stop_token_ids=(want(world, event)[int(stop)],))
    if "emitted" in options:
        event = retold(world, event, emitted=tuple(want(world, event)[: int(options["emitted"])]))
    return event


def want(world: World, event: Arrive) -> list[int]:
    return answer(event.prompt, event.sampling, world.config.max_model_len).tokens


def retold(world: World, event: Arrive, **changes: Any) -> Arrive:
    if "stop_token_ids" in changes:
        return replace(event, sampling=msgspec.structs.replace(event.sampling, **changes))
    return replace(event, **changes)


def perform(world: World, command: str, line: str) -> None:
    verb, *words = command.split()
    options = dict(re.findall(r"(\w+)=(\S+)", command)) | dict.fromkeys((w for w in words if "=" not in w), "")
    match verb:
        case "whole" | "prefill" | "decode":
            world.arrive(event_of(world, verb, words[0], options))
        case "grant":
            world.grant(words[0])
        case "pages":
            world.pages_arrive(words[0], int(words[1]))
        case "first":
            world.first_token(words[0])
        case "release":
            world.release(words[0])
        case "cancel":
            world.cancel(words[0])
        case "step":
            world.step()
        case "steps":
            for _ in range(int(words[0])):
                world.step()
        case "load":
            load = world.scheduler.load()
            for name, value in re.findall(r"(\w+)=(\S+)", command):
                assert getattr(load, name) == int(value), f"{line}: {load}"
        case "cached":
            request = world.find(words[0])
            assert request is not None
            assert request.cached_tokens == int(words[1]), line
        case _:
            raise ValueError(line)


def check(script: str, *, max_steps: int = 1, to_the_end: bool = True, **config: Any) -> World:
    defaults = {
        "pages": 32,
        "page_tokens": 4,
        "max_model_len": 64,
        "step_budget_ms": 1e6,
        "prefill_step_budget_ms": 1e6,
    }
    world = World(SchedulerConfig(**(defaults | config)), max_steps=max_steps)
    for line in filter(None, (line.split("#")[0].strip() for line in script.splitlines())):
        command, arrow, expected = line.partition("->")
        perform(world, command, line)
        if arrow:
            plan, bar, outcome = (part.strip() for part in expected.partition("|"))
            assert shown_plan(world) == plan, line
            if bar:
                assert shown_outcome(world) == outcome, line
    if to_the_end:
        world.run_to_completion()
    return world


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


def test_priority_then_arrival() -> None:
    check(
        """
        whole late prompt=4 family=0 max=1 at=2
        whole early prompt=4 family=1 max=1 at=1
        whole urgent prompt=4 family=2 max=1 at=3 priority=-1
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


def test_the_context_ends_the_answer() -> None:
    check(
        """
        whole a prompt=6 max=5
        step -> a 0+6*  | a token 0
        step -> a 6+1*  | a token 1 length
        """,
        max_model_len=8,
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
        whole a prompt=7 max=6 family=0
        whole b prompt=7 max=6 family=1
        step -> a 0+7*              # b would take the last pages, and a still grows
        steps 5 -> a 11+1*          | a token 5 length
        step -> b 0+7*
        """,
        pages=4,
        max_model_len=16,
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
        pages=7,
        max_model_len=20,
    )
    assert world.scheduler.preemptions == 1


def test_a_preempted_decode_leg_goes_back_to_the_gateway() -> None:
    check(
        """
        decode a prompt=6 max=12 family=0
        decode b prompt=6 max=12 family=1
        step -> reserved a@0, reserved b@0
        pages a 6
        first a
        pages b 6
        first b
        step -> a 6+1*, b 6+1*      | a token 0, b token 0, a token 1, b token 1
        steps 5 -> a 11+1*, b 11+1*
        step -> a 12+1*, returned b preempted, preempted 1
        load running=1 queued=0 awaiting=0
        """,
        pages=7,
        max_model_len=20,
    )


def test_a_prefill_leg_waits_for_credit_announces_and_holds_until_released() -> None:
    check(
        """
        prefill a prompt=10 family=0 at=0
        whole b prompt=3 family=1 max=1 at=1       # is not held up by it
        step -> b 0+3*
        grant a
        step -> a 0+4     | a page 0:4
        step -> a 4+4     | a page 1:4
        step -> a 8+2*    | a page 2:2, a token 0
        load running=0 handing_over=1 pages_used=3 tokens_in_flight=1
        step ->           |
        release a
        load handing_over=0 pages_used=0
        prefill c prompt=10 family=0
        grant c
        step -> c 8+2*    | c page 0:4, c page 1:4, c page 2:2, c token 0
        """,
        max_chunk_tokens=4,
    )


def test_a_prefill_leg_may_end_with_its_first_token() -> None:
    check(
        """
        prefill a prompt=8 max=1
        grant a
        step -> a 0+8*   | a page 0:4, a page 1:4, a token 0 length
        load handing_over=1 pages_used=2
        release a
        load pages_used=0
        """
    )


def test_hand_overs_are_never_preempted() -> None:
    check(
        """
        whole a prompt=2 max=18 family=0
        step -> a 0+2*
        prefill b prompt=12 family=1
        grant b
        step -> a 2+1*, b 0+12*
        step -> a 3+1*
        steps 4 -> a 7+1*
        step ->                     # no page to be had, and nobody but itself to take one from
        release b
        step -> a 8+1*
        """,
        pages=5,
        max_model_len=20,
    )


def test_prefill_legs_are_not_preempted_while_they_compute() -> None:
    check(
        """
        whole a prompt=1 max=18 family=0
        step -> a 0+1*
        prefill b prompt=12 family=1
        grant b
        steps 7 -> a 7+1*, b 6+1
        steps 2 -> b 8+1            # no page for a, which takes none from who may be being copied
        steps 3 -> b 11+1*
        """,
        pages=5,
        max_model_len=20,
        max_chunk_tokens=1,
        to_the_end=False,
    )


def test_a_decode_leg_starts_with_all_pages_and_the_first_token() -> None:
    check(
        """
        decode a prompt=9 max=4
        step -> reserved a@0
        pages a 8                   # one is missing: it could compute that, but it is not asked to
        step ->
        pages a 9
        step ->
        first a
        first a
        step -> a 9+1*              | a token 0, a token 1
        decode b prompt=9 family=1 max=4
        step -> a 10+1*, reserved b@0
        first b
        first b
        step -> a 11+1*             | b token 0, a token 3 length
        pages b 9
        step -> b 9+1*              | b token 1
        """
    )


def test_a_decode_leg_takes_what_is_cached_and_pulls_the_rest() -> None:
    check(
        """
        whole a prompt=8 max=1
        step -> a 0+8*
        decode b prompt=11 max=4
        step -> reserved b@8
        load awaiting=1 running=0
        step ->
        first b
        step ->            | b token 0
        pages b 11
        step -> b 11+1*    | b token 1
        """
    )


def test_arrived_pages_are_cached_like_computed_ones() -> None:
    check(
        """
        decode a prompt=9 max=2
        step -> reserved a@0
        pages a 9
        cancel a
        whole b prompt=9 max=1
        step -> b 8+1*
        """
    )


def test_pages_that_did_not_arrive_are_not_cached() -> None:
    check(
        """
        decode a prompt=9 max=2
        step -> reserved a@0
        pages a 5
        cancel a
        whole b prompt=9 max=1
        step -> b 4+5*
        """
    )


def test_a_first_token_that_is_the_last_ends_in_silence() -> None:
    check(
        """
        decode a prompt=9 max=1
        step -> reserved a@0
        first a
        load awaiting=0 pages_used=0
        step ->  |
        """
    )


def test_a_later_epoch_replaces_and_an_earlier_one_is_ignored() -> None:
    check(
        """
        whole a prompt=9 max=4 epoch=1
        step -> a 0+9*
        whole a prompt=9 max=4 epoch=1
        whole a prompt=9 max=4 epoch=0
        step -> a 9+1*
        whole a prompt=9 max=4 epoch=2 emitted=2
        load running=0 queued=1 pages_used=0
        step -> a 8+3*   | a token 2
        """
    )


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


def test_a_request_that_goes_during_a_step_is_dropped_from_it() -> None:
    world = check("whole a prompt=9 max=4", to_the_end=False)
    world.arrive(event_of(world, "whole", "b", {"prompt": "9", "family": "1"}))
    world.step(cancel_in_flight="a")
    assert shown_outcome(world) == "b token 0"
    assert world.scheduler.load().pages_used == 3
    world.run_to_completion()


def test_cached_pages_of_one_who_goes_during_its_first_step_are_not_announced() -> None:
    world = check(
        """
        whole a prompt=9 max=1
        step -> a 0+9*
        prefill b prompt=9
        grant b
        """,
        to_the_end=False,
    )
    world.step(cancel_in_flight="b")
    assert shown_plan(world) == "b 8+1*"
    assert shown_outcome(world) == ""


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
