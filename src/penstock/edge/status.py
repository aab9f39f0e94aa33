"""What the service says about itself: models, health, readiness, metrics, version, workers, decisions.

Liveness is progress, not an open port: ``/health`` is 503 while something runs and nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock import __version__
from penstock.clock import Clock, MonotonicClock
from penstock.edge.errors import refusal
from penstock.edge.scraped import MetricsPage
from penstock.errors import UnknownModel, UnknownRequest
from penstock.types import RequestId
from penstock.wire.ports import ModelCard, TokenStreams

_encode = msgspec.json.Encoder().encode

MONOTONIC = MonotonicClock()
MAX_ID_CHARS = 128
"""Of a request's id in a path; ours are shorter."""


def routes(
    streams: TokenStreams,
    cards: Callable[[], Sequence[ModelCard]],
    page: MetricsPage,
    metrics_type: str,
    *,
    waiting: Callable[[], Sequence[tuple[str, str]]] = tuple,
    clock: Clock = MONOTONIC,
) -> list[Route]:
    """All ``GET`` paths (``HEAD`` comes with them).  ``waiting``: addresses of workers that are not joined yet."""
    began = clock.now()

    async def models(_: Request) -> Response:
        return _json({"object": "list", "data": [model_object(card) for card in cards()]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        all_cards = cards()
        for card in all_cards:
            if card.name == name:
                return _json(model_object(card))
        answer = refusal(UnknownModel(name[:128], all_cards[0].name))
        return Response(answer.body, answer.status, media_type="application/json")

    async def health(_: Request) -> Response:
        why = streams.alive()
        return _json({"status": "ok"}) if why is None else _json({"status": "stuck", "reason": why}, 503)

    async def ready(_: Request) -> Response:
        if streams.ready():
            return _json({"status": "ready"})
        missing = "; ".join(f"{endpoint}: {reason}" for endpoint, reason in waiting())
        reason = "a worker that is needed is not ready" + (f" (waiting for {missing})" if missing else "")
        return _json({"status": "not ready", "reason": reason}, 503)

    async def show_metrics(_: Request) -> Response:
        return Response(await page.get(), headers={"content-type": metrics_type})

    async def version(_: Request) -> Response:
        return _json({"version": __version__})

    async def workers(_: Request) -> Response:
        shown = {"service": _service(cards()[0], clock.now() - began), "workers": list(streams.workers())}
        joining = [{"endpoint": endpoint, "reason": reason} for endpoint, reason in waiting()]
        return _json(shown | ({"joining": joining} if joining else {}))

    async def decisions(request: Request) -> Response:
        return _explained(streams, request.path_params["name"][:MAX_ID_CHARS])

    return [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", show_metrics),
        Route("/version", version),
        Route("/admin/workers", workers),
        Route("/debug/requests/{name:path}", decisions),
    ]


def _service(card: ModelCard, uptime_s: float) -> dict[str, Any]:
    """What ``penstock status`` begins with."""
    return {
        "model": card.name,
        "max_model_len": card.max_model_len,
        "version": __version__,
        "uptime_s": round(uptime_s, 1),
    }


def _explained(streams: TokenStreams, name: str) -> Response:
    choices = _decisions(streams, name)
    if choices:
        return _json({"id": name, "choices": choices})
    answer = refusal(UnknownRequest(f"Nothing is remembered of a request {name!r}.", code="request_not_found"))
    return Response(answer.body, answer.status, media_type="application/json")


def _decisions(streams: TokenStreams, name: str) -> list[dict[str, Any]]:
    """Of one choice (``ID/0``), or of all choices of an answer's id."""
    told = streams.explain(RequestId(name))
    if told:
        return [{"id": name, "decisions": list(told)}]
    choices: list[dict[str, Any]] = []
    while told := streams.explain(RequestId(f"{name}/{len(choices)}")):
        choices.append({"id": f"{name}/{len(choices)}", "decisions": list(told)})
    return choices


def model_object(card: ModelCard) -> dict[str, Any]:
    """OpenAI's model object, with the context as vLLM and as others call it."""
    shown: dict[str, Any] = {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "penstock",
        "max_model_len": card.max_model_len,
        "context_length": card.max_model_len,
    }
    if card.sampling:
        shown["default_sampling_params"] = card.sampling
    if card.parent is not None:
        shown["parent"] = card.parent
    return shown


def _json(value: Any, status: int = 200) -> Response:
    headers = {"retry-after": "1"} if status == 503 else None
    return Response(_encode(value), status, headers, media_type="application/json")
