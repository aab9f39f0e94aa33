"""Decisions in words: a fleet, and who is picked."""

from __future__ import annotations

from router_words import IDENTITY, OTHER, OTHER_CLASS, hashes_of, holds, report, request, up

from penstock.router.decide import Decision, PlacementRequest, PlacementRules, choose_workers
from penstock.router.fleet import Fleet
from penstock.router.prefix_index import PrefixIndex
from penstock.types import WorkerState
from penstock.wire.gateway_messages import StepRates

PROMPT = tuple(range(128))
NOW = 100.0


def fleet_in_words(words: str) -> tuple[Fleet, PrefixIndex]:
    """``prefill-0 cached=96 queued=50; decode-0 free=3; both-0 starting``: one worker a clause, ready and idle.

    ``queued`` are prompt tokens, ``answers`` those being written (of 100 tokens each); a worker has measured itself
    with ``token_us`` (microseconds a token and a draw), ``step_ms``, ``page_us`` and ``wait_us``, and takes pages out
    of the caches of its ``domain`` in ``fetch_us`` each.  Workers of one ``cores`` lend each other cores; one that
    says ``local=1`` wants to compute prompts itself.
    """
    fleet, prefixes = Fleet(), PrefixIndex()
    for slot, clause in enumerate(words.split(";")):
        name, *facts = clause.split()
        up(fleet, name)
        told = dict(fact.split("=") for fact in facts if "=" in fact)
        state = next((WorkerState(fact) for fact in facts if "=" not in fact), WorkerState.READY)
        identity = {"other": OTHER, "class": OTHER_CLASS}.get(told.get("identity", ""), IDENTITY)
        if state is not WorkerState.STARTING:
            answers = int(told.get("answers", 0))
            token = float(told.get("token_us", 0)) * 1e-6
            said = report(
                name,
                state=state,
                identity=identity,
                kv_pages_free=int(told.get("free", 100)),
                prompt_tokens=int(told.get("queued", 0)),
                decodes=answers,
                context_tokens=100 * answers,
                rates=StepRates(step=float(told.get("step_ms", 0)) * 1e-3, token=token, sample=token),
                measured=int(token > 0),
                page_bytes=100,
                counters={
                    "bytes_received": 100.0,
                    "transfer_seconds": float(told.get("page_us", 0)) * 1e-6,
                    "transfer_wait_seconds": float(told.get("wait_us", 0)) * 1e-6,
                },
                gateways=int(told.get("gateways", 1)),
                domain=told.get("domain", ""),
                core_group=told.get("cores", ""),
                local_prefill="local" in told,
                fetch_s=float(told.get("fetch_us", 0)) * 1e-6,
                tier_s=tuple(float(told[name]) * 1e-6 for name in ("host_us", "disk_us") if name in told),
            )
            assert fleet.on_report(said, NOW - float(told.get("silent", 0)))
        cached, host, disk = (hashes_of(PROMPT[: int(told.get(tier, 0))]) for tier in ("cached", "host", "disk"))
        below = dict.fromkeys(disk[len(cached) :], 2) | dict.fromkeys(host[len(cached) :], 1)
        holds(prefixes, slot, cached, lower=below)
    return fleet, prefixes


def picked(decision: Decision) -> str:
    return " ".join(f"{chosen.stage.value}={chosen.worker}" for chosen in decision.stages)


def check(
    words: str, *, picks: str, because: str = "", ask: PlacementRequest | None = None, how: PlacementRules | None = None
) -> Decision:
    fleet, prefixes = fleet_in_words(words)
    decision = choose_workers(ask or PlacementRequest(request=request(prompt=PROMPT)), fleet, prefixes, NOW, how)
    assert picked(decision) == picks
    reasons = "; ".join(f"{reason.worker}: {reason.explanation}" for reason in decision.reasons())
    for clause in filter(None, because.split("; ")):
        assert clause in reasons
    return decision
