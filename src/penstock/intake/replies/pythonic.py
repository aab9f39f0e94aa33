"""Tool calls written as Python: ``[name(a=1, b="x"), other()]``.

Read with Python's own grammar and turned into JSON; nothing is run.  A call is given out when it is complete.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection
from typing import Any

from penstock.intake.replies.reader import CallBegun, CallMore, NotACallError, Reader, Steps

_MAX_CALL_CHARS = 1 << 18
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,255}")
_CONSTANTS = {"true": True, "false": False, "null": None}


def read_list(reader: Reader, known: Collection[str]) -> Steps[None]:
    """Calls of ``known`` tools in brackets.  Raises NotACallError."""
    yield from reader.expect("[")
    while True:
        yield from reader.skip_space()
        name = yield from _name(reader)
        if name not in known:
            raise NotACallError
        yield from _call(reader, name)
        if (yield from reader.skip_space()) != ",":
            yield from reader.take("]")
            return
        yield from reader.take(",")


def read_dotted_call(reader: Reader) -> Steps[None]:
    """``name.call(...)``, as Llama 3 calls the tools that it was trained on.  Raises NotACallError."""
    name = yield from _name(reader)
    if not name.endswith(".call"):
        raise NotACallError
    yield from _call(reader, name.removesuffix(".call"))


def _name(reader: Reader) -> Steps[str]:
    size = 1
    while _WORD.fullmatch(text := (yield from reader.peek(size))) and len(text) == size:
        size += 1
    name = text[: size - 1]
    yield from reader.expect(name or "?")
    return name


def _call(reader: Reader, name: str) -> Steps[None]:
    source = yield from _parenthesized(reader)
    try:
        tree = ast.parse(f"f{source}", mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args:
            raise NotACallError
        arguments = {word.arg: _value(word.value) for word in tree.keywords if word.arg is not None}
        text = json.dumps(arguments, ensure_ascii=False)
    except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError) as error:
        raise NotACallError from error
    yield CallBegun(name)
    yield CallMore(text)


def _parenthesized(reader: Reader) -> Steps[str]:
    """From ``(`` to the ``)`` that closes it."""
    text, depth, quote = "", 0, ""
    while True:
        char = yield from reader.peek()
        if not char or len(text) > _MAX_CALL_CHARS or (not text and char != "("):
            raise NotACallError
        yield from reader.take(char)
        text += char
        if quote:
            if char == "\\":
                after = yield from reader.peek()
                yield from reader.take(after)
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
