"""Whatever happens in whatever order: no page lost or owned twice, every answer right, and everything ends.

An operation is four small numbers, read against the state in which it is applied, so that every list of them means
something and a failing one can be shortened.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from engine_world import MOST_GUESSES, World
from glass_model import ROOT, STOP, answer, prompt_of
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from msgspec import structs

from penstock.config.schema import SchedulerConfig
from penstock.engine.core.events import AddRequest
from penstock.engine.core.plan import SampledTokens, ScheduledTokens
from penstock.engine.core.request import Request, RequestStatus
from penstock.hashing import block_hashes
from penstock.kv_spec import FULL_ATTENTION, KvSpec, max_pages
from penstock.types import Qos, RequestId, RequestStage, SamplingParams, ServiceClass

MAX_LEN = 32
MOVES = (
    ("arrive",) * 7
    + ("step",) * 5
    + ("pages", "first", "here", "grant", "release", "cancel", "in_flight", "resubmit", "stale")
)
OF = {
    "pages": RequestStatus.RESERVED,
    "first": RequestStatus.RESERVED,
    "here": RequestStatus.RESERVED,
    "grant": RequestStatus.UNGRANTED,
    "release": RequestStatus.HANDOVER,
}
"""In which state a request must be for these."""

LEGS = (
    RequestStage.WHOLE,
    RequestStage.WHOLE,
    RequestStage.WHOLE,
    RequestStage.DECODE,
    RequestStage.DECODE,
    RequestStage.PREFILL,
)

STATE = KvSpec(window=1, state_interval=3)  # blocks here, of whatever size
REACHES = (
    (FULL_ATTENTION,),
    (FULL_ATTENTION, KvSpec(window=5)),
    (KvSpec(window=3),),
    (FULL_ATTENTION, KvSpec(chunk=8), KvSpec(window=6), KvSpec(window=6)),
    (FULL_ATTENTION, STATE, STATE),
    (FULL_ATTENTION, KvSpec(window=6), STATE),
)

Move = tuple[str, int, int, int]
moves = st.lists(
    st.tuples(st.sampled_from(MOVES), st.integers(0, 999), st.integers(0, 999), st.integers(0, 999)),
    min_size=20,
    max_size=80,
)


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    size = draw(st.sampled_from([1, 4, 16]))
    reaches = tuple(
        reach if reach.state_interval is None else structs.replace(reach, state_interval=reach.state_interval * size)
        for reach in draw(st.sampled_from(REACHES))
    )
    step, chunk = draw(st.sampled_from([64, 64, 5, 1])), draw(st.sampled_from([1, 3, 16, 64]))
    least = max_pages(reaches, MAX_LEN, ahead=min(step, chunk), page_tokens=size)
    return SchedulerConfig(
        pages=least + draw(st.integers(0, least)),
        page_tokens=size,
        reaches=reaches,
        max_model_len=MAX_LEN,
        max_running=draw(st.sampled_from([8, 8, 3, 1])),
        max_step_tokens=step,
        max_chunk_tokens=chunk,
        step_budget_ms=draw(st.sampled_from([0.5, 3.0, 100.0, 100.0])),
        prefill_step_budget_ms=draw(st.sampled_from([0.5, 100.0])),
        max_queued=draw(st.sampled_from([3, 100, 100])),
        batch_step_budget_ms=draw(st.sampled_from([0.5, 250.0])),
        contended_step_ms=draw(st.sampled_from([0.5, 20.0])),
        batch_patience_s=draw(st.sampled_from([0.05, 5.0])),
        even_pace=draw(st.booleans()),
        stoppable=draw(st.booleans()),
    )


def arrival(name: str, epoch: int, a: int, b: int, *, size: int) -> AddRequest:
    """A request made of two numbers."""
    prompt = prompt_of(a % 2, 1 + a % 13)
    sampling = SamplingParams(
        seed=b % 3,
        max_tokens=1 + b % 19,
        min_tokens=(0, 0, 3)[b % 3],
        stop_token_ids=((), (STOP,))[a % 5 == 0],
        prompt_logprobs=(None, None, None, 0)[b % 4],
    )
    whole = answer(prompt, sampling, MAX_LEN).tokens
    return AddRequest(
        id=RequestId(name),
        epoch=epoch,
        stage=LEGS[b % 6],
        prompt=prompt,
        sampling=sampling,
        arrival=a % 7,
        root=ROOT,
        hashes=tuple(block_hashes(ROOT, prompt, page_tokens=size)) if a % 2 else (),
        emitted=tuple(whole[: b % len(whole)]) if b % 5 == 0 else (),
        qos=Qos(tenant="xyz"[b % 3], weight=1 + b % 2, service=ServiceClass(int(a % 4 == 0))),
    )


def pick(world: World, number: int, *statuses: RequestStatus) -> str | None:
    """One of the requests in these states, or in any."""
    names = [r.id for r in world.requests() if not statuses or r.status in statuses]
    return names[number % len(names)] if names else None


def apply(world: World, move: Move) -> None:
    kind, number, a, b = move
    if kind == "step":
        for _ in range(1 + number % 3):
            world.step()
        return
    if kind == "arrive":
        name = f"r{number % 40}"
        present = world.clients.get(name)
        epoch = 0 if present is None else present.event.epoch + 1
        world.arrive(arrival(name, epoch, a, b, size=world.config.page_tokens))
        return
    if kind == "resubmit":
        for name in [name for name, client in world.clients.items() if client.returned]:
            world.resubmit(name)
        return
    found = pick(world, number, *([OF[kind]] if kind in OF else []))
    if found is None:
        return
    match kind:
        case "pages":
            world.pages_arrive(found, a % (MAX_LEN + 1))
        case "first" if not world.clients[found].prefilled:
            world.first_token(found)
        case "here" if not world.clients[found].prefilled:
            world.compute_here(found)
        case "grant":
            world.grant(found)
        case "release":
            world.release(found)
        case "cancel":
            world.cancel(found)
        case "in_flight":
            world.step(cancel_in_flight=found)
        case "stale":
            request = world.find(found)
            world.arrive(replace(world.clients[found].event, epoch=world.clients[found].event.epoch - a % 2))
            assert world.find(found) is request


class Guesser:
    """Knows the right tokens, and gives them or others, as many as it likes."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.stood = self.fell = 0
        self.asked: set[RequestId] = set()

    def propose(self, rows: Sequence[ScheduledTokens]) -> list[tuple[int, ...]]:
        self.asked |= {row.request.id for row in rows}
        return [self.guess(row.request) for row in rows] if self.random.random() < 0.8 else []

    def guess(self, request: Request) -> tuple[int, ...]:
        right = answer(request.prompt, request.sampling, MAX_LEN).tokens[len(request.output) :]
        most = min(self.random.randrange(MOST_GUESSES + 1), request.local_end - request.known - 1)
        wrong = self.random.randrange(8)
        return tuple(token if index != wrong else token + 1 for index, token in enumerate(right[: max(most, 0)]))

    def on_step(self, rows: Sequence[ScheduledTokens], drawn: Sequence[SampledTokens], seconds: float) -> None:
        for row, new in zip(rows, drawn, strict=True):
            self.stood += len(new.tokens) - 1
            self.fell += len(row.draft) - (len(new.tokens) - 1)

    def remove_request(self, request: RequestId) -> None:
        self.asked.discard(request)


