"""Whatever is drawn along a schema's grammar and ends is valid, by the opinion of another program (jsonschema).

The schemas: JSON Schema's own test suite, ones made at random, and nasty ones by hand; 500 and more in all.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest

from grammar_world import admits, compiled, random_schema, schema_grammar, wander

SUITE = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "fixtures/schemas/suite.jsonl").read_text(encoding="utf-8").splitlines()
]
OTHERS_DISAGREE = {("optional/ecmascript-regex: ECMA 262 \\S matches everything but whitespace", "\ufeff")}
"""A byte order mark is white space to ECMAScript, not to Unicode, nor to Python."""

RECURSIVE = {
    "$defs": {"node": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
                       "required": ["v"], "additionalProperties": False}},
    "$ref": "#/$defs/node",
}  # fmt: skip
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}},
       "required": ["kind", "lives"], "additionalProperties": False}  # fmt: skip
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}, "name": {"type": "string"}},
       "required": ["kind"], "additionalProperties": False}  # fmt: skip
NASTY: list[Any] = [
    {},
    True,
    RECURSIVE,
    {"type": "object"},
    {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "$defs": {"cat": CAT, "dog": DOG}},
    {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 4}, {"pattern": "^[a-f]*$"}]},
    {"type": "object", "properties": {"": {"type": "integer"}, "\\": {"type": "null"}, '"': {}}, "required": ["", '"']},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
    {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
    {"type": "object", "properties": {"minProperties": {"type": "integer"}, "x": {"const": {"x-guidance": 1}}}},
    {"type": "object", "required": ["a"], "minProperties": 1, "properties": {"a": {"enum": [1, 2]}}},
    {"enum": [f"value {i}" for i in range(3000)]},
    {"type": "string", "minLength": 60, "maxLength": 60},
    {"type": "array", "minItems": 30, "maxItems": 30, "items": {"type": "boolean"}},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    {"type": "number", "multipleOf": 0.25, "minimum": -1, "maximum": 1},
    {"type": "string", "pattern": "^(a|b)*a(a|b){6}$"},
    {"type": "string", "format": "binary", "maxLength": 3},
    *({"type": "number", "exclusiveMinimum": 39, "maximum": 39.5 + i} for i in range(2)),
    *({"type": "string", "pattern": p} for p in ('^[^"]{2}$', "^[^\\\\a]{2}$", "^[\\x00-\\x21]{2}$", "^[^!-/]{2}$")),
    {"anyOf": [{"type": "object", "properties": {f"k{i}": {"const": i}}, "required": [f"k{i}"]} for i in range(60)]},
]


FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER


def is_valid(schema: Any, value: Any) -> bool:
    validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
    return bool(validator.is_valid(value))


def test_no_grammar_of_the_suite_admits_what_the_suite_calls_invalid() -> None:
    followed = refused = valid = 0
    for case in SUITE:
        grammar = compiled(schema_grammar(case["schema"]))
        if grammar.failure:
            refused += 1
            continue
        followed += 1
        for value in case["invalid"]:
            text = json.dumps(value, ensure_ascii=False)
            assert not admits(grammar, text) or (case["name"], value) in OTHERS_DISAGREE, (case["name"], text)
        valid += sum(admits(grammar, json.dumps(value, ensure_ascii=False)) for value in case["valid"])
    assert followed > 170
    assert refused < 175
    assert valid > 350


def walks() -> list[tuple[Any, int]]:
    """More than 500 schemas with a seed each."""
    chance = Random(20261122)
    made = [random_schema(chance) for _ in range(320)]
    suite = [case["schema"] for case in SUITE if "\\\\p" not in json.dumps(case["schema"])]  # unknown to Python's re
    return [(schema, seed) for seed, schema in enumerate((*NASTY, *made, *suite))]


def test_what_ends_is_valid() -> None:
    finished = followed = 0
    for schema, seed in walks():
        grammar = compiled(schema_grammar(schema, compact=seed % 3 == 0))
        if grammar.failure:
            continue
        followed += 1
        text = wander(grammar, seed)
        if text is not None:
            finished += 1
            assert is_valid(schema, json.loads(text)), (schema, text)
    assert followed >= 500
    assert finished > 0.9 * followed


@pytest.mark.parametrize("schema", NASTY, ids=lambda schema: json.dumps(schema)[:40])
def test_nasty_schemas_are_followed(schema: Any) -> None:
    assert compiled(schema_grammar(schema)).failure is None


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "minProperties": 1}, "minProperties"),
        ({"properties": {"a": {"minProperties": 1}}}, "minProperties"),
        ({"oneOf": [{"type": "object"}, {"required": ["a"]}]}, "oneOf"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
        ({"properties": {"a": {"x-guidance": {"lenient": True}}}}, "x-guidance"),
        ({"const": "a\0b"}, "control character"),
        ({"properties": {"a\x01": {}}}, "control character"),
        ({"$ref": "#"}, "no text"),
        ({"$ref": "http://localhost/x"}, "localhost"),
        ({"$ref": "file:///etc/passwd"}, "passwd"),
        ({"type": "objekt"}, "objekt"),
        ({"format": "idn-email"}, "idn-email"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        (False, "false"),
    ],
)
def test_what_cannot_be_kept_is_refused(schema: Any, reason: str) -> None:
    grammar = compiled(schema_grammar(schema))
    matcher = None if grammar.failure else grammar.matcher()
    if matcher is not None:
        matcher.mask()
    assert reason in ((grammar.failure or matcher.failure or "") if matcher else grammar.failure or "")


def test_a_key_has_one_spelling() -> None:
    """Else a schema's own property could be written in another way, and its value would be free."""
    grammar = compiled(schema_grammar({"type": "object", "properties": {"a/b": {"type": "integer"}}}))
    assert admits(grammar, '{"a/b": 1}')
    assert admits(grammar, '{"c": "\\n"}')
    for text in ('{"\\u0061/b": "x"}', '{"a\\/b": "x"}', '{"a/b": "x"}', '{"a/b": 1, "a/b": "x"}'):
        assert not admits(grammar, text)
