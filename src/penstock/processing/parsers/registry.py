"""Which format a model's output has, by its chat template, and the syntax of tool calls in it.

A table of families, of which the first match counts: a template writes earlier output in the model's format.  A
template without tool calls gets Hermes' format, which ``TemplateAdapter`` then explains to the model.
For a forced tool call, ``forced_tool_call`` gives the syntax to a grammar; formats whose arguments are not JSON use
Hermes' syntax.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from penstock.grammar.sources import SyntaxParts, ToolCallSyntax
from penstock.processing.parsers.incremental import ReasoningMarks, ToolCallFormat
from penstock.processing.parsers.parser import OutputFormat, ToolCallIds
from penstock.processing.parsers.tool_call_formats import (
    ArrowCalls,
    BareJson,
    GlmCalls,
    JsonCalls,
    MistralCalls,
    NamedCalls,
    PythonicCalls,
    XmlCalls,
)

Sees = Callable[[str], bool]


def _contains(*words: str) -> Sees:
    """Whether all of ``words`` are in the template."""
    return lambda source: all(word in source for word in words)


HERMES = JsonCalls(begins=("<tool_call>",), ends=("</tool_call>",))


def _deepseek(name: str) -> str:
    """A control token as DeepSeek writes them."""
    return f"<\uff5ctool\u2581{name}\uff5c>"


_DEEPSEEK_BEGIN, _DEEPSEEK_END, _DEEPSEEK_SEP = map(_deepseek, ("call\u2581begin", "call\u2581end", "sep"))
_DEEPSEEK_DROPS = (_deepseek("calls\u2581begin"), _deepseek("calls\u2581end"))
_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")

CALLS: tuple[tuple[str, Sees, ToolCallFormat], ...] = (
    ("glm", _contains("<tool_call>", "<arg_key>"), GlmCalls()),
    (
        "qwen-coder",
        _contains("<tool_call>", "<function=", "<parameter="),
        XmlCalls(begin="<tool_call>", end="</tool_call>"),
    ),
    ("seed", _contains("<seed:tool_call>"), XmlCalls(begin="<seed:tool_call>", end="</seed:tool_call>")),
    (
        "kimi",
        _contains("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        NamedCalls(
            begins=("<|tool_call_begin|>",),
            divides=("<|tool_call_argument_begin|>",),
            ends=("<|tool_call_end|>",),
            drops=_SECTION,
            numbered=True,
        ),
    ),
    (
        "deepseek",
        _contains(_DEEPSEEK_BEGIN, "```json"),
        NamedCalls(
            begins=(_DEEPSEEK_BEGIN,),
            kind_first=_DEEPSEEK_SEP,
            divides=("\n```json\n",),
            ends=(_DEEPSEEK_END,),
            drops=_DEEPSEEK_DROPS,
        ),
    ),
    (
        "deepseek-v3.1",
        _contains(_DEEPSEEK_BEGIN),
        NamedCalls(
            begins=(_DEEPSEEK_BEGIN,),
            divides=(_DEEPSEEK_SEP,),
            ends=(_DEEPSEEK_END,),
            drops=_DEEPSEEK_DROPS,
        ),
    ),
    ("mistral-v11", _contains("[TOOL_CALLS]", "[ARGS]"), MistralCalls(named=True)),
    ("mistral", _contains("[TOOL_CALLS]"), MistralCalls()),
    ("nemotron", _contains("<TOOLCALL>"), JsonCalls(begins=("<TOOLCALL>",), ends=("</TOOLCALL>",), listed=True)),
    (
        "apertus",
        _contains("<|tools_prefix|>"),
        JsonCalls(begins=("<|tools_prefix|>",), ends=("<|tools_suffix|>",), named=True),
    ),
    (
        "command-r7b",
        _contains("<|START_ACTION|>"),
        JsonCalls(
            begins=("<|START_ACTION|>",),
            ends=("<|END_ACTION|>",),
            drops=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
            listed=True,
            keys=("tool_name", "parameters"),
        ),
    ),
    (
        "command-r",
        _contains("Action:", "```json"),
        JsonCalls(
            begins=("Action:\n```json", "Action: ```json", "Action:```json"),
            ends=("```",),
            listed=True,
            keys=("tool_name", "parameters"),
        ),
    ),
    (
        "granite",
        _contains("<|tool_call|>"),
        JsonCalls(begins=("<|tool_call|>",), drops=("<|/tool_call|>", "<response>", "</response>"), listed=True),
    ),
    ("hermes", _contains("<tool_call>"), HERMES),
    ("functionary-v3.2", _contains(">>>"), ArrowCalls()),
    (
        "functionary-v3.1",
        _contains("<function="),
        NamedCalls(begins=("<function=",), divides=(">",), ends=("</function>",)),
    ),
    ("firefunction", _contains("functools["), JsonCalls(begins=("functools",), listed=True)),
    ("llama4", _contains("<|header_start|>"), PythonicCalls()),
    ("llama3", _contains("<|start_header_id|>", '"parameters": '), BareJson()),
)

REASONING = (
    ReasoningMarks("<seed:think>", "</seed:think>"),
    ReasoningMarks("<think>", "</think>"),
    ReasoningMarks("[THINK]", "[/THINK]"),
    ReasoningMarks("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningMarks("<|inner_prefix|>", "<|inner_suffix|>"),
)


def detect_format(source: str) -> OutputFormat:
    """The format of answers to prompts that the template ``source`` writes."""
    if "<|channel|>" in source and "<|message|>" in source:
        return OutputFormat(name="harmony", harmony=True)
    reasoning = next((pair for pair in REASONING if pair.end in source), None)
    for name, sees, calls in CALLS:
        if sees(source):
            ids = ToolCallIds.SHORT if isinstance(calls, MistralCalls) else ToolCallIds.LONG
            return OutputFormat(name=name, reasoning=reasoning, calls=calls, ids=ids)
    return OutputFormat(name="generic", reasoning=reasoning, calls=HERMES)


ControlToken = Callable[[str], int | None]
"""The id of a mark that is a control token, None for one that is written as text."""


class ForcedToolCall(msgspec.Struct, frozen=True):
    """An answer that must be calls."""

    format: OutputFormat  # to read it in
    shape: ToolCallSyntax
    several: bool  # can it have more than one?


def forced_tool_call(form: OutputFormat, control: ControlToken) -> ForcedToolCall:
    """For answers in ``form``."""

    def parts(*words: str) -> SyntaxParts:
        found = ((word, control(word)) for word in words if word)
        return tuple(word if token is None else token for word, token in found)

    if form.harmony:
        before = parts("<|channel|>", "commentary to=functions.")
        after = parts(" ", "<|constrain|>", "json", "<|message|>")
        return ForcedToolCall(form, ToolCallSyntax(before_name=before, after_name=after), several=False)
    match form.calls:
        case JsonCalls(named=True) as calls:
            shape = _list(parts, calls, '{"', '": ')
        case JsonCalls() as calls:
            name, arguments = calls.keys
            head, middle = f'{{"{name}": "', f'", "{arguments}": '
            shape = _list(parts, calls, head, middle) if calls.listed else _objects(parts, calls, head, middle)
        case BareJson():
            shape = ToolCallSyntax(before_name=('{"name": "',), after_name=('", "parameters": ',), after_call=("}",))
            return ForcedToolCall(form, shape, several=False)
        case ArrowCalls():
            return ForcedToolCall(form, ToolCallSyntax(before_name=(), after_name=("\n",)), several=False)
        case MistralCalls(named=True):
            shape = ToolCallSyntax(before_name=parts("[TOOL_CALLS]"), after_name=parts("[ARGS]"))
        case MistralCalls():
            as_json = JsonCalls(begins=("[TOOL_CALLS]",), listed=True)
            shape = _list(parts, as_json, '{"name": "', '", "arguments": ')
        case NamedCalls() as calls:
            return ForcedToolCall(form, _named(parts, calls), several=not calls.numbered)
        case _:
            shape = _objects(parts, HERMES, '{"name": "', '", "arguments": ')
            return ForcedToolCall(msgspec.structs.replace(form, calls=HERMES), shape, several=True)
    return ForcedToolCall(form, shape, several=True)


MakeParts = Callable[..., SyntaxParts]


def _objects(parts: MakeParts, calls: JsonCalls, head: str, middle: str) -> ToolCallSyntax:
    """A mark before each."""
    return ToolCallSyntax(
        before_name=parts(calls.begins[0], f"\n{head}"),
        after_name=(middle,),
        after_call=parts("}\n", *calls.ends[:1]),
        between=("\n",),
    )


def _list(parts: MakeParts, calls: JsonCalls, head: str, middle: str) -> ToolCallSyntax:
    """One mark before all."""
    return ToolCallSyntax(
        begin=parts(calls.begins[0], "["),
        before_name=(head,),
        after_name=(middle,),
        after_call=("}",),
        between=(", ",),
        end=parts("]", *calls.ends[:1]),
    )


def _named(parts: MakeParts, calls: NamedCalls) -> ToolCallSyntax:
    begin, end = (calls.drops[0], calls.drops[1]) if calls.drops else ("", "")
    before = ("function", calls.kind_first) if calls.kind_first else ("functions." if calls.numbered else "",)
    return ToolCallSyntax(
        begin=parts(begin),
        before_name=parts(calls.begins[0], *before),
        after_name=parts(":0" if calls.numbered else "", calls.divides[0]),
        after_call=parts("\n```" if calls.kind_first else "", calls.ends[0]),
        end=parts(end),
    )
