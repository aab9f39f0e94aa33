"""Models, health, readiness, metrics, version and workers; and what an operator may do to workers.

``/health`` is 503 while requests are open and nothing makes progress.  The metrics page is made outside the event
loop, at most once in ``metrics_cache_s``.  Paths that change a worker (role, drain, resume, restart) need a key and a
JSON body, so no web page can post to them unasked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from penstock import __version__
from penstock.api.auth import NO_TENANT, Tenant
from penstock.api.errors import error_response
from penstock.api.http import TENANT, EndpointFactory, HttpExchange, JsonBody
from penstock.api.key_permissions import KeyPermissions, card_names, may_use, visible_cards
from penstock.api.session_prefixes import PrefixBreak, SessionPrefixes, shown_tokens
from penstock.clock import Clock, MonotonicClock
from penstock.errors import BadField, RequestError, UnknownModel, UnknownRequest
from penstock.interfaces import JsonObject, ModelCard, RequestProcessor, TokenStreams, WorkerAdmin
from penstock.types import Duty, RequestId, Role

MetricsSnapshot = Callable[[], Callable[[], bytes]]
"""Looks at everything, which is quick, and returns what makes a page of that, on any thread."""

GatewayMetrics = Callable[[str], Callable[[], bytes] | None]
"""The same of one gateway process of the host, by its name; None: there is no such gateway."""


class MetricsPage:
    """One for an application."""

    def __init__(self, take: MetricsSnapshot, clock: Clock, cache_s: float) -> None:
        self._take = take
        self._clock = clock
        self._cache_s = cache_s
        self._made_at = -cache_s
        self._making: asyncio.Task[bytes] | None = None

    async def get(self) -> bytes:
        """The page as it was ``cache_s`` ago at the earliest."""
        making = self._making
        now = self._clock.now()
        if making is None or (making.done() and (now - self._made_at >= self._cache_s or making.exception())):
            self._made_at = now
            making = self._making = asyncio.create_task(asyncio.to_thread(self._take()))
        return await asyncio.shield(making)  # one client's disconnect must not cancel it for others


WORKER_ACTIONS = {"drain": Duty.DRAIN, "resume": Duty.SERVE, "restart": Duty.RESTART}
"""The last segment of each path, apart from ``role``."""

ROLES = (Role.PREFILL, Role.DECODE, Role.BOTH)

_encode = msgspec.json.Encoder().encode


def admin_routes(posts: WorkerAdmin, door: EndpointFactory) -> list[Route]:
    """``POST /admin/workers/{id}/role``, ``drain``, ``resume`` and ``restart``."""
    paths = ["role", *WORKER_ACTIONS]
    return [
        Route(f"/admin/workers/{{name}}/{path}", _endpoint(posts, door, WORKER_ACTIONS.get(path)), methods=["POST"])
        for path in paths
    ]


def _endpoint(posts: WorkerAdmin, door: EndpointFactory, duty: Duty | None) -> ASGIApp:
    async def work(exchange: HttpExchange, asked: JsonBody) -> None:
        role = _role(asked.body) if duty is None else None
        force = _force(asked.body)
        _nothing_else(asked.body, {"force"} if duty is not None else {"role", "force"})
        named = [] if role is None else [f"role={role.value}"]
        exchange.log_entry.detail = " ".join([*named, *(["force"] if force else [])])
        row = await posts.assign(exchange.path_parameter("name"), role=role, duty=duty, force=force)
        await exchange.send_response(200, _encode(row))

    return door.json_endpoint(work)


def _role(body: JsonObject) -> Role:
    given: Any = body.get("role")
    if given is None:
        raise RequestError("Missing required parameter: 'role'.", param="role", code="missing_required_parameter")
    if given not in ROLES:
        raise BadField("role", got=given, want=" or ".join(f"'{role.value}'" for role in ROLES))
    return Role(given)


def _force(body: JsonObject) -> bool:
    given: Any = body.get("force", False)
    if not isinstance(given, bool):
        raise BadField("force", got=given, want="true or false", code="invalid_type")
    return given


def _nothing_else(body: JsonObject, known: set[str]) -> None:
    for name in body:
        if name not in known:
            raise RequestError(
                f"Unrecognized request argument: {name[:64]}.", param=name[:64], code="unknown_parameter"
            )


CODEX_INSTRUCTIONS = (
    "You are Codex, a coding agent that works in a terminal on the user's computer. Read the files that matter before "
    "you change them, and make the smallest change that solves the task, in the style of the code around it. Use the "
    "tools that you are given to run commands and to edit files; run the project's tests or the program itself to "
    "check your work, and go on until the task is done. Never undo changes that you did not make, and do not commit "
    "unless you are asked to. If a command fails, read its output and find the cause. Answer briefly: say what you "
    "did, what you checked and what is left, and name files with their paths."
)
"""What Codex gives a model as its instructions when the model's server describes it."""

