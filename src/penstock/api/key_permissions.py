"""What an API key may be used for: until when, which models, which routes, how many requests at once.

Pure decisions: ``now`` is an argument.  The same rules hold in a gateway and in a catalog's front.  Knows nothing about
where keys are stored (``config.api_keys``) or how requests are counted (``api.concurrency``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from penstock.errors import Forbidden, ModelNotAllowed, Unauthorized
from penstock.interfaces import ModelCard

ROUTE_PATHS: Mapping[str, tuple[str, ...]] = {
    "chat": ("/v1/chat/completions",),
    "completions": ("/v1/completions",),
    "responses": ("/v1/responses",),
    "messages": ("/v1/messages",),
    "embeddings": ("/v1/embeddings",),
    "rerank": ("/rerank", "/v1/rerank", "/v2/rerank"),
    "classify": ("/classify",),
    "audio": ("/v1/audio/transcriptions", "/v1/audio/translations"),
    "tokenize": ("/tokenize", "/detokenize"),
}
"""Paths of each of ``config.api_keys.RouteName``; what is below a path belongs to it."""

UNRESTRICTED_PATHS = ("/v1/models", "/props")
"""Paths for every key, and what is below them: they show the models that the key is for."""

EXPIRED_API_KEY = "expired_api_key"
"""The code of a refusal because the key has expired."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPermissions:
    """The restrictions of one key."""

    key: str = ""  # its id, which is no secret
    expires: int | None = None  # Unix seconds by this host's clock; None: never
    models: tuple[str, ...] | None = None  # None: all
    routes: tuple[str, ...] | None = None  # None: all
    max_concurrency: int | None = None  # open requests; None: any number


UNRESTRICTED = KeyPermissions()


def route_of(path: str) -> str | None:
    """The route that a path belongs to; None: to none that a key can be restricted to."""
    return next((route for route, paths in ROUTE_PATHS.items() if any(_is_below(path, each) for each in paths)), None)


def _is_below(path: str, base: str) -> bool:
    return path == base or path.startswith(base + "/")


def check_expiry(key: KeyPermissions, now: float) -> None:
    """``now``: Unix seconds.  Raises Unauthorized from the moment on at which the key expires."""
    if key.expires is not None and now >= key.expires:
        raise Unauthorized(
            f"This API key expired at {utc_text(key.expires)}. Ask the operator for a new one (`penstock keys add`).",
            code=EXPIRED_API_KEY,
        )


def check_route(key: KeyPermissions, path: str) -> None:
    """Raises Forbidden for a path that the key is not for.  What belongs to no route is refused, too."""
    if key.routes is None or route_of(path) in key.routes or any(_is_below(path, each) for each in UNRESTRICTED_PATHS):
        return
    paths = ", ".join(each for route in key.routes for each in ROUTE_PATHS[route])
    raise Forbidden(f"This API key is for {paths} only.", code="route_not_allowed")


def may_use(key: KeyPermissions, names: Collection[str]) -> bool:
    """Whether the key is for a model with these names: the one that a client sends, and the one that it stands for."""
    return key.models is None or any(name in key.models for name in names)


def check_model(key: KeyPermissions, asked: str, names: Collection[str]) -> None:
    """Raises ModelNotAllowed, whether or not there is such a model: the key's holder learns of its own models only.

    ``asked``: the name that the client sent; ``names``: as in ``may_use``.
    """
    if not may_use(key, names):
        raise ModelNotAllowed(asked, key.models or ())


def card_names(card: ModelCard) -> tuple[str, ...]:
    """The names under which a key may be for this model: its own, and of an alias the name that it stands for."""
    return (card.name,) if card.stands_for is None else (card.name, card.stands_for)


def visible_cards(key: KeyPermissions, cards: Sequence[ModelCard]) -> list[ModelCard]:
    """The models that the key is for."""
    return [card for card in cards if may_use(key, card_names(card))]


def utc_text(seconds: int) -> str:
    """Unix seconds as ``2027-01-31T00:00:00Z``."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