@given(
    config=configs(),
    max_steps=st.sampled_from([1, 1, 4]),
    seconds=st.sampled_from([None, 0.002, 0.03, 0.03]),
    guesser=st.none() | st.builds(Guesser, st.integers(0, 99)),
    moves=moves,
)
@settings(
    max_examples=int(os.environ.get("PENSTOCK_EXAMPLES", "80")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
def test_no_page_is_lost_and_every_answer_is_right(
    config: SchedulerConfig, max_steps: int, seconds: float | None, guesser: Guesser | None, moves: list[Move]
) -> None:
    if any(reach.state_interval for reach in config.reaches):
        guesser = None  # a state takes nothing back
    world = World(config, max_steps=max_steps, seconds=seconds, speculator=guesser)
    for move in moves:
        apply(world, move)
        world.check()
    world.run_to_completion()
    memory = world.scheduler.memory
    world.step()  # tells of those that left in the last one
    if guesser is not None:
        assert not guesser.asked, "whoever guesses was not told that a request has gone"
        event(f"guesses stood {guesser.stood > 0}, fell {guesser.fell > 0}")
    event(f"preempted {min(world.scheduler.preemptions, 3)}")
    event(f"yielded {world.scheduler.yields > 0}, left out {world.scheduler.rows_skipped > 0}")
    event(f"preempted decode leg {world.resubmitted > 0}")
    event(f"computed here instead {world.taken_over > 0}")
    event(f"found in the cache {memory.hit_tokens > 0}")
    event(f"evicted {any(memory.pool.generation(page) > 1 for page in range(config.pages))}")
    event(f"groups {config.reaches}")
    event(f"announced pages {any(client.blocks for client in world.clients.values())}")
    event(f"several steps at once {world.several}")
    event(f"rested {world.rested}")
    event(f"answers {min(sum(client.finish is not None for client in world.clients.values()), 4)}")
