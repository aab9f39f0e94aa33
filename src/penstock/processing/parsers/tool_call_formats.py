"""How the families write tool calls: one class per format.

JSON between marks, a name and JSON, Python calls (``[name(a=1)]``, parsed by Python's own grammar and never executed),
arguments in tags (GLM-4.5, Qwen3-Coder, Seed-OSS).  Arguments in JSON are passed on as the model writes them; others
when they are complete, typed by the parameter's schema.  ``NotACallError`` is raised for what is no call, or breaks
off.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.processing.parsers.incremental import (
    IncrementalReader,
    MarkSet,
    NotACallError,
    ParserEvent,
    ParserSteps,
    ToolCallArguments,
    ToolCallStart,
    ToolSchemas,
)

_MAX_CALL_CHARS = 1 << 18
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,255}")
_CONSTANTS = {"true": True, "false": False, "null": None}


def read_list(reader: IncrementalReader, known: Collection[str]) -> ParserSteps[None]:
    """Calls of ``known`` tools in brackets.  Raises NotACallError."""
    yield from reader.expect("[")
    while True:
        yield from reader.skip_space()
        name = yield from _name(reader)
        if name not in known:
            raise NotACallError
        yield from _call(reader, name)
        if (yield from reader.skip_space()) != ",":
            yield from reader.accept("]")
            return
        yield from reader.accept(",")


def read_dotted_call(reader: IncrementalReader) -> ParserSteps[None]:
    """``name.call(...)``, as Llama 3 calls the tools that it was trained on.  Raises NotACallError."""
    name = yield from _name(reader)
    if not name.endswith(".call"):
        raise NotACallError
    yield from _call(reader, name.removesuffix(".call"))


def _name(reader: IncrementalReader) -> ParserSteps[str]:
    size = 1
    while _WORD.fullmatch(text := (yield from reader.peek(size))) and len(text) == size:
        size += 1
    name = text[: size - 1]
    yield from reader.expect(name or "?")
    return name


def _call(reader: IncrementalReader, name: str) -> ParserSteps[None]:
    source = yield from _parenthesized(reader)
    try:
        tree = ast.parse(f"f{source}", mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args:
            raise NotACallError
        arguments = {word.arg: _value(word.value) for word in tree.keywords if word.arg is not None}
        text = json.dumps(arguments, ensure_ascii=False)
    except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError) as error:
        raise NotACallError from error
    yield ToolCallStart(name)
    yield ToolCallArguments(text)


def _parenthesized(reader: IncrementalReader) -> ParserSteps[str]:
    """From ``(`` to the ``)`` that closes it."""
    text, depth, quote = "", 0, ""
    while True:
        char = yield from reader.peek()
        if not char or len(text) > _MAX_CALL_CHARS or (not text and char != "("):
            raise NotACallError
        yield from reader.accept(char)
        text += char
        if quote:
            if char == "\\":
                after = yield from reader.peek()
                yield from reader.accept(after)
                text += after
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth == 0:
                return text


def _value(node: ast.expr) -> Any:
    """A literal, JSON's words included.  Raises NotACallError for anything that would have to be computed."""
    match node:
        case ast.Constant(value=str() | int() | float() | bool() | None):
            return node.value
        case ast.Name(id=word) if word in _CONSTANTS:
            return _CONSTANTS[word]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {str(_value(key)): _value(value) for key, value in zip(keys, values, strict=True) if key is not None}
    raise NotACallError


_NAMES = frozenset({"name", "tool_name"})
_ARGUMENTS = frozenset({"arguments", "parameters"})


def argument_text(text: str) -> Iterable[ParserEvent]:
    """A part of the arguments."""
    return (ToolCallArguments(text),)


def read_arguments(reader: IncrementalReader) -> ParserSteps[None]:
    """A JSON value as the arguments of the call that began.  Some models write JSON in a string."""
    first = yield from reader.peek()
    if first == '"':
        yield ToolCallArguments((yield from reader.json_string()))
    elif first == "n":
        yield ToolCallArguments("{}")
        yield from reader.json_raw()
    else:
        yield from reader.copy_json(argument_text)


