"""Short ways to say flights, decisions and effects in the tests of failover."""

from __future__ import annotations

from router_words import IDENTITY, ROOT, request

from penstock.router.decide import ChosenWorker, Decision
from penstock.router.effects import (
    CancelStage,
    DeliverTokens,
    FailRequest,
    RequestEffect,
    RequestEffects,
    StageEnded,
    SubmitStage,
    WaitForWorker,
)
from penstock.router.request import FailoverLimits, RoutedRequest
from penstock.router.worker_load import ExpectedWork
from penstock.types import RequestStage, ValidRequest, WorkerId
from penstock.wire.gateway_messages import TokenItem

P0, P1, D0, D1, B0 = (WorkerId(name) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1", "both-0"))
PATIENCE = FailoverLimits(max_attempts=3, first_byte_s=100.0, stall_s=10.0)


def chosen(leg: RequestStage, worker: WorkerId, incarnation: int = 1) -> ChosenWorker:
    return ChosenWorker(leg, 0, worker, incarnation, f"memory://{worker}", 5, ExpectedWork(tokens=5))


def split(decode: WorkerId = D0, prefill: WorkerId = P0) -> Decision:
    legs = (chosen(RequestStage.DECODE, decode), chosen(RequestStage.PREFILL, prefill))
    return Decision(at=0.0, policy="none", identity=IDENTITY, stages=legs)


WHOLE = Decision(at=0.0, policy="none", identity=IDENTITY, stages=(chosen(RequestStage.WHOLE, B0),))
NOBODY = Decision(at=0.0, policy="none", identity=None)


def waiting(asked: ValidRequest | None = None) -> RoutedRequest:
    flight = RoutedRequest(asked or request(), PATIENCE, 0.0)
    assert flight.begin(0.0) == (WaitForWorker(0.0),)
    return flight


def flying(decision: Decision | None = None, asked: ValidRequest | None = None) -> RoutedRequest:
    flight = waiting(asked)
    flight.on_placed(decision or split(), ROOT, 0.0)
    return flight


def item(index: int, *tokens: int, epoch: int = 1, **fields) -> TokenItem:
    return TokenItem(request=request().id, epoch=epoch, index=index, tokens=tokens, **fields)


def said(effects: RequestEffects) -> list[str]:
    """Effects in short: ``deliver 1 2``, ``cancel prefill-0 e1``."""
    return [_short(effect) for effect in effects]


def _short(effect: RequestEffect) -> str:
    match effect:
        case DeliverTokens(batch):
            return " ".join(["deliver", *map(str, batch.tokens), *([batch.finish.value] if batch.finish else [])])
        case CancelStage() | StageEnded():
            return f"{'cancel' if isinstance(effect, CancelStage) else 'end'} {effect.worker} e{effect.epoch}"
        case SubmitStage():
            return f"send {effect.worker} {effect.submit.stage.value} e{effect.submit.epoch}"
        case FailRequest(error):
            return f"fail {type(error).__name__}"
        case WaitForWorker(not_before):
            return f"wait {not_before:g}"


def started(flight: RoutedRequest) -> RoutedRequest:
    """The first token came from the prefill worker."""
    assert said(flight.on_tokens(item(0, 1), P0, 1, 1.0)) == ["deliver 1"]
    return flight
