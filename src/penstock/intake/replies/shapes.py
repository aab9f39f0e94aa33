"""The ways of writing calls as data for grammars: what an answer looks like that must be calls.

Formats whose arguments are not JSON, or whose calls have no shape of their own, are left out: an answer to them is
demanded, and read, in Hermes' words.  Knows nothing about schemas.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from penstock.grammar.tools import CallShape, Parts
from penstock.intake.replies.detect import HERMES
from penstock.intake.replies.formats import ArrowCalls, BareJson, JsonCalls, MistralCalls, NamedCalls
from penstock.intake.replies.parser import ReplyFormat

ControlToken = Callable[[str], int | None]
"""The id of a mark that is a control token, None for one that is written as text."""


class Demand(msgspec.Struct, frozen=True):
    """An answer that must be calls."""

    format: ReplyFormat  # to read it in
    shape: CallShape
    several: bool  # can it have more than one?


def demand(form: ReplyFormat, control: ControlToken) -> Demand:
    """For answers in ``form``."""

    def parts(*words: str) -> Parts:
        found = ((word, control(word)) for word in words if word)
        return tuple(word if token is None else token for word, token in found)

    if form.harmony:
        before = parts("<|channel|>", "commentary to=functions.")
        after = parts(" ", "<|constrain|>", "json", "<|message|>")
        return Demand(form, CallShape(before_name=before, after_name=after), several=False)
    match form.calls:
        case JsonCalls(named=True) as calls:
            shape = _list(parts, calls, '{"', '": ')
        case JsonCalls() as calls:
            name, arguments = calls.keys
            head, middle = f'{{"{name}": "', f'", "{arguments}": '
            shape = _list(parts, calls, head, middle) if calls.listed else _objects(parts, calls, head, middle)
        case BareJson():
            shape = CallShape(before_name=('{"name": "',), after_name=('", "parameters": ',), after_call=("}",))
            return Demand(form, shape, several=False)
        case ArrowCalls():
            return Demand(form, CallShape(before_name=(), after_name=("\n",)), several=False)
        case MistralCalls(named=True):
            shape = CallShape(before_name=parts("[TOOL_CALLS]"), after_name=parts("[ARGS]"))
        case MistralCalls():
            as_json = JsonCalls(begins=("[TOOL_CALLS]",), listed=True)
            shape = _list(parts, as_json, '{"name": "', '", "arguments": ')
        case NamedCalls() as calls:
            return Demand(form, _named(parts, calls), several=not calls.numbered)
        case _:
            shape = _objects(parts, HERMES, '{"name": "', '", "arguments": ')
            return Demand(msgspec.structs.replace(form, calls=HERMES), shape, several=True)
    return Demand(form, shape, several=True)


MakeParts = Callable[..., Parts]


def _objects(parts: MakeParts, calls: JsonCalls, head: str, middle: str) -> CallShape:
    """A mark before each."""
    return CallShape(
        before_name=parts(calls.begins[0], f"\n{head}"),
        after_name=(middle,),
        after_call=parts("}\n", *calls.ends[:1]),
        between=("\n",),
    )


def _list(parts: MakeParts, calls: JsonCalls, head: str, middle: str) -> CallShape:
    """One mark before all."""
    return CallShape(
        begin=parts(calls.begins[0], "["),
        before_name=(head,),
        after_name=(middle,),
        after_call=("}",),
        between=(", ",),
        end=parts("]", *calls.ends[:1]),
    )


def _named(parts: MakeParts, calls: NamedCalls) -> CallShape:
    begin, end = (calls.drops[0], calls.drops[1]) if calls.drops else ("", "")
    before = ("function", calls.kind_first) if calls.kind_first else ("functions." if calls.numbered else "",)
    return CallShape(
        begin=parts(begin),
        before_name=parts(calls.begins[0], *before),
        after_name=parts(":0" if calls.numbered else "", calls.divides[0]),
        after_call=parts("\n```" if calls.kind_first else "", calls.ends[0]),
        end=parts(end),
    )
