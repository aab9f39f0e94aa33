"""What a key is for: decisions without a clock, a file or a request."""

from __future__ import annotations

import re
import typing
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.routing import Route

from penstock.api.auth import OPEN_PATHS, OPERATOR_PATHS, Tenant, tenant_header
from penstock.api.key_permissions import (
    ROUTE_PATHS,
    UNRESTRICTED_PATHS,
    KeyPermissions,
    card_names,
    check_expiry,
    check_model,
    check_route,
    may_use,
    route_of,
    visible_cards,
)
from penstock.config.api_keys import RouteName
from penstock.deploy.kubernetes import ROUTED_PATHS
from penstock.errors import Forbidden, ModelNotAllowed, Unauthorized
from penstock.interfaces import ModelCard
from penstock.processing.model_aliases import find_card, listed_cards

NOON = 1_800_000_000


@given(st.integers(-100, 100))
def test_a_key_ends_at_its_second_and_not_before(seconds: int):
    key = KeyPermissions(expires=NOON)
    if seconds < 0:
        check_expiry(key, NOON + seconds)
        return
    with pytest.raises(Unauthorized, match="expired at 2027-01-15T08:00:00Z") as refused:
        check_expiry(key, NOON + seconds)
    assert refused.value.code == "expired_api_key"


def test_a_key_without_an_end_never_expires():
    check_expiry(KeyPermissions(), 1e12)


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/chat/completions", "chat"),
        ("/v1/responses/resp_1/input_items", "responses"),
        ("/v1/messages/count_tokens", "messages"),
        ("/v2/rerank", "rerank"),
        ("/detokenize", "tokenize"),
        ("/v1/completions2", None),
        ("//v1/completions", None),
        ("/v1/models", None),
        ("/", None),
    ],
)
def test_the_route_of_a_path(path: str, route: str | None):
    assert route_of(path) == route


@pytest.mark.parametrize("route", ROUTE_PATHS)
def test_a_key_for_one_route_is_for_no_other(route: str):
    key = KeyPermissions(routes=(route,))
    for other, paths in ROUTE_PATHS.items():
        for path in paths:
            if other == route:
                check_route(key, path)
                continue
            with pytest.raises(Forbidden, match=ROUTE_PATHS[route][0]) as refused:
                check_route(key, path)
            assert refused.value.code == "route_not_allowed"
    for path in ("/v1/models", "/v1/models/some/name", "/props"):
        check_route(key, path)
    with pytest.raises(Forbidden):
        check_route(key, "/v1/modelsx")


def test_the_vocabulary_of_files_is_that_of_routes():
    assert set(typing.get_args(RouteName)) == set(ROUTE_PATHS)


def test_every_path_of_both_applications_belongs_somewhere():
    """A route that is added must be given to a name, or a key for others could use it."""
    from penstock.catalog import http_proxy

    known = {path for paths in ROUTE_PATHS.values() for path in paths}
    assert {*http_proxy.PASSED, *http_proxy.PASSED_FORMS} - known == {"/v1/messages/count_tokens"}
    for path in paths_of_a_gateway():
        found = (
            path in OPEN_PATHS
            or path.startswith(OPERATOR_PATHS)
            or route_of(path) is not None
            or path.split("/{")[0] in UNRESTRICTED_PATHS
        )
        assert found, path


def test_a_cluster_lets_out_all_paths_of_clients_and_none_of_operators():
    for path in paths_of_a_gateway():
        routed = any(path == each or path.startswith(f"{each}/") for each in ROUTED_PATHS)
        assert routed == (path.startswith("/v1/") and not path.startswith(OPERATOR_PATHS)), path


def test_the_proxies_of_the_documentation_block_what_is_for_operators():
    page = (Path(__file__).parents[3] / "docs/security.md").read_text(encoding="utf-8")
    nginx, caddy = re.search(r"location ~ (\S+) {", page), re.search(r"@operators path (.+)", page)
    assert nginx
    assert caddy
    for path in paths_of_a_gateway():
        blocked = path.startswith(OPERATOR_PATHS)
        assert (re.search(nginx[1], path) is not None) == blocked, path
        assert any(fnmatch(path, pattern) for pattern in caddy[1].split()) == blocked, path


def paths_of_a_gateway() -> list[str]:
    from penstock.api import app

    found: list[str] = []

    class Noting(Starlette):
        def __init__(self, *, routes: list[Any], **rest: Any) -> None:
            found.extend(route.path for route in routes if isinstance(route, Route))
            super().__init__(routes=routes, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "Starlette", Noting)
        from null.http_stage import app_of
        from null.streams import NullStreams

        app_of(NullStreams())
    assert "/v1/chat/completions" in found
    return found


CARDS = listed_cards(ModelCard(name="base", created=1, max_model_len=8), ("fox",), ("gpt=base", "cat=fox"))
PATTERNS = ("gpt=base", "cat=fox", "claude-*=base")


@pytest.mark.parametrize(
    ("models", "may"),
    [
        (None, {"base", "fox", "gpt", "cat", "claude-1", "none"}),
        (("base",), {"base", "gpt", "claude-1"}),  # an adapter is another model
        (("fox",), {"fox", "cat"}),
        (("gpt",), {"gpt"}),  # this name and no other
        (("claude-1", "none"), {"claude-1", "none"}),
    ],
)
def test_models_by_name_alias_and_adapter(models: tuple[str, ...] | None, may: set[str]):
    key = KeyPermissions(models=models)
    for name in ("base", "fox", "gpt", "cat", "claude-1", "none"):
        card = find_card(CARDS, name, PATTERNS)
        names = (name,) if card is None else card_names(card)
        assert may_use(key, names) == (name in may), name
        if name not in may:
            with pytest.raises(ModelNotAllowed, match=f"'{name}'") as refused:
                check_model(key, name, names)
            assert (refused.value.status, refused.value.code, refused.value.param) == (403, "model_not_found", None)
    assert {card.name for card in visible_cards(key, CARDS)} == may & {card.name for card in CARDS}


def test_a_front_keeps_the_permissions_to_itself():
    """It has checked them, and sixty names would not fit the header."""
    tenant = Tenant(id="t", permissions=KeyPermissions(key="k-1", models=("m" * 250,) * 64, max_concurrency=1))
    assert tenant_header(tenant) == tenant_header(Tenant(id="t"))
