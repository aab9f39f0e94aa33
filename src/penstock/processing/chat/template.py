"""Chat templates: where a model has them, and messages to the text that it was trained on.

They are found as ``transformers`` finds them (``tokenization_utils_base``, ``processing_utils``):
``chat_template.jinja`` and ``additional_chat_templates/*.jinja``, else ``chat_template.json``, else ``chat_template``
in tokenizer_config.json, one template or a list of named ones.  The environment is that of ``transformers``
(``chat_template_utils``): ``raise_exception``, ``strftime_now``, ``tojson`` without HTML escapes, loop controls and
``{% generation %}``, within ``chat.sandbox``.  An error while rendering is the request's, in the template's own words.
Knows nothing about tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import msgspec

from penstock.errors import ModelError, RequestError
from penstock.processing.chat.sandbox import RENDER_BUDGET, LimitReached, MeteredEnvironment, Namespace, RenderBudget

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


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """What a template renders, in the words of transformers' ``apply_chat_template``."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False  # the text is to end where the last message's content ends
    arguments: Mapping[str, Any] = {}  # further names that the template may look up


class TemplateLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one rendering may use (``config.schema.Limits``)."""

    max_output_bytes: int
    max_seconds: float


class ChatTemplate:
    """One template, compiled once.  Rendering may happen on any thread."""

    def __init__(self, source: str, *, special: Mapping[str, str], limits: TemplateLimits) -> None:
        """``special`` holds the tokenizer's named tokens (``bos_token``, ...).  Raises ModelError."""
        if len(source.encode()) > MAX_TEMPLATE_BYTES:
            raise ModelError(f"The chat template is larger than {MAX_TEMPLATE_BYTES} bytes.")
        self._special = dict(special)
        self._limits = limits
        environment = _environment()
        try:
            parsed = environment.parse(source)
            self.literals = _literals(parsed) | frozenset(special.values())
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(parsed))
            self.source = source
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"The model's chat template is not one: {error}") from error

    def render(self, conversation: Conversation) -> str:
        """The text.  Raises RequestError with what the template said, or the limit reached."""
        messages = [_with_reasoning_names(message) for message in conversation.messages]
        if conversation.continue_final_message:
            messages[-1] = _tagged(messages[-1])
        text = self._generate(
            {
                **self._special,
                **conversation.arguments,
                "messages": messages,
                "add_generation_prompt": conversation.add_generation_prompt,
                "tools": conversation.tools,
                "documents": conversation.documents,
            }
        )
        return _cut_at_tag(text) if conversation.continue_final_message else text

    def _generate(self, variables: Mapping[str, Any]) -> str:
        meter = RenderBudget(seconds=self._limits.max_seconds, max_bytes=self._limits.max_output_bytes)
        token = RENDER_BUDGET.set(meter)
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(variables):
                size += len(piece.encode())
                meter.check_size(size)
                meter.check_time()
                pieces.append(piece)
        except LimitReached as error:
            raise RequestError(str(error), param="messages", code="template_limit") from error
        except Exception as error:
            raise RequestError(_in_own_words(error), param="messages", code="template_error") from error
        finally:
            RENDER_BUDGET.reset(token)
        return "".join(pieces)


def _with_reasoning_names(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Reasoning under both names that templates know it by (gpt-oss reads ``thinking``)."""
    reasoning = message.get("reasoning_content")
    return message if reasoning is None else {"thinking": reasoning, **message}


def _tagged(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with a tag where its text ends; of several parts, the last text's."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _CONTINUE_TAG}
    parts = list(content or ())
    for i in reversed(range(len(parts))):
        if "text" in parts[i]:
            parts[i] = {**parts[i], "text": parts[i]["text"] + _CONTINUE_TAG}
            return {**message, "content": parts}
    raise RequestError(
        "The last message has no text that could be continued.", param="continue_final_message", code="invalid_value"
    )


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
    RENDER_BUDGET.get().check_time()
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


def load_template_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
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
