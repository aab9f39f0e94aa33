"""Names that clients send for a model, mapped to those that are served (``--model-alias PATTERN=NAME``).

Coding agents name models that they were built for; with ``claude-*=NAME`` they get the one that there is.  A name that
is served is never mapped.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from functools import cache

import msgspec

from penstock.errors import ConfigError
from penstock.interfaces import ModelCard

MAX_ALIASES = 256
MAX_PATTERN_CHARS = 256


@cache
def parse_aliases(given: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Pairs of a pattern, as shells have them, and a name.  Raises ConfigError."""
    if len(given) > MAX_ALIASES:
        raise ConfigError(f"--model-alias: {len(given)} aliases; at most {MAX_ALIASES} are allowed")
    pairs: list[tuple[str, str]] = []
    for text in given:
        pattern, equals, name = text.rpartition("=")
        if not equals or not pattern.strip() or not name.strip() or len(pattern) > MAX_PATTERN_CHARS:
            raise ConfigError(f"--model-alias {text!r}: expected PATTERN=NAME, such as 'claude-*=NAME'")
        pairs.append((pattern.strip(), name.strip()))
    return tuple(pairs)


def check_aliases(given: tuple[str, ...], served: Collection[str]) -> None:
    """Raises ConfigError for a malformed alias, or one of a model that is not served."""
    for pattern, name in parse_aliases(given):
        if name not in served:
            known = ", ".join(served)
            raise ConfigError(f"--model-alias {pattern}={name}: no model {name!r} is served here, but {known}")


def aliased_model(name: str, given: tuple[str, ...]) -> str:
    """The served model that ``name`` stands for by the first pattern that matches; else ``name`` itself."""
    return next((served for pattern, served in parse_aliases(given) if fnmatchcase(name, pattern)), name)


def served_model(name: str, served: Collection[str], given: tuple[str, ...]) -> str | None:
    """The one of ``served`` that a client means by ``name``; None: there is none."""
    if name in served:
        return name
    meant = aliased_model(name, given)
    return meant if meant in served else None


def listed_cards(own: ModelCard, adapters: Sequence[str], given: tuple[str, ...]) -> tuple[ModelCard, ...]:
    """The model, its adapters, and the aliases that can be listed, each name once."""
    parents = dict.fromkeys(adapters, own.name)
    served = (own.name, *adapters)
    cards = [own, *(msgspec.structs.replace(own, name=name, parent=parent) for name, parent in parents.items())]
    aliases: dict[str, str] = {}
    for alias, name in plain_aliases(given):
        if alias not in served and name in served:
            aliases.setdefault(alias, name)
    return (*cards, *(_alias_card(own, alias, name) for alias, name in aliases.items()))


def _alias_card(card: ModelCard, alias: str, name: str) -> ModelCard:
    return msgspec.structs.replace(card, name=alias, parent=name, stands_for=name)


def find_card(cards: Sequence[ModelCard], name: str, given: tuple[str, ...]) -> ModelCard | None:
    """The card of a name that clients may send, also of an alias that cannot be listed."""
    by_name = {card.name: card for card in cards}
    meant = served_model(name, by_name, given)
    if meant is None or meant == name:
        return by_name.get(name)
    return _alias_card(by_name[meant], name, meant)


def plain_aliases(given: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """The aliases without wildcards, which can be listed."""
    return tuple(pair for pair in parse_aliases(given) if not any(char in pair[0] for char in "*?["))
