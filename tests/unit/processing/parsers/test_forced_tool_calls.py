"""Answers that must be calls: whatever a family's grammar lets a model write is read as calls of the tools."""

from __future__ import annotations

import pytest
from test_output_formats import FORMATS, calls_of, read

from grammar_world import admits, compiled, wander
from penstock.grammar.sources import ToolFunction, tool_call_grammar
from penstock.processing.parsers.incremental import ToolSchemas
from penstock.processing.parsers.registry import HERMES, forced_tool_call

SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [ToolFunction(name=name, parameters=schema) for name, schema in SCHEMAS.items()]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_whatever_may_be_written_is_read_as_calls(name: str):
    demanded = forced_tool_call(FORMATS[name], lambda _: None)
    grammar = compiled(tool_call_grammar(TOOLS, demanded.shape, several=demanded.several))
    assert grammar.failure is None
    counts = set()
    for seed in range(12):
        text = wander(grammar, seed, most=500)
        if text is None:
            continue
        message = read(demanded.format, list(text), tools=ToolSchemas(SCHEMAS))
        assert (message["content"], message["reasoning"]) == ("", "")
        for called, arguments in calls_of(message):
            assert called in SCHEMAS
            assert set(arguments) <= SCHEMAS[called]["properties"].keys()  # type: ignore[attr-defined]
            assert called == "now" or isinstance(arguments["city"], str)
        counts.add(len(message["calls"]))
    assert min(counts) >= 1
    assert not admits(grammar, "")
    assert not admits(grammar, "Hello.")


def test_marks_that_are_control_tokens_are_tokens():
    shape = forced_tool_call(FORMATS["mistral"], {"[TOOL_CALLS]": 9}.get).shape
    assert shape.begin == (9, "[")
    harmony = forced_tool_call(FORMATS["harmony"], {"<|channel|>": 1, "<|message|>": 2, "<|constrain|>": 3}.get).shape
    assert (harmony.before_name, harmony.after_name) == ((1, "commentary to=functions."), (" ", 3, "json", 2))


def test_formats_without_a_shape_are_demanded_in_hermes_words():
    for name in ("glm", "qwen-coder", "seed", "llama4"):
        assert forced_tool_call(FORMATS[name], lambda _: None).format.calls is HERMES
