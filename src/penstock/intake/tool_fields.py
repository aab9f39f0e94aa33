"""``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a chat.

Tools of a kind that this server does not know (a vendor's own web search, ...) are passed over, so that no client fails
because of them.  Knows nothing about templates or formats.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.config.limits import Limits
from penstock.errors import BadField, RequestError
from penstock.intake.fields import WRONG_TYPE, Fields, array, mapping, string

TOOL_FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/\-]{1,128}")
_WANT_CHOICE = "'none', 'auto', 'required' or an object that names a function"

log = logging.getLogger(__name__)


class Tooling(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a chat, as templates know them, and what the model is to do with them."""

    tools: tuple[dict[str, Any], ...] = ()
    required: bool = False  # the answer must be a call
    named: str | None = None  # of this tool
    parallel: bool = True  # one answer may call several times

    def parameters(self) -> dict[str, dict[str, Any]]:
        """Schemas by name."""
        return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}


def parse_tooling(fields: Fields, limits: Limits) -> Tooling:
    """The tools that may be called: none, if ``tool_choice`` says so."""
    tools = _parse_tools(fields.raw("tools"), limits)
    parallel = fields.boolean("parallel_tool_calls", default=True)
    choice = fields.raw("tool_choice")
    if choice is None or choice == "auto":
        return Tooling(tools=tools, parallel=parallel)
    if choice == "none":
        return Tooling()
    if choice != "required" and not isinstance(choice, dict):
        raise BadField("tool_choice", got=choice, want=_WANT_CHOICE, code=WRONG_TYPE)
    if fields.raw("tools") in (None, []):
        raise RequestError(
            "'tool_choice' is only allowed when 'tools' are specified.", param="tool_choice", code="invalid_value"
        )
    if choice == "required":
        return Tooling(tools=tools, required=bool(tools), parallel=parallel)
    return _with_choice(tools, choice, parallel=parallel)


def _with_choice(tools: tuple[dict[str, Any], ...], choice: Mapping[str, Any], *, parallel: bool) -> Tooling:
    kind = choice.get("type")
    if kind == "allowed_tools":
        allowed = mapping("tool_choice.allowed_tools", choice.get("allowed_tools"))
        entries = array(
            "tool_choice.allowed_tools.tools", allowed.get("tools"), max_items=len(tools) + 64, what="tools"
        )
        names = {_named(entry) for entry in entries if isinstance(entry, dict)}
        kept = tuple(tool for tool in tools if tool["function"]["name"] in names)
        return Tooling(tools=kept, required=allowed.get("mode") == "required" and bool(kept), parallel=parallel)
    name = _named(choice)
    if kind != "function" or name is None:
        raise BadField("tool_choice", got=dict(choice), want=_WANT_CHOICE)
    if all(tool["function"]["name"] != name for tool in tools):
        raise BadField("tool_choice.function.name", got=name, want="the name of one of 'tools'")
    return Tooling(tools=tools, required=True, named=name, parallel=False)


def _named(entry: Mapping[str, Any]) -> str | None:
    function = entry.get("function")
    name = function.get("name") if isinstance(function, dict) else entry.get("name")
    return name if isinstance(name, str) else None


def _parse_tools(value: object, limits: Limits) -> tuple[dict[str, Any], ...]:
    if value is None:
        return ()
    items = array("tools", value, max_items=limits.max_tools, what="tools")
    parsed: dict[str, dict[str, Any]] = {}
    for i, item in enumerate(items):
        entry = mapping(f"tools[{i}]", item)
        kind = entry.get("type", "function")
        if kind != "function":
            log.info("passed over a tool of type %.64r: only functions can be called", kind)
            continue
        tool = _parse_function(f"tools[{i}].function", mapping(f"tools[{i}].function", entry.get("function")))
        parsed[tool["name"]] = {"type": "function", "function": tool}
    return tuple(parsed.values())


def _parse_function(where: str, function: Mapping[str, Any]) -> dict[str, Any]:
    name = string(f"{where}.name", function.get("name"), max_chars=1 << 10)
    if not _TOOL_NAME.fullmatch(name):
        raise BadField(f"{where}.name", got=name, want="1 to 128 letters, digits, or any of '_-.:/'")
    tool: dict[str, Any] = {"name": name}
    # Templates read a description without asking whether there is one.
    description = function.get("description")
    tool["description"] = "" if description is None else string(f"{where}.description", description, max_chars=1 << 62)
    parameters = function.get("parameters")
    schema = {} if parameters is None else dict(mapping(f"{where}.parameters", parameters))
    tool["parameters"] = schema or {"type": "object", "properties": {}}
    if isinstance(function.get("strict"), bool):
        tool["strict"] = function["strict"]
    return tool
