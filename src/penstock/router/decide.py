"""Which workers serve a request: a pure function from (request, fleet, now) to a decision with its reasons.

Knows no sockets, clocks or models; the simulator calls the same function.  It finds the candidates; a policy
(``policy``) chooses among them.  A decision keeps the numbers it was made from; ``reasons`` puts them into words.
``DecisionLog`` keeps the decisions of the latest requests, bounded in requests and in decisions of each.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.router.fleet import OTHER_IDENTITY, STATES, Fleet
from penstock.router.poison import WorkerKeys
from penstock.router.policy.base import CandidateScores, PlacementView, Policy, PolicyChoice
from penstock.router.policy.least_cost import LeastCost, expected_work
from penstock.router.prefix_index import PrefixIndex
from penstock.router.worker_load import NO_WORK, ExpectedWork, Slots
from penstock.types import (
    PAGE_TOKENS,
    ModelIdentity,
    RequestId,
    RequestStage,
    Role,
    ServiceClass,
    ValidRequest,
    WorkerId,
    WorkerState,
)
from penstock.wire.gateway_messages import PageSource

QUIET_S = 0.75
"""Workers answer several times in so long.  One that does not is given work only where there is no other."""

_NOBODY: WorkerKeys = frozenset()

_NO_HELP = (WorkerState.DEAD, WorkerState.FOREIGN)

SERVING = (Role.PREFILL, Role.DECODE, Role.BOTH)
"""Roles that have a part in an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """What a flight needs now."""

    request: ValidRequest
    emitted: int = 0  # tokens of the answer that exist already
    identity: ModelIdentity | None = None  # that of the answer's first tokens; None: any
    avoid: WorkerKeys = _NOBODY  # those that gave it back
    distrusted: WorkerKeys = _NOBODY  # those to be taken only where there is no other
    min_context: int = 0  # only workers with more of a context than this: it has become too long for such a one


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRules:
    """By which rules.  With ``mixed_numerics`` an answer may go on in another numerics class of its model, while none
    of its own can take it."""

    policy: Policy = field(default_factory=LeastCost)
    always_split: bool = False
    mixed_numerics: bool = False
    page_tokens: int = PAGE_TOKENS  # that a block's hash stands for


@dataclass(frozen=True, slots=True)
class ChosenWorker:
    """One worker's part in a decision."""

    stage: RequestStage
    slot: int
    worker: WorkerId
    incarnation: int
    endpoint: str
    tokens: int  # that it will have to compute
    work: ExpectedWork = NO_WORK


