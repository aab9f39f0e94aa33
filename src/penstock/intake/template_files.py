"""The chat templates that come with a model: where they lie, what they are called, which one a chat takes.

As ``transformers`` looks for them (``tokenization_utils_base``, ``processing_utils``): ``chat_template.jinja`` and
``additional_chat_templates/*.jinja``, else ``chat_template.json``, else ``chat_template`` in tokenizer_config.json: one
template or a list of named ones.  Knows nothing about what a template says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import ModelError
from penstock.intake.template import MAX_TEMPLATE_BYTES, ChatTemplate, TemplateLimits

DEFAULT, TOOL_USE = "default", "tool_use"
MAX_TEMPLATES = 16

T = TypeVar("T")


class ChatTemplates:
    """One model's templates, at least one."""

    def __init__(self, sources: Mapping[str, str], *, special: Mapping[str, str], limits: TemplateLimits) -> None:
        """``sources`` by name; ``special`` as for ``ChatTemplate``.  Raises ModelError."""
        if DEFAULT not in sources and len(sources) > 1:
            raise ModelError(
                f"The model has chat templates named {', '.join(sorted(sources))} and none named '{DEFAULT}'. "
                "Put the one to use into chat_template.jinja."
            )
        named = {name: ChatTemplate(source, special=special, limits=limits) for name, source in sources.items()}
        self._plain = named.get(DEFAULT) or next(iter(named.values()))
        self._with_tools = named.get(TOOL_USE, self._plain)
        self.literals = frozenset[str]().union(*(template.literals for template in named.values()))

    def for_chat(self, *, tools: bool) -> ChatTemplate:
        """The template of a chat with or without tools."""
        return self._with_tools if tools else self._plain


def load_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; none when the model has none.  ``config`` is its tokenizer_config.json.  Raises ModelError."""
    main, more = folder / "chat_template.jinja", sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if main.is_file() or more:
        files = {DEFAULT: main} if main.is_file() else {}
        files |= {path.stem: path for path in more}
        return {name: _read(path) for name, path in _bounded(files, folder).items()}
    legacy = folder / "chat_template.json"
    if legacy.is_file():
        try:
            config = json.loads(_read(legacy))
        except ValueError as error:
            raise ModelError(f"{legacy} is not JSON: {error}") from error
    given = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(given, list):
        entries = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}
        named = {name: text for name, text in entries.items() if isinstance(name, str) and isinstance(text, str)}
        return _bounded(named, folder)
    return {DEFAULT: given} if isinstance(given, str) else {}


def _bounded(entries: dict[str, T], folder: Path) -> dict[str, T]:
    if len(entries) > MAX_TEMPLATES:
        raise ModelError(f"{folder} has {len(entries)} chat templates; at most {MAX_TEMPLATES} are read.")
    return entries


def _read(path: Path) -> str:
    if path.stat().st_size > MAX_TEMPLATE_BYTES:
        raise ModelError(f"{path} is larger than {MAX_TEMPLATE_BYTES} bytes.")
    return path.read_text(encoding="utf-8")
