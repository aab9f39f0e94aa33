"""The ``messages`` of a chat, rebuilt from known fields only: nothing else of a client's reaches a template.

Texts and images.  Text parts that follow one another become one text, a line each, so that no control token can grow
out of two of them; only a message with images keeps parts.  Arguments of tool calls stay text here.  Knows nothing
about templates.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from penstock.config.limits import RequestLimits
from penstock.errors import BadField, RequestError
from penstock.processing.requests.fields import WRONG_TYPE, array, mapping, number, string, unsupported

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_KNOWN = frozenset({"role", "content", "name", "refusal"})
# Clients send messages back as they got them; LiteLLM adds ``provider_specific_fields`` to each of a response.
_OF_RESPONSES = frozenset({"annotations", "provider_specific_fields"})
_KNOWN_BY_ROLE = {
    "assistant": _KNOWN | _OF_RESPONSES | {"reasoning", "reasoning_content", "tool_calls", "function_call"},
    "tool": _KNOWN | {"tool_call_id"},
}
_LATER = frozenset({"audio"})
_PART = ("type", "text", "image_url")
_IMAGE_URL = ("url", "detail")
_NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,128}")
_ID = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")

_MAX_ARGUMENTS = 32
_MAX_ARGUMENT_CHARS = 256
_MAX_DOCUMENT_FIELDS = 64
_ARGUMENT_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9_]{0,63}")

Message = dict[str, Any]


class ImageUrl(msgspec.Struct, frozen=True):
    """An image of a chat, and which field named it.  Nothing of it was looked at."""

    url: str
    where: str


def parse_messages(
    value: object, limits: RequestLimits, images: list[ImageUrl] | None = None, *, lenient: bool = False
) -> list[Message]:
    """At least one message, each with a role, and text or tool calls.

    ``images`` gets the chat's images, in order; each leaves a part of the type "image" where it was.  None: the model
    reads text only.  ``lenient``: fields that are not known are passed over.
    """
    items = array("messages", value, max_items=limits.max_messages, what="messages")
    if not items:
        raise BadField("messages", got="an empty array", want="at least one message", code="empty_array")
    _check_parts(items, limits)
    names: dict[str, str] = {}  # of tools, by the ids of their calls
    messages: list[Message] = []
    for i, item in enumerate(items):
        where = f"messages[{i}]"
        given = mapping(where, item)
        message = _parse_message(where, _known_only(given) if lenient else given, limits, images)
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]
        messages.append(message)
    _check_arguments(messages, limits)
    return messages


def _check_parts(items: Sequence[Any], limits: RequestLimits) -> None:
    """How many parts and calls there are."""
    lists = [item.get(name) for item in items if isinstance(item, dict) for name in ("content", "tool_calls")]
    parts = sum(len(given) for given in lists if isinstance(given, list))
    if parts > limits.max_content_parts:
        raise BadField(
            "messages",
            got=f"{parts} parts and tool calls",
            want=f"at most {limits.max_content_parts} in one chat (max_content_parts)",
            code="array_above_max_length",
        )


def _check_arguments(messages: Sequence[Message], limits: RequestLimits) -> None:
    """How many brackets there are in the arguments of calls: they become arrays and objects for templates."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    texts = [call["function"]["arguments"] for call in calls]
    brackets = sum(text.count("[") + text.count("{") for text in texts)
    if brackets > limits.max_json_containers:
        raise BadField(
            "messages",
            got=f"tool calls whose arguments have {brackets} brackets",
            want=f"at most {limits.max_json_containers} (max_json_containers)",
            code="array_above_max_length",
        )


def _parse_message(
    where: str, item: Mapping[str, Any], limits: RequestLimits, images: list[ImageUrl] | None
) -> Message:
    role = _parse_role(f"{where}.role", item.get("role"))
    _refuse_unknown(where, item, _KNOWN_BY_ROLE.get(role, _KNOWN))
    message: Message = {"role": _TEMPLATE_ROLES.get(role, role)}
    calls = _parse_calls(where, item, limits) if role == "assistant" else []
    reasoning = item.get("reasoning_content") if item.get("reasoning") is None else item["reasoning"]
    content = item.get("content")
    may_be_empty = calls or role == "tool" or (role == "assistant" and reasoning is not None)
    if content == [] and may_be_empty:
        content = None
    # A template decides what an absent text looks like (``TemplateAdapter``).
    message["content"] = (
        None
        if content is None and may_be_empty
        else _parse_content(f"{where}.content", content, images, role=role, limits=limits)
    )
    if item.get("name") is not None:
        message["name"] = _parse_name(f"{where}.name", item["name"])
    if reasoning is not None and role == "assistant":
        message["reasoning_content"] = _text(f"{where}.reasoning_content", reasoning)
    if calls:
        message["tool_calls"] = calls
    if role == "tool" and item.get("tool_call_id") is not None:
        message["tool_call_id"] = _parse_id(f"{where}.tool_call_id", item["tool_call_id"])
    return message


