"""Bodies of ``/v1/messages`` (Anthropic's Messages API) to bodies of ``/v1/chat/completions``.

Only what a chat knows is translated; ``parse_chat`` checks it like any other.  Results of tools, which stand inside a
message of the user, become messages of their own before the rest of that message; text, thinking and calls of one
assistant turn are one message, and so are turns of one role that follow one another.  What is not known (fields,
content types, tools that a vendor runs itself) is skipped and logged once, so that clients of tomorrow go on working; a
known field of a wrong type is refused.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.config.limits import RequestLimits
from penstock.errors import BadField
from penstock.interfaces import HIDDEN_THINKING, JsonObject
from penstock.processing.requests.fields import WRONG_TYPE, BodyFields, array, boolean, integer, mapping, number, string
from penstock.processing.requests.skipped import SkippedKinds

EXTENSION_FIELDS = frozenset(
    {
        *("seed", "min_p", "stop_token_ids", "min_tokens", "ignore_eos", "logit_bias", "presence_penalty"),
        *("frequency_penalty", "repetition_penalty", "cache_salt", "chat_template_kwargs", "priority"),
        *("prompt_cache_key", "skip_special_tokens"),
    }
)
"""Fields that chats have under the same name; the Messages API does not have them."""

_PASSED_FIELDS = EXTENSION_FIELDS | {"model", "temperature", "top_p", "top_k"}
PROMPT_FIELDS = frozenset({"messages", "system", "tools", "tool_choice", "thinking", "output_config", "output_format"})
MESSAGES_FIELDS = (
    _PASSED_FIELDS | PROMPT_FIELDS | {"max_tokens", "stop_sequences", "stream", "metadata", "service_tier"}
)

_IGNORED_FIELDS = frozenset(
    {"cache_control", "betas", "container", "context_management", "inference_geo", "mcp_servers", "speed"}
)
"""Fields of Anthropic's that change nothing about a response of this server, and are not worth a line in the log."""

_MOST = (1 << 31) - 1
_ANY_TEXT = 1 << 62
_SCHEMA_NAME = "output"

BILLING_HEADER = re.compile(r"^x-anthropic-billing-header:[^\n]*\n?", re.IGNORECASE | re.MULTILINE)
"""A line that Claude Code puts into its system prompt, with a part that differs in each request."""

_OMITTED_IMAGE = "[An image was omitted: this model reads text only.]"
_OMITTED_DOCUMENT = "[A document was omitted: only documents of text are read here.]"

_EFFORTS = {"xhigh": "high", "max": "high"}
"""Efforts of Anthropic's models that no template knows, and the nearest that templates do."""

_LOW_BUDGET, _MEDIUM_BUDGET = 4096, 16_384
"""Thinking tokens up to which a budget is low or medium effort, for templates that know efforts and no budgets."""

_BLOCK_FIELDS = {
    kind: frozenset({"type", "cache_control", *fields.split()})
    for kind, fields in {
        "text": "text citations",
        "image": "source transformations",
        "document": "source title context citations",
        "search_result": "source title content citations",
        "tool_result": "tool_use_id content is_error toolset_name",
        "tool_use": "id name input caller toolset_name",
        "thinking": "thinking signature",
        "redacted_thinking": "data",
    }.items()
}
_TOOL_FIELDS = frozenset(
    {
        *("type", "name", "description", "input_schema", "strict", "cache_control", "input_examples"),
        *("allowed_callers", "defer_loading", "eager_input_streaming"),
    }
)


class MessagesOptions(msgspec.Struct, frozen=True):
    """How the bodies of one service are translated."""

    skipped: SkippedKinds
    max_model_len: int  # tokens; a longer response is not asked for, and what fits is known with the prompt
    strip_billing_header: bool = True  # ``BILLING_HEADER`` would break the prefix cache with each request


