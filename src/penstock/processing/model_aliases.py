"""Names that clients send for a model, mapped to those that are served (``--model-alias PATTERN=NAME``).

Coding agents name models that they were built for; with ``claude-*=NAME`` they get the one that there is.  A name that
is served is never mapped.
"""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase
from functools import cache

from penstock.errors import ConfigError

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


def plain_aliases(given: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """The aliases without wildcards, which can be listed."""
    return tuple(pair for pair in parse_aliases(given) if not any(char in pair[0] for char in "*?["))