@dataclass(frozen=True, slots=True)
class CandidateReason:
    """Why a worker was, or was not, chosen for a leg."""

    stage: RequestStage | None  # None: it was no candidate for any
    worker: WorkerId
    chosen: bool
    explanation: str
    numbers: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The chosen workers: none in ``legs`` (no worker can serve now), one whole stage, or a decode and a prefill stage.

    ``scores`` are the numbers that were compared; ``states`` and ``excluded`` explain who was no candidate.
    """

    at: float
    policy: str
    identity: ModelIdentity | None
    stages: tuple[ChosenWorker, ...] = ()
    encoders: tuple[PageSource, ...] = ()  # of a request with images: those that may be asked for their rows
    explanation: str = ""  # why it is split, or is not
    names: tuple[WorkerId, ...] = ()  # by slot
    scores: tuple[CandidateScores, ...] = ()
    states: bytes = b""  # by slot (``Fleet.state_bytes``)
    excluded: tuple[tuple[int, str], ...] = ()  # (slot, why it was no candidate though it is ready)
    expected_tokens: int = 0  # expected output of a request without a length
    longest_context: float = math.inf  # without a choice: the longest context of any decode worker,
    longest_prefill_context: float = math.inf  # and of any that reads prompts

    @property
    def prefill(self) -> ChosenWorker | None:
        """The worker that reads the prompt: of the prefill leg, or of the whole."""
        return next((chosen for chosen in self.stages if chosen.stage is not RequestStage.DECODE), None)

    @property
    def decode(self) -> ChosenWorker | None:
        """The worker that writes the answer: of the decode leg, or of the whole."""
        return next((chosen for chosen in self.stages if chosen.stage is not RequestStage.PREFILL), None)

    def reasons(self) -> tuple[CandidateReason, ...]:
        """One reason a candidate and leg (the best of each), and one a worker that was no candidate."""
        taken = {(chosen.stage, chosen.slot) for chosen in self.stages}
        reasons: list[CandidateReason] = []
        for weighed in self.scores:
            for slot, column in zip(weighed.slots.tolist(), weighed.numbers.T.tolist(), strict=True):
                numbers = dict(zip(weighed.names, column, strict=True))
                chosen = (weighed.stage, slot) in taken
                reasons.append(CandidateReason(weighed.stage, self.names[slot], chosen, _in_words(numbers), numbers))
        known = {slot for weighed in self.scores for slot in weighed.slots.tolist()}
        aside = dict(self.excluded)
        for slot, standing in enumerate(self.states):
            if slot not in known and self.names[slot]:
                why = aside.get(slot) or self._why_not(standing)
                reasons.append(CandidateReason(None, self.names[slot], False, why))
        return tuple(reasons)

    def _why_not(self, standing: int) -> str:
        state = STATES[standing & ~OTHER_IDENTITY]
        if state is not WorkerState.READY:
            return state.value
        if standing & OTHER_IDENTITY:
            return "another model or numerics class"
        dearer = any(weighed.omitted for weighed in self.scores)
        return "dearer than those, or not looked at" if dearer else "not needed, or completes no set of legs"


def choose_workers(
    ask: PlacementRequest,
    fleet: Fleet,
    prefixes: PrefixIndex,
    now: float,
    how: PlacementRules | None = None,
    *,
    write: float = math.inf,
) -> Decision:
    """Choose the workers for one submission of a request.

    All workers of an answer have one identity.  ``write`` is how many tokens an answer has on the average.
    """
    how = how or PlacementRules()
    request = ask.request
    stored = prefixes.stored_blocks(request.block_hashes, len(fleet))
    hits = prefixes.with_pending(request.block_hashes, stored)
    best = int(hits.max(initial=0))
    sharers = prefixes.pending.sharers(request.block_hashes, best) if best else 0
    below = prefixes.tier_blocks(request.block_hashes, len(fleet)) if fleet.loads.tiers else ()
    seen = _Seen(ask, how, (hits, fleet.loads.reachable(hits, stored), *below), sharers, write)
    for room in seen.rooms():
        for identity in _identities(ask, fleet, how.mixed_numerics):
            set_aside: dict[int, str] = {}
            choice = how.policy.choose(seen.view(fleet, identity, now, set_aside, room))
            if choice.stages:
                return _decision(seen, fleet, (identity, now), choice, set_aside)
    return _decision(seen, fleet, (ask.identity, now), PolicyChoice(), _aside(seen, fleet, now))


def choose_migration_target(
    ask: PlacementRequest, fleet: Fleet, prefixes: PrefixIndex, now: float, how: PlacementRules, *, write: float
) -> Decision:
    """Choose the worker that continues a request which is being decoded: one decode stage, or none.

    Of the answer's own identity, since its pages are taken over.  ``ask.avoid`` has the worker that writes it.
    """
    hits = prefixes.hits(ask.request.block_hashes, len(fleet))
    seen, set_aside = _Seen(ask, how, (hits, hits), 0, write), dict[int, str]()
    if ask.identity is None:
        return _decision(seen, fleet, (None, now), PolicyChoice(), set_aside)
    choice = PolicyChoice()
    for room in seen.rooms():
        view = seen.view(fleet, ask.identity, now, set_aside, room)
        able = [slot for slot in (*view.decode.tolist(), *view.aggregated.tolist()) if fleet.can_transfer_kv(slot)]
        if able and not choice.stages:
            choice = how.policy.choose_decode(replace(view, decode=np.array(able, dtype=np.intp)))
    return _decision(seen, fleet, (ask.identity, now), choice, set_aside)


def has_ready_workers(fleet: Fleet) -> bool:
    """Whether there is a ready worker for each stage of a request, all of one identity."""
    return any(
        fleet.ready(Role.BOTH, identity) or (fleet.ready(Role.PREFILL, identity) and fleet.ready(Role.DECODE, identity))
        for identity in fleet.identities()
    )


def has_live_workers(fleet: Fleet, besides: frozenset[WorkerId] = frozenset()) -> bool:
    """Whether processes other than ``besides``, in whatever state, could serve each stage."""
    every = zip(fleet.ids, fleet.roles, fleet.states, strict=True)
    there = {role for name, role, state in every if state not in _NO_HELP and name not in besides}
    return Role.BOTH in there or (Role.PREFILL in there and Role.DECODE in there)


class _Room(NamedTuple):
    """How much of a context workers must have."""

    reads: int  # of a prefill worker
    writes: int  # of a decode worker
    longest: bool = False  # of those, only who has most


class _Seen:
    """A request as a policy is to see it, whatever the identity."""

    def __init__(
        self,
        ask: PlacementRequest,
        how: PlacementRules,
        hits: tuple[NDArray[np.int32], ...],
        sharers: int,
        write: float,
    ) -> None:
        request = ask.request
        left = request.sampling.max_tokens - ask.emitted
        self.ask, self.how, self.sharers = ask, how, sharers
        self.hits, self.reach, *self.below = hits
        self.known = len(request.prompt) + ask.emitted
        self.write = max(1, min(left, math.ceil(write) if write < left else left))
        self.left = left
        self.expected = self.write if request.open_ended else 0
        self.to_write = self.expected or left  # as it counts in a worker's load
        start = request.block_hashes[0] if request.block_hashes else request.id.encode()
        self.key = _hash(request.session.encode() if request.session else start)
        self.luck = _hash(f"{request.id} {ask.emitted} {len(ask.avoid)} {len(ask.distrusted)}".encode())

    def rooms(self) -> tuple[_Room, ...]:
        """What is asked of workers' contexts, the most first.

        A length that somebody named must fit.  Without one the answer begins wherever it will probably fit, or else
        where there is most room for it; should it become longer, it goes on elsewhere.
        """
        request, beyond = self.ask.request, self.ask.min_context + 1
        if request.pooling is not None:
            return (_Room(self.known, self.known),)
        least = self.known + 1
        if not request.open_ended:
            return (_Room(least, max(self.known + self.left, beyond)),)
        # A decode worker behind the prefill worker's token needs room for one of its own.
        fewest = self.known + min(2, self.left)
        probable = _Room(least, max(self.known + self.write, fewest, beyond))
        return (probable, _Room(least, max(fewest, beyond), longest=True))

    def view(
        self, fleet: Fleet, identity: ModelIdentity, now: float, set_aside: dict[int, str], room: _Room
    ) -> PlacementView:
        """With the candidates of this identity."""
        slots = {
            role: _candidates(self.ask, fleet, _with_room(fleet, role, identity, room, set_aside), now, set_aside)
            for role in SERVING
        }
        return PlacementView(
            loads=fleet.loads,
            known_tokens=self.known,
            expected_output=self.write,
            single_token=self.left == 1 and not (identity.mixed and self.ask.emitted),
            hits=self.hits,
            reachable_hits=self.reach,
            tier_hits=tuple(self.below),
            prefix_sharers=self.sharers,
            affinity_key=self.key,
            tie_break=self.luck,
            has_session=bool(self.ask.request.session),
            interactive=self.ask.request.qos.service is ServiceClass.INTERACTIVE,
            prefill=slots[Role.PREFILL],
            decode=slots[Role.DECODE],
            aggregated=slots[Role.BOTH],
            always_split=self.how.always_split or identity.mixed,
            page_tokens=self.how.page_tokens,
        )


def _identities(ask: PlacementRequest, fleet: Fleet, mixed_numerics: bool) -> Sequence[ModelIdentity]:
    """Identities whose workers may serve the request, preferred ones first."""
    own = ask.identity
    if own is None:
        return fleet.identities()
    if not mixed_numerics:
        return (own,)
    return (own, *(each for each in fleet.identities() if each.fingerprint == own.fingerprint and each != own))


def _candidates(ask: PlacementRequest, fleet: Fleet, slots: Slots, now: float, set_aside: dict[int, str]) -> Slots:
    """Workers that may get the request, without the doubtful ones if others are left."""
    if not len(slots):
        return slots
    avoided = _among(ask.avoid, fleet, slots)
    if avoided is not None:
        set_aside.update(dict.fromkeys(slots[avoided].tolist(), "gave this request back"))
        slots = slots[~avoided]
    doubtful = fleet.loads.quiet_slots(slots, now - QUIET_S)
    doubted = _among(ask.distrusted, fleet, slots)
    if doubted is not None:
        doubtful = doubted if doubtful is None else doubtful | doubted
    if doubtful is None or not doubtful.any() or doubtful.all():
        return slots
    set_aside.update(dict.fromkeys(slots[doubtful].tolist(), "silent, or failed this request before"))
    return slots[~doubtful]


def _encoders(
    ask: PlacementRequest, fleet: Fleet, identity: ModelIdentity | None, now: float
) -> tuple[PageSource, ...]:
    """The prefill worker chooses among them by image, so that one image always goes to the same encoder."""
    if not ask.request.images:
        return ()
    workers = [
        PageSource(worker=fleet.ids[slot], incarnation=fleet.incarnations[slot], endpoint=fleet.endpoints[slot])
        for slot in fleet.ready(Role.ENCODE, identity)
        if now - fleet.last_seen[slot] <= QUIET_S
    ]
    return tuple(each for each in workers if (each.worker, each.incarnation) not in ask.distrusted)


def _among(pairs: WorkerKeys, fleet: Fleet, slots: Slots) -> NDArray[np.bool_] | None:
    """Which of ``slots`` are workers of ``pairs``; None when no pair is a worker that is there now."""
    if not pairs:
        return None
    current = [
        slot
        for worker, incarnation in pairs
        if (slot := fleet.slot(worker)) is not None and fleet.incarnations[slot] == incarnation
    ]
    return np.isin(slots, current) if current else None


def _with_room(
    fleet: Fleet, role: Role, identity: ModelIdentity | None, room: _Room, set_aside: dict[int, str]
) -> Slots:
    """The ready workers of this role whose contexts are long enough."""
    slots = fleet.ready_slots(role, identity)
    least: float = room.reads if role is Role.PREFILL else room.writes
    if not len(slots) or (fleet.shortest_context(role, identity) >= least and not room.longest):
        return slots
    contexts = fleet.loads.contexts(slots)
    if room.longest and role is not Role.PREFILL:
        least = max(least, contexts.max())
    small = contexts < least
    if not small.any():
        return slots
    for slot, context in zip(slots[small].tolist(), contexts[small].tolist(), strict=True):
        set_aside[slot] = f"has a context of {context:.0f} tokens, and {least:.0f} are wanted"
    return slots[~small]


def _aside(seen: _Seen, fleet: Fleet, now: float) -> dict[int, str]:
    """Ready workers that were no candidates, when none was chosen."""
    set_aside: dict[int, str] = {}
    ask, room = seen.ask, seen.rooms()[-1]
    for role in SERVING:
        slots = _with_room(fleet, role, ask.identity, room, set_aside)
        _candidates(ask, fleet, slots, now, set_aside)
    return set_aside


def _decision(
    seen: _Seen, fleet: Fleet, of: tuple[ModelIdentity | None, float], choice: PolicyChoice, set_aside: dict[int, str]
) -> Decision:
    identity, now = of
    whose = None if seen.how.mixed_numerics else seen.ask.identity
    return Decision(
        at=now,
        policy=seen.how.policy.name,
        identity=identity,
        stages=tuple(_chosen(seen, fleet, leg, slot) for leg, slot in choice.stages),
        encoders=_encoders(seen.ask, fleet, identity, now) if choice.stages else (),
        explanation=choice.explanation,
        names=fleet.worker_names(),
        scores=choice.scores,
        states=fleet.state_bytes(identity),
        excluded=tuple(set_aside.items()),
        expected_tokens=seen.expected,
        longest_context=math.inf if choice.stages else fleet.longest_context(whose, (Role.DECODE, Role.BOTH)),
        longest_prefill_context=math.inf if choice.stages else fleet.longest_context(whose, (Role.PREFILL, Role.BOTH)),
    )


def _chosen(seen: _Seen, fleet: Fleet, leg: RequestStage, slot: int) -> ChosenWorker:
    hit = int((seen.reach if fleet.loads.prefers_fetch(slot) else seen.hits)[slot])
    if seen.below:
        hit = fleet.loads.with_tiers(slot, hit, seen.below, seen.how.page_tokens)
    due = expected_work(
        seen.known,
        hit,
        reads=leg is not RequestStage.DECODE,
        writes=leg is not RequestStage.PREFILL,
        batch=seen.ask.request.qos.service is not ServiceClass.INTERACTIVE,
        page_tokens=seen.how.page_tokens,
    )
    tokens = due.tokens + (seen.to_write if leg is not RequestStage.PREFILL else 0)
    return ChosenWorker(leg, slot, fleet.ids[slot], fleet.incarnations[slot], fleet.endpoints[slot], tokens, due)


def _hash(of: bytes) -> int:
    return int.from_bytes(blake2b(of, digest_size=8).digest(), "little")


def _in_words(numbers: dict[str, float]) -> str:
    """Seconds as milliseconds; what is 0 is left out, but for the cost."""
    words = []
    for name, value in numbers.items():
        if name.endswith("_s"):
            words.append(f"{name[:-2]} {value * 1e3:.4g} ms" if value or name == "cost_s" else "")
        else:
            words.append(f"{name} {value:g}" if value else "")
    return ", ".join(filter(None, words))


class DecisionLog:
    """Keeps the last ``per_request`` decisions of each of the last ``requests`` requests; none when either is 0."""

    def __init__(self, requests: int = 1024, per_request: int = 16) -> None:
        self._requests = requests if per_request else 0
        self._per_request = per_request
        self._decisions: OrderedDict[RequestId, deque[Decision]] = OrderedDict()

    def add(self, request: RequestId, decision: Decision) -> None:
        """Keep one more; the oldest make room."""
        if not self._requests:
            return
        kept = self._decisions.get(request)
        if kept is None:
            while len(self._decisions) >= self._requests:
                self._decisions.popitem(last=False)
            kept = self._decisions[request] = deque(maxlen=self._per_request)
        kept.append(decision)

    def decisions(self, request: RequestId) -> tuple[Decision, ...]:
        """The request's decisions, oldest first; none when they were forgotten or never made."""
        return tuple(self._decisions.get(request, ()))

    def explain(self, request: RequestId) -> list[dict[str, Any]]:
        """The same as JSON."""
        decisions = self.decisions(request)
        return [decision_json(decision, decisions[0].at) for decision in decisions]

    def explain_in_a_line(self, request: RequestId) -> str | None:
        """The latest of them, as a header tells it."""
        decisions = self.decisions(request)
        return decision_line(decisions[-1]) if decisions else None


