"""How long do the masks of constrained answers take?

``python bench/grammar.py``: the bundled model's 4,096 tokens, and with ``--tiktoken FILE`` a vocabulary of that format
(o200k_base has 200,000).  Masks are timed one by one along random answers to some schemas.
"""

from __future__ import annotations

import argparse
import base64
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from penstock.bundled import storyteller
from penstock.config.schema import Limits
from penstock.grammar.matcher import CompiledGrammar, mask_words
from penstock.grammar.vocabulary import Vocabulary, token_trie
from penstock.intake.service import ModelIntake
from penstock.types import Grammar, GrammarKind

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 60},
                "zip": {"type": "string", "pattern": "^\\d{5}$"},
            },
            "required": ["street", "zip"],
        },
    },
    "required": ["name", "age", "email", "tags", "address"],
    "additionalProperties": False,
}
TREE = {"$defs": {"t": {"type": "object", "properties": {"l": {"$ref": "#/$defs/t"}, "v": {}}}}, "$ref": "#/$defs/t"}
SCHEMAS: dict[str, Any] = {
    "any object": {"type": "object"},
    "person": PERSON,
    "people": {"type": "array", "items": PERSON},
    "enum of 1000": {"enum": [f"value {i * 7919 % 10007}" for i in range(1000)]},
    "tree": TREE,
    "pattern": {"type": "array", "items": {"type": "string", "pattern": "^[A-Z][a-z]+( [A-Z][a-z]+)*$"}},
    "numbers": {"type": "array", "items": {"type": "number", "minimum": -1000, "maximum": 1000}},
    "dates": {"type": "array", "items": {"type": "string", "format": "date-time"}},
    "alternatives": {"anyOf": [{"type": "object", "properties": {f"k{i}": {"type": "string"}}} for i in range(40)]},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiktoken", type=Path, help="a vocabulary: a token in base 64 and its rank a line")
    parser.add_argument("--answers", type=int, default=20, help="answers to each schema (default 20)")
    options = parser.parse_args()
    vocabulary = tiktoken(options.tiktoken) if options.tiktoken else bundled()
    begin = time.perf_counter()
    trie = token_trie(vocabulary)
    print(f"{len(vocabulary.tokens)} tokens, made ready in {time.perf_counter() - begin:.2f} s")
    masks: list[float] = []
    means: list[float] = []
    takes: list[float] = []
    words = np.zeros(mask_words(len(vocabulary.tokens)), np.uint32)
    print(f"{'schema':14} {'compile':>9} {'mask p50':>9} {'p99':>9} {'mean':>9}  us")
    for name, schema in SCHEMAS.items():
        begin = time.perf_counter()
        grammar = CompiledGrammar(Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema)), trie)
        compiled_us = (time.perf_counter() - begin) * 1e6
        assert grammar.failure is None, grammar.failure
        own: list[float] = []
        for seed in range(options.answers):
            one = walk(grammar, vocabulary, words, seed, takes)
            own += one
            means.append(statistics.mean(one))
        masks += own
        print(f"{name:14} {compiled_us:9.0f} {at(own, 0.5):9.1f} {at(own, 0.99):9.1f} {statistics.mean(own):9.1f}")
    print(f"all masks: p50 {at(masks, 0.5):.1f}, p99 {at(masks, 0.99):.1f}, mean {statistics.mean(masks):.1f} us")
    print(f"mean of an answer's masks: p50 {at(means, 0.5):.1f}, p99 {at(means, 0.99):.1f} us")
    print(f"taking a token: p50 {at(takes, 0.5):.1f}, p99 {at(takes, 0.99):.1f} us")


def bundled() -> Vocabulary:
    intake = ModelIntake(storyteller(), name="", max_model_len=1, limits=Limits(), created=0)
    vocabulary = intake.vocabulary()
    intake.close()
    return vocabulary


def tiktoken(path: Path) -> Vocabulary:
    tokens = [base64.b64decode(line.split()[0]) for line in path.read_text(encoding="ascii").splitlines()]
    return Vocabulary(tokens=[*tokens, b"<|end|>"], special=(len(tokens),), end_tokens=(len(tokens),))


def walk(grammar: CompiledGrammar, vocabulary: Vocabulary, words: Any, seed: int, takes: list[float]) -> list[float]:
    """Microseconds of each mask of one answer of 100 tokens at most; short tokens are taken more often, as in JSON."""
    chance = Random(seed)
    matcher = grammar.matcher()
    times: list[float] = []
    end = vocabulary.end_tokens[0]
    for _ in range(100):
        begin = time.perf_counter()
        assert matcher.write_mask(words), matcher.failure
        times.append((time.perf_counter() - begin) * 1e6)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        some = [int(token) for token in chance.choices(allowed.tolist(), k=4) if token != end]
        if not some:
            break
        token = min(some, key=lambda one: len(vocabulary.tokens[one]))
        begin = time.perf_counter()
        assert matcher.take([token]), matcher.failure
        takes.append((time.perf_counter() - begin) * 1e6)
    return times


def at(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


if __name__ == "__main__":
    main()
