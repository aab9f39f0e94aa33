"""Conversations that every chat template must render as transformers does.

Each is what a client may send once it is checked: tools and tool results, reasoning, parts, odd characters, documents,
arguments for the template, and conversations that some templates refuse.
"""

from __future__ import annotations

from typing import Any

from penstock.processing.chat.template import Conversation

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather <now>, in 'one' \"city\".\nOr two. é",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "City & country", "enum": ["Zürich", "北京"]},
                "unit": {"type": ["string", "null"], "default": "C", "maxLength": 9, "minLength": 1},
                "days": {"type": "array", "items": {"type": "integer"}, "description": "which days"},
                "deep": {
                    "type": "object",
                    "properties": {"x": {"type": "number"}, "y": {"type": "boolean", "default": True}},
                    "required": ["x"],
                },
                "either": {"anyOf": [{"type": "string"}, {"type": "integer"}], "nullable": True},
                "kinds": {
                    "oneOf": [{"type": "string", "default": "a"}, {"type": "array", "items": {"type": "string"}}]
                },
            },
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
NOW = {
    "type": "function",
    "function": {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}},
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "The first."},
                "b": {"type": "number", "description": "The second."},
            },
            "required": ["a", "b"],
        },
    },
}
BARE = {"type": "function", "function": {"name": "bare"}}


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    """A message."""
    return {"role": role, "content": content} | more


def call(name: str, arguments: Any, identity: str = "abcdef123") -> dict[str, Any]:
    """A tool call."""
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text: Any, identity: str = "abcdef123", **more: Any) -> dict[str, Any]:
    """A tool's answer."""
    return {"role": "tool", "content": text, "tool_call_id": identity} | more


SYSTEM = said("system", "You are kind.\n")
HELLO = said("user", "Hello <b> & 'q' \"z\" é 狐🦊 ")
YES = said("assistant", "Yes? ")
TELL = said("user", " Tell me.\n")
IMAGE = {"type": "image"}
IMAGE_URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
ARGUMENTS = {"city": "Zürich", "days": [1, 2], "deep": {"x": 1.5, "y": None}, "quote": "a \"b\" 'c' <d>"}
AS_TEXT = '{"city": "Zürich", "days": [1, 2]}'
TOOLS = [ADD, NOW]


def text(words: str) -> dict[str, str]:
    """A text part."""
    return {"type": "text", "text": words}


def _tool_turns(arguments: Any, content: Any, *, named: bool) -> list[dict[str, Any]]:
    more = {"name": "get_weather"} if named else {}
    return [
        SYSTEM,
        said("user", "Weather?"),
        said("assistant", content, tool_calls=[call("get_weather", arguments)]),
        result('{"sky": "blue <&>"}', **more),
    ]


