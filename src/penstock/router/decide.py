"""Which workers serve a request: a pure function from (request, fleet, now) to a decision with its reasons.

Knows no sockets, clocks or models; the simulator calls this very function.  The numbers a decision was made from are
kept in it, and become words only when somebody asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.router.fleet import Fleet
from penstock.router.policy.least_tokens import LeastTokens, Score
from penstock.router.prefix_index import PrefixIndex
from penstock.types import Leg, ModelIdentity, Role, ValidRequest, WorkerId, WorkerState
from penstock.wire.messages import PageSource

QUIET_S = 0.75
"""Workers answer several times in so long.  One that does not is given work only where there is no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a flight needs now."""

    request: ValidRequest
    emitted: int = 0  # tokens of the answer that exist already
    identity: ModelIdentity | None = None  # that of the answer's first tokens; None: any
    avoid: frozenset[tuple[WorkerId, int]] = frozenset()  # (worker, incarnation) pairs that gave it back
    doubt: frozenset[tuple[WorkerId, int]] = frozenset()  # pairs to be taken only where there is no other


@dataclass(frozen=True, slots=True)
class Chosen:
    """One worker's part in a decision."""

    leg: Leg
    slot: int
    worker: WorkerId
    incarnation: int
    endpoint: str
    tokens: int  # that it will have to compute


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a worker was, or was not, chosen for a leg."""

    leg: Leg | None  # None: it was no candidate for any
    worker: WorkerId
    chosen: bool
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Who does what.  ``legs`` is empty (nobody can serve now), one whole leg, or a decode and a prefill leg.

    ``weighed`` and ``passed_over`` are the numbers and states that were looked at.
    """

    at: float
    identity: ModelIdentity | None
    legs: tuple[Chosen, ...] = ()
    encoders: tuple[PageSource, ...] = ()  # of a request with images: those that may be asked for their rows
    names: tuple[WorkerId, ...] = ()  # by slot
    weighed: tuple[tuple[Leg, tuple[Score, ...]], ...] = ()
    passed_over: tuple[tuple[int, str], ...] = ()  # (slot, why it was no candidate)

    @property
    def prefill(self) -> Chosen | None:
        """The worker that reads the prompt: of the prefill leg, or of the whole."""
        return next((chosen for chosen in self.legs if chosen.leg is not Leg.DECODE), None)

    @property
    def decode(self) -> Chosen | None:
        """The worker that writes the answer: of the decode leg, or of the whole."""
        return next((chosen for chosen in self.legs if chosen.leg is not Leg.PREFILL), None)

    def reasons(self) -> tuple[Reason, ...]:
        """One reason a candidate and leg, and one a worker that was no candidate."""
        taken = {(chosen.leg, chosen.slot) for chosen in self.legs}
        told = [
            Reason(leg, self.names[score.slot], (leg, score.slot) in taken, _numbers(score))
            for leg, scores in self.weighed
            for score in scores
        ]
        told += [Reason(None, self.names[slot], False, why) for slot, why in self.passed_over]
        return tuple(told)


def decide(ask: Ask, fleet: Fleet, prefixes: PrefixIndex, now: float, *, mixed_numerics: bool = False) -> Decision:
    """Choose the workers for one submission of a request.

    All workers of an answer have one identity.  With ``mixed_numerics`` it may change in mid-answer to another class of
    the same model, while none of the answer's own can take it.

    Where prefill and decode workers stand ready the request is split between them, except for its very last token: that
    one needs no hand-over, and a prefill worker writes it.  Otherwise a worker that does both takes it whole.
    """
    policy = LeastTokens()
    for identity in _identities(ask, fleet, mixed_numerics):
        for parts in _ways(ask):
            legs: list[Chosen] = []
            weighed: list[tuple[Leg, tuple[Score, ...]]] = []
            for leg, role in parts:
                slots = _candidates(ask, fleet, fleet.ready(role, identity), now)
                scores = policy.scores(ask.request, ask.emitted, leg, slots, (fleet, prefixes))
                best = policy.best(ask.request, scores, fleet.ids)
                if best is None:
                    break
                weighed.append((leg, tuple(scores)))
                legs.append(_chosen(leg, best, fleet))
            else:
                return Decision(
                    at=now,
                    identity=identity,
                    legs=tuple(legs),
                    encoders=_encoders(ask, fleet, identity, now),
                    names=tuple(fleet.ids),
                    weighed=tuple(weighed),
                    passed_over=_passed_over(ask, fleet, (identity, now), weighed),
                )
    names, passed_over = tuple(fleet.ids), _passed_over(ask, fleet, (ask.identity, now), ())
    return Decision(at=now, identity=ask.identity, names=names, passed_over=passed_over)