MONOTONIC = MonotonicClock()
MAX_ID_CHARS = 128
"""Of a request's id in a path; ours are shorter."""


def session_route(sessions: SessionPrefixes, processor: RequestProcessor, clock: Clock) -> Route:
    """Where the prompts of a session broke, with the text on both sides: for operators."""

    async def texts(found: PrefixBreak) -> dict[str, Any]:
        earlier, later = [
            await processor.detokenize({"tokens": shown_tokens(side)}) for side in (found.earlier, found.later)
        ]
        return {
            "seconds_ago": round(clock.now() - found.at, 3),
            "reason": found.reason.value,
            "token": found.token,
            "lost_tokens": found.lost_tokens,
            "earlier_tokens": found.earlier_tokens,
            "shown_from_token": found.shown_from,
            "earlier": earlier,
            "later": later,
        }

    async def session(request: Request) -> Response:
        name = request.path_params["name"]
        shown = [
            {
                "tenant": tenant,
                "turns": record.turns,
                "prompt_tokens": [len(prompt.tokens) for prompt in record.prompts],
                "broken": record.broken,
                "breaks": [await texts(found) for found in record.breaks],
            }
            for tenant, record in sessions.find(name)
        ]
        if shown:
            return _json({"session": name, "records": shown})
        error = UnknownRequest(f"Nothing is remembered of a session {name[:128]!r}.", code="session_not_found")
        answer = error_response(error)
        return Response(answer.body, answer.status, media_type="application/json")

    return Route("/debug/sessions/{name:path}", session)


def status_routes(
    streams: TokenStreams,
    processor: RequestProcessor,
    *,
    waiting: Callable[[], Sequence[tuple[str, str]]] = tuple,
    clock: Clock = MONOTONIC,
) -> list[Route]:
    """All ``GET`` paths (``HEAD`` comes with them).  ``waiting``: addresses of workers that are not joined yet."""
    began, cards = clock.now(), processor.cards

    async def models(request: Request) -> Response:
        return _json(model_list(visible_cards(permissions_of(request), cards())))

    async def model(request: Request) -> Response:
        name, key = request.path_params["name"], permissions_of(request)
        card = processor.card(name)
        if card is not None and may_use(key, card_names(card)):
            return _json(model_object(card))
        return _unknown_model(name, visible_cards(key, cards()))

    async def health(_: Request) -> Response:
        why = streams.stall_reason()
        return _json({"status": "ok"}) if why is None else _json({"status": "stuck", "reason": why}, 503)

    async def ready(_: Request) -> Response:
        if streams.ready():
            return _json({"status": "ready"})
        missing = "; ".join(f"{endpoint}: {reason}" for endpoint, reason in waiting())
        reason = "a worker that is needed is not ready" + (f" (waiting for {missing})" if missing else "")
        return _json({"status": "not ready", "reason": reason}, 503)

    async def props(request: Request) -> Response:
        key = permissions_of(request)
        shown = visible_cards(key, cards())
        return _json(llama_server_props(shown[0])) if shown else _unknown_model(",".join(key.models or ()), ())

    async def workers(_: Request) -> Response:
        shown = {"service": _service(cards()[0], clock.now() - began), "workers": list(streams.workers())}
        joining = [{"endpoint": endpoint, "reason": reason} for endpoint, reason in waiting()]
        return _json(shown | ({"joining": joining} if joining else {}))

    async def decisions(request: Request) -> Response:
        return _explained(streams, request.path_params["name"][:MAX_ID_CHARS])

    return [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/props", props),
        Route("/health", health),
        Route("/ready", ready),
        Route("/version", _version),
        Route("/admin/workers", workers),
        Route("/debug/requests/{name:path}", decisions),
    ]


def metrics_routes(page: MetricsPage, gateway_metrics: GatewayMetrics, content_type: str) -> list[Route]:
    """The metrics of the host, and of each of its gateway processes."""

    async def host(_: Request) -> Response:
        return Response(await page.get(), headers={"content-type": content_type})

    async def gateway(request: Request) -> Response:
        name = request.path_params["gateway"][:MAX_ID_CHARS]
        make = gateway_metrics(name)
        if make is not None:
            return Response(await asyncio.to_thread(make), headers={"content-type": content_type})
        known = "the names are gateway-0, gateway-1 and so on"
        error = UnknownRequest(f"There is no gateway {name!r} on this host; {known}.", code="gateway_not_found")
        answer = error_response(error)
        return Response(answer.body, answer.status, media_type="application/json")

    return [Route("/metrics", host), Route("/metrics/{gateway}", gateway)]


