"""Settings as the TOML file that ``--config`` reads: what is in force, and what is left to be decided as a comment."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.config.schema import EngineSettings

SECRETS = ("api_key",)
"""Never printed."""


def dump_toml(config: EngineSettings, command: str) -> str:
    """The file; ``config.load`` reads the same settings from it.  ``command``: whose settings they are."""
    lines = [f"# Settings of `{command}` that are in force; use with --config FILE.  What is commented out is not set."]
    tables = []
    for field in msgspec.structs.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, msgspec.Struct):
            tables.append((field.name, value))
        else:
            lines.append(_line(field.name, value))
    for name, table in tables:
        lines += ["", f"[{name}]"]
        lines += [_line(key, value) for key, value in msgspec.structs.asdict(table).items()]
    return "\n".join(lines) + "\n"


def _line(name: str, value: Any) -> str:
    if name in SECRETS and value is not None:
        return f"# {name}: set it in the environment, as PENSTOCK_{name.upper()}"
    return f"# {name} =" if value is None else f"{name} = {_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return msgspec.json.encode(value).decode()  # strings, numbers and booleans of TOML are spelled as JSON's
