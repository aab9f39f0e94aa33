"""How busy an engine is, counted from its table of requests.  Pure; knows neither steps nor seconds."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.core.table import RequestTable
from penstock.types import Leg


@dataclass(frozen=True, slots=True)
class Load:
    """How busy this engine is."""

    running: int  # take part in steps
    awaiting: int  # leg=decode: have pages, wait for what the prefill worker computes
    handing_over: int  # computed, or stopped to go on elsewhere: wait for the receiver
    queued: int  # have no pages yet
    tokens_in_flight: int  # known tokens still to compute, and output tokens asked for or expected
    prompt_tokens: int  # known tokens still to compute before an answer begins or goes on; none of hand-overs to here
    prompt_pairs: int  # (query, key) pairs of their attention
    batch_tokens: int  # of prompt_tokens, those of batch work
    batch_pairs: int  # the same of prompt_pairs
    answers: int  # requests whose answers are written here, or will be
    context_tokens: int  # known tokens of those
    pages_used: int
    pages_free: int  # cached ones included


def load_of(table: RequestTable) -> Load:
    """As of now.  O(requests)."""
    pool = table.memory.pool
    in_flight = answers = context_tokens = 0
    tokens, pairs = [0, 0], [0, 0]  # of prompts: of the first class, of those after it
    for request in table.all.values():
        missing = request.missing
        in_flight += missing
        if request.leg is not Leg.PREFILL:
            in_flight += request.left
            answers += 1
            context_tokens += request.known
        if missing > 1 and request.leg is not Leg.DECODE:
            tokens[request.rank > 0] += missing
            pairs[request.rank > 0] += missing * request.computed + missing * (missing + 1) // 2
    return Load(
        running=len(table.running),
        awaiting=len(table.reserved),
        handing_over=len(table.all) - table.queued - len(table.running) - len(table.reserved),
        queued=table.queued,
        tokens_in_flight=in_flight,
        prompt_tokens=sum(tokens),
        prompt_pairs=sum(pairs),
        batch_tokens=tokens[1],
        batch_pairs=pairs[1],
        answers=answers,
        context_tokens=context_tokens,
        pages_used=pool.leased,
        pages_free=pool.available,
    )
