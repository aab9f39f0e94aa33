"""Chat templates: where a model has them, and messages to the text that it was trained on.

They are found as ``transformers`` finds them (``tokenization_utils_base``, ``processing_utils``):
``chat_template.jinja`` and ``additional_chat_templates/*.jinja``, else ``chat_template.json``, else ``chat_template``
in tokenizer_config.json, one template or a list of named ones.  The environment is that of ``transformers``
(``chat_template_utils``): ``raise_exception``, ``strftime_now``, ``tojson`` without HTML escapes, loop controls and
``{% generation %}``, within ``chat.sandbox``.  An error while rendering is the request's, in the template's own words.

Templates differ in what they can render: arguments of tool calls as an object or as text, ``content`` null or empty in
a message with calls, ids of nine characters, one call per message, text as a list of parts, no tools at all.
``probe_template`` finds out once, by rendering small chats; ``TemplateAdapter`` then rewrites every chat so that it
renders.  One thing is lost: text beside tool calls is dropped where the template cannot show both.  Knows nothing about
tokens, and no family by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from hashlib import blake2b
from itertools import product
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
from penstock.processing.parsers.parser import OutputFormat
from penstock.processing.parsers.registry import HERMES, detect_format
from penstock.processing.parsers.tool_call_formats import JsonCalls
from penstock.processing.requests.messages import Message, joined_contents, with_text_before

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
    """What one rendering may use (``config.limits.RequestLimits``)."""

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


_FUNCTION: dict[str, Any] = {
    "name": "probe_tool",
    "description": "probe",
    "parameters": {
        "type": "object",
        "properties": {"probe_key": {"type": "string", "description": "probe"}},
        "required": ["probe_key"],
    },
}
_TOOL: dict[str, Any] = {"type": "function", "function": _FUNCTION}
_ARGUMENTS = {"probe_key": "probe_value"}
_IDS = ("call_0123456789abcdef01234567", "call_123456789abcdef012345678"), ("abcdef123", "zyxwvu987")
_USER = {"role": "user", "content": "probe_user"}


class TemplateCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a template takes."""

    tools: bool  # it shows the tools it is given
    flat_tools: bool = False  # each without the object around the function
    calls: bool  # it shows calls in earlier answers
    results: bool  # and what tools answered
    objects: bool = True  # arguments are objects, else text
    null_content: bool = False  # with calls ``content`` is null, else empty
    short_ids: bool = False  # ids have nine letters and digits
    many: bool = True  # one message may have several calls
    words: bool = True  # and content with them
    system: bool = True  # it shows a system message
    late_system: bool = True  # and one amid the chat
    parts: bool = False  # it shows text in a list of parts only


def probe_template(template: ChatTemplate) -> TemplateCapabilities:
    """Some twenty renderings, a few milliseconds."""
    flat = not _Probe(template, _USER, [_TOOL]).shows("probe_tool")
    shown = [_FUNCTION] if flat else [_TOOL]
    tools = _Probe(template, _USER, shown).shows("probe_tool")
    plain = _Probe(template, _USER)
    parts = not plain.shows("probe_user") and _Probe(template, as_content_parts(_USER)).shows("probe_user")
    probe = _Probe(template, as_content_parts(_USER) if parts else _USER, shown if tools else None)
    known = TemplateCapabilities(
        tools=tools,
        flat_tools=flat and tools,
        calls=False,
        results=tools and probe.shows("probe_result0", {"role": "assistant", "content": "x"}, *_results(_IDS[1][:1])),
        system=probe.shows_system(),
        late_system=probe.shows_late_system(),
        parts=parts,
    )
    for null, objects, short in product((True, False), (True, False), (False, True)):
        trial = msgspec.structs.replace(known, null_content=null, objects=objects, short_ids=short)
        if tools and probe.shows_calls(trial, 1):
            many, words = probe.shows_calls(trial, 2), probe.shows_calls(trial, 1, words="probe_words")
            return msgspec.structs.replace(trial, calls=True, results=True, many=many, words=words)
    return known


