"""Names that clients send are mapped by the first pattern that matches; bad aliases are refused at the start."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.processing.model_aliases import MAX_ALIASES, aliased_model, check_aliases, plain_aliases

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
