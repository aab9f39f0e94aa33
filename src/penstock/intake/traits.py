"""What a chat template can render, found out by rendering small chats with it.

Templates differ: arguments of tool calls as an object or as text, ``content`` null or empty beside calls, ids of nine
characters, one call a message, text as a list of parts, no tools at all.  Knows no family by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import product
from typing import Any

import msgspec

from penstock.errors import RequestError
from penstock.intake.message_fields import Message
from penstock.intake.template import ChatTemplate, Conversation

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


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """What a template takes."""

    tools: bool  # it shows the tools it is given
    flat_tools: bool = False  # each without the object around the function
    calls: bool  # it shows calls in earlier answers
    results: bool  # and what tools answered
    objects: bool = True  # arguments are objects, else text
    null_content: bool = False  # beside calls ``content`` is null, else empty
    short_ids: bool = False  # ids have nine letters and digits
    many: bool = True  # one message may have several calls
    words: bool = True  # and content beside them
    system: bool = True  # it shows a system message
    parts: bool = False  # it shows text in a list of parts only


def find_out(template: ChatTemplate) -> Traits:
    """Some twenty renderings, a few milliseconds."""
    flat = not _Probe(template, _USER, [_TOOL]).shows("probe_tool")
    shown = [_FUNCTION] if flat else [_TOOL]
    tools = _Probe(template, _USER, shown).shows("probe_tool")
    plain = _Probe(template, _USER)
    parts = not plain.shows("probe_user") and _Probe(template, in_parts(_USER)).shows("probe_user")
    probe = _Probe(template, in_parts(_USER) if parts else _USER, shown if tools else None)
    known = Traits(
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


def usual_arguments(template: ChatTemplate, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What some templates want to be given beside the tools (Firefunction): the tools as text, and the time."""
    if not {"functions", "datetime"} <= template.variables:
        return {}
    functions = json.dumps([tool["function"] for tool in tools], indent=4, ensure_ascii=False)
    return {"functions": functions, "datetime": datetime.now().strftime("%Y-%m-%d %H:%M:%S")}


def in_parts(message: Message) -> Message:
    """The message with its text in a list of one part."""
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


class _Probe:
    """Small chats that begin with one message of a user."""

    def __init__(self, template: ChatTemplate, user: Message, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._template, self._user, self._tools = template, user, tools
        self._arguments = usual_arguments(template, [_TOOL] if tools else [])

    def shows(self, word: str, *more: Message) -> bool:
        """Is ``word`` in what the template writes of the user's message and ``more``?"""
        return word in self._rendered([self._user, *more])

    def shows_system(self) -> bool:
        """Is a system message there?"""
        return "probe_system" in self._rendered([{"role": "system", "content": "probe_system"}, self._user])

    def shows_calls(self, traits: Traits, count: int, *, words: str = "") -> bool:
        """Are so many calls, their results and the words beside them there?

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
