"""The spans of one request: queue, decisions, stages, retries, fences, and phases that workers measured.

Records what happens and decides nothing.  A request that is not sampled has no spans.
"""

from __future__ import annotations

from penstock.router.decide import Decision
from penstock.router.effects import CancelStage, RequestEffect, RequestEffects, StageEnded, SubmitStage, WaitForWorker
from penstock.telemetry.spans import (
    ANSWER,
    DECISION,
    DECODE,
    LEG,
    NO_SPAN,
    QUEUE,
    RETRY,
    WORKER_SPANS,
    Span,
    Tracer,
)
from penstock.types import ValidRequest, WorkerId
from penstock.wire.gateway_messages import TokenItem

WorkerKey = tuple[WorkerId, int]
"""A worker and its incarnation."""


class RequestSpans:
    """The spans of one recorded request.  Methods are events, in order."""

    def __init__(self, tracer: Tracer, request: ValidRequest, now: float) -> None:
        self._tracer = tracer
        self._answer = tracer.begin(request.trace, ANSWER, now)
        self._answer.set_attributes(penstock__request=request.id, penstock__prompt_tokens=len(request.prompt))
        self._context = self._answer.context
        self._queue: Span | None = None
        self._retry: Span | None = None
        self._decode: Span | None = None
        self._stages: dict[WorkerKey, tuple[Span, float, int]] = {}  # -> span, when it was sent, its epoch
        self._outcomes: dict[WorkerKey, str] = {}  # of legs that are about to end
        self._epochs = 1
        self._begun = self._tokens = len(request.begun.tokens)

    # --- placing ----------------------------------------------------------------------------------------------------

    def on_decision(self, decision: Decision, began: float, ended: float) -> None:
        """Record a placement decision."""
        span = self._tracer.begin(self._context, DECISION, began)
        outcome = ("nobody", "whole", "split")[len(decision.stages)]
        span.set_attributes(
            penstock__outcome=outcome, penstock__policy=decision.policy, penstock__because=decision.explanation
        )
        for name, chosen in (("prefill", decision.prefill), ("decode", decision.decode)):
            if chosen is not None:
                span.set_attributes(**{f"penstock__{name}": chosen.worker})
        span.end(ended)

    def on_effect(self, effect: RequestEffect, now: float) -> None:
        """A flight asks for this."""
        match effect:
            case WaitForWorker():
                if self._queue is None:
                    self._queue = self._tracer.begin(self._context, QUEUE, now)
                    self._queue.set_attributes(penstock__epoch=self._epochs)
            case SubmitStage():
                self._sent(effect, now)
            case CancelStage():
                self._over((effect.worker, effect.incarnation), "cancelled", now)
            case StageEnded():
                self._over((effect.worker, effect.incarnation), "ended", now)
            case _:
                pass

    def _sent(self, effect: SubmitStage, now: float) -> None:
        if self._queue is not None:
            self._queue.end(now)
            self._queue = None
        submit, place = effect.submit, (effect.worker, effect.incarnation)
        self._over(place, "replaced", now)
        self._epochs = submit.epoch
        span = self._tracer.begin(self._context, LEG, now)
        span.set_attributes(
            penstock__leg=submit.stage.value,
            penstock__worker=effect.worker,
            penstock__incarnation=effect.incarnation,
            penstock__epoch=submit.epoch,
            penstock__tokens_to_compute=effect.tokens,
        )
        self._stages[place] = (span, now, submit.epoch)

    def _over(self, place: WorkerKey, outcome: str, now: float) -> None:
        stage = self._stages.pop(place, None)
        said = self._outcomes.pop(place, "")
        if stage is not None:
            stage[0].set_attributes(penstock__outcome=said or outcome)
            stage[0].end(now, said)

    # --- what workers say, and what happens to them -----------------------------------------------------------------

    def on_phases(self, item: TokenItem, place: WorkerKey) -> None:
        """Record the phases that a worker measured."""
        stage = self._stages.get(place)
        if stage is None or stage[2] != item.epoch:
            return
        span, sent, _ = stage
        for phase in item.phases:
            family = WORKER_SPANS.get(phase.name)
            if family is None:
                continue
            begin = sent + phase.begin_s
            part = self._tracer.begin(span.context, family, begin)
            part.set_attributes(**{f"penstock__{name}": value for name, value in phase.facts.items()})
            part.end(begin + phase.seconds)

    def on_failure(self, place: WorkerKey, reason: str, effects: RequestEffects, now: float) -> None:
        """The worker is lost or returns its stage; ``effects`` follow from it.

        One that ignores it has none; one that asks for no other worker, as others have the rest, does not try again.
        """
        if not effects or place not in self._stages:
            return
        self._outcomes[place] = reason
        if self._retry is None and any(isinstance(effect, WaitForWorker) for effect in effects):
            self._retry = self._tracer.begin(self._context, RETRY, now)
            self._retry.set_attributes(
                penstock__worker=place[0],
                penstock__reason=reason,
                penstock__epoch=self._epochs,
                penstock__tokens=self._tokens,
            )

    def on_fenced(self, place: WorkerKey, kind: str, now: float) -> None:
        """A message of an older epoch was ignored.  Those of an earlier incarnation are of no request any more."""
        self._answer.add_event("fence", now, penstock__worker=place[0], penstock__kind=kind)

    def on_delivered(self, tokens: int, now: float) -> None:
        """Record ``tokens`` tokens delivered to the client."""
        self._tokens += tokens
        if self._retry is not None:
            self._retry.end(now)
            self._retry = None
        if self._decode is None:
            self._answer.add_event("first_token", now)
            self._decode = self._tracer.begin(self._context, DECODE, now)

    def on_finished(self, reason: str, now: float, *, error: bool) -> None:
        """The flight is over, for ``reason``."""
        for place in list(self._stages):
            self._over(place, "ended", now)
        for span in (self._queue, self._retry):
            if span is not None:
                span.end(now, reason if error else "")
        if self._decode is not None:
            self._decode.set_attributes(penstock__tokens=self._tokens - self._begun)
            self._decode.end(now)
        self._answer.set_attributes(
            penstock__tokens=self._tokens, penstock__epochs=self._epochs, penstock__finish=reason
        )
        self._answer.end(now, reason if error else "")
        self._queue = self._retry = self._decode = None
        self._answer = NO_SPAN


def begin_spans(tracer: Tracer, request: ValidRequest, now: float) -> RequestSpans | None:
    """The spans of a request that is recorded."""
    return RequestSpans(tracer, request, now) if request.trace else None