MESSAGES: dict[str, list[dict[str, Any]]] = {
    "one": [HELLO],
    "system": [SYSTEM, HELLO],
    "turns": [SYSTEM, HELLO, YES, TELL],
    "developer": [said("developer", "Be brief."), HELLO],
    "thought in text": [HELLO, said("assistant", "<think>hm</think>\n\nYes? "), TELL],
    "reasoning": [HELLO, said("assistant", "Yes.", reasoning_content="Let me\nthink."), TELL],
    "reasoning at the end": [HELLO, said("assistant", "Yes.", reasoning_content="hm")],
    "two users": [HELLO, TELL],
    "system in the middle": [HELLO, YES, SYSTEM, TELL],
    "assistant first": [YES, TELL],
    "assistant last": [SYSTEM, HELLO, YES],
    "names": [said("user", "Hi", name="ann"), said("assistant", "Hi", name="bob"), TELL],
    "empty": [said("system", ""), said("user", ""), said("assistant", ""), said("user", " \n")],
    "parts": [said("system", [text("Be kind.")]), said("user", [text("One. "), text("Two.")]), YES, TELL],
    "image": [said("user", [IMAGE, text("What is it?")]), YES, said("user", [text("And"), IMAGE, text("it?")])],
    "image by url": [SYSTEM, said("user", [text("What is it?"), IMAGE_URL])],
    "unknown part": [said("user", [{"type": "smell"}, text("?")])],
    "call, object": [*_tool_turns(ARGUMENTS, "", named=False), said("assistant", "Blue."), TELL],
    "call, text": [*_tool_turns(AS_TEXT, "", named=False), said("assistant", "Blue."), TELL],
    "call, object, null": _tool_turns(ARGUMENTS, None, named=True),
    "call, text, null": _tool_turns(AS_TEXT, None, named=True),
    "call with words": _tool_turns({}, "I shall look.", named=True),
    "call and reasoning": [
        HELLO,
        said("assistant", "", reasoning_content="I should look.", tool_calls=[call("now", {})]),
        result("12:00", name="now"),
        said("assistant", "Noon.", reasoning_content="It is noon."),
        TELL,
    ],
    "two calls": [
        HELLO,
        said("assistant", None, tool_calls=[call("now", {}, "abcdef123"), call("get_weather", ARGUMENTS, "zyxwvu987")]),
        result("12:00", "abcdef123", name="now"),
        result({"sky": ["blue"]}, "zyxwvu987", name="get_weather"),
        said("assistant", "Noon, blue."),
        TELL,
    ],
    "two calls, text": [
        HELLO,
        said("assistant", "", tool_calls=[call("now", "{}"), call("get_weather", AS_TEXT, "zyxwvu987")]),
        result("12:00"),
        result("blue", "zyxwvu987"),
    ],
    "calls in turns": [
        HELLO,
        said("assistant", "", tool_calls=[call("now", "{}")]),
        result("12:00"),
        said("assistant", "", tool_calls=[call("get_weather", AS_TEXT, "zyxwvu987")]),
        result("blue", "zyxwvu987"),
        said("assistant", "Noon, blue."),
        TELL,
    ],
    "tool result in parts": [HELLO, said("assistant", "", tool_calls=[call("now", {})]), result([text("12:00")])],
    "call to nobody": [HELLO, said("assistant", "", tool_calls=[call("python", {"code": "1"}, "short")]), TELL],
    "ipython": [HELLO, said("assistant", "", tool_calls=[call("now", {})]), said("ipython", "12:00")],
    "strange role": [said("narrator", "Once."), HELLO],
    "control words": [said("user", "<|im_end|></s>[INST]<|eot_id|><think>{{ 7 * 7 }}{% raw %}")],
}

_TOOL_SETS: dict[str, list[dict[str, Any]]] = {
    "plain": TOOLS,
    "rich": [WEATHER, NOW],  # some templates never end with it, in transformers as here
    "bare": [BARE],
    "none": [],
}
_DOCUMENTS = [{"title": "Sky", "text": "It is blue."}, {"title": "Sea", "text": "It is wet.", "source": "x"}]
_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"enable_thinking": False},
    {"enable_thinking": True, "date_string": "1 Jan 2026", "tools_in_user_message": False},
    {"thinking": True, "reasoning_effort": "high", "model_identity": "You are a fox.", "builtin_tools": ["python"]},
    {"citations": True, "length": "short", "thinking_budget": 512, "functions": "[]", "datetime": "now"},
)


def _all() -> dict[str, Conversation]:
    made: dict[str, Conversation] = {}
    for i, (name, messages) in enumerate(MESSAGES.items()):
        made[name] = Conversation(messages=messages, add_generation_prompt=i % 2 == 0)
        made[f"{name}, tools"] = Conversation(messages=messages, tools=TOOLS, add_generation_prompt=i % 2 == 1)
    for kind, tools in _TOOL_SETS.items():
        for name in ("turns", "two calls"):
            made[f"{name}, {kind} tools"] = Conversation(
                messages=MESSAGES[name], tools=tools, add_generation_prompt=True
            )
    for i, arguments in enumerate(_ARGUMENTS):
        for name in ("turns", "reasoning", "call and reasoning", "calls in turns"):
            made[f"{name}, arguments {i}"] = Conversation(
                messages=MESSAGES[name], tools=TOOLS, add_generation_prompt=True, arguments=arguments
            )
    made["documents"] = Conversation(messages=MESSAGES["turns"], documents=_DOCUMENTS, add_generation_prompt=True)
    made["documents and tools"] = Conversation(messages=MESSAGES["turns"], documents=_DOCUMENTS, tools=TOOLS)
    for name in ("assistant last", "reasoning at the end"):
        made[f"{name}, continued"] = Conversation(messages=MESSAGES[name], continue_final_message=True)
    return made


CONVERSATIONS = _all()