def read_object(reader: IncrementalReader, known: Collection[str] | None = None) -> ParserSteps[None]:
    """``{"name": ..., "arguments": ...}``, keys in any order; other keys are passed over.

    NotACallError also for a name that is not ``known``.
    """
    yield from reader.expect("{")
    begun, early, done = False, None, False
    while (char := (yield from reader.skip_space())) not in ("}", ""):
        if char == ",":
            yield from reader.expect(",")
            continue
        key = yield from reader.json_string()
        yield from reader.skip_space()
        yield from reader.expect(":")
        value = yield from reader.skip_space()
        if key == "function" and value == "{":
            yield from read_object(reader, known)
            begun = done = True
        elif key in _NAMES and not begun:
            name = yield from reader.json_string()
            if not name or (known is not None and name not in known):
                raise NotACallError
            begun = True
            yield ToolCallStart(name)
            if early is not None:
                yield ToolCallArguments(early)
                done = True
        elif key in _ARGUMENTS and begun and not done:
            yield from read_arguments(reader)
            done = True
        elif key in _ARGUMENTS and early is None:
            early = yield from reader.json_raw()
        else:
            yield from reader.json_raw()
    if not begun:
        raise NotACallError
    if char == "}":
        if not done:
            yield ToolCallArguments("{}")
        yield from reader.accept("}")


def read_objects(reader: IncrementalReader, known: Collection[str] | None = None) -> ParserSteps[None]:
    """One such object, or a list of them."""
    if (yield from reader.skip_space()) != "[":
        yield from read_object(reader, known)
        return
    yield from reader.expect("[")
    if (yield from reader.skip_space()) == "]":
        raise NotACallError
    yield from read_object(reader, known)
    yield from _rest(reader, read_object)


def read_named_objects(reader: IncrementalReader) -> ParserSteps[None]:
    """A list of ``{"NAME": {...}}``."""
    yield from reader.skip_space()
    yield from reader.expect("[")
    yield from reader.skip_space()
    yield from _named_object(reader)
    yield from _rest(reader, _named_object)


def _named_object(reader: IncrementalReader) -> ParserSteps[None]:
    yield from reader.expect("{")
    yield from reader.skip_space()
    name = yield from reader.json_string()
    yield from reader.skip_space()
    yield from reader.expect(":")
    yield from reader.skip_space()
    yield ToolCallStart(name)
    yield from read_arguments(reader)
    yield from reader.skip_space()
    yield from reader.accept("}")


def _rest(reader: IncrementalReader, read: Callable[[IncrementalReader], ParserSteps[None]]) -> ParserSteps[None]:
    """The rest of a list."""
    while (char := (yield from reader.skip_space())) == ",":
        yield from reader.accept(",")
        yield from reader.skip_space()
        yield from read(reader)
    if char == "]":
        yield from reader.accept("]")


_NAME = re.compile(r"[^\s\"'{}\[\]<>()]{1,256}")


def checked_name(text: str) -> str:
    """A tool's name.  Raises NotACallError for what cannot be one."""
    name = text.strip()
    if not _NAME.fullmatch(name):
        raise NotACallError
    return name