def messages_chat(
    body: JsonObject, limits: RequestLimits, *, sees: bool, options: MessagesOptions, counts: bool = False
) -> JsonObject:
    """The chat that a body asks for.  Raises RequestError.

    ``sees``: the model reads images.  ``counts``: only the prompt is wanted, so no length is needed.
    """
    fields = BodyFields(body)
    for name in body:
        if name not in MESSAGES_FIELDS and name not in _IGNORED_FIELDS:
            options.skipped.note("field", name)
    chat = {name: body[name] for name in _PASSED_FIELDS if body.get(name) is not None}
    chat |= _prompt(body, limits, sees=sees, options=options)
    if not counts or fields.raw("max_tokens") is not None:
        length = integer("max_tokens", fields.required("max_tokens"), low=1, high=_MOST)
        chat["max_tokens"] = min(length, options.max_model_len)
    chat["stream"] = fields.boolean("stream")
    if fields.raw("temperature") is not None:
        number("temperature", fields.raw("temperature"), low=0, high=2)
    stops = fields.raw("stop_sequences")
    if stops:
        chat["stop"] = [
            string(f"stop_sequences[{i}]", stop, max_chars=_ANY_TEXT)
            for i, stop in enumerate(_items("stop_sequences", stops, 1024))
        ]
    form = _output_format(fields)
    if form is not None:
        chat["response_format"] = form
    if fields.raw("service_tier") is not None:
        tier = string("service_tier", fields.raw("service_tier"), max_chars=64)
        chat["service_tier"] = "default" if tier == "standard_only" else "auto"
    session = _session(fields, limits)
    if session and "prompt_cache_key" not in chat:
        chat["prompt_cache_key"] = session
    return chat


def _prompt(body: JsonObject, limits: RequestLimits, *, sees: bool, options: MessagesOptions) -> JsonObject:
    """The fields of the chat that its prompt follows from.  Raises RequestError."""
    fields = BodyFields(body)
    conversation = _Conversation(limits, options, sees=sees)
    system = fields.raw("system")
    if system is not None:
        conversation.add_system("system", system)
    given = fields.required("messages")
    items = _items("messages", given, limits.max_messages)
    if not items:
        raise BadField("messages", got="an empty array", want="at least one message", code="empty_array")
    for i, item in enumerate(items):
        conversation.add(f"messages[{i}]", mapping(f"messages[{i}]", item))
    messages = conversation.messages()
    if not messages:
        raise BadField("messages", got="nothing that is known here", want="at least one message", code="empty_array")
    prompt: dict[str, Any] = {"messages": messages, **_tool_fields(fields, limits, options.skipped)}
    last = messages[-1]
    if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:  # the response's beginning
        prompt |= {"continue_final_message": True, "add_generation_prompt": False}
    arguments = _thinking(fields, options.skipped)
    if arguments:
        given_arguments = fields.raw("chat_template_kwargs")
        own = {} if given_arguments is None else mapping("chat_template_kwargs", given_arguments)
        prompt["chat_template_kwargs"] = {**arguments, **own}
    elif fields.raw("chat_template_kwargs") is not None:
        prompt["chat_template_kwargs"] = fields.raw("chat_template_kwargs")
    return prompt


def _items(where: str, value: Any, most: int, what: str = "items") -> Sequence[Any]:
    return array(where, value, max_items=most, what=what)


def _session(fields: BodyFields, limits: RequestLimits) -> str:
    """The session that ``metadata.user_id`` names beside its user, as Claude Code writes it; nothing where it does not.

    A JSON object with ``session_id``, or, in older versions, ``user_…_account_…_session_ID``.
    """
    value = fields.raw("metadata")
    user = None if value is None else mapping("metadata", value).get("user_id")
    if user is None:
        return ""
    text = string("metadata.user_id", user, max_chars=limits.max_ignored_chars)
    if text.startswith("{"):
        try:
            name = _decode_user(text).session_id
        except msgspec.DecodeError:
            return ""
    else:
        _, marked, name = text.rpartition("_session_")
        if not marked:
            return ""
    return string("metadata.user_id", name, max_chars=limits.max_session_chars)


class _SessionUser(msgspec.Struct):
    """The object that Claude Code writes into ``metadata.user_id``, as far as it is read."""

    session_id: str = ""


_decode_user = msgspec.json.Decoder(_SessionUser).decode


def _thinking(fields: BodyFields, skipped: SkippedKinds) -> dict[str, Any]:
    """What templates are told of ``thinking`` and ``output_config.effort``; nothing where the request says nothing."""
    arguments: dict[str, Any] = {}
    value = fields.raw("thinking")
    if value is not None:
        kind = string("thinking.type", mapping("thinking", value).get("type"), max_chars=_ANY_TEXT)
        skipped.note_fields("field of thinking", value, frozenset({"type", "budget_tokens", "display"}))
        budget, display = value.get("budget_tokens"), value.get("display")
        if display is not None:
            string("thinking.display", display, max_chars=_ANY_TEXT)
        if budget is not None:
            budget = integer("thinking.budget_tokens", budget, low=0, high=_MOST)
        if kind in ("enabled", "disabled"):
            arguments |= {"enable_thinking": kind == "enabled", "thinking": kind == "enabled"}
        elif kind not in ("adaptive", "between_tools"):
            skipped.note("thinking", kind)
        if kind == "enabled" and budget is not None:
            implied = "low" if budget <= _LOW_BUDGET else "medium" if budget <= _MEDIUM_BUDGET else "high"
            arguments |= {"thinking_budget": budget, "reasoning_effort": implied}
    config = fields.raw("output_config")
    effort = None if config is None else mapping("output_config", config).get("effort")
    if effort is not None:
        named = string("output_config.effort", effort, max_chars=32)
        arguments["reasoning_effort"] = _EFFORTS.get(named, named)
    return arguments


