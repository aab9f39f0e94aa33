"""Bodies of ``/v1/responses`` (OpenAI's Responses API) to bodies of ``/v1/chat/completions``.

Only what a chat knows is translated; ``parse_chat`` checks it like any other.  Items that follow one another become
messages as chats have them: reasoning, text and calls of one turn are one message.  Custom tools are shown to the model
as functions with one text, tools of namespaces as functions with both names.  What is not known (fields, item types,
tools that a vendor runs itself) is skipped and logged once, so that clients of tomorrow go on working; a known field of
a wrong type is refused.  Knows nothing about stored responses beyond their items.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from penstock.config.limits import RequestLimits
from penstock.errors import BadField, RequestError
from penstock.interfaces import JsonObject, ResponseHistory, ResponsesRequest, ToolTarget
from penstock.processing.requests.fields import (
    WRONG_TYPE,
    BodyFields,
    array,
    boolean,
    integer,
    mapping,
    string,
    unsupported,
    weight,
)
from penstock.processing.requests.skipped import SkippedKinds

PASSED_FIELDS = frozenset(
    {
        *("temperature", "top_p", "parallel_tool_calls", "prompt_cache_key", "stream", "model"),
        *("seed", "top_k", "min_p", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "logit_bias"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "cache_salt", "chat_template_kwargs"),
        *("priority", "skip_special_tokens"),
    }
)
"""Fields that chats have under the same name; from ``seed`` on they are extensions of the Responses API."""

ECHOED_FIELDS = frozenset({"metadata", "user", "safety_identifier", "max_tool_calls"})
"""Fields that change nothing about a response and are returned with it."""

_OWN_FIELDS = frozenset(
    {
        *("input", "instructions", "tools", "tool_choice", "text", "reasoning", "max_output_tokens", "top_logprobs"),
        *("include", "previous_response_id", "store", "truncation", "service_tier", "stream_options", "background"),
        *("conversation", "prompt"),
    }
)
RESPONSES_FIELDS = PASSED_FIELDS | ECHOED_FIELDS | _OWN_FIELDS

CUSTOM_INPUT = "input"
"""The one argument of the function that a custom tool is shown as."""

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"

_TIERS = frozenset({"auto", "default", "standard", "scale", "priority", "flex", "batch"})
_ITEMS_INLINE = 128
"""More are translated on a thread: each takes some 10 us."""
_MOST_NAME_CHARS = 128
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.:/\-]")
_SEALED = "penstock-1."
_OMITTED_IMAGE = "[An image was omitted: this model reads text only.]"


def sealed_reasoning(text: str) -> str:
    """``encrypted_content`` that carries reasoning through a client that returns nothing else of it.

    The text is the client's own, who gets it in clear as well: it is encoded, not kept secret.
    """
    return _SEALED + base64.urlsafe_b64encode(text.encode()).decode()


def _unsealed_reasoning(sealed: object) -> str:
    """The text of ``sealed_reasoning``; empty for what another server has sealed."""
    if not isinstance(sealed, str) or not sealed.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(sealed[len(_SEALED) :], altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return ""


def referenced_ids(body: JsonObject) -> list[str]:
    """Ids of earlier items that the input names instead of repeating them."""
    given = body.get("input")
    items = [item for item in given if isinstance(item, dict)] if isinstance(given, list) else []
    names = [item.get("id") for item in items if _is_reference(item)]
    return list(dict.fromkeys(name for name in names if isinstance(name, str)))


def _is_reference(item: Mapping[str, Any]) -> bool:
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "id" in item and "role" not in item)


async def translate_responses(
    body: JsonObject, history: ResponseHistory, limits: RequestLimits, *, sees: bool, skipped: SkippedKinds
) -> ResponsesRequest:
    """``sees``: whether the model reads images.  Raises RequestError."""
    previous = BodyFields(body).string("previous_response_id", max_chars=256)
    earlier = await history.conversation(previous) if previous else ()
    names = referenced_ids(body)
    referenced = await history.items(names) if names else {}
    given = body.get("input")

    def translate() -> ResponsesRequest:
        return translate_with_history(body, limits, earlier, referenced, sees=sees, skipped=skipped)

    many = len(earlier) + (len(given) if isinstance(given, list) else 0) > _ITEMS_INLINE
    return await asyncio.to_thread(translate) if many else translate()


def translate_with_history(
    body: JsonObject,
    limits: RequestLimits,
    earlier: Sequence[Any],
    referenced: Mapping[str, Any],
    *,
    sees: bool,
    skipped: SkippedKinds,
) -> ResponsesRequest:
    """``earlier``: the items of the conversation that this continues.  ``referenced``: stored items by id.  ``sees``:
    whether the model reads images.  Raises RequestError."""
    fields = BodyFields(body)
    for name in body:
        if name not in RESPONSES_FIELDS:
            skipped.note("field", name)
    _refuse_unsupported(fields)
    tools = _ToolTranslator(limits, skipped)
    tools.read(fields.raw("tools"))
    given = _input_items(fields, limits, referenced, skipped, continues=bool(earlier))
    conversation = _Conversation(limits, tools, skipped, sees=sees)
    instructions = fields.string("instructions", max_chars=1 << 62)
    if instructions:
        conversation.messages.append({"role": "system", "content": instructions})
    for where, item in _located(earlier, given):
        conversation.add(where, item)
    conversation.end()
    include = _include(fields)
    chat = {name: body[name] for name in PASSED_FIELDS if body.get(name) is not None}
    chat |= {
        "messages": conversation.messages,
        **tools.chat_fields(fields),
        **_generation_fields(fields, include, limits),
    }
    if (tier := _tier(fields, skipped)) is not None:
        chat["service_tier"] = tier
    return ResponsesRequest(
        chat=chat,
        tools=tools.targets,
        items=given,
        echo=_echo(fields, limits),
        store=fields.boolean("store", default=True),
        summary=_summarizes(fields),
        seal=sealed_reasoning if ENCRYPTED_REASONING in include else None,
    )


def _refuse_unsupported(fields: BodyFields) -> None:
    """What would change the response and is not there, by name."""
    if fields.boolean("background"):
        raise unsupported("background", "responses are generated while their client waits; leave it out.")
    if fields.raw("conversation") is not None:
        raise unsupported("conversation", "this server has no conversations; use 'previous_response_id'.")
    if fields.raw("prompt") is not None:
        raise unsupported("prompt", "this server has no prompt templates; send 'instructions' and 'input'.")


def _include(fields: BodyFields) -> frozenset[str]:
    value = fields.raw("include")
    items = [] if value is None else array("include", value, max_items=64, what="strings")
    return frozenset(string(f"include[{i}]", item, max_chars=128) for i, item in enumerate(items))


def _summarizes(fields: BodyFields) -> bool:
    """Whether reasoning is to be told as a summary."""
    reasoning = _object(fields, "reasoning")
    asked = reasoning.raw("summary") or reasoning.raw("generate_summary")
    return asked is not None and string("reasoning.summary", asked, max_chars=32) != "none"


def _object(fields: BodyFields, name: str) -> BodyFields:
    value = fields.raw(name)
    return BodyFields({} if value is None else mapping(name, value))


def _generation_fields(fields: BodyFields, include: frozenset[str], limits: RequestLimits) -> dict[str, Any]:
    """What is called otherwise in chats."""
    chat: dict[str, Any] = {}
    most = fields.raw("max_output_tokens")
    if most is not None:
        chat["max_completion_tokens"] = integer("max_output_tokens", most, low=1, high=(1 << 31) - 1)
    top = fields.integer("top_logprobs", low=0, high=limits.max_top_logprobs)
    if top or LOGPROBS in include:
        chat |= {"logprobs": True, "top_logprobs": top or 0}
    effort = _object(fields, "reasoning").raw("effort")
    if effort is not None:
        chat["reasoning_effort"] = string("reasoning.effort", effort, max_chars=32)
    text = _object(fields, "text")
    if text.raw("verbosity") is not None:
        chat["verbosity"] = string("text.verbosity", text.raw("verbosity"), max_chars=32)
    if text.raw("format") is not None:
        chat["response_format"] = _response_format(mapping("text.format", text.raw("format")))
    _object(fields, "stream_options")
    if fields.raw("truncation") not in (None, "auto", "disabled"):
        raise BadField("truncation", got=fields.raw("truncation"), want="'auto' or 'disabled'")
    return chat


def _response_format(given: Mapping[str, Any]) -> dict[str, Any]:
    """``text.format``, whose schema stands beside its type."""
    kind = given.get("type")
    if kind in ("text", "json_object"):
        return {"type": kind}
    if kind != "json_schema":
        raise BadField("text.format.type", got=kind, want="'text', 'json_object' or 'json_schema'")
    schema = given.get("schema")
    if schema is not None:
        mapping("text.format.schema", schema)
    name = given.get("name")
    named: dict[str, Any] = {"name": "schema" if name is None else name, "schema": schema}
    if given.get("strict") is not None:
        named["strict"] = boolean("text.format.strict", given["strict"])
    return {"type": "json_schema", "json_schema": named}


def _tier(fields: BodyFields, skipped: SkippedKinds) -> str | None:
    value = fields.raw("service_tier")
    if value is None:
        return None
    tier = string("service_tier", value, max_chars=64)
    if tier not in _TIERS:
        skipped.note("service tier", tier)
        return None
    return tier


def _echo(fields: BodyFields, limits: RequestLimits) -> dict[str, Any]:
    """The fields of the request that its response repeats."""
    reasoning, text = _object(fields, "reasoning"), _object(fields, "text")
    for name in ECHOED_FIELDS:
        if (chars := weight(fields.raw(name), limits.max_ignored_chars)) > limits.max_ignored_chars:
            want = f"at most {limits.max_ignored_chars} characters, in a field without effect (max_ignored_chars)"
            raise BadField(name, got=f"{chars} characters or more", want=want, code="string_above_max_length")
    metadata = fields.raw("metadata")
    for key, value in ({} if metadata is None else mapping("metadata", metadata)).items():
        string(f"metadata.{key[:64]}", value, max_chars=limits.max_ignored_chars)
    for name in ("user", "safety_identifier"):
        fields.string(name, max_chars=limits.max_ignored_chars)
    tool_choice = fields.raw("tool_choice")
    return {
        "background": False,
        "instructions": fields.raw("instructions"),
        "max_output_tokens": fields.raw("max_output_tokens"),
        "max_tool_calls": fields.integer("max_tool_calls", low=0, high=(1 << 31) - 1),
        "metadata": {} if metadata is None else metadata,
        "parallel_tool_calls": fields.boolean("parallel_tool_calls", default=True),
        "previous_response_id": fields.raw("previous_response_id"),
        "prompt_cache_key": fields.raw("prompt_cache_key"),
        "reasoning": {"effort": reasoning.raw("effort"), "summary": reasoning.raw("summary")},
        "safety_identifier": fields.raw("safety_identifier"),
        "service_tier": fields.raw("service_tier") or "default",
        "temperature": fields.raw("temperature"),
        "text": {"format": text.raw("format") or {"type": "text"}, "verbosity": text.raw("verbosity") or "medium"},
        "tool_choice": "auto" if tool_choice is None else tool_choice,
        "tools": fields.raw("tools") or [],
        "top_logprobs": fields.raw("top_logprobs") or 0,
        "top_p": fields.raw("top_p"),
        "truncation": "disabled",
        "user": fields.raw("user"),
    }


# --- input -----------------------------------------------------------------------------------------------------------


def _input_items(
    fields: BodyFields,
    limits: RequestLimits,
    referenced: Mapping[str, Any],
    skipped: SkippedKinds,
    *,
    continues: bool,
) -> list[Any]:
    """The new items, references resolved."""
    value = fields.raw("input") if continues else fields.required("input")
    if value is None:
        return []
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": value}]}]
    if not isinstance(value, list):
        raise BadField("input", got=value, want="a string or an array of items", code=WRONG_TYPE)
    array("input", value, max_items=limits.max_messages, what="items")
    if not value and not continues:
        raise BadField("input", got="an empty array", want="at least one item", code="empty_array")
    items: list[Any] = []
    for i, given in enumerate(value):
        item = mapping(f"input[{i}]", given)
        if not _is_reference(item):
            items.append(item)
            continue
        name = string(f"input[{i}].id", item.get("id"), max_chars=256)
        if name not in referenced:
            raise RequestError(
                f"Item with id '{name[:64]}' not found. Items are kept with stored responses, for a time "
                "(docs/responses.md); send the item itself.",
                param="input",
                code="item_not_found",
            )
        items.append(referenced[name])
    return items


def _located(earlier: Sequence[Any], given: Sequence[Any]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    for item in earlier:
        yield "input", item
    for i, item in enumerate(given):
        yield f"input[{i}]", item


class _Conversation:
    """Items to messages."""

    def __init__(self, limits: RequestLimits, tools: _ToolTranslator, skipped: SkippedKinds, *, sees: bool) -> None:
        self.messages: list[dict[str, Any]] = []
        self._limits = limits
        self._tools = tools
        self._skipped = skipped
        self._sees = sees
        self._turn: dict[str, Any] | None = None  # the assistant's, that grows
        self._images: list[dict[str, Any]] = []  # of tools' results: templates have images in users' messages only
        self._parts = 0
        self._adders: dict[str, Callable[[str, Mapping[str, Any]], None]] = {
            "message": self._add_message,
            "reasoning": self._add_reasoning,
            "function_call": self._add_function_call,
            "custom_tool_call": self._add_custom_call,
            "function_call_output": self._add_output,
            "custom_tool_call_output": self._add_output,
        }

    def add(self, where: str, item: Mapping[str, Any]) -> None:
        """The next item."""
        kind = item.get("type", "message" if "role" in item else None)
        adder = self._adders.get(kind) if isinstance(kind, str) else None
        if adder is None:
            self._skipped.note("item", kind)
            return
        if self._images and adder != self._add_output:
            self._end_results()
        adder(where, item)

    def end(self) -> None:
        """No more items."""
        self._end_turn()
        self._end_results()

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None and (turn.get("content") is not None or len(turn) > 2):
            self.messages.append(turn)

    def _end_results(self) -> None:
        images, self._images = self._images, []
        if images:
            self.messages.append({"role": "user", "content": images})

    def _open_turn(self, *, fresh: bool) -> dict[str, Any]:
        """The assistant's message; another one if ``fresh`` and this one has text or calls already."""
        turn = self._turn
        if turn is not None and fresh and (turn["content"] is not None or "tool_calls" in turn):
            self._end_turn()
            turn = None
        if turn is None:
            turn = self._turn = {"role": "assistant", "content": None}
        return turn

    def _add_message(self, where: str, item: Mapping[str, Any]) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in ("user", "assistant", "system", "developer"):
            raise BadField(f"{where}.role", got=role, want="one of user, assistant, system, developer")
        content = item.get("content")
        if content is None and role == "assistant":
            return
        parts = self._read_parts(f"{where}.content", content)
        if role == "assistant":
            self._open_turn(fresh=True)["content"] = "".join(part.get("text", "") for part in parts)
            return
        self._end_turn()
        texts = [part["text"] for part in parts if part["type"] == "text"]
        plain = texts[0] if len(parts) == 1 and texts else ""
        self.messages.append({"role": role, "content": plain if len(parts) == len(texts) < 2 else parts})

    def _read_parts(self, where: str, content: Any) -> list[dict[str, Any]]:
        """Parts as chats have them."""
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        parts: list[dict[str, Any]] = []
        for i, given in enumerate(array(where, content, max_items=self._limits.max_content_parts, what="parts")):
            part = self._read_part(f"{where}[{i}]", mapping(f"{where}[{i}]", given))
            if part is not None:
                parts.append(part)
        self._parts += len(parts)
        if self._parts > self._limits.max_content_parts:
            want = f"at most {self._limits.max_content_parts} in one conversation (max_content_parts)"
            raise BadField("input", got=f"{self._parts} parts", want=want, code="array_above_max_length")
        return parts

    def _read_part(self, where: str, part: Mapping[str, Any]) -> dict[str, Any] | None:
        kind = part.get("type")
        match kind:
            case "input_text" | "output_text" | "text" | "summary_text" | "reasoning_text":
                return {"type": "text", "text": _string(f"{where}.text", part.get("text"))}
            case "refusal":
                return {"type": "text", "text": _string(f"{where}.refusal", part.get("refusal"))}
            case "input_image":
                return self._read_image(where, part)
            case "input_file" | "input_audio":
                raise unsupported(f"{where}.type", f"this model reads neither files nor sound here, not '{kind}'.")
        self._skipped.note("content", kind)
        return None

    def _read_image(self, where: str, part: Mapping[str, Any]) -> dict[str, Any]:
        url = part.get("image_url")
        if url is None:
            raise unsupported(f"{where}.file_id", "this server has no files; send 'image_url'.")
        detail = part.get("detail")
        shown: dict[str, Any] = {"url": _string(f"{where}.image_url", url)}
        if detail in ("auto", "low", "high"):
            shown["detail"] = detail
        elif detail is not None:
            string(f"{where}.detail", detail, max_chars=64)
        return {"type": "image_url", "image_url": shown}

    def _add_reasoning(self, where: str, item: Mapping[str, Any]) -> None:
        text = (
            self._joined(f"{where}.content", item.get("content"))
            or _unsealed_reasoning(item.get("encrypted_content"))
            or self._joined(f"{where}.summary", item.get("summary"))
        )
        if text:
            turn = self._open_turn(fresh=True)
            before = turn.get("reasoning_content")
            turn["reasoning_content"] = text if before is None else f"{before}\n\n{text}"

    def _joined(self, where: str, value: Any) -> str:
        if value is None:
            return ""
        return "\n\n".join(part["text"] for part in self._read_parts(where, value) if "text" in part)

    def _add_function_call(self, where: str, item: Mapping[str, Any]) -> None:
        self._add_call(where, item, _string(f"{where}.arguments", item.get("arguments")))

    def _add_custom_call(self, where: str, item: Mapping[str, Any]) -> None:
        text = _string(f"{where}.input", item.get("input"))
        self._add_call(where, item, json.dumps({CUSTOM_INPUT: text}, ensure_ascii=False))

    def _add_call(self, where: str, item: Mapping[str, Any], arguments: str) -> None:
        name = string(f"{where}.name", item.get("name"), max_chars=1 << 10)
        namespace = item.get("namespace")
        if namespace is not None:
            namespace = string(f"{where}.namespace", namespace, max_chars=1 << 10)
        function = {"name": self._tools.function_name(namespace, name), "arguments": arguments}
        call: dict[str, Any] = {"type": "function", "function": function}
        identity = item.get("call_id") if item.get("call_id") is not None else item.get("id")
        if identity is not None:
            call["id"] = string(f"{where}.call_id", identity, max_chars=1 << 12)
        self._open_turn(fresh=False).setdefault("tool_calls", []).append(call)

    def _add_output(self, where: str, item: Mapping[str, Any]) -> None:
        self._end_turn()
        message: dict[str, Any] = {"role": "tool", "content": self._read_output(f"{where}.output", item.get("output"))}
        if item.get("call_id") is not None:
            message["tool_call_id"] = string(f"{where}.call_id", item["call_id"], max_chars=1 << 12)
        self.messages.append(message)

    def _read_output(self, where: str, output: Any) -> str:
        """The text of a tool's result; its images follow all results, in a message of the user."""
        if isinstance(output, dict):
            return json.dumps(output, ensure_ascii=False)
        texts: list[str] = []
        for part in self._read_parts(where, output):
            if part["type"] == "text":
                texts.append(part["text"])
            elif self._sees:
                self._images.append(part)
            else:
                texts.append(_OMITTED_IMAGE)
        return "\n".join(texts)


