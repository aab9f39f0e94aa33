"""The text of a pod's ``--config`` file, the same whether it is written here or by the templates of the Helm chart.

Of a number in YAML, Go keeps the value only, and of a table it forgets the order.  So keys are sorted, 60.0 is written
as 60, and tables stand in one line.  ``charts/penstock/templates/_settings.tpl`` has the same rules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def settings_text(settings: Mapping[str, Any]) -> str:
    """The file; ``settings``: what TOML can have, without dates."""
    return "".join(f"{_key(key)} = {_value(settings[key])}\n" for key in sorted(settings))


def number_text(value: float) -> str:
    """A number as JSON of ECMAScript and Go has it: the shortest text that is read as the same value."""
    if isinstance(value, int):
        return str(value)
    if value == 0 or 1e-6 <= abs(value) < 1e21:
        return format(Decimal(repr(value)), "f").removesuffix(".0")
    return repr(value).replace("e-0", "e-")


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _text(key)


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return number_text(value)
        case Mapping():
            items = [f"{_key(key)} = {_value(value[key])}" for key in sorted(value)]
            return f"{{{', '.join(items)}}}"
        case list() | tuple():
            return f"[{', '.join(map(_value, value))}]"
        case _:
            return _text(str(value))


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