def _output_format(fields: BodyFields) -> dict[str, Any] | None:
    """``output_config.format``, or ``output_format`` as it was called before."""
    config = fields.raw("output_config")
    given = None if config is None else mapping("output_config", config).get("format")
    where = "output_config.format"
    if given is None:
        given, where = fields.raw("output_format"), "output_format"
    if given is None:
        return None
    form = mapping(where, given)
    if form.get("type") != "json_schema":
        raise BadField(f"{where}.type", got=form.get("type"), want="'json_schema'")
    schema = mapping(f"{where}.schema", form.get("schema"))
    return {"type": "json_schema", "json_schema": {"name": _SCHEMA_NAME, "schema": schema}}


# --- messages --------------------------------------------------------------------------------------------------------


class _Conversation:
    """Messages as chats have them.  Texts and parts are kept apart until all are known: any number of turns of one role
    are joined once."""

    def __init__(self, limits: RequestLimits, options: MessagesOptions, *, sees: bool) -> None:
        self._messages: list[dict[str, Any]] = []
        self._limits = limits
        self._skipped = options.skipped
        self._strip_billing_header = options.strip_billing_header
        self._sees = sees
        self._parts = 0

    def messages(self) -> list[dict[str, Any]]:
        """All that was added."""
        return [_joined(message) for message in self._messages]

    def add_system(self, where: str, content: Any) -> None:
        """A system prompt, at the beginning or amid the chat."""
        texts = [content] if isinstance(content, str) else self._texts(where, content)
        if self._strip_billing_header:
            texts = [BILLING_HEADER.sub("", text) for text in texts]
        texts = [text for text in texts if text]
        if texts:
            message = self._pop_or_begin("system")
            message["content"] += texts
            self._messages.append(message)

    def add(self, where: str, item: Mapping[str, Any]) -> None:
        """The next message."""
        role, content = item.get("role"), item.get("content")
        self._skipped.note_fields("field of a message", item, frozenset({"role", "content", "cache_control"}))
        if role == "system":
            self.add_system(f"{where}.content", content)
        elif role == "user":
            self._add_user(f"{where}.content", content)
        elif role == "assistant":
            self._add_assistant(f"{where}.content", content)
        else:
            raise BadField(f"{where}.role", got=role, want="one of user, assistant, system")

    def _blocks(self, where: str, content: Any) -> list[tuple[str, Mapping[str, Any]]]:
        """Content blocks, each with its place; a string is one of text."""
        if isinstance(content, str):
            return [(where, {"type": "text", "text": content})]
        if not isinstance(content, list):
            raise BadField(where, got=content, want="a string or an array of content blocks", code=WRONG_TYPE)
        self._parts += len(content)
        if self._parts > self._limits.max_content_parts:
            want = f"at most {self._limits.max_content_parts} in one conversation (max_content_parts)"
            raise BadField("messages", got=f"{self._parts} content blocks", want=want, code="array_above_max_length")
        blocks = [(f"{where}[{i}]", mapping(f"{where}[{i}]", block)) for i, block in enumerate(content)]
        for at, block in blocks:
            kind = string(f"{at}.type", block.get("type"), max_chars=_ANY_TEXT)
            if kind in _BLOCK_FIELDS:
                self._skipped.note_fields(f"field of a block of {kind}", block, _BLOCK_FIELDS[kind])
        return blocks

    def _texts(self, where: str, content: Any) -> list[str]:
        """The texts of blocks; others are skipped."""
        texts: list[str] = []
        for at, block in self._blocks(where, content):
            if block.get("type") == "text":
                texts.append(_string(f"{at}.text", block.get("text")))
            else:
                self._skipped.note("content", block.get("type"))
        return texts

    def _add_user(self, where: str, content: Any) -> None:
        if content == []:
            raise BadField(where, got="an empty array", want="at least one content block", code="empty_array")
        message = self._pop_or_begin("user")
        images: list[dict[str, Any]] = []  # of results: templates have images in messages of the user only
        parts: list[dict[str, Any]] = []
        for at, block in self._blocks(where, content):
            if block.get("type") == "tool_result":
                self._add_result(at, block, images)
            else:
                parts += self._read_parts(at, block)
        message["content"] += images + parts
        if message["content"]:
            self._messages.append(message)

    def _pop_or_begin(self, role: str) -> dict[str, Any]:
        """The last message if it is of this role, which its next turn continues; else a new one."""
        if self._messages and self._messages[-1]["role"] == role:
            return self._messages.pop()
        return {"role": role, "content": []}

    def _add_result(self, where: str, block: Mapping[str, Any], images: list[dict[str, Any]]) -> None:
        content = block.get("content")
        texts: list[str] = []
        for at, inner in [] if content is None else self._blocks(f"{where}.content", content):
            for part in self._read_parts(at, inner):
                if part["type"] == "text":
                    texts.append(part["text"])
                elif self._sees:
                    images.append(part)
                else:
                    texts.append(_OMITTED_IMAGE)
        text = "\n".join(texts)
        failed = block.get("is_error")
        if failed is not None and boolean(f"{where}.is_error", failed):
            text = f"Error: {text}"
        message: dict[str, Any] = {"role": "tool", "content": text}
        if block.get("tool_use_id") is not None:
            message["tool_call_id"] = string(f"{where}.tool_use_id", block["tool_use_id"], max_chars=1 << 12)
        self._messages.append(message)

    def _read_parts(self, where: str, block: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A block of the user's, or of a result, as parts of a chat."""
        match block.get("type"):
            case "text":
                return [{"type": "text", "text": _string(f"{where}.text", block.get("text"))}]
            case "image":
                return [self._read_image(where, mapping(f"{where}.source", block.get("source")))]
            case "document":
                return self._read_document(where, block)
            case "search_result":
                title = _string(f"{where}.title", block.get("title") or "")
                texts = self._texts(f"{where}.content", block.get("content") or [])
                return [{"type": "text", "text": "\n".join(filter(None, (title, *texts)))}]
            case kind:
                self._skipped.note("content", kind)
                return []

    def _read_image(self, where: str, source: Mapping[str, Any]) -> dict[str, Any]:
        match source.get("type"):
            case "base64":
                media = string(f"{where}.source.media_type", source.get("media_type"), max_chars=64)
                url = f"data:{media};base64,{_string(f'{where}.source.data', source.get('data'))}"
            case "url":
                url = _string(f"{where}.source.url", source.get("url"))
            case kind:
                raise BadField(f"{where}.source.type", got=kind, want="'base64' or 'url'")
        return {"type": "image_url", "image_url": {"url": url}}

    def _read_document(self, where: str, block: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Documents of text, with images in it; others leave a note, so that the model can say what it did not see."""
        source = mapping(f"{where}.source", block.get("source"))
        kind = string(f"{where}.source.type", source.get("type"), max_chars=_ANY_TEXT)
        head = [_string(f"{where}.{name}", block[name]) for name in ("title", "context") if block.get(name) is not None]
        parts: list[dict[str, Any]] = []
        if kind == "text":
            head.append(_string(f"{where}.source.data", source.get("data")))
        elif kind == "content":
            for at, inner in self._blocks(f"{where}.source.content", source.get("content")):
                if inner["type"] in ("text", "image"):
                    parts += self._read_parts(at, inner)
                else:
                    self._skipped.note("content of a document", inner["type"])
        else:
            self._skipped.note("document", kind)
            head.append(_OMITTED_DOCUMENT)
        lead = next((i for i, part in enumerate(parts) if part["type"] != "text"), len(parts))
        texts = [*head, *(part["text"] for part in parts[:lead])]
        return [{"type": "text", "text": "\n".join(texts)}, *parts[lead:]] if texts else parts

    def _add_assistant(self, where: str, content: Any) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for at, block in self._blocks(where, content):
            match block.get("type"):
                case "text":
                    texts.append(_string(f"{at}.text", block.get("text")))
                case "thinking":
                    thoughts.append(_thought(at, block))
                case "tool_use":
                    calls.append(_read_call(at, block))
                case "redacted_thinking":
                    pass  # another server's, which nobody here can read
                case kind:
                    self._skipped.note("content", kind)
        if not (thoughts or calls or any(texts)):
            return
        message = self._pop_or_begin("assistant")
        message["content"] += texts
        for name, more in (("reasoning_content", thoughts), ("tool_calls", calls)):
            if more:
                message.setdefault(name, []).extend(more)
        self._messages.append(message)


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    """A message of ``_Conversation`` as chats have it."""
    content = message["content"]
    match message["role"]:
        case "system":
            return message | {"content": "\n\n".join(content)}
        case "user":
            only = content[0].get("text") if len(content) == 1 else None
            return message | {"content": content if only is None else only}
        case "assistant":
            joined = message | {"content": "".join(content) or None}
            if "reasoning_content" in message:
                joined["reasoning_content"] = "".join(message["reasoning_content"])
            return joined
        case _:  # a result
            return message


def _read_call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    given = block.get("input")
    arguments = {} if given is None else mapping(f"{where}.input", given)
    call: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": string(f"{where}.name", block.get("name"), max_chars=1 << 10),
            "arguments": json.dumps(arguments, ensure_ascii=False),
        },
    }
    if block.get("id") is not None:
        call["id"] = string(f"{where}.id", block["id"], max_chars=1 << 12)
    return call


def _thought(where: str, block: Mapping[str, Any]) -> str:
    """The text of an earlier turn's thinking; of one whose display was omitted it is within the signature."""
    text, signature = _string(f"{where}.thinking", block.get("thinking")), block.get("signature")
    if signature is not None:
        _string(f"{where}.signature", signature)
    if text or signature is None or not signature.startswith(HIDDEN_THINKING):
        return text
    try:
        return b64decode(signature.removeprefix(HIDDEN_THINKING), validate=True).decode()
    except ValueError:
        raise BadField(f"{where}.signature", got=signature, want="the signature that came with the block") from None


def _string(where: str, value: Any) -> str:
    return string(where, value, max_chars=_ANY_TEXT)


# --- tools -----------------------------------------------------------------------------------------------------------


def _tool_fields(fields: BodyFields, limits: RequestLimits, skipped: SkippedKinds) -> dict[str, Any]:
    """``tools``, ``tool_choice`` and ``parallel_tool_calls`` of the chat."""
    given = fields.raw("tools")
    tools: dict[str, dict[str, Any]] = {}
    unknown: set[Any] = set()  # names of tools that were skipped
    for i, item in enumerate(() if given is None else _items("tools", given, limits.max_tools, "tools")):
        tool = mapping(f"tools[{i}]", item)
        vendor = "custom" if tool.get("type") is None else string(f"tools[{i}].type", tool["type"], max_chars=_ANY_TEXT)
        if vendor != "custom":
            skipped.note("tool", vendor)
            unknown |= {tool["name"]} if isinstance(tool.get("name"), str) else set()
            continue
        skipped.note_fields("field of a tool", tool, _TOOL_FIELDS)
        function = _read_tool(f"tools[{i}]", tool)
        tools.setdefault(function["name"], {"type": "function", "function": function})
    chat: dict[str, Any] = {"tools": list(tools.values())} if tools else {}
    value = fields.raw("tool_choice")
    if value is None:
        return chat
    choice = mapping("tool_choice", value)
    skipped.note_fields("field of tool_choice", choice, frozenset({"type", "name", "disable_parallel_tool_use"}))
    kind = choice.get("type")
    if kind not in ("auto", "any", "tool", "none"):
        raise BadField("tool_choice.type", got=kind, want="'auto', 'any', 'tool' or 'none'")
    alone = choice.get("disable_parallel_tool_use")
    if alone is not None and boolean("tool_choice.disable_parallel_tool_use", alone) and tools:
        chat["parallel_tool_calls"] = False
    if kind == "tool":
        name = choice.get("name")
        if isinstance(name, str) and name in unknown and name not in tools:
            return chat  # as it would be without that tool
        if not isinstance(name, str) or name not in tools:
            raise BadField("tool_choice.name", got=name, want="the name of one of 'tools'")
        chat["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif tools:
        chat["tool_choice"] = {"auto": "auto", "any": "required", "none": "none"}[kind]
    return chat


def _read_tool(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = {"name": string(f"{where}.name", tool.get("name"), max_chars=1 << 10)}
    description = tool.get("description")
    if description is not None:
        function["description"] = _string(f"{where}.description", description)
    schema = tool.get("input_schema")
    function["parameters"] = None if schema is None else mapping(f"{where}.input_schema", schema)
    if isinstance(tool.get("strict"), bool):
        function["strict"] = tool["strict"]
    return function
