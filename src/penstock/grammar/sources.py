"""A grammar in its own language to a Lark grammar with JSON schemas in it, which llguidance reads.

Options that would weaken a grammar are set here and cannot be set from within it.  ``tool_call_grammar`` is for a
forced tool call: the whole output is calls of the given tools, in the model's syntax (``ToolCallSyntax``), with
arguments that satisfy their schemas.  Knows nothing about tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from penstock.grammar.json_schema import OPTIONS, close_objects, rewrite_schema
from penstock.types import Grammar, GrammarKind

WHITE_SPACE = r"( |\r?\n[ \t]{0,32})?"
"""Between the parts of JSON: a blank, or a line end and an indent.  Bounded: some models would write it for ever."""

OPTIONS_MARK = "%llguidance"

_OPTIONS = OPTIONS_MARK + ' {"no_forcing": true}'
"""Where only one text can follow, any spelling of it in tokens may be drawn: the model's own is the likeliest."""

_ESCAPES = 'bfnrt"\\'
"""After a backslash in a JSON string.  A character must have one spelling only: else a key that a schema names could
be written in another way, and its value would be free."""

_REGEX_SIGNS = frozenset("\\.+*?()|[]{}^$#&-~/")


def lark_source(grammar: Grammar) -> str:
    """As a Lark grammar.  Raises ValueError with the reason for what can be seen without compiling."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            rules = f"start: {json_rule(json.loads(grammar.text), compact=grammar.compact, closed=grammar.closed)}"
        case GrammarKind.REGEX:
            rules = _regex_rules(grammar.text)
        case GrammarKind.LARK:
            rules = _checked(grammar.text)
        case GrammarKind.EBNF:
            rules = _checked(from_ebnf(grammar.text))
        case GrammarKind.CHOICE:
            rules = _regex_rules("|".join(map(regex_literal, json.loads(grammar.text))))
    return LLMatcher.grammar_from_lark(f"{rules}\n{_OPTIONS}\n")


def _checked(rules: str) -> str:
    if OPTIONS_MARK in rules:
        raise ValueError(f"'{OPTIONS_MARK}' is not accepted: options of the grammar library are this server's")
    return rules


def from_ebnf(text: str) -> str:
    """Lark rules of an EBNF in the dialect of llama.cpp (GBNF), whose first rule is ``root``.  Raises ValueError."""
    try:
        # The library marks what it has made with options, which are set by ``lark_source``.
        return gbnf_to_lark(text).removeprefix(f"{OPTIONS_MARK} {{}}")
    except (RecursionError, MemoryError):
        raise
    except IndexError:
        raise ValueError("it ends in the middle of a text") from None
    except Exception as error:  # noqa: BLE001 - what the library raises for rules without a definition
        raise ValueError(str(error) or type(error).__name__) from None


def json_rule(schema: object, *, compact: bool = False, closed: bool = False) -> str:
    """What stands for JSON of this schema in a Lark rule, its objects ``closed`` or not (``close_objects``).

    Raises ValueError for what it cannot hold.
    """
    rewritten = rewrite_schema(close_objects(schema) if closed else schema)
    options: Any = {
        "whitespace_flexible": not compact,
        "whitespace_pattern": None if compact else WHITE_SPACE,
        "item_separator": ",",
        "key_separator": ":",
        "coerce_one_of": False,
        "lenient": False,
        "json_allowed_escapes": _ESCAPES,
    }
    whole = rewritten if isinstance(rewritten, dict) else {"allOf": [rewritten]}
    return f"%json {json.dumps({**whole, OPTIONS: options})}"


def text_rule(text: str) -> str:
    """What stands for this very text in a Lark rule."""
    return json.dumps(text)


def token_rule(token: int) -> str:
    """What stands for this token in a Lark rule, be it a control token."""
    return f"<[{token}]>"


def regex_literal(text: str) -> str:
    """A regular expression that matches ``text`` and nothing else."""
    return "".join(f"\\{char}" if char in _REGEX_SIGNS else char for char in text)


def _regex_rules(regex: str) -> str:
    """Lark writes regular expressions between slashes; the library knows how to escape them."""
    rules: str = json.loads(LLMatcher.grammar_from_regex(regex))["grammars"][0]["lark_grammar"]
    return rules


SyntaxParts = tuple[str | int, ...]
"""Text, and control tokens by their id: those are never text."""


class ToolFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function as a request describes it."""

    name: str
    parameters: Mapping[str, Any] = {}  # JSON schema of its arguments, an object


class ToolCallSyntax(msgspec.Struct, frozen=True, kw_only=True):
    """How a family writes calls::

    begin  before_name NAME after_name ARGUMENTS after_call  between  before_name NAME ...  end
    """

    begin: SyntaxParts = ()
    before_name: SyntaxParts
    after_name: SyntaxParts
    after_call: SyntaxParts = ()
    between: SyntaxParts = ()  # two calls; only when several are allowed
    end: SyntaxParts = ()
    compact: bool = False  # arguments without white space


def tool_call_grammar(
    tools: Sequence[ToolFunction], shape: ToolCallSyntax, *, several: bool, closed: bool = False
) -> Grammar:
    """Calls of these tools and nothing else; one, or with ``several`` one and more.

    ``closed``: the objects of their arguments are (``close_objects``).

    Raises ValueError, with the tool's name, for a schema that cannot be followed to the letter.
    """
    if not tools:
        raise ValueError("no tool can be called")
    begin, between, end = (_rule(parts) for parts in (shape.begin, shape.between, shape.end))
    more = f" ({between} call)*" if several and between else " call*" if several else ""
    rules = [f"start: {begin} call{more} {end}", f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    for index, tool in enumerate(tools):
        head, middle, tail = (_rule(parts) for parts in (shape.before_name, shape.after_name, shape.after_call))
        name = text_rule(tool.name)
        rules.append(
            f"call_{index}: {head} {name} {middle} {_arguments(tool, compact=shape.compact, closed=closed)} {tail}"
        )
    return Grammar(kind=GrammarKind.LARK, text="\n".join(rules), of_tools=True)


def _rule(parts: SyntaxParts) -> str:
    return " ".join(token_rule(part) if isinstance(part, int) else text_rule(part) for part in parts if part != "")


def _arguments(tool: ToolFunction, *, compact: bool, closed: bool) -> str:
    """Arguments are an object whatever their schema says."""
    try:
        return json_rule({"type": "object", **tool.parameters}, compact=compact, closed=closed)
    except ValueError as error:
        raise ValueError(f"tool '{tool.name}': {error}") from None