class JsonCalls(msgspec.Struct, frozen=True, kw_only=True):
    """A mark and JSON: one object, or a list (Hermes, Qwen, Granite, Phi-4, Nemotron, Command R, Firefunction)."""

    begins: tuple[str, ...]
    ends: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    named: bool = False  # the objects are {"NAME": {...}} (Apertus)
    listed: bool = False  # several calls are one list behind one mark
    keys: tuple[str, str] = ("name", "arguments")
    alone: bool = False

    def inner_marks(self) -> tuple[str, ...]:
        return self.ends

    def parse(self, reader: IncrementalReader, mark: str, tools: ToolSchemas) -> ParserSteps[None]:
        if self.named:
            yield from read_named_objects(reader)
        else:
            yield from read_objects(reader)
        yield from _pass_end(reader, self.ends)

    def written(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Calls, each with ``name`` and ``arguments``, as a model writes them."""
        name, arguments = self.keys
        named = [{name: call["name"], arguments: call["arguments"]} for call in calls]
        values: Sequence[object] = [named] if self.listed else named
        line = "" if self.listed else "\n"
        end = f"{line}{self.ends[0]}" if self.ends else ""
        return "\n".join(f"{self.begins[0]}{line}{json.dumps(value, ensure_ascii=False)}{end}" for value in values)


class BareJson(msgspec.Struct, frozen=True, kw_only=True):
    """A message that is JSON, or begins with a mark and is (Llama 3).

    Without a mark only the name of a tool of the request makes it a call: other JSON is an answer.  Several calls are
    divided by semicolons or new lines.
    """

    begins: tuple[str, ...] = ("<|python_tag|>",)
    drops: tuple[str, ...] = ()
    alone: bool = True

    def inner_marks(self) -> tuple[str, ...]:
        return ()

    def parse(self, reader: IncrementalReader, mark: str, tools: ToolSchemas) -> ParserSteps[None]:
        first = yield from reader.skip_space()
        if mark and first not in ("{", "["):
            yield from read_dotted_call(reader)
            return
        known = None if mark else tools.parameters
        yield from read_objects(reader, known)
        while (char := (yield from reader.skip_space())) in {";", ",", "{"}:
            if char == "{":
                yield from read_object(reader, known)
            else:
                yield from reader.accept(char)


class NamedCalls(msgspec.Struct, frozen=True, kw_only=True):
    """A mark, a name, a mark, arguments, a mark (Kimi K2, DeepSeek, Functionary 3.1)."""

    begins: tuple[str, ...]
    divides: tuple[str, ...]  # the first of them ends the name
    ends: tuple[str, ...]
    drops: tuple[str, ...] = ()
    kind_first: str | None = None  # what stands between the kind of tool and its name (DeepSeek V3 and R1)
    numbered: bool = False  # the name is "functions.NAME:0", and that is the call's id (Kimi K2)
    alone: bool = False

    def inner_marks(self) -> tuple[str, ...]:
        return (*self.divides, *self.ends, *([self.kind_first] if self.kind_first else []))

    def parse(self, reader: IncrementalReader, mark: str, tools: ToolSchemas) -> ParserSteps[None]:
        if self.kind_first is not None:
            yield from reader.read_until(MarkSet((self.kind_first, *self.ends)))
        text, divided = yield from reader.read_until(self._stops())
        if divided not in self.divides:
            raise NotACallError
        if self.numbered:
            identity = text.strip()
            yield ToolCallStart(
                checked_name(identity.removeprefix("functions.").rpartition(":")[0] or identity), identity
            )
        else:
            yield ToolCallStart(checked_name(text))
        if (yield from reader.skip_space()) in ("{", '"'):
            yield from read_arguments(reader)
            yield from reader.read_until(MarkSet(self.ends))
        else:
            yield from reader.copy_until(MarkSet(self.ends), argument_text)

    def _stops(self) -> MarkSet:
        """What ends a name, or shows that it is none."""
        return MarkSet((*self.divides, *(end for end in self.ends if not any(word in end for word in self.divides))))


class MistralCalls(msgspec.Struct, frozen=True, kw_only=True):
    """``[TOOL_CALLS]`` and a list of objects, or since v11 a name, perhaps an id, and the arguments, for each call."""

    begins: tuple[str, ...] = ("[TOOL_CALLS]",)
    drops: tuple[str, ...] = ()
    named: bool = False  # as since v11; both are read
    alone: bool = False

    def inner_marks(self) -> tuple[str, ...]:
        return ("[ARGS]", "[CALL_ID]")

    def parse(self, reader: IncrementalReader, mark: str, tools: ToolSchemas) -> ParserSteps[None]:
        if (yield from reader.skip_space()) in ("[", "{"):
            yield from read_objects(reader)
            return
        name, divided = yield from reader.read_until(MarkSet(("[ARGS]", "[CALL_ID]", "[TOOL_CALLS]")))
        identity = None
        if divided == "[CALL_ID]":
            identity, divided = yield from reader.read_until(MarkSet(("[ARGS]", "[TOOL_CALLS]")))
        if divided != "[ARGS]":
            raise NotACallError
        usable = identity is not None and len(identity) == 9 and identity.isalnum()
        yield ToolCallStart(checked_name(name), identity if usable else None)
        yield from reader.skip_space()
        yield from read_arguments(reader)


class PythonicCalls(msgspec.Struct, frozen=True, kw_only=True):
    """A message that is a list of Python calls of tools of the request (Llama 4)."""

    begins: tuple[str, ...] = ("<|python_start|>",)
    drops: tuple[str, ...] = ("<|python_end|>",)
    alone: bool = True

    def inner_marks(self) -> tuple[str, ...]:
        return ()

    def parse(self, reader: IncrementalReader, mark: str, tools: ToolSchemas) -> ParserSteps[None]:
        yield from reader.skip_space()
        yield from read_list(reader, tools.parameters)


class ArrowCalls(msgspec.Struct, frozen=True, kw_only=True):
    """``>>>NAME`` and a new line before everything; what follows ``>>>all`` is content (Functionary 3.2)."""

    begins: tuple[str, ...] = (">>>",)
    drops: tuple[str, ...] = ()
    alone: bool = True  # the prompt ends with the first ">>>"

    def inner_marks(self) -> tuple[str, ...]:
        return ()

    def parse(self, reader: IncrementalReader, mark: str, tools: ToolSchemas) -> ParserSteps[None]:
        head, line = yield from reader.read_until(MarkSet(("\n",)))
        if head == "all" and line:
            return
        if line is None or (not mark and head not in tools.parameters):
            raise NotACallError
        yield ToolCallStart(checked_name(head))
        yield from reader.copy_json(argument_text)


def _pass_end(reader: IncrementalReader, ends: Iterable[str]) -> ParserSteps[None]:
    yield from reader.skip_space()
    for end in ends:
        if (yield from reader.accept(end)):
            return


class GlmCalls(msgspec.Struct, frozen=True, kw_only=True):
    """A name, then ``<arg_key>`` and ``<arg_value>`` in turn."""

    begins: tuple[str, ...] = ("<tool_call>",)
    drops: tuple[str, ...] = ()
    alone: bool = False

    def inner_marks(self) -> tuple[str, ...]:
        return ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def parse(self, reader: IncrementalReader, mark: str, tools: ToolSchemas) -> ParserSteps[None]:
        head, divided = yield from reader.read_until(MarkSet(("<arg_key>", "</tool_call>")))
        if divided is None:
            raise NotACallError
        name = checked_name(head)
        yield ToolCallStart(name)
        written = _Arguments(name, tools)
        while divided == "<arg_key>":
            key, closed = yield from reader.read_until(MarkSet(("</arg_key>", "</tool_call>")))
            if closed == "</arg_key>":
                _, closed = yield from reader.read_until(MarkSet(("<arg_value>", "</tool_call>")))
            if closed != "<arg_value>":
                break
            value, closed = yield from reader.read_until(MarkSet(("</arg_value>",)))
            if closed is None:
                return
            yield ToolCallArguments(written.one(key.strip(), value))
            _, divided = yield from reader.read_until(MarkSet(("<arg_key>", "</tool_call>")))
        yield ToolCallArguments(written.end())


class XmlCalls(msgspec.Struct, frozen=True, kw_only=True):
    """``<function=NAME>`` with ``<parameter=KEY>VALUE</parameter>`` in it, within a mark of the family's own."""

    begin: str
    end: str
    drops: tuple[str, ...] = ()
    alone: bool = False

    @property
    def begins(self) -> tuple[str, ...]:
        return (self.begin,)

    def inner_marks(self) -> tuple[str, ...]:
        return (self.end,)

    def parse(self, reader: IncrementalReader, mark: str, tools: ToolSchemas) -> ParserSteps[None]:
        yield from reader.skip_space()
        yield from reader.expect("<function=")
        head, closed = yield from reader.read_until(MarkSet((">",)))
        if closed is None:
            raise NotACallError
        name = checked_name(head)
        yield ToolCallStart(name)
        written = _Arguments(name, tools)
        marks = MarkSet(("<parameter=", "</function>", self.end))
        _, found = yield from reader.read_until(marks)
        while found == "<parameter=":
            key, _ = yield from reader.read_until(MarkSet((">",)))
            value, closed = yield from reader.read_until(MarkSet(("</parameter>", "</function>")))
            if closed is None:
                return
            yield ToolCallArguments(written.one(key.strip(), value.removeprefix("\n").removesuffix("\n")))
            found = closed
            if closed == "</parameter>":
                _, found = yield from reader.read_until(marks)
        if found is not None:
            yield ToolCallArguments(written.end())
        if found == "</function>":
            yield from reader.skip_space()
            yield from reader.accept(self.end)


class _Arguments:
    """A JSON object that grows by one argument at a time."""

    def __init__(self, tool: str, tools: ToolSchemas) -> None:
        self._tool, self._tools = tool, tools
        self._before = "{"

    def one(self, key: str, text: str) -> str:
        """The next argument."""
        value = _typed(text, self._tools.kind_of(self._tool, key))
        written = f"{self._before}{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
        self._before = ", "
        return written

    def end(self) -> str:
        """What closes it."""
        return "{}" if self._before == "{" else "}"


def _typed(text: str, kind: str | None) -> Any:
    """Text for a string; for anything else JSON, or Python's words for it, and text where it is neither."""
    if kind == "string":
        return text
    word = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
    try:
        return json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text


def _refuse(word: str) -> None:
    raise ValueError(word)
