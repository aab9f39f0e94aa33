"""Grammars of tool calls: for ``tool_choice`` that demands one, whatever way a model has of writing it.

How a family writes its calls is data (``CallShape``), given by who knows its template.  What is demanded is that the
whole answer is calls of the given tools with arguments that satisfy their schemas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.grammar.sources import json_rule, text_rule, token_rule
from penstock.types import Grammar, GrammarKind

Parts = tuple[str | int, ...]
"""Text, and control tokens by their id: those are never text."""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function as a request describes it."""

    name: str
    parameters: Mapping[str, Any] = {}  # JSON schema of its arguments, an object


class CallShape(msgspec.Struct, frozen=True, kw_only=True):
    """How a family writes calls::

    begin  before_name NAME after_name ARGUMENTS after_call  between  before_name NAME ...  end
    """

    begin: Parts = ()
    before_name: Parts
    after_name: Parts
    after_call: Parts = ()
    between: Parts = ()  # two calls; only when several are allowed
    end: Parts = ()
    compact: bool = False  # arguments without white space


def tool_call_grammar(tools: Sequence[Tool], shape: CallShape, *, several: bool, closed: bool = False) -> Grammar:
    """Calls of these tools and nothing else; one, or with ``several`` one and more.

    ``closed``: objects of their arguments are (``closing``).

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


def _rule(parts: Parts) -> str:
    return " ".join(token_rule(part) if isinstance(part, int) else text_rule(part) for part in parts if part != "")


def _arguments(tool: Tool, *, compact: bool, closed: bool) -> str:
    """Arguments are an object whatever their schema says."""
    try:
        return json_rule({"type": "object", **tool.parameters}, compact=compact, closed=closed)
    except ValueError as error:
        raise ValueError(f"tool '{tool.name}': {error}") from None
