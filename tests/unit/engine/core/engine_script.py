"""Scripts of what happens to one scheduler, and what each step must grant and bring.

A script's line is an event or ``step``; after ``->`` stands what the step must grant, as ``name start+count`` with
``*`` where it draws, and after ``|`` what must come of it.  Tests know nothing else of the scheduler's API.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import msgspec
from engine_world import World
from glass_model import ROOT, answer, prompt_of

from penstock.config.schema import SchedulerConfig
from penstock.engine.core.events import AddRequest
from penstock.types import Qos, RequestId, RequestStage, SamplingParams, ServiceClass

TOO_SMALL_FOR_TWO = {"pages": 7, "max_model_len": 20}
"""Room for two prompts of 6 tokens, and for one answer of 12."""


def shown_plan(world: World) -> str:
    plan = world.plan
    parts = [f"{row.request.id} {row.start}+{row.count}{'*' * row.samples}" for row in plan.rows]
    parts += [f"x{plan.steps}"] * (plan.steps > 1)
    parts += [f"reserved {request.id}@{request.computed}" for request in plan.reserved]
    parts += [f"returned {returned.id} {returned.reason}" for returned in plan.returned]
    parts += [f"preempted {plan.preempted}"] * bool(plan.preempted)
    return ", ".join(parts)


def shown_outcome(world: World) -> str:
    parts = [f"{p.request.id} page {p.piece}:{p.tokens}" for p in world.outcome.completed_pages]
    parts += [
        f"{p.request.id} token {p.index}" + f"+{len(p.tokens)}" * (len(p.tokens) > 1) + f" {p.finish}" * bool(p.finish)
        for p in world.outcome.new_tokens
    ]
    return ", ".join(parts)


def event_of(world: World, leg: str, name: str, options: dict[str, str]) -> AddRequest:
    prompt = prompt_of(int(options.get("family", "0")), int(options["prompt"]))
    stop = options.get("stop")
    sampling = SamplingParams(
        seed=int(options.get("seed", "0")),
        max_tokens=int(options.get("max", "4")),
        prompt_logprobs=0 if "plogs" in options else None,
    )
    event = AddRequest(
        id=RequestId(name),
        epoch=int(options.get("epoch", "0")),
        stage=RequestStage(leg),
        prompt=prompt,
        sampling=sampling,
        arrival=float(options.get("at", len(world.clients))),
        root=ROOT,
        qos=claim_of(options),
        open_ended="expected" in options,
        expected_tokens=int(options.get("expected", "0")),
    )
    if stop is not None:  # the answer's token at this index is a stop token
        event = retold(world, event, stop_token_ids=(want(world, event)[int(stop)],))
    if "emitted" in options:
        event = retold(world, event, emitted=tuple(want(world, event)[: int(options["emitted"])]))
    return event


def claim_of(options: dict[str, str]) -> Qos:
    return Qos(
        tenant=options.get("tenant", ""),
        weight=float(options.get("weight", "1")),
        service=ServiceClass[options.get("class", "interactive").upper()],
        max_wait_s=float(options["wait"]) if "wait" in options else None,
    )


def want(world: World, event: AddRequest) -> list[int]:
    return answer(event.prompt, event.sampling, world.config.max_model_len).tokens


def retold(world: World, event: AddRequest, **changes: Any) -> AddRequest:
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
        case "here":
            world.compute_here(words[0])
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


def check(script: str, *, max_steps: int = 1, to_the_end: bool = True, clock_s: float = 0.0, **config: Any) -> World:
    """``clock_s``: what a step takes by the clock; nothing is learned of it."""
    defaults = {
        "pages": 32,
        "page_tokens": 4,
        "max_model_len": 64,
        "step_budget_ms": 1e6,
        "prefill_step_budget_ms": 1e6,
    }
    world = World(SchedulerConfig(**(defaults | config)), max_steps=max_steps, clock_s=clock_s)
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
