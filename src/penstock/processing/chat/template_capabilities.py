"""What a chat template can render, and a chat rewritten for it.

Templates differ: arguments of tool calls as an object or as text, ``content`` null or empty in a message with calls,
ids of nine characters, one call per message, text as a list of parts, no tools at all.  ``probe_template`` finds out
once, by rendering small chats; ``TemplateAdapter`` then rewrites every chat so that nothing fails and nothing is lost.
Knows no family by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from hashlib import blake2b
from itertools import product
from typing import Any

import msgspec

from penstock.errors import RequestError
from penstock.processing.chat.template import ChatTemplate, Conversation
from penstock.processing.parsers.parser import OutputFormat
from penstock.processing.parsers.registry import HERMES, detect_format
from penstock.processing.parsers.tool_call_formats import JsonCalls
from penstock.processing.requests.messages import Message, with_text_before

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
        """Is ``word`` in what the template writes of the user's message and ``more``?"""
        return word in self._rendered([self._user, *more])

    def shows_system(self) -> bool:
        """Is a system message there?"""
        return "probe_system" in self._rendered([{"role": "system", "content": "probe_system"}, self._user])

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
        messages: list[Message] = [dict(message) for message in conversation.messages]
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
