"""The ``messages`` of a chat, rebuilt from known fields only: nothing else of a client's reaches a template.

Text only.  Several text parts become one text, a line each, so that no control token can grow out of two of them.
Knows nothing about templates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from penstock.config.schema import Limits
from penstock.errors import BadField, RequestError
from penstock.intake.fields import array, mapping, number, string, unsupported

ROLES = ("system", "developer", "user", "assistant")
_LATER_ROLES = ("tool", "function")
_KNOWN = frozenset({"role", "content", "name", "refusal"})
_ASSISTANT_KNOWN = _KNOWN | {"reasoning", "reasoning_content"}
_LATER = frozenset({"tool_calls", "function_call", "tool_call_id", "audio"})
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

_MAX_ARGUMENTS = 32
_MAX_ARGUMENT_CHARS = 256
_ARGUMENT_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9_]{0,63}")

Message = dict[str, str]


def parse_messages(value: object, limits: Limits) -> list[Message]:
    """At least one message, each with a role and text."""
    items = array("messages", value, max_items=limits.max_messages, what="messages")
    if not items:
        raise BadField("messages", got="an empty array", want="at least one message", code="empty_array")
    return [_parse_message(f"messages[{i}]", mapping(f"messages[{i}]", item)) for i, item in enumerate(items)]


def _parse_message(where: str, item: Mapping[str, Any]) -> Message:
    role = _parse_role(f"{where}.role", item.get("role"))
    known = _ASSISTANT_KNOWN if role == "assistant" else _KNOWN
    for key, value in item.items():
        if key in _LATER:
            if value is not None and value != []:
                raise unsupported(f"{where}.{key}", "tools and audio are not supported by this server yet.")
        elif key not in known:
            raise RequestError(
                f"Unrecognized field in '{where}': '{key[:64]}'.", param=f"{where}.{key[:64]}", code="unknown_parameter"
            )
    # Templates know "system"; OpenAI calls the same thing "developer" since 2025.
    message = {"role": "system" if role == "developer" else role}
    message["content"] = _parse_content(f"{where}.content", item.get("content"))
    if item.get("name") is not None:
        message["name"] = _parse_name(f"{where}.name", item["name"])
    reasoning = item.get("reasoning_content") if item.get("reasoning") is None else item["reasoning"]
    if reasoning is not None:
        message["reasoning_content"] = _text(f"{where}.reasoning_content", reasoning)
    return message


def _parse_role(where: str, role: object) -> str:
    if role is None:
        raise RequestError(f"Missing required parameter: '{where}'.", param=where, code="missing_required_parameter")
    if role in _LATER_ROLES:
        raise unsupported(where, f"messages with role '{role}' are not supported by this server yet.")
    if not isinstance(role, str) or role not in ROLES:
        raise BadField(where, got=role, want=f"one of {', '.join(ROLES)}")
    return role


def _parse_name(where: str, name: object) -> str:
    text = _text(where, name)
    if not _NAME.fullmatch(text):
        raise BadField(where, got=text, want="1 to 64 letters, digits, '_' or '-'")
    return text


def _parse_content(where: str, content: object) -> str:
    if content is None:
        raise BadField(where, got=None, want="a string or an array of text parts", code="invalid_type")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadField(where, got=content, want="a string or an array of text parts", code="invalid_type")
    if not content:
        raise BadField(where, got="an empty array", want="at least one part", code="empty_array")
    return "\n".join(_parse_part(f"{where}[{i}]", mapping(f"{where}[{i}]", part)) for i, part in enumerate(content))


def _parse_part(where: str, part: Mapping[str, Any]) -> str:
    kind = part.get("type")
    if kind in ("image_url", "input_audio", "file", "refusal", "video_url", "audio_url"):
        raise unsupported(f"{where}.type", f"this model reads text only, not '{kind}'. Nothing was fetched.")
    if kind != "text":
        raise BadField(f"{where}.type", got=kind, want="'text'")
    extra = next((key for key in part if key not in ("type", "text")), None)
    if extra is not None:
        raise RequestError(f"Unrecognized field in '{where}': '{extra[:64]}'.", param=where, code="unknown_parameter")
    return _text(f"{where}.text", part.get("text"))


def _text(where: str, value: object) -> str:
    # Length is a matter of the context, and is looked at when all text is known.
    return string(where, value, max_chars=1 << 62)


def parse_template_arguments(value: object, reserved: frozenset[str]) -> dict[str, Any]:
    """``chat_template_kwargs``: a few scalars under names that the template may look up."""
    if value is None:
        return {}
    name = "chat_template_kwargs"
    entries = mapping(name, value)
    if len(entries) > _MAX_ARGUMENTS:
        raise BadField(name, got=f"{len(entries)} arguments", want=f"at most {_MAX_ARGUMENTS} arguments")
    for key, item in entries.items():
        if not _ARGUMENT_NAME.fullmatch(key) or key in reserved:
            raise BadField(name, got=key[:64], want="names of letters, digits and '_' that are not taken")
        if isinstance(item, str):
            string(f"{name}.{key}", item, max_chars=_MAX_ARGUMENT_CHARS)
        elif isinstance(item, int | float) and not isinstance(item, bool):
            number(f"{name}.{key}", item, low=-1e15, high=1e15)
        elif item is not None and not isinstance(item, bool):
            raise BadField(f"{name}.{key}", got=item, want="a string, number, boolean or null", code="invalid_type")
    return dict(entries)
