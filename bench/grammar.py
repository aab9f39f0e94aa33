"""How long do the masks of constrained answers take?

``python bench/grammar.py``: the bundled model's 4,096 tokens, and with ``--tiktoken FILE`` a vocabulary of that format
(o200k_base has 200,000).  Masks are timed one by one along random answers to some schemas, in processor time of the
thread.  Each round compiles every grammar anew and does the very same; the least time that a mask took in any counts.
"""

from __future__ import annotations

import argparse
import base64
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from llguidance import LLTokenizer

from penstock.bundled import storyteller
from penstock.config.limits import RequestLimits
from penstock.grammar.matcher import CompiledGrammar, GrammarVocabulary, mask_words, token_trie
from penstock.processing.service import GenerationProcessor
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
    parser.add_argument("--rounds", type=int, default=3, help="of which the least times count (default 3)")
    options = parser.parse_args()
    vocabulary = tiktoken(options.tiktoken) if options.tiktoken else bundled()
    begin = time.perf_counter()
    trie = token_trie(vocabulary)
    print(f"{len(vocabulary.tokens)} tokens, made ready in {time.perf_counter() - begin:.2f} s")
    masks: list[float] = []
    means: list[float] = []
    takes: list[float] = []
    print(f"{'schema':14} {'compile':>9} {'mask p50':>9} {'p99':>9} {'mean':>9}  us")
    for name, schema in SCHEMAS.items():
        rounds = [timed(schema, vocabulary, trie, options.answers) for _ in range(options.rounds)]
        compiled_us = min(one.compiled_us for one in rounds)
        answers = [np.min(same, axis=0).tolist() for same in zip(*(one.masks for one in rounds), strict=True)]
        own = [mask for answer in answers for mask in answer]
        means += [statistics.mean(answer) for answer in answers]
        takes += np.min([one.takes for one in rounds], axis=0).tolist()
        masks += own
        print(f"{name:14} {compiled_us:9.0f} {at(own, 0.5):9.1f} {at(own, 0.99):9.1f} {statistics.mean(own):9.1f}")
    print(f"all masks: p50 {at(masks, 0.5):.1f}, p99 {at(masks, 0.99):.1f}, mean {statistics.mean(masks):.1f} us")
    print(f"mean of an answer's masks: p50 {at(means, 0.5):.1f}, p99 {at(means, 0.99):.1f} us")
    print(f"taking a token: p50 {at(takes, 0.5):.1f}, p99 {at(takes, 0.99):.1f} us")


def bundled() -> GrammarVocabulary:
    intake = GenerationProcessor(storyteller(), name="", max_model_len=1, limits=RequestLimits(), created=0)
    vocabulary = intake.vocabulary()
    intake.close()
    return vocabulary


def tiktoken(path: Path) -> GrammarVocabulary:
    tokens = [base64.b64decode(line.split()[0]) for line in path.read_text(encoding="ascii").splitlines()]
    return GrammarVocabulary(tokens=[*tokens, b"<|end|>"], special=(len(tokens),), end_tokens=(len(tokens),))


@dataclass(frozen=True)
class Round:
    """Microseconds."""

    compiled_us: float
    masks: list[list[float]]  # of each answer
    takes: list[float]  # of all answers


def timed(schema: Any, vocabulary: GrammarVocabulary, trie: LLTokenizer, answers: int) -> Round:
    """A grammar that is compiled, and so many answers that follow it."""
    begin = time.thread_time_ns()
    grammar = CompiledGrammar(Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema)), trie)
    compiled_us = (time.thread_time_ns() - begin) / 1e3
    assert grammar.failure is None, grammar.failure
    words = np.zeros(mask_words(len(vocabulary.tokens)), np.uint32)
    takes: list[float] = []
    return Round(compiled_us, [walk(grammar, vocabulary, words, seed, takes) for seed in range(answers)], takes)


def walk(
    grammar: CompiledGrammar, vocabulary: GrammarVocabulary, words: Any, seed: int, takes: list[float]
) -> list[float]:
    """Microseconds of each mask of one answer of 100 tokens at most; short tokens are taken more often, as in JSON."""
    chance = Random(seed)
    matcher = grammar.matcher()
    times: list[float] = []
    end = vocabulary.end_tokens[0]
    for _ in range(100):
        begin = time.thread_time_ns()
        assert matcher.write_mask(words), matcher.failure
        times.append((time.thread_time_ns() - begin) / 1e3)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        picked = [int(allowed[chance.randrange(len(allowed))]) for _ in range(4)]
        some = [token for token in picked if token != end]
        if not some:
            break
        token = min(some, key=lambda one: len(vocabulary.tokens[one]))
        begin = time.thread_time_ns()
        assert matcher.accept_tokens([token]), matcher.failure
        takes.append((time.thread_time_ns() - begin) / 1e3)
    return times


def at(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


if __name__ == "__main__":
    main()
