"""Fields that constrain the output: ``response_format``, ``structured_outputs``, ``guided_*``, ``tools``.

One constraint per request.  Types and sizes are checked here; compiling a grammar shows what it means.  Tools of
unknown types (a vendor's own web search, ...) are ignored, so that clients that send them do not fail.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from penstock.config.limits import RequestLimits
from penstock.config.schema import RequestConfig
from penstock.errors import BadField, RequestError
from penstock.processing.requests.fields import WRONG_TYPE, BodyFields, array, boolean, mapping, string, unsupported
from penstock.types import Grammar, GrammarKind

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's older fields and the names that they have in ``structured_outputs`` now."""

GRAMMAR_FIELDS = frozenset({"response_format", "structured_outputs", *GUIDED})

_OPTIONS = ("disable_any_whitespace", "disable_additional_properties")
_STRUCTURED = frozenset({"json", "json_object", "regex", "choice", "grammar", *_OPTIONS})
_SCHEMA_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class RequestedGrammar(msgspec.Struct, frozen=True):
    """A grammar, and the field that it came in."""

    grammar: Grammar
    field: str


class JsonOptions(msgspec.Struct, frozen=True):
    """How JSON is to be written, whatever field asks for it."""

    compact: bool = False  # without white space between its parts
    closed: bool = False  # objects have no other properties than their schemas name (``close_objects``)
    lenient: bool = False  # fields that are not known are passed over


def parse_json_form(fields: BodyFields, config: RequestConfig) -> JsonOptions:
    """Options of ``structured_outputs``, or the service's where it sets none.  Raises RequestError."""
    value = fields.raw("structured_outputs")
    given = BodyFields({} if value is None else mapping("structured_outputs", value))
    compact, closed = (given.raw(name) for name in _OPTIONS)
    return JsonOptions(
        compact=False if compact is None else boolean(f"structured_outputs.{_OPTIONS[0]}", compact),
        closed=(
            config.disable_additional_properties
            if closed is None
            else boolean(f"structured_outputs.{_OPTIONS[1]}", closed)
        ),
        lenient=config.unknown_fields == "ignore",
    )


def parse_grammar(fields: BodyFields, limits: RequestLimits, form: JsonOptions) -> RequestedGrammar | None:
    """What the answer must look like; None for plain text.  Raises RequestError."""
    given = _GrammarFields(limits, form)
    found = [*given.response_format(fields), *given.structured_outputs(fields), *given.guided(fields)]
    if len(found) > 1:
        names = " and ".join(f"'{asked.field}'" for asked in found[:3])
        raise RequestError(
            f"Only one of {names} can be followed.", param=found[1].field, code="invalid_parameter_combination"
        )
    return found[0] if found else None


class _GrammarFields:
    """Reads the fields of one request."""

    def __init__(self, limits: RequestLimits, form: JsonOptions) -> None:
        self._limits = limits
        self._form = form

    def response_format(self, fields: BodyFields) -> Iterator[RequestedGrammar]:
        """OpenAI's; ``schema`` with ``json_object`` is llama.cpp's and others'."""
        value = fields.raw("response_format")
        if value is None:
            return
        form = BodyFields(mapping("response_format", value))
        kind = form.required("type") if isinstance(value.get("type"), str) else None
        match kind:
            case "text":
                self._refuse_others("response_format", value, ("type",))
            case "json_object":
                self._refuse_others("response_format", value, ("type", "schema"))
                schema = form.raw("schema")
                where = "response_format" if schema is None else "response_format.schema"
                yield RequestedGrammar(self._json(_ANY_OBJECT if schema is None else schema, where), where)
            case "json_schema":
                self._refuse_others("response_format", value, ("type", "json_schema"))
                yield self._json_schema(form)
            case _:
                want = "'text', 'json_object' or 'json_schema'"
                raise BadField("response_format.type", got=value.get("type"), want=want)

    def _json_schema(self, form: BodyFields) -> RequestedGrammar:
        """``strict`` or not makes no difference: a schema is followed to the letter or refused."""
        where = "response_format.json_schema"
        value = form.raw("json_schema")
        if value is None:
            raise RequestError(
                f"Missing required parameter: '{where}'.", param=where, code="missing_required_parameter"
            )
        named = mapping(where, value)
        name = named.get("name")
        if not isinstance(name, str) or not _SCHEMA_NAME.fullmatch(name):
            raise BadField(f"{where}.name", got=name, want="1 to 64 letters, digits, '_' or '-'")
        self._refuse_others(where, named, ("name", "schema", "strict", "description"))
        if named.get("strict") is not None:
            boolean(f"{where}.strict", named["strict"])
        schema = named.get("schema")
        return RequestedGrammar(self._json({} if schema is None else schema, f"{where}.schema"), f"{where}.schema")

    def _refuse_others(self, where: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
        for key in value:
            if key not in known and value[key] is not None and not self._form.lenient:
                raise RequestError(f"Unknown parameter: '{where}.{key[:64]}'.", param=where, code="unknown_parameter")

    def structured_outputs(self, fields: BodyFields) -> Iterator[RequestedGrammar]:
        """vLLM's."""
        value = fields.raw("structured_outputs")
        if value is None:
            return
        given = {key: item for key, item in mapping("structured_outputs", value).items() if item not in (None, False)}
        for key in given:
            if key not in _STRUCTURED and not self._form.lenient:
                known = ", ".join(sorted(_STRUCTURED))
                raise unsupported(f"structured_outputs.{key[:64]}", f"this server knows {known}.")
        for key, item in given.items():
            if key in _STRUCTURED and key not in _OPTIONS:
                yield self._constraint(key, item, f"structured_outputs.{key}")

    def guided(self, fields: BodyFields) -> Iterator[RequestedGrammar]:
        """vLLM's older ones."""
        for name, key in GUIDED.items():
            if fields.raw(name) is not None:
                yield self._constraint(key, fields.raw(name), name)

    def _constraint(self, key: str, value: Any, where: str) -> RequestedGrammar:
        limits = self._limits
        match key:
            case "json":
                schema = _parsed(where, value, limits) if isinstance(value, str) else value
                return RequestedGrammar(self._json(schema, where), where)
            case "json_object":
                boolean(where, value)
                return RequestedGrammar(self._json(_ANY_OBJECT, where), where)
            case "regex":
                return RequestedGrammar(_grammar(GrammarKind.REGEX, _text(where, value, limits), where, limits), where)
            case "grammar":
                text = _text(where, value, limits)
                kind = GrammarKind.EBNF if "::=" in text else GrammarKind.LARK
                return RequestedGrammar(_grammar(kind, text, where, limits), where)
            case _:
                return RequestedGrammar(_choice_grammar(value, where, limits), where)

    def _json(self, schema: object, where: str) -> Grammar:
        if not isinstance(schema, dict | bool):
            raise BadField(where, got=schema, want="a JSON schema: an object or a boolean", code=WRONG_TYPE)
        grammar = _grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), where, self._limits)
        return msgspec.structs.replace(grammar, compact=self._form.compact, closed=self._form.closed)


