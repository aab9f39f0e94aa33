"""Names of modules, and the patterns by which a ``quantization_config`` speaks of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import translate

from penstock.errors import ModelError

MAX_PATTERNS = 100_000
MAX_PATTERN = 256
"""Modules that a configuration may name in one list, and characters of one."""

REGEX = "re:"
EVERY_LINEAR = "Linear"
"""The class of all matrices that are multiplied, in the words of torch."""


def pattern_of(names: Iterable[str], where: str) -> re.Pattern[str] | None:
    """One pattern of the tensors (or modules) that a list names; None for an empty list.

    An entry is a regular expression behind ``re:``, else a module's name, whole or its last parts, in which ``*``
    stands for anything.  Raises ModelError for a list that is too long, or an entry that is no pattern.
    """
    forms = list(names)
    if len(forms) > MAX_PATTERNS or any(len(form) > MAX_PATTERN for form in forms):
        raise ModelError(f"{where}: more than {MAX_PATTERNS} modules are named, or one has too long a name")
    wanted = []
    for form in forms:
        if form.startswith(REGEX):
            wanted.append(form.removeprefix(REGEX))
        else:
            glob = translate(form).removesuffix("\\Z").removesuffix("\\z")
            wanted.append(rf"(?:.*\.)?{glob}(?:\..*)?\Z")
    try:
        return re.compile("|".join(f"(?:{each})" for each in wanted)) if wanted else None
    except re.error as error:
        raise ModelError(f"{where}: names of modules: {error}") from error
