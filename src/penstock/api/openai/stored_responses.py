"""``/v1/responses/{id}``: stored responses, their input and their events, for the tenant who made them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.routing import Route

from penstock.api import sse
from penstock.api.auth import NO_TENANT
from penstock.api.http import EndpointFactory, HttpExchange
from penstock.api.openai.response_events import ResponseEvents
from penstock.api.response_format import StreamEvent, encode
from penstock.api.response_store import ResponseStore, StoredConversation
from penstock.errors import BadField, RequestError, UnknownResponse
from penstock.interfaces import ToolTarget

PATH = "/v1/responses/{name}"
_MOST_LISTED = 100
_LISTED = 20
_MAX_ID_CHARS = 256
_MAX_NUMBER = 1 << 53

_decode = msgspec.json.decode


def stored_response_routes(store: ResponseStore | None, factory: EndpointFactory) -> list[Route]:
    """All paths of stored responses.  ``store`` None: nothing is stored, and nothing found."""
    found = _StoredResponses(store)
    return [
        Route(PATH, factory.bodiless_endpoint(found.get), methods=["GET"]),
        Route(PATH, factory.bodiless_endpoint(found.delete), methods=["DELETE"]),
        Route(f"{PATH}/input_items", factory.bodiless_endpoint(found.input_items), methods=["GET"]),
        Route(f"{PATH}/cancel", factory.bodiless_endpoint(found.cancel), methods=["POST"]),
    ]


class _StoredResponses:
    """The endpoints."""

    def __init__(self, store: ResponseStore | None) -> None:
        self._store = store

    async def get(self, exchange: HttpExchange) -> None:
        """The response, or its events."""
        stored, query = await self._load(exchange), exchange.query()
        if query.get("stream", "false").lower() != "true":
            await exchange.send_response(200, stored.response)
            return
        after = _number(query, "starting_after", low=0, high=_MAX_NUMBER, default=-1)
        events = replayed_events(stored)[after + 1 :]
        await exchange.send_response(
            200, b"".join(sse.sse_event_without_id(event.data, event.name) for event in events), *sse.HEADERS
        )

    async def delete(self, exchange: HttpExchange) -> None:
        """It is gone when this returns."""
        name = _name(exchange)
        if self._store is None or not await self._store.delete(_tenant(exchange), name):
            raise UnknownResponse(name)
        await exchange.send_response(200, encode({"id": name, "object": "response", "deleted": True}))

    async def input_items(self, exchange: HttpExchange) -> None:
        """All items that the model read, those of earlier responses included, newest first unless asked otherwise."""
        stored, query = await self._load(exchange), exchange.query()
        items = _with_ids(_decode(stored.items), stored.id)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise BadField("order", got=order, want="'asc' or 'desc'")
        if order == "desc":
            items.reverse()
        if (after := query.get("after")) is not None:
            places = [i for i, item in enumerate(items) if item["id"] == after]
            if not places:
                raise BadField("after", got=after, want="the id of an input item of this response")
            items = items[places[0] + 1 :]
        limit = _number(query, "limit", low=1, high=_MOST_LISTED, default=_LISTED)
        shown = items[:limit]
        await exchange.send_response(
            200,
            encode(
                {
                    "object": "list",
                    "data": shown,
                    "first_id": shown[0]["id"] if shown else None,
                    "last_id": shown[-1]["id"] if shown else None,
                    "has_more": len(items) > len(shown),
                }
            ),
        )

    async def cancel(self, exchange: HttpExchange) -> None:
        """Always a refusal: what is stored has ended."""
        await self._load(exchange)
        raise RequestError(
            "Only responses of background requests can be cancelled, and this server has none. A response that is "
            "being generated ends when its client disconnects.",
            code="response_not_cancellable",
        )

    async def _load(self, exchange: HttpExchange) -> StoredConversation:
        name = _name(exchange)
        found = None if self._store is None else await self._store.load(_tenant(exchange), name)
        if found is None:
            raise UnknownResponse(name)
        return found


def _name(exchange: HttpExchange) -> str:
    return exchange.path_parameter("name")[: _MAX_ID_CHARS + 1]


def _tenant(exchange: HttpExchange) -> str:
    found: str = (exchange.tenant or NO_TENANT).id
    return found


def _number(query: dict[str, str], name: str, *, low: int, high: int, default: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and low <= int(text) <= high):
        raise BadField(name, got=text, want=f"an integer from {low} to {high}")
    return int(text)


def _with_ids(items: Sequence[Any], response: str) -> list[dict[str, Any]]:
    """The items, each with an id, which a listing can be continued after."""
    prefix = f"in_{response.removeprefix('resp_')}_"
    return [
        item if isinstance(item.get("id"), str) else {"id": f"{prefix}{i}", "type": "message", **item}
        for i, item in enumerate(items)
    ]


def replayed_events(stored: StoredConversation) -> list[StreamEvent]:
    """The events of the stream that the response came in, numbered as there.

    Log-probabilities of deltas come with the events of their text's end.
    """
    response = _decode(stored.response)
    deltas: list[list[int]] = _decode(stored.deltas)

    def snapshot(status: str, output: Sequence[Any], **fields: Any) -> bytes:
        if status != "in_progress":
            return stored.response
        absent = {"completed_at": None, "incomplete_details": None, "usage": None, "error": None}
        return encode({**response, **absent, "status": status, "output": output})

    events = ResponseEvents(stored.id, snapshot)
    events.lifecycle("response.created", "in_progress")
    events.lifecycle("response.in_progress", "in_progress")
    for item, sizes in zip(response["output"], deltas, strict=True):
        text = _open_again(events, item)
        at = 0
        for size in sizes:
            events.grow(text[at : at + size])
            at += size
        if item["type"] == "message" and events.item is not None:
            events.item.logprobs = item["content"][0]["logprobs"]
        events.close(item["status"])
    events.lifecycle(f"response.{response['status']}", response["status"])
    return events.pop_events()


def _open_again(events: ResponseEvents, item: dict[str, Any]) -> str:
    """Opens a stored item; its text."""
    kind = item["type"]
    match kind:
        case "message":
            events.open(kind)
            return str(item["content"][0]["text"])
        case "reasoning":
            parts, sealed = item["summary"] or item["content"], item["encrypted_content"]
            events.open(kind, summary=bool(item["summary"]), seal=(lambda _: sealed) if sealed else None)
            return str(parts[0]["text"]) if parts else ""
        case _:
            target = ToolTarget(name=item["name"], namespace=item.get("namespace"))
            events.open(kind, target=target, call_id=item["call_id"])
            return str(item["arguments" if kind == "function_call" else "input"])