def _choice_grammar(value: object, where: str, limits: RequestLimits) -> Grammar:
    items = array(where, value, max_items=limits.max_grammar_choices, what="strings")
    if not items:
        raise BadField(where, got="an empty array", want="at least one string", code="empty_array")
    for index, item in enumerate(items):
        if string(f"{where}[{index}]", item, max_chars=limits.max_grammar_chars) == "":
            raise BadField(f"{where}[{index}]", got=item, want="a string that is not empty", code="empty_string")
    return _grammar(GrammarKind.CHOICE, json.dumps(list(dict.fromkeys(items))), where, limits)


def _grammar(kind: GrammarKind, text: str, where: str, limits: RequestLimits) -> Grammar:
    """Sizes are those of the JSON that travels, in characters."""
    if len(text) > limits.max_grammar_chars:
        got = f"{len(text)} characters"
        raise BadField(
            where, got=got, want=f"at most {limits.max_grammar_chars} characters", code="string_above_max_length"
        )
    return Grammar(kind=kind, text=text)


def _text(where: str, value: object, limits: RequestLimits) -> str:
    return string(where, value, max_chars=limits.max_grammar_chars)


def _parsed(where: str, text: str, limits: RequestLimits) -> object:
    """A schema that came as a string of JSON, as vLLM allows."""
    _text(where, text, limits)
    try:
        parsed: object = json.loads(text)
    except (ValueError, RecursionError):
        raise BadField(where, got=text, want="a JSON schema", code="invalid_json") from None
    return parsed


TOOL_FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/\-]{1,128}")
_WANT_CHOICE = "'none', 'auto', 'required' or an object that names a function"

log = logging.getLogger(__name__)


class ToolOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a chat, as templates know them, and what the model is to do with them."""

    tools: tuple[dict[str, Any], ...] = ()
    required: bool = False  # the answer must be a call
    named: str | None = None  # of this tool
    parallel: bool = True  # one answer may call several times

    def parameters(self) -> dict[str, dict[str, Any]]:
        """Schemas by name."""
        return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}


def parse_tooling(fields: BodyFields, limits: RequestLimits) -> ToolOptions:
    """The tools that may be called: none, if ``tool_choice`` says so."""
    tools = _parse_tools(fields.raw("tools"), limits)
    parallel = fields.boolean("parallel_tool_calls", default=True)
    choice = fields.raw("tool_choice")
    if choice is None or choice == "auto":
        return ToolOptions(tools=tools, parallel=parallel)
    if choice == "none":
        return ToolOptions()
    if choice != "required" and not isinstance(choice, dict):
        raise BadField("tool_choice", got=choice, want=_WANT_CHOICE, code=WRONG_TYPE)
    if fields.raw("tools") in (None, []):
        raise RequestError(
            "'tool_choice' is only allowed when 'tools' are specified.", param="tool_choice", code="invalid_value"
        )
    if choice == "required":
        return ToolOptions(tools=tools, required=bool(tools), parallel=parallel)
    return _with_choice(tools, choice, parallel=parallel)


def _with_choice(tools: tuple[dict[str, Any], ...], choice: Mapping[str, Any], *, parallel: bool) -> ToolOptions:
    kind = choice.get("type")
    if kind == "allowed_tools":
        allowed = mapping("tool_choice.allowed_tools", choice.get("allowed_tools"))
        entries = array(
            "tool_choice.allowed_tools.tools", allowed.get("tools"), max_items=len(tools) + 64, what="tools"
        )
        names = {_named(entry) for entry in entries if isinstance(entry, dict)}
        kept = tuple(tool for tool in tools if tool["function"]["name"] in names)
        return ToolOptions(tools=kept, required=allowed.get("mode") == "required" and bool(kept), parallel=parallel)
    name = _named(choice)
    if kind != "function" or name is None:
        raise BadField("tool_choice", got=dict(choice), want=_WANT_CHOICE)
    if all(tool["function"]["name"] != name for tool in tools):
        raise BadField("tool_choice.function.name", got=name, want="the name of one of 'tools'")
    return ToolOptions(tools=tools, required=True, named=name, parallel=False)


def _named(entry: Mapping[str, Any]) -> str | None:
    function = entry.get("function")
    name = function.get("name") if isinstance(function, dict) else entry.get("name")
    return name if isinstance(name, str) else None


def _parse_tools(value: object, limits: RequestLimits) -> tuple[dict[str, Any], ...]:
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