def permissions_of(request: Request) -> KeyPermissions:
    """What the key of a request may be used for."""
    tenant: Tenant = request.scope.get(TENANT) or NO_TENANT
    return tenant.permissions


def _unknown_model(name: str, cards: Sequence[ModelCard]) -> Response:
    answer = error_response(UnknownModel(name[:128], [card.name for card in cards]))
    return Response(answer.body, answer.status, media_type="application/json")


async def _version(_: Request) -> Response:
    return _json({"version": __version__})


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
    answer = error_response(UnknownRequest(f"Nothing is remembered of a request {name!r}.", code="request_not_found"))
    return Response(answer.body, answer.status, media_type="application/json")


def _decisions(streams: TokenStreams, name: str) -> list[dict[str, Any]]:
    """The decisions for one choice (``ID/0``), or for all choices of a response."""
    decisions = streams.routing_decisions(RequestId(name))
    if decisions:
        return [{"id": name, "decisions": list(decisions)}]
    choices: list[dict[str, Any]] = []
    while decisions := streams.routing_decisions(RequestId(f"{name}/{len(choices)}")):
        choices.append({"id": f"{name}/{len(choices)}", "decisions": list(decisions)})
    return choices


def model_list(cards: Sequence[ModelCard]) -> dict[str, Any]:
    """OpenAI's list, with what Codex and Anthropic's clients want beside ``data``."""
    described = [codex_model(card.name, card.max_model_len, vision=card.vision) for card in cards]
    names = [card.name for card in cards]  # none, where the key is for others
    page = {"has_more": False, "first_id": names[0] if names else None, "last_id": names[-1] if names else None}
    return {"object": "list", "data": [model_object(card) for card in cards], "models": described, **page}


def model_object(card: ModelCard) -> dict[str, Any]:
    """OpenAI's model object, with the context as vLLM and as others call it."""
    shown: dict[str, Any] = {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "penstock",
        **context_fields(card.max_model_len),
        **anthropic_model(card.name, card.created),
    }
    if card.sampling:
        shown["default_sampling_params"] = card.sampling
    if card.parent is not None:
        shown["parent"] = card.parent
    return shown


def context_fields(max_model_len: int | None) -> dict[str, Any]:
    """The context of a model, where clients look for it: vLLM's, OpenRouter's, LM Studio's and Mistral's, Groq's,
    Anthropic's and llama-server's names for it.  Empty where it is not known."""
    if max_model_len is None:
        return {}
    names = ("max_model_len", "context_length", "max_context_length", "context_window", "max_input_tokens")
    return dict.fromkeys(names, max_model_len) | {"meta": {"n_ctx_train": max_model_len, "n_ctx": max_model_len}}


def llama_server_props(card: ModelCard) -> dict[str, Any]:
    """What llama-server's clients look for: the context above all."""
    return {
        "default_generation_settings": {"n_ctx": card.max_model_len, "params": card.sampling},
        "total_slots": 1,
        "model_alias": card.name,
        "model_path": card.name,
        "modalities": {"vision": card.vision, "audio": False},
        "build_info": f"penstock {__version__}",
    }


def anthropic_model(name: str, created: int) -> dict[str, Any]:
    """What Anthropic's clients read of a model, beside OpenAI's fields."""
    moment = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "display_name": name, "created_at": moment}


def codex_model(name: str, max_model_len: int | None, *, vision: bool) -> dict[str, Any]:
    """A model as Codex wants it, in ``models`` beside ``data``; other clients do not read it."""
    return {
        "slug": name,
        "display_name": name,
        "description": None,
        "supported_reasoning_levels": [],
        "shell_type": "shell_command",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "upgrade": None,
        "base_instructions": CODEX_INSTRUCTIONS,
        "supports_reasoning_summaries": True,
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": "freeform",
        "truncation_policy": {"mode": "bytes", "limit": 10_000},
        "supports_parallel_tool_calls": True,
        "context_window": max_model_len,
        "experimental_supported_tools": [],
        "input_modalities": ["text", "image"] if vision else ["text"],
    }


def _json(value: Any, status: int = 200) -> Response:
    headers = {"retry-after": "1"} if status == 503 else None
    return Response(_encode(value), status, headers, media_type="application/json")
