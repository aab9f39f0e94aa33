"""Which output tokens are reasoning, and which stop string ended an output, do not depend on how tokens came."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.interfaces import OutputDelta
from penstock.processing.chat.render import OutputParserFactory
from penstock.processing.detokenizer import IncrementalDetokenizer, OutputOptions
from penstock.processing.parsers.incremental import ReasoningMarks, ToolSchemas
from penstock.processing.parsers.parser import OutputFormat
from penstock.processing.parsers.registry import HERMES
from penstock.processing.tokenizer.token_bytes import TokenTable
from penstock.types import FinishReason, TokenBatch

FOX = "🦊".encode()
CALL = '{"name": "f", "arguments": {}}'
VOCABULARY: list[str | bytes] = [
    *("</s>", "<think>", "</think>", "</thi", "nk>", "a", " b", "\n", "so</think>it", "é", FOX[:2], FOX[2:]),
    *("<tool_call>", "</tool_call>", CALL, "<|channel|>", "analysis", "final", "<|message|>", "<|end|>", "<|start|>"),
]
END = 0
THINKING = OutputFormat(name="thinking", reasoning=ReasoningMarks("<think>", "</think>"), calls=HERMES)
HARMONY = OutputFormat(name="harmony", harmony=True)


class Vocabulary:
    def id_to_token(self, token: int) -> str | bytes | None:
        return VOCABULARY[token] if token < len(VOCABULARY) else None


TABLE = TokenTable(Vocabulary(), decoder=None, special=frozenset({END}))  # type: ignore[arg-type]


def tokens_of(*words: str | bytes) -> list[int]:
    return [VOCABULARY.index(word) for word in words]


def run(wanted: OutputOptions, tokens: Sequence[int], edges: Sequence[int], finish: FinishReason) -> list[OutputDelta]:
    """The deltas of ``tokens``, cut at ``edges``."""
    text, deltas = IncrementalDetokenizer(TABLE, wanted), list[OutputDelta]()
    for a, b in pairwise([0, *sorted(edges), len(tokens)]):
        deltas.append(text.push(TokenBatch(tokens=tuple(tokens[a:b]), finish=finish if b == len(tokens) else None)))
        if deltas[-1].finish is not None:
            break
    return deltas


def options(form: OutputFormat, *stops: str, thinking: bool = False, parallel: bool = True) -> OutputOptions:
    reply = OutputParserFactory(format=form, tools=ToolSchemas({}), thinking=thinking, parallel=parallel)
    return OutputOptions(stops=stops, stop_token_ids=frozenset({END}), reply=reply)


@given(
    tokens=st.lists(st.integers(0, len(VOCABULARY) - 1), min_size=1, max_size=20),
    stops=st.lists(st.sampled_from(["b\n", "a", "</think>", "é", "\ufffd", "k>it", "<tool_call>"]), max_size=2),
    form=st.sampled_from([THINKING, HARMONY]),
    flags=st.tuples(st.booleans(), st.booleans()),
    finish=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    data=st.data(),
)
def test_they_are_the_same_however_tokens_are_batched(tokens, stops, form, flags, finish, data) -> None:
    wanted = options(form, *stops, thinking=flags[0], parallel=flags[1])
    edges = data.draw(st.sets(st.integers(1, len(tokens) - 1)) if len(tokens) > 1 else st.just(set()))
    together, single, mixed = (run(wanted, tokens, cuts, finish) for cuts in ((), range(1, len(tokens)), sorted(edges)))
    for deltas in (single, mixed):
        for field in ("text", "reasoning"):
            assert "".join(getattr(d, field) for d in deltas) == "".join(getattr(d, field) for d in together)
        last, whole = deltas[-1], together[-1]
        assert (last.tokens, last.reasoning_tokens) == (whole.tokens, whole.reasoning_tokens)
        assert (last.finish, last.stop_text) == (whole.finish, whole.stop_text)
    counts = [delta.reasoning_tokens for delta in single]
    assert counts == sorted(counts)
    assert all(later - earlier <= 1 for earlier, later in pairwise([0, *counts]))
    assert single[-1].reasoning_tokens <= single[-1].tokens
    assert bool(counts[-1]) or not any(delta.reasoning for delta in single)
    assert all(delta.stop_text is None for delta in single[:-1])
    assert single[-1].stop_text is None or (single[-1].finish is FinishReason.STOP and single[-1].stop_text in stops)


@pytest.mark.parametrize(
    ("form", "words", "thinking", "count"),
    [
        (THINKING, ["a", " b", "</s>"], False, 0),
        (THINKING, ["<think>", "a", " b", "</think>", "a", "</s>"], False, 4),
        (THINKING, ["<think>", "a", "</thi", "nk>", "a", "</s>"], False, 4),
        (THINKING, ["<think>", "a", "so</think>it", "a"], False, 3),
        (THINKING, ["a", FOX[:2], FOX[2:], "</think>", "a"], True, 4),
        (THINKING, ["a", "</think>", "<tool_call>", CALL, "</tool_call>", "</s>"], True, 2),
        (HARMONY, ["<|channel|>", "analysis", "<|message|>", "a", " b", "<|end|>", "<|start|>"], False, 4),
        (HARMONY, ["<|channel|>", "final", "<|message|>", "a", " b", "<|end|>"], False, 0),
    ],
)
def test_reasoning_with_its_marks_is_counted(form: OutputFormat, words: list[str | bytes], thinking, count) -> None:
    deltas = run(options(form, thinking=thinking), tokens_of(*words), range(1, len(words)), FinishReason.STOP)
    assert deltas[-1].reasoning_tokens == count


def test_a_stop_string_that_only_the_end_completes_is_no_further_token() -> None:
    tokens = tokens_of("<think>", "a", FOX[:2])
    (delta,) = run(options(THINKING, "\ufffd"), tokens, (), FinishReason.LENGTH)
    assert (delta.reasoning_tokens, delta.tokens, delta.stop_text) == (3, 3, "\ufffd")


@pytest.mark.parametrize(
    ("words", "finish", "ended_by", "stop_text"),
    [
        (["a", " b", "\n"], FinishReason.LENGTH, FinishReason.STOP, "b\n"),
        (["a", " b", "</s>"], FinishReason.STOP, FinishReason.STOP, None),
        (["a", " b"], FinishReason.LENGTH, FinishReason.LENGTH, None),
        (["<tool_call>", CALL, "</tool_call>", " b", "\n"], FinishReason.LENGTH, FinishReason.TOOL_CALLS, None),
    ],
)
def test_the_stop_string_is_named_where_it_is_why_the_output_ended(words, finish, ended_by, stop_text) -> None:
    last = run(options(THINKING, "b\n"), tokens_of(*words), (), finish)[-1]
    assert (last.finish, last.stop_text) == (ended_by, stop_text)
