"""Vocabularies for grammars without a model, and answers drawn at random along a grammar."""

from __future__ import annotations

import json
from functools import cache
from random import Random
from typing import Any

from llguidance import LLTokenizer

from penstock.grammar.matcher import CompiledGrammar, GrammarMatcher, GrammarVocabulary, token_trie
from penstock.types import Grammar, GrammarKind

END = 256
WORDS = (
    b'{"',
    b'":',
    b'",',
    b'": "',
    b'"}',
    b"}}",
    b", ",
    b": ",
    b"true",
    b"null",
    b"[]",
    b"{}",
    b"\n  ",
    b"00",
    b"the",
)
BYTES = GrammarVocabulary(
    tokens=[*(bytes((byte,)) for byte in range(256)), b"<|end|>", *WORDS], special=(END,), end_tokens=(END,)
)
"""Every byte, the end, and some of what tokenizers make one token of."""


@cache
def trie() -> LLTokenizer:
    return token_trie(BYTES)


def schema_grammar(schema: object, *, compact: bool = False) -> Grammar:
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema), compact=compact)


def grammar_of(kind: str, text: str) -> Grammar:
    return Grammar(kind=GrammarKind(kind), text=text)


def compiled(grammar: Grammar) -> CompiledGrammar:
    return CompiledGrammar(grammar, trie())


def allowed(matcher: GrammarMatcher) -> list[int]:
    """Tokens that may come next."""
    mask = matcher.mask()
    return [token for token in range(len(BYTES.tokens)) if mask[token // 8] >> token % 8 & 1]


def admits(grammar: CompiledGrammar, text: str) -> bool:
    """Can this be a whole answer?"""
    matcher = grammar.matcher()
    return matcher.accept_tokens(list(text.encode("utf-8", "surrogatepass"))) and END in allowed(matcher)


def wander(grammar: CompiledGrammar, seed: int, most: int = 300) -> str | None:
    """An answer of at most ``most`` tokens drawn at random, ended where that is allowed; None when it was too long.

    What closes something is taken more often than chance would have it, or nothing would ever be closed.
    """
    chance = Random(seed)
    matcher = grammar.matcher()
    text = b""
    for count in range(most):
        tokens = allowed(matcher)
        assert tokens, f"nothing is allowed after {text!r}"
        if END in tokens and (len(tokens) == 1 or chance.random() < 0.5):
            return text.decode()
        tokens = [token for token in tokens if token != END]
        closing = [token for token in tokens if BYTES.tokens[token] in (b'"', b"}", b"]", b'"}', b"}}")]
        token = chance.choice(closing if closing and chance.random() < 0.3 + count / most else tokens)
        text += BYTES.tokens[token]
        assert matcher.accept_tokens([token]), f"{matcher.failure} after {text!r}"
    return None


def random_schema(chance: Random, depth: int = 3) -> dict[str, Any]:
    """A schema of any kind that grammars can follow."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format"]
    kind = chance.choice([*kinds, *(["object", "array", "tuple", "anyOf", "types"] * 2 if depth else [])])
    make = _MAKERS.get(kind)
    return make(chance, depth) if make is not None else {"type": kind}


def _string(chance: Random, depth: int) -> dict[str, Any]:
    least = chance.randrange(4)
    return {"type": "string", "minLength": least, "maxLength": least + chance.randrange(9)}


def _integer(chance: Random, depth: int) -> dict[str, Any]:
    low = chance.randrange(-500, 500)
    return {
        "type": "integer",
        "minimum": low,
        chance.choice(["maximum", "exclusiveMaximum"]): low + 1 + chance.randrange(99),
    }


def _number(chance: Random, depth: int) -> dict[str, Any]:
    low = chance.randrange(-50, 50)
    return {"type": "number", "exclusiveMinimum": low, "maximum": low + chance.choice([0.5, 3, 1000])}


def _enum(chance: Random, depth: int) -> dict[str, Any]:
    values: list[Any] = ["a", "ab", 'say "hi"', "\\", "é😀", "", 1, -2.5, True, None, [1, "x"], {"k": [None]}]
    return {"enum": chance.sample(values, chance.randrange(1, 6))}


def _pattern(chance: Random, depth: int) -> dict[str, Any]:
    patterns = ["^[A-Z]{2}-\\d{3}$", "^(foo|ba[rz])+$", "a.c", "^\\S+@\\S+$", '^[^"\\\\]{2,5}$', "^.{0,3}$", "[0-9]"]
    return {"type": "string", "pattern": chance.choice(patterns)}


def _format(chance: Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "format": chance.choice(["date", "time", "date-time", "uuid", "ipv4", "email", "binary"])}


def _object(chance: Random, depth: int) -> dict[str, Any]:
    names = chance.sample(["a", "b", "name", "with space", 'quote"', "ü", "x-1"], chance.randrange(5))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(chance, depth - 1) for name in names},
    }
    schema["required"] = [name for name in names if chance.random() < 0.7]
    if chance.random() < 0.7:
        schema["additionalProperties"] = chance.choice([False, False, {"type": "integer"}])
    if chance.random() < 0.2:
        schema["maxProperties"] = len(names) + 1
    return schema


def _array(chance: Random, depth: int) -> dict[str, Any]:
    least = chance.randrange(3)
    return {"type": "array", "items": random_schema(chance, depth - 1), "minItems": least, "maxItems": least + 2}


def _tuple(chance: Random, depth: int) -> dict[str, Any]:
    items = [random_schema(chance, depth - 1) for _ in range(chance.randrange(1, 4))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _any_of(chance: Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(chance, depth - 1) for _ in range(chance.randrange(1, 4))]}


def _types(chance: Random, depth: int) -> dict[str, Any]:
    return {"type": chance.sample(["string", "integer", "null", "boolean", "array"], 2), "maxItems": 2, "maxLength": 5}


_MAKERS = {
    "string": _string,
    "integer": _integer,
    "number": _number,
    "enum": _enum,
    "const": lambda chance, depth: {"const": _enum(chance, depth)["enum"][0]},
    "pattern": _pattern,
    "format": _format,
    "object": _object,
    "array": _array,
    "tuple": _tuple,
    "anyOf": _any_of,
    "types": _types,
}
