"""Objects of schemas are closed: they have the properties that are named and no others."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import msgspec
import pytest

from grammar_world import admits, compiled, random_schema, schema_grammar
from penstock.grammar.json_schema import close_objects
from penstock.types import Grammar

A, B, C = ({"properties": {name: {"type": "integer"}}} for name in "abc")
A_AND_B = {**A, "allOf": [B]}
NODE = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#"}}, "required": ["v"]}


def closed(schema: Any) -> Grammar:
    return msgspec.structs.replace(schema_grammar(schema), closed=True)


CASES: list[tuple[Any, list[Any], list[Any]]] = [
    # schema, what is admitted, what is not
    (A | {"type": "object"}, [{}, {"a": 1}], [{"b": 1}, {"a": 1, "b": 1}]),
    ({"type": "object", "properties": {}}, [{}], [{"a": 1}]),
    ({"type": "object", "properties": {"a": A | {"type": "object"}}}, [{"a": {"a": 1}}], [{"a": {"b": 1}}]),
    ({"type": "array", "items": A | {"type": "object"}, "maxItems": 2}, [[{"a": 1}, {}]], [[{"b": 1}]]),
    # The schema says otherwise.
    ({"type": "object", "additionalProperties": True} | A, [{"a": 1, "b": "x"}], [{"a": "x"}]),
    ({"type": "object", "additionalProperties": {"type": "null"}} | A, [{"b": None}], [{"b": 1}]),
    ({"type": "object"}, [{}, {"anything": 1}], [[]]),
    ({"type": "object", "required": ["a"]}, [{"a": 1, "b": 1}], [{"b": 1}]),
    ({"type": "object", "properties": {"x": {}}, "patternProperties": {"^n": {"type": "null"}}},
     [{"n1": None}], [{"y": 1}]),
    # What is required may be there, though nothing describes it.
    ({"type": "object", "properties": {}, "required": ["z"]}, [{"z": [1]}], [{}, {"z": 1, "y": 1}]),
    # Several schemas describe one object.
    ({"type": "object"} | A_AND_B, [{"a": 1, "b": 2}], [{"a": 1, "c": 1}, {"b": "x"}]),
    ({"allOf": [{"type": "object"}, A, B]}, [{"a": 1, "b": 2}], [{"c": 1}]),
    ({"allOf": [{"type": "object"}, A]}, [{"a": 1}], [{"b": 1}]),
    ({"allOf": [{"type": "object", "additionalProperties": True}, A, B]}, [{"a": 1, "c": 1}], [{"a": "x"}]),
    ({"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
      "properties": {**A["properties"], **B["properties"]}},
     [{"a": 1}, {"b": 1}], [{}, {"a": 1, "c": 1}]),
    ({"type": "object", "anyOf": [B, C]} | A, [{"a": 1, "b": 1}, {"c": 1}], [{"a": 1, "d": 1}]),
    # Alternatives are closed one by one.
    ({"anyOf": [{"type": "object", **A}, {"type": "object", **B}]}, [{"a": 1}, {"b": 1}], [{"c": 1}, {"a": 1, "b": 1}]),
    # Definitions, alone and together with others.
    ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "object", **A}}}, [{"a": 1}], [{"b": 1}]),
    ({"allOf": [{"$ref": "#/$defs/x"}, B], "$defs": {"x": {"type": "object", **A}}}, [{"a": 1, "b": 1}], [{"c": 1}]),
    (NODE, [{"v": 1, "next": {"v": 2}}], [{"v": 1, "w": 1}, {"v": 1, "next": {"v": 2, "w": 1}}]),
    # Names that are keywords, and data that looks like a schema.
    ({"type": "object", "properties": {"properties": {"const": {"properties": {"a": 1}}}}},
     [{"properties": {"properties": {"a": 1}}}], [{"a": 1}]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=lambda value: json.dumps(value)[:60])
def test_objects_are_closed_unless_the_schema_says_otherwise(schema: Any, good: list[Any], bad: list[Any]) -> None:
    grammar = compiled(closed(schema))
    assert not grammar.failure
    assert [value for value in good if not admits(grammar, json.dumps(value))] == []
    assert [value for value in bad if admits(grammar, json.dumps(value))] == []


ODD: list[Any] = [
    True,
    {},
    {"$ref": "#"},
    {"allOf": [{"$ref": "#"}, A]},
    {"$ref": 1, **A},
    {"properties": [], "allOf": {}},
    {"$ref": "#/$defs/x", **A},
    {"$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"$ref": "#/$defs/x", **A}}, **B},
]


@pytest.mark.parametrize("schema", ODD, ids=json.dumps)
def test_odd_schemas_are_taken_as_they_are(schema: Any) -> None:
    before = json.dumps(schema)
    close_objects(schema)
    assert json.dumps(schema) == before


def test_what_describes_one_object_is_looked_at_a_bounded_number_of_times() -> None:
    """Every level of this one is two references to the next, and all of it describes one object."""
    levels = {f"l{i}": {"allOf": [{"$ref": f"#/$defs/l{i + 1}"}] * 2} for i in range(60)}
    schema = {"type": "object", **A, "$ref": "#/$defs/l0", "$defs": {**levels, "l60": dict(B)}}
    assert "additionalProperties" not in close_objects(schema)  # type: ignore[operator]


def test_closed_schemas_admit_nothing_that_open_ones_do_not() -> None:
    rng = Random(5)
    for _ in range(60):
        schema = random_schema(rng)
        open_one, closed_one = compiled(schema_grammar(schema)), compiled(closed(schema))
        if open_one.failure:
            continue
        assert not closed_one.failure, schema
        for text in ("{}", '{"a": 1}', '{"a": null, "z": 1}', "[]", "1", '"x"'):
            assert admits(open_one, text) or not admits(closed_one, text), (schema, text)
