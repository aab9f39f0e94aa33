"""What an operator may do to workers over HTTP: another role, drain, resume, restart.

Every path needs the service's key, as all but the open ones do, and a JSON body: no page in a browser can send it
unasked.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.routing import Route
from starlette.types import ASGIApp

from penstock.edge.door import Asked, Door
from penstock.edge.exchange import Exchange
from penstock.errors import BadField, RequestError
from penstock.types import Duty, Role
from penstock.wire.ports import JsonObject, Posts

DUTIES = {"drain": Duty.DRAIN, "resume": Duty.SERVE, "restart": Duty.RESTART}
"""The last word of each path, beside ``role``."""

ROLES = (Role.PREFILL, Role.DECODE, Role.BOTH)

_encode = msgspec.json.Encoder().encode


def routes(posts: Posts, door: Door) -> list[Route]:
    """``POST /admin/workers/{id}/role``, ``drain``, ``resume`` and ``restart``."""
    paths = ["role", *DUTIES]
    return [
        Route(f"/admin/workers/{{name}}/{path}", _endpoint(posts, door, DUTIES.get(path)), methods=["POST"])
        for path in paths
    ]


def _endpoint(posts: Posts, door: Door, duty: Duty | None) -> ASGIApp:
    async def work(exchange: Exchange, asked: Asked) -> None:
        role = _role(asked.body) if duty is None else None
        force = _force(asked.body)
        _nothing_else(asked.body, {"force"} if duty is not None else {"role", "force"})
        row = await posts.assign(exchange.path_parameter("name"), role=role, duty=duty, force=force)
        await exchange.reply(200, _encode(row))

    return door.endpoint(work)


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
