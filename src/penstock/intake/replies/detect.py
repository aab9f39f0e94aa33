"""Which format a model answers in, seen from its chat template: the template writes earlier answers down in it.

A table of families, the first that fits counts.  A template without a format of its own gets Hermes', which the intake
then explains to the model (``intake.adapting``).  Knows nothing about how formats are read.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.intake.replies.formats import (
    ArrowCalls,
    BareJson,
    JsonCalls,
    MistralCalls,
    NamedCalls,
    PythonicCalls,
)
from penstock.intake.replies.parser import Ids, ReplyFormat
from penstock.intake.replies.reply import CallFormat, Pair
from penstock.intake.replies.tagged import GlmCalls, XmlCalls

Sees = Callable[[str], bool]


def has(*words: str) -> Sees:
    """Are all of ``words`` in the template?"""
    return lambda source: all(word in source for word in words)


HERMES = JsonCalls(begins=("<tool_call>",), ends=("</tool_call>",))


def _deepseek(name: str) -> str:
    """A control token as DeepSeek writes them."""
    return f"<\uff5ctool\u2581{name}\uff5c>"


_DEEPSEEK_BEGIN, _DEEPSEEK_END, _DEEPSEEK_SEP = map(_deepseek, ("call\u2581begin", "call\u2581end", "sep"))
_DEEPSEEK_DROPS = (_deepseek("calls\u2581begin"), _deepseek("calls\u2581end"))
_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")

CALLS: tuple[tuple[str, Sees, CallFormat], ...] = (
    ("glm", has("<tool_call>", "<arg_key>"), GlmCalls()),
    ("qwen-coder", has("<tool_call>", "<function=", "<parameter="), XmlCalls(begin="<tool_call>", end="</tool_call>")),
    ("seed", has("<seed:tool_call>"), XmlCalls(begin="<seed:tool_call>", end="</seed:tool_call>")),
    (
        "kimi",
        has("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
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
        has(_DEEPSEEK_BEGIN, "```json"),
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
        has(_DEEPSEEK_BEGIN),
        NamedCalls(
            begins=(_DEEPSEEK_BEGIN,),
            divides=(_DEEPSEEK_SEP,),
            ends=(_DEEPSEEK_END,),
            drops=_DEEPSEEK_DROPS,
        ),
    ),
    ("mistral-v11", has("[TOOL_CALLS]", "[ARGS]"), MistralCalls(named=True)),
    ("mistral", has("[TOOL_CALLS]"), MistralCalls()),
    ("nemotron", has("<TOOLCALL>"), JsonCalls(begins=("<TOOLCALL>",), ends=("</TOOLCALL>",), listed=True)),
    (
        "apertus",
        has("<|tools_prefix|>"),
        JsonCalls(begins=("<|tools_prefix|>",), ends=("<|tools_suffix|>",), named=True),
    ),
    (
        "command-r7b",
        has("<|START_ACTION|>"),
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
        has("Action:", "```json"),
        JsonCalls(
            begins=("Action:\n```json", "Action: ```json", "Action:```json"),
            ends=("```",),
            listed=True,
            keys=("tool_name", "parameters"),
        ),
    ),
    (
        "granite",
        has("<|tool_call|>"),
        JsonCalls(begins=("<|tool_call|>",), drops=("<|/tool_call|>", "<response>", "</response>"), listed=True),
    ),
    ("hermes", has("<tool_call>"), HERMES),
    ("functionary-v3.2", has(">>>"), ArrowCalls()),
    (
        "functionary-v3.1",
        has("<function="),
        NamedCalls(begins=("<function=",), divides=(">",), ends=("</function>",)),
    ),
    ("firefunction", has("functools["), JsonCalls(begins=("functools",), listed=True)),
    ("llama4", has("<|header_start|>"), PythonicCalls()),
    ("llama3", has("<|start_header_id|>", '"parameters": '), BareJson()),
)

REASONING = (
    Pair("<seed:think>", "</seed:think>"),
    Pair("<think>", "</think>"),
    Pair("[THINK]", "[/THINK]"),
    Pair("<|START_THINKING|>", "<|END_THINKING|>"),
    Pair("<|inner_prefix|>", "<|inner_suffix|>"),
)


def detect(source: str) -> ReplyFormat:
    """The format of answers to prompts that the template ``source`` writes."""
    if "<|channel|>" in source and "<|message|>" in source:
        return ReplyFormat(name="harmony", harmony=True)
    reasoning = next((pair for pair in REASONING if pair.end in source), None)
    for name, sees, calls in CALLS:
        if sees(source):
            ids = Ids.SHORT if isinstance(calls, MistralCalls) else Ids.LONG
            return ReplyFormat(name=name, reasoning=reasoning, calls=calls, ids=ids)
    return ReplyFormat(name="generic", reasoning=reasoning, calls=HERMES)