def can_serve(fleet: Fleet) -> bool:
    """Is there a worker for each part of a request, all of one identity?"""
    return any(
        fleet.ready(Role.BOTH, identity) or (fleet.ready(Role.PREFILL, identity) and fleet.ready(Role.DECODE, identity))
        for identity in fleet.identities()
    )


def _identities(ask: Ask, fleet: Fleet, mixed_numerics: bool) -> Sequence[ModelIdentity]:
    """Whose workers may serve this, the preferred ones first."""
    own = ask.identity
    if own is None:
        return fleet.identities()
    if not mixed_numerics:
        return (own,)
    return (own, *(each for each in fleet.identities() if each.fingerprint == own.fingerprint and each != own))


def _ways(ask: Ask) -> tuple[tuple[tuple[Leg, Role], ...], ...]:
    """The ways to serve this, the preferred one first."""
    whole = ((Leg.WHOLE, Role.BOTH),)
    if ask.request.sampling.max_tokens - ask.emitted == 1:
        return (((Leg.WHOLE, Role.PREFILL),), whole)
    return (((Leg.DECODE, Role.DECODE), (Leg.PREFILL, Role.PREFILL)), whole)


def _chosen(leg: Leg, score: Score, fleet: Fleet) -> Chosen:
    slot = score.slot
    return Chosen(leg, slot, fleet.ids[slot], fleet.incarnations[slot], fleet.endpoints[slot], score.compute)


def _candidates(ask: Ask, fleet: Fleet, slots: Sequence[int], now: float) -> Sequence[int]:
    """Those who may be given the request, without the doubtful if others are left."""
    if ask.avoid:
        slots = [slot for slot in slots if not _avoided(ask, fleet, slot)]
    return [slot for slot in slots if not _doubtful(ask, fleet, slot, now)] or slots


def _encoders(ask: Ask, fleet: Fleet, identity: ModelIdentity, now: float) -> tuple[PageSource, ...]:
    """Whoever reads the prompt chooses among them by image, so that one image is always asked of the same."""
    if not ask.request.images:
        return ()
    slots = fleet.ready(Role.ENCODE, identity)
    return tuple(
        PageSource(worker=fleet.ids[slot], incarnation=fleet.incarnations[slot], endpoint=fleet.endpoints[slot])
        for slot in slots
        if not _doubtful(ask, fleet, slot, now)
    )


def _doubtful(ask: Ask, fleet: Fleet, slot: int, now: float) -> bool:
    """Has it failed this request before, or not answered lately?  It is no proof, but a reason to prefer others."""
    return now - fleet.heard[slot] > QUIET_S or (
        bool(ask.doubt) and (fleet.ids[slot], fleet.incarnations[slot]) in ask.doubt
    )


def _avoided(ask: Ask, fleet: Fleet, slot: int) -> bool:
    return (fleet.ids[slot], fleet.incarnations[slot]) in ask.avoid


def _passed_over(
    ask: Ask,
    fleet: Fleet,
    at: tuple[ModelIdentity | None, float],
    weighed: Sequence[tuple[Leg, tuple[Score, ...]]],
) -> tuple[tuple[int, str], ...]:
    candidates = {score.slot for _, scores in weighed for score in scores}
    return tuple((slot, _why_not(ask, fleet, slot, *at)) for slot in range(len(fleet)) if slot not in candidates)


def _why_not(ask: Ask, fleet: Fleet, slot: int, identity: ModelIdentity | None, now: float) -> str:
    """In a word or two, from constants: this stands in the way of every decision."""
    state = fleet.states[slot]
    if state is not WorkerState.READY:
        return state.value
    report = fleet.reports[slot]
    if report is None or (identity is not None and report.identity != identity):
        return "another model or numerics class"
    if _avoided(ask, fleet, slot):
        return "gave this request back"
    if _doubtful(ask, fleet, slot, now):
        return "silent, or failed this request before"
    return "completes no set of legs"


def _numbers(score: Score) -> str:
    words = f"{score.in_flight} tokens in flight, {score.compute} to compute, {score.cached} cached"
    return words + (f", lacks {score.short} pages" if score.short else "")
