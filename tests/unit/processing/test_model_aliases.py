"""Names that clients send are mapped by the first pattern that matches; bad aliases are refused at the start."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError, UnknownModel
from penstock.interfaces import ModelCard
from penstock.processing.model_aliases import (
    MAX_ALIASES,
    aliased_model,
    check_aliases,
    find_card,
    listed_cards,
    plain_aliases,
    served_model,
)

ALIASES = ("claude-*=big", "gpt-?=small", "my=model=small", "*=big")


@pytest.mark.parametrize(
    ("name", "served"),
    [("claude-opus-5", "big"), ("gpt-5", "small"), ("gpt-55", "big"), ("my=model", "small"), ("Claude-x", "big")],
)
def test_the_first_pattern_that_matches_counts(name: str, served: str) -> None:
    assert aliased_model(name, ALIASES) == served


def test_without_a_match_a_name_stays_what_it_is() -> None:
    assert aliased_model("Claude-x", ALIASES[:1]) == "Claude-x"
    assert aliased_model("x", ()) == "x"


def test_only_aliases_without_wildcards_can_be_listed() -> None:
    assert plain_aliases(ALIASES) == (("my=model", "small"),)


@pytest.mark.parametrize("alias", ["claude", "=big", "claude-*=", " =big", f"{'c' * 257}=big"])
def test_what_is_no_alias_is_refused(alias: str) -> None:
    with pytest.raises(ConfigError, match="PATTERN=NAME"):
        check_aliases((alias,), ["big"])


def test_an_alias_of_a_model_that_is_not_served_is_refused_and_so_are_too_many() -> None:
    with pytest.raises(ConfigError, match="no model 'huge' is served here, but big, small"):
        check_aliases(("claude-*=huge",), ["big", "small"])
    with pytest.raises(ConfigError, match=str(MAX_ALIASES)):
        check_aliases(tuple(f"a{number}=big" for number in range(MAX_ALIASES + 1)), ["big"])


CARD = ModelCard(name="big", created=1, max_model_len=8)


def test_a_name_that_is_served_is_never_mapped() -> None:
    assert served_model("gpt-5", ["big", "small", "gpt-5"], ALIASES) == "gpt-5"
    assert served_model("gpt-5", ["big", "small"], ALIASES) == "small"
    assert served_model("gpt-5", ["big"], ALIASES) is None


def test_each_name_is_listed_once_and_only_if_it_is_served() -> None:
    given = ("mine=fox", "fox=big", "big=fox", "mine=big", "gone=owl", "any-*=big")
    listed = [(card.name, card.parent) for card in listed_cards(CARD, ["fox"], given)]
    assert listed == [("big", None), ("fox", "big"), ("mine", "fox")]


def test_a_card_is_found_by_any_name_that_requests_may_have() -> None:
    given = ("mine=fox", "any-*=fox")
    cards = listed_cards(CARD, ["fox"], given)
    found = {name: find_card(cards, name, given) for name in ("big", "fox", "mine", "any-1", "none")}
    assert {name: card and (card.name, card.parent) for name, card in found.items()} == {
        "big": ("big", None),
        "fox": ("fox", "big"),
        "mine": ("mine", "fox"),
        "any-1": ("any-1", "fox"),
        "none": None,
    }


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("claude-sonnet-5", "--model-alias 'claude-*=big'"),
        ("gpt-9", "--model-alias 'gpt-*=big'"),
        ("llama", "--model-alias 'claude-*=big'"),
        ("'; rm -rf", "--model-alias 'claude-*=big'"),
    ],
)
def test_an_unknown_model_is_refused_with_what_there_is_and_how_names_are_mapped(name: str, advice: str) -> None:
    message = UnknownModel(name, ["big", "small"]).message
    assert "This server has 'big', 'small'." in message
    assert advice in message
    assert "--model-alias" not in UnknownModel(name, ["big"], mappable=False).message
    assert "'m19' and 5 more." in UnknownModel(name, [f"m{number}" for number in range(25)]).message