def default_arguments(template: ChatTemplate, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Arguments that some templates need in addition to the tools (Firefunction): the tools as text, and the time."""
    if not {"functions", "datetime"} <= template.variables:
        return {}
    functions = json.dumps([tool["function"] for tool in tools], indent=4, ensure_ascii=False)
    return {"functions": functions, "datetime": datetime.now().strftime("%Y-%m-%d %H:%M:%S")}


def as_content_parts(message: Message) -> Message:
    """The message with its text in a list of one part."""
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


class _Probe:
    """Small chats that begin with one message of a user."""

    def __init__(self, template: ChatTemplate, user: Message, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._template, self._user, self._tools = template, user, tools
        self._arguments = default_arguments(template, [_TOOL] if tools else [])

    def shows(self, word: str, *more: Message) -> bool:
        """Whether ``word`` is in what the template writes of the user's message and ``more``."""
        return word in self._rendered([self._user, *more])

    def shows_system(self) -> bool:
        """Whether a system message is rendered."""
        return "probe_system" in self._rendered([{"role": "system", "content": "probe_system"}, self._user])

    def shows_late_system(self) -> bool:
        """Whether a system message amid a chat is rendered."""
        answer, system = {"role": "assistant", "content": "x"}, {"role": "system", "content": "probe_late"}
        return "probe_late" in self._rendered([self._user, answer, system, self._user])

    def shows_calls(self, traits: TemplateCapabilities, count: int, *, words: str = "") -> bool:
        """Whether ``count`` calls, their results and the text with them are rendered.

        Arguments neither as Python writes an object nor as a string within a string.
        """
        ids = _IDS[traits.short_ids][:count]
        arguments = _ARGUMENTS if traits.objects else json.dumps(_ARGUMENTS)
        calls = [
            {"id": identity, "type": "function", "function": {"name": "probe_tool", "arguments": arguments}}
            for identity in ids
        ]
        content = words or (None if traits.null_content else "")
        answer = {"role": "assistant", "content": content, "tool_calls": calls}
        text = self._rendered([self._user, answer, *_results(ids)])
        broken = any(sign in text for sign in ("{'probe_key'", '\\"probe_key', "None"))
        there = text.count("probe_value") >= count and f"probe_result{count - 1}" in text and words in text
        return there and not broken

    def _rendered(self, messages: Sequence[Message]) -> str:
        """The text, empty when the template fails."""
        try:
            return self._template.render(
                Conversation(
                    messages=messages, tools=self._tools, arguments=self._arguments, add_generation_prompt=True
                )
            )
        except RequestError:
            return ""


def _results(ids: Sequence[str]) -> list[Message]:
    return [
        {"role": "tool", "content": f"probe_result{i}", "tool_call_id": identity, "name": "probe_tool"}
        for i, identity in enumerate(ids)
    ]


_INTRODUCTION = (
    "You may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> "
    'XML tags:\n<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)
"""Hermes' way, for templates that have none."""


class TemplateAdapter:
    """One template, chats as it takes them, and the format of the answers to them."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.traits = probe_template(template)
        self.format = detect_format(template.source)
        if not self.traits.tools:
            # The tools are explained in our words, so the model follows them.
            self.format = msgspec.structs.replace(self.format, calls=HERMES)

    def adapted(self, conversation: Conversation) -> Conversation:
        """The same chat for this template.  Messages and tools are as ``message_fields`` and ``tool_fields`` parse."""
        traits = self.traits
        tools = list(conversation.tools or ())
        messages: list[Message] = [dict(message) for message in _with_shown_systems(conversation.messages, traits)]
        if not traits.calls:
            messages = [_with_calls_as_text(message, self.format) for message in messages]
        elif not traits.many:
            messages = list(_one_call_each(messages))
        if not traits.results:
            messages = list(_results_as_text(messages))
        messages = [_fitted(message, traits) for message in messages]
        if tools and not traits.tools:
            messages = _introduced(messages, tools, traits)
            tools = []
        elif traits.flat_tools:
            tools = [tool["function"] for tool in tools]
        if traits.parts:
            messages = [as_content_parts(message) for message in messages]
        return msgspec.structs.replace(
            conversation,
            messages=messages,
            tools=tools or None,
            arguments={**default_arguments(self.template, conversation.tools or ()), **conversation.arguments},
        )


def _with_shown_systems(
    messages: Sequence[Mapping[str, Any]], traits: TemplateCapabilities
) -> Sequence[Mapping[str, Any]]:
    """System messages that the template does not show, or refuses, as text of the user's where they stand."""
    shown: list[tuple[Mapping[str, Any], list[Any]]] = []  # messages, and the contents of each
    moved = False  # the message before was one of the system's, and is the user's now
    begins = True  # only system messages came so far
    for given in messages:
        begins = begins and given["role"] == "system"
        moves = given["role"] == "system" and not (traits.system if begins else traits.late_system)
        message = {**given, "role": "user"} if moves else given
        if (moves or moved) and message["role"] == "user" and shown and shown[-1][0]["role"] == "user":
            shown[-1][1].append(message["content"])
        else:
            shown.append((message, [message.get("content")]))
        moved = moves
    return [
        message if len(contents) == 1 else {**message, "content": joined_contents(contents)}
        for message, contents in shown
    ]


def _fitted(message: Message, traits: TemplateCapabilities) -> Message:
    """Content, arguments and ids as the template takes them."""
    if message.get("content") is None:
        keeps_null = traits.null_content and "tool_calls" in message
        message["content"] = None if keeps_null else ""
    elif "tool_calls" in message and (message["content"] == "" or not traits.words):
        message["content"] = None if traits.null_content else ""  # text with calls is dropped where there may be none
    if "tool_calls" in message:
        message["tool_calls"] = [_fitted_call(call, traits) for call in message["tool_calls"]]
    if "tool_call_id" in message and traits.short_ids:
        message["tool_call_id"] = _short(message["tool_call_id"])
    return message


def _fitted_call(call: Mapping[str, Any], traits: TemplateCapabilities) -> dict[str, Any]:
    function = dict(call["function"])
    if traits.objects:
        function["arguments"] = _as_object(function["arguments"])
    elif not function["arguments"]:
        function["arguments"] = "{}"
    return {**call, "id": _short(call["id"]) if traits.short_ids else call["id"], "function": function}


def _as_object(text: str) -> Any:
    """The arguments; text that is no JSON object (an answer that was cut off) stays text, under a name."""
    if not text:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


def _short(identity: str) -> str:
    if len(identity) == 9 and identity.isalnum() and identity.isascii():
        return identity
    return blake2b(identity.encode(), digest_size=5).hexdigest()[:9]


def _one_call_each(messages: Sequence[Message]) -> Iterator[Message]:
    """Every call in a message of its own, followed by its result."""
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            yield message
            continue
        results: list[Message] = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        for i, call in enumerate(calls):
            yield {**(message if i == 0 else {"role": "assistant", "content": None}), "tool_calls": [call]}
            own = [result for result in results if result.get("tool_call_id") == call["id"]]
            yield from own
            results = [result for result in results if result not in own]
        yield from results


def _with_calls_as_text(message: Message, form: OutputFormat) -> Message:
    """Calls within the answer's text, as the model itself would write them."""
    if "tool_calls" not in message:
        return message
    calls = [
        {"name": call["function"]["name"], "arguments": _as_object(call["function"]["arguments"])}
        for call in message["tool_calls"]
    ]
    written = form.calls if isinstance(form.calls, JsonCalls) else HERMES
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join([*filter(None, [message["content"]]), written.written(calls)])}


def _results_as_text(messages: Sequence[Message]) -> Iterator[Message]:
    """Results as messages of the user: several in one, so that roles still alternate."""
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{message['content'] or ''}\n</tool_response>")
            continue
        text, results = "\n".join(results), []
        if text and message["role"] == "user":
            yield {**message, "content": with_text_before(text, "\n", message["content"])}
            continue
        if text:
            yield {"role": "user", "content": text}
        yield message
    if results:
        yield {"role": "user", "content": "\n".join(results)}


def _introduced(
    messages: list[Message], tools: Sequence[Mapping[str, Any]], traits: TemplateCapabilities
) -> list[Message]:
    """The tools explained in the system message, or, where the template has none, before the user's first words."""
    text = _INTRODUCTION.format("\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    first = messages[0] if messages else {"role": "user", "content": ""}
    if traits.system:
        if first["role"] == "system":
            return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]
    at = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if at is None:
        return [{"role": "user", "content": text}, *messages]
    joined = {**messages[at], "content": with_text_before(text, "\n\n", messages[at]["content"])}
    return [*messages[:at], joined, *messages[at + 1 :]]