def _string(where: str, value: Any) -> str:
    return string(where, value, max_chars=1 << 62)


# --- tools -----------------------------------------------------------------------------------------------------------


class _ToolTranslator:
    """The tools of one request as functions, and what each function stands for."""

    def __init__(self, limits: RequestLimits, skipped: SkippedKinds) -> None:
        self.targets: dict[str, ToolTarget] = {}
        self._functions: list[dict[str, Any]] = []
        self._names: dict[tuple[str | None, str], str] = {}
        self._limits = limits
        self._skipped = skipped

    def read(self, value: Any) -> None:
        """All ``tools``.  Raises RequestError."""
        for i, item in enumerate(() if value is None else self._array("tools", value)):
            self._read_tool(f"tools[{i}]", mapping(f"tools[{i}]", item), None, "")

    def _array(self, where: str, value: Any) -> Sequence[Any]:
        return array(where, value, max_items=self._limits.max_tools, what="tools")

    def _read_tool(self, where: str, tool: Mapping[str, Any], namespace: str | None, about: str) -> None:
        kind = tool.get("type", "function")
        if kind == "namespace" and namespace is None:
            self._read_namespace(where, tool)
        elif kind == "function":
            self._add_function(where, tool, namespace, about)
        elif kind == "custom":
            self._add_custom(where, tool, namespace, about)
        else:
            self._skipped.note("tool", kind)

    def _read_namespace(self, where: str, tool: Mapping[str, Any]) -> None:
        """Its description stands before that of its first tool."""
        name = _string(f"{where}.name", tool.get("name"))
        about = tool.get("description")
        about = "" if about is None else _string(f"{where}.description", about)
        for i, item in enumerate(self._array(f"{where}.tools", tool.get("tools"))):
            self._read_tool(f"{where}.tools[{i}]", mapping(f"{where}.tools[{i}]", item), name, "" if i else about)

    def _add_function(self, where: str, tool: Mapping[str, Any], namespace: str | None, about: str) -> None:
        nested = tool.get("function")  # as chats have it; some clients send that here, too
        given = nested if isinstance(nested, dict) else tool
        parameters = given.get("parameters")
        function: dict[str, Any] = {
            "description": _described(where, given, about),
            "parameters": None if parameters is None else mapping(f"{where}.parameters", parameters),
        }
        if isinstance(given.get("strict"), bool):
            function["strict"] = given["strict"]
        self._add(where, given.get("name"), namespace, function, custom=False)

    def _add_custom(self, where: str, tool: Mapping[str, Any], namespace: str | None, about: str) -> None:
        form = tool.get("format")
        form = {"type": "text"} if form is None else mapping(f"{where}.format", form)
        description = _described(where, tool, about)
        if form.get("type") == "grammar":
            syntax = string(f"{where}.format.syntax", form.get("syntax"), max_chars=64)
            definition = _string(f"{where}.format.definition", form.get("definition"))
            description += f"\n\nThe text must match this grammar ({syntax}):\n\n{definition}"
        text = {"type": "string", "description": "The whole input, as plain text."}
        parameters = {
            "type": "object",
            "properties": {CUSTOM_INPUT: text},
            "required": [CUSTOM_INPUT],
            "additionalProperties": False,
        }
        function = {"description": description.strip(), "parameters": parameters}
        self._add(where, tool.get("name"), namespace, function, custom=True)

    def _add(self, where: str, given: Any, namespace: str | None, function: dict[str, Any], *, custom: bool) -> None:
        name = string(f"{where}.name", given, max_chars=1 << 10)
        if _NOT_IN_NAMES.search(name) or not 0 < len(name) <= _MOST_NAME_CHARS:
            raise BadField(f"{where}.name", got=name, want="1 to 128 letters, digits, or any of '_-.:/'")
        if (namespace, name) in self._names:
            return  # said twice
        flat = _free(_joined_name(namespace, name), self.targets)
        self._names[namespace, name] = flat
        self.targets[flat] = ToolTarget(name=name, namespace=namespace, text_argument=CUSTOM_INPUT if custom else None)
        self._functions.append({"type": "function", "function": {"name": flat, **function}})
        if len(self._functions) > self._limits.max_tools:
            want = f"at most {self._limits.max_tools} tools, those of namespaces included (max_tools)"
            raise BadField("tools", got=f"{len(self._functions)} tools", want=want, code="array_above_max_length")

    def function_name(self, namespace: str | None, name: str) -> str:
        """The function's name of a tool, also of one that is no longer among ``tools``."""
        return self._names.get((namespace, name)) or _joined_name(namespace, name)

    def chat_fields(self, fields: BodyFields) -> dict[str, Any]:
        """``tools`` and ``tool_choice`` of the chat."""
        choice = fields.raw("tool_choice")
        if choice is not None and not isinstance(choice, str | dict):
            raise BadField("tool_choice", got=choice, want="a string or an object", code=WRONG_TYPE)
        if isinstance(choice, str) and choice not in ("auto", "none", "required"):
            raise BadField("tool_choice", got=choice, want="'none', 'auto', 'required' or an object")
        if not self._functions:
            if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
                self._chosen(choice)
            return {}
        chat: dict[str, Any] = {"tools": self._functions}
        if isinstance(choice, str):
            chat["tool_choice"] = choice
        elif choice is not None and (translated := self._choice(choice)) is not None:
            chat["tool_choice"] = translated
        return chat

    def _choice(self, choice: Mapping[str, Any]) -> dict[str, Any] | None:
        kind = choice.get("type")
        if kind in ("function", "custom"):
            return {"type": "function", "function": {"name": self._chosen(choice)}}
        if kind != "allowed_tools":
            self._skipped.note("tool choice", kind)
            return None
        nested = choice.get("allowed_tools")
        given = nested if isinstance(nested, dict) else choice
        names = [
            self.function_name(_namespace(entry), entry["name"])
            for entry in self._array("tool_choice.tools", given.get("tools"))
            if isinstance(entry, dict) and isinstance(entry.get("name"), str)
        ]
        allowed = [{"type": "function", "function": {"name": name}} for name in names]
        mode = given.get("mode", "auto")
        if mode not in ("auto", "required"):
            raise BadField("tool_choice.mode", got=mode, want="'auto' or 'required'")
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}

    def _chosen(self, choice: Mapping[str, Any]) -> str:
        nested = choice.get("function")
        name = nested.get("name") if isinstance(nested, dict) else choice.get("name")
        found = self._names.get((_namespace(choice), name)) if isinstance(name, str) else None
        if found is None:
            raise BadField("tool_choice.name", got=name, want="the name of one of 'tools'")
        return found


def _namespace(entry: Mapping[str, Any]) -> str | None:
    value = entry.get("namespace")
    return None if value is None else string("tool_choice.namespace", value, max_chars=1 << 10)


def _described(where: str, tool: Mapping[str, Any], about: str) -> str:
    own = tool.get("description")
    own = "" if own is None else _string(f"{where}.description", own)
    return f"{about}\n\n{own}".strip() if about else own


def _joined_name(namespace: str | None, name: str) -> str:
    """Both names as one that functions may have."""
    if namespace is None:
        return name
    between = "" if namespace.endswith(("_", ".", "/", ":", "-")) else "__"
    joined = _NOT_IN_NAMES.sub("_", f"{namespace}{between}{name}")
    if len(joined) <= _MOST_NAME_CHARS:
        return joined
    mark = blake2b(joined.encode(), digest_size=8).hexdigest()
    return f"{joined[: _MOST_NAME_CHARS - 17]}_{mark}"


def _free(name: str, taken: Mapping[str, ToolTarget]) -> str:
    """The name, with a number where another tool has it already."""
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name[: _MOST_NAME_CHARS - 5]}_{number}"
    return found
