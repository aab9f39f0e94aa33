"""Chat templates: messages to the text that a model was trained on.

The environment is that of ``transformers`` (``chat_template_utils``): ``raise_exception``, ``strftime_now``,
``tojson`` without HTML escapes, loop controls and ``{% generation %}``; the sandbox is ``intake.sandbox``.  What goes
wrong while rendering is the request's fault and says so in the template's own words.  Knows nothing about tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from penstock.errors import ModelError, RequestError
from penstock.intake.sandbox import METER, LimitReached, Meter, MeteredEnvironment, Namespace

MAX_TEMPLATE_BYTES = 1 << 20
_MAX_JSON_INDENT = 16
_CONTINUE_TAG = "\ufdd8continue\ufdd9 "
"""Ends with a blank, to tell templates that trim from those that do not."""

RESERVED = frozenset({"messages", "add_generation_prompt", "tools", "documents"})
"""Names that a template gets from us; ``chat_template_kwargs`` may not set them."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what a model wrote; that matters in training only."""

    tags = {"generation"}  # noqa: RUF012 - declared as jinja2 wants it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """``dict()`` for templates, without the type and what hangs on it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class ChatTemplate:
    """One model's template, compiled once.  Rendering may happen on any thread."""

    def __init__(
        self, source: str, *, special: Mapping[str, str], max_output_bytes: int = 16 << 20, max_seconds: float = 5.0
    ) -> None:
        """``special`` holds the tokenizer's named tokens (``bos_token``, ...).  Raises ModelError."""
        if len(source.encode()) > MAX_TEMPLATE_BYTES:
            raise ModelError(f"The chat template is larger than {MAX_TEMPLATE_BYTES} bytes.")
        self._special = dict(special)
        self._max_output_bytes = max_output_bytes
        self._max_seconds = max_seconds
        environment = _environment()
        try:
            self.literals = _literals(environment.parse(source)) | frozenset(special.values())
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"The model's chat template is not one: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The text for ``messages``.  Raises RequestError with what the template said, or the limit reached.

        With ``continue_final_message`` the text ends where the last message's content ends.
        """
        shown: Sequence[Mapping[str, Any]] = messages
        if continue_final_message:
            shown = [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{_CONTINUE_TAG}"}]
        variables: dict[str, Any] = {
            **self._special,
            **(arguments or {}),
            "messages": shown,
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        text = self._generate(variables)
        return _cut_at_tag(text) if continue_final_message else text

    def _generate(self, variables: Mapping[str, Any]) -> str:
        meter = Meter(seconds=self._max_seconds, max_bytes=self._max_output_bytes)
        token = METER.set(meter)
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(variables):
                size += len(piece.encode())
                meter.weigh(size)
                meter.look()
                pieces.append(piece)
        except LimitReached as error:
            raise RequestError(str(error), param="messages", code="template_limit") from error
        except Exception as error:
            raise RequestError(_in_own_words(error), param="messages", code="template_error") from error
        finally:
            METER.reset(token)
        return "".join(pieces)


def load_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template of a model: ``chat_template.jinja``, else the one in its tokenizer_config; or None."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise ModelError(f"{path} is larger than {MAX_TEMPLATE_BYTES} bytes.")
        return path.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None


def _environment() -> MeteredEnvironment:
    environment = MeteredEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = Namespace
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None and not 0 <= int(indent) <= _MAX_JSON_INDENT:
        raise LimitReached(f"Chat templates may indent JSON by at most {_MAX_JSON_INDENT}.")
    METER.get().look()
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _literals(template: jinja2.nodes.Template) -> frozenset[str]:
    """Every string that the template itself contains."""
    texts = {node.data for node in template.find_all(jinja2.nodes.TemplateData)}
    return frozenset(texts | {node.value for node in template.find_all(jinja2.nodes.Const) if type(node.value) is str})


def _in_own_words(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "The chat template calls itself without end."
    said = str(error) or type(error).__name__
    return f"The model's chat template refused these messages: {said[:1000]}"


def _cut_at_tag(text: str) -> str:
    at = text.rfind(_CONTINUE_TAG.rstrip())
    if at < 0:
        raise RequestError(
            "The model's chat template does not show the last message, so it cannot be continued.",
            param="continue_final_message",
            code="template_error",
        )
    return text[:at] if text[at:].startswith(_CONTINUE_TAG) else text[:at].rstrip()