_TEMPLATE_ROLES = {"developer": "system", "function": "tool"}
"""Templates know "system"; OpenAI calls the same thing "developer" since 2025, and "function" is the old "tool"."""


def _refuse_unknown(where: str, item: Mapping[str, Any], known: frozenset[str]) -> None:
    for key, value in item.items():
        if key in _LATER:
            if value is not None:
                raise unsupported(f"{where}.{key}", "audio is not supported by this server yet.")
        elif key not in known and value not in (None, []):
            raise RequestError(
                f"Unrecognized field in '{where}': '{key[:64]}'.", param=f"{where}.{key[:64]}", code="unknown_parameter"
            )


def _known_only(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message without fields that are not known, in it or in parts of its content."""
    role, content = item.get("role"), item.get("content")
    known = (_KNOWN_BY_ROLE.get(role, _KNOWN) if isinstance(role, str) else _KNOWN) | _LATER
    if isinstance(content, list):
        content = [_only(part, _PART) for part in content]
        content = [
            {**part, "image_url": _only(part["image_url"], _IMAGE_URL)}
            if isinstance(part, dict) and "image_url" in part
            else part
            for part in content
        ]
    return {**_only(item, known), "content": content}


def _only(value: Any, known: Collection[str]) -> Any:
    return {key: item for key, item in value.items() if key in known} if isinstance(value, dict) else value


def _parse_role(where: str, role: object) -> str:
    if role is None:
        raise RequestError(f"Missing required parameter: '{where}'.", param=where, code="missing_required_parameter")
    if not isinstance(role, str) or role not in ROLES:
        raise BadField(where, got=role, want=f"one of {', '.join(ROLES)}")
    return role


def _parse_calls(where: str, item: Mapping[str, Any], limits: RequestLimits) -> list[dict[str, Any]]:
    """``tool_calls``, or the old ``function_call``, which is one of them without an id."""
    calls: Sequence[Any] = ()
    if item.get("tool_calls") is not None:
        calls = array(f"{where}.tool_calls", item["tool_calls"], max_items=limits.max_tools, what="calls")
    elif item.get("function_call") is not None:
        calls = [{"function": item["function_call"]}]
    return [_parse_call(f"{where}.tool_calls[{i}]", i, mapping(f"{where}.tool_calls", c)) for i, c in enumerate(calls)]


def _parse_call(where: str, place: int, call: Mapping[str, Any]) -> dict[str, Any]:
    function = mapping(f"{where}.function", call.get("function"))
    name = _parse_name(f"{where}.function.name", function.get("name"))
    arguments = function.get("arguments")
    identity = f"call_{place}" if call.get("id") is None else _parse_id(f"{where}.id", call["id"])
    text = "" if arguments is None else _text(f"{where}.function.arguments", arguments)
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": text}}


def _parse_id(where: str, value: object) -> str:
    """An id that no template can take for anything else: one with odd characters gets another."""
    text = string(where, value, max_chars=1 << 12)
    return text if _ID.fullmatch(text) else f"call_{blake2b(text.encode(), digest_size=12).hexdigest()}"


def _parse_name(where: str, name: object) -> str:
    text = _text(where, name)
    if not _NAME.fullmatch(text):
        raise BadField(where, got=text, want="1 to 128 letters, digits, or any of '_-.:/'")
    return text


def _parse_content(
    where: str, content: object, images: list[ImageUrl] | None, *, role: str, limits: RequestLimits
) -> str | list[dict[str, str]]:
    if content is None:
        raise BadField(where, got=None, want="a string or an array of text parts", code=WRONG_TYPE)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadField(where, got=content, want="a string or an array of text parts", code=WRONG_TYPE)
    if not content:
        raise BadField(where, got="an empty array", want="at least one part", code="empty_array")
    parts: list[dict[str, str]] = []
    texts: list[str] = []  # that follow one another

    def end_text() -> None:
        if texts:
            parts.append({"type": "text", "text": "\n".join(texts)})
            texts.clear()

    for i, item in enumerate(content):
        own, part = f"{where}[{i}]", mapping(f"{where}[{i}]", item)
        if part.get("type") == "image_url" and images is not None:
            images.append(_parse_image(own, part, len(images), role=role, limits=limits))
            end_text()
            parts.append({"type": "image"})
            continue
        texts.append(_parse_part(own, part))
    end_text()
    return parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts


def _parse_image(where: str, part: Mapping[str, Any], before: int, *, role: str, limits: RequestLimits) -> ImageUrl:
    """``detail`` changes nothing: every image is read at the size that the model's makers give it."""
    if role != "user":
        raise unsupported(f"{where}.type", "images are read in messages of the user only. Nothing was fetched.")
    if before == limits.max_images:
        raise RequestError(
            f"Too many images: at most {limits.max_images} are allowed in one chat (max_images).",
            param=where,
            code="too_many_images",
        )
    refuse_others(where, part, ("type", "image_url"))
    image = mapping(f"{where}.image_url", part.get("image_url"))
    refuse_others(f"{where}.image_url", image, _IMAGE_URL)
    if image.get("detail") not in (None, "auto", "low", "high"):
        raise BadField(f"{where}.image_url.detail", got=image["detail"], want="'auto', 'low' or 'high'")
    return ImageUrl(string(f"{where}.image_url.url", image.get("url"), max_chars=1 << 62), f"{where}.image_url.url")


def refuse_others(where: str, part: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Fields that a part does not have."""
    extra = next((key for key in part if key not in known), None)
    if extra is not None:
        raise RequestError(f"Unrecognized field in '{where}': '{extra[:64]}'.", param=where, code="unknown_parameter")


def content_chars(content: str | Sequence[Mapping[str, str]] | None) -> int:
    """Characters of a message's texts."""
    if content is None or isinstance(content, str):
        return len(content or "")
    return sum(len(part.get("text", "")) for part in content)


def with_text_before(text: str, between: str, content: str | list[dict[str, str]]) -> str | list[dict[str, str]]:
    """The content of a message with ``text`` at its beginning."""
    if isinstance(content, str):
        return f"{text}{between}{content}"
    return [{"type": "text", "text": f"{text}{between}"}, *content]


def joined_contents(contents: Sequence[str | list[dict[str, str]]]) -> str | list[dict[str, str]]:
    """The contents of several messages as that of one, a blank line between texts."""
    texts: list[str] = []  # before the first message with parts
    parts: list[dict[str, str]] = []
    for content in contents:
        if not isinstance(content, str):
            if texts and not parts:
                parts.append({"type": "text", "text": "\n\n".join([*texts, ""])})
            parts += content
        elif parts:
            parts.append({"type": "text", "text": f"\n\n{content}"})
        else:
            texts.append(content)
    return parts or "\n\n".join(texts)


def _parse_part(where: str, part: Mapping[str, Any]) -> str:
    kind = part.get("type")
    if kind in ("image_url", "input_audio", "file", "refusal", "video_url", "audio_url"):
        reads = "text only" if kind == "image_url" else "neither sound nor films nor files here"
        raise unsupported(f"{where}.type", f"this model reads {reads}, not '{kind}'. Nothing was fetched.")
    if kind != "text":
        raise BadField(f"{where}.type", got=kind, want="'text'")
    refuse_others(where, part, ("type", "text"))
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
            raise BadField(f"{name}.{key}", got=item, want="a string, number, boolean or null", code=WRONG_TYPE)
    return dict(entries)


def parse_documents(value: object, limits: RequestLimits) -> list[dict[str, Any]] | None:
    """``documents`` for templates that quote them: objects of texts and numbers."""
    if value is None:
        return None
    documents: list[dict[str, Any]] = []
    for i, item in enumerate(array("documents", value, max_items=limits.max_messages, what="documents")):
        entries = mapping(f"documents[{i}]", item)
        if len(entries) > _MAX_DOCUMENT_FIELDS:
            raise BadField(
                f"documents[{i}]", got=f"{len(entries)} fields", want=f"at most {_MAX_DOCUMENT_FIELDS} fields"
            )
        for key, text in entries.items():
            if not isinstance(text, str | int | float | None):
                raise BadField(f"documents[{i}].{key[:64]}", got=text, want="a string or a number", code=WRONG_TYPE)
        documents.append(dict(entries))
    return documents