def decision_json(decision: Decision, arrival: float) -> dict[str, Any]:
    """A decision with all its numbers, as ``GET /debug/requests/{id}`` tells it; times count from ``arrival``."""
    return {
        "at_s": round(decision.at - arrival, 6),
        "policy": decision.policy,
        "identity": decision.identity.system_fingerprint if decision.identity else None,
        "because": decision.explanation or "nobody can serve it now",
        "legs": [
            {"leg": chosen.stage.value, "worker": chosen.worker, "incarnation": chosen.incarnation}
            | {"tokens_to_compute": chosen.work.tokens, "pages": chosen.work.pages}
            for chosen in decision.stages
        ],
        "candidates": [
            {"leg": reason.stage.value, "worker": reason.worker, "chosen": reason.chosen, "because": reason.explanation}
            | {name: round(value, 9) for name, value in reason.numbers.items()}
            for reason in decision.reasons()
            if reason.stage is not None
        ],
        "not_candidates": {reason.worker: reason.explanation for reason in decision.reasons() if reason.stage is None},
        "candidates_not_told": sum(weighed.omitted for weighed in decision.scores),
    }


def decision_line(decision: Decision) -> str:
    """A decision in the characters of a header: who, why, and the chosen ones' numbers."""
    if not decision.stages:
        return f"policy={decision.policy}; nobody"
    chosen = {(reason.stage, reason.worker): reason.numbers for reason in decision.reasons() if reason.chosen}
    parts = [f"policy={decision.policy}", f"why={decision.explanation}"]
    for leg in sorted(decision.stages, key=_order):
        numbers = " ".join(f"{name}={value:.6g}" for name, value in chosen.get((leg.stage, leg.worker), {}).items())
        parts.append(f"{leg.stage.value}={leg.worker} {numbers}".strip())
    return "; ".join(parts)


def _order(chosen: ChosenWorker) -> int:
    return list(RequestStage).index(chosen.stage)
