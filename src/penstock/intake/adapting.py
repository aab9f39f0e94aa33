"""A chat in the form that one template takes.

What a template takes is found out once (``traits.py``); every chat is then rewritten so that it does not fail, and that
nothing in it is lost, for such a reason.  Knows no family by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from penstock.intake.message_fields import Message, with_text_before
from penstock.intake.replies.detect import HERMES, detect
from penstock.intake.replies.formats import JsonCalls
from penstock.intake.replies.parser import ReplyFormat
from penstock.intake.template import ChatTemplate, Conversation
from penstock.intake.traits import Traits, find_out, in_parts, usual_arguments

_INTRODUCTION = (
    "You may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> "
    'XML tags:\n<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)
"""Hermes' way, for templates that have none."""


class Adapter:
    """One template, chats as it takes them, and the format of the answers to them."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.traits = find_out(template)
        self.format = detect(template.source)
        if not self.traits.tools:
            # The model is told about tools in our words, so it answers in that way.
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
            messages = [in_parts(message) for message in messages]
        return msgspec.structs.replace(
            conversation,
            messages=messages,
            tools=tools or None,
            arguments={**usual_arguments(self.template, conversation.tools or ()), **conversation.arguments},
        )


def _fitted(message: Message, traits: Traits) -> Message:
    """Content, arguments and ids as the template takes them."""
    if message.get("content") is None:
        keeps_null = traits.null_content and "tool_calls" in message
        message["content"] = None if keeps_null else ""
    elif "tool_calls" in message and (message["content"] == "" or not traits.words):
        message["content"] = None if traits.null_content else ""  # words beside calls, where there may be none, go
    if "tool_calls" in message:
        message["tool_calls"] = [_fitted_call(call, traits) for call in message["tool_calls"]]
    if "tool_call_id" in message and traits.short_ids:
        message["tool_call_id"] = _short(message["tool_call_id"])
    return message


def _fitted_call(call: Mapping[str, Any], traits: Traits) -> dict[str, Any]:
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


def _with_calls_as_text(message: Message, form: ReplyFormat) -> Message:
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


def _introduced(messages: list[Message], tools: Sequence[Mapping[str, Any]], traits: Traits) -> list[Message]:
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
