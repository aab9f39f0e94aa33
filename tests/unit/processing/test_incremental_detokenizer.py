"""The text of an answer: the same whatever the batches, with stops, logprobs and echo."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import small_tokenizers
from penstock.interfaces import OutputDelta
from penstock.processing.detokenizer import (
    LOWEST_LOGPROB,
    IncrementalDetokenizer,
    OutputOptions,
    PromptEcho,
    prompt_offsets,
)
from penstock.processing.tokenizer.token_bytes import TokenTable
from penstock.types import FinishReason, TokenBatch, TokenLogprob

TOKENIZER = small_tokenizers.byte_level()
END = TOKENIZER.token_to_id("</s>")
TABLE = TokenTable(
    TOKENIZER,
    decoder=TOKENIZER.decoder.__getstate__(),
    special=frozenset(i for i, added in TOKENIZER.get_added_tokens_decoder().items() if added.special),
)


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def batches(tokens: Sequence[int], cuts: Sequence[int], finish: FinishReason) -> list[TokenBatch]:
    """``tokens`` cut at ``cuts``, each with a log-probability that tells its place."""
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(tokens)}), len(tokens)]
    return [
        TokenBatch(
            tokens=tuple(tokens[a:b]),
            logprobs=tuple(TokenLogprob(tokens[i], -float(i)) for i in range(a, b)),
            finish=finish if b == len(tokens) else None,
        )
        for a, b in pairwise(edges)
    ]


def run(wanted: OutputOptions, stream: Sequence[TokenBatch]) -> list[OutputDelta]:
    text = IncrementalDetokenizer(TABLE, wanted)
    pieces: list[OutputDelta] = []
    for batch in stream:
        pieces.append(text.push(batch))
        if pieces[-1].finish is not None:
            break
    return pieces


def joined(pieces: Sequence[OutputDelta]) -> dict[str, Any]:
    return {
        "text": "".join(piece.text for piece in pieces),
        "logprobs": [token for piece in pieces for token in piece.logprobs],
        "token_ids": [token for piece in pieces for token in piece.token_ids],
        "tokens": pieces[-1].tokens,
        "finish": pieces[-1].finish,
    }


tokens_lists = st.one_of(
    st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), min_size=1, max_size=24),
    st.text(st.sampled_from("ab é狐🦊\n"), min_size=1, max_size=16).map(ids),
)


@given(
    tokens=tokens_lists,
    cuts=st.lists(st.integers(1, 23), max_size=8),
    stops=st.lists(st.text(st.sampled_from("ab é狐🦊\n"), min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 6),
    finish=st.sampled_from(FinishReason),
)
@example(tokens=[*ids("x"), END, *ids("ab")], cuts=[1, 2, 3], stops=["a"], min_tokens=0, finish=FinishReason.LENGTH)
@example(tokens=ids("狐"), cuts=[1, 2], stops=["狐"], min_tokens=0, finish=FinishReason.LENGTH)
def test_pieces_joined_do_not_depend_on_batches(
    tokens: list[int], cuts: list[int], stops: list[str], min_tokens: int, finish: FinishReason
):
    wanted = OutputOptions(
        stops=tuple(stops), stop_token_ids=frozenset({END}), min_tokens=min_tokens, logprobs=True, token_ids=True
    )
    whole = joined(run(wanted, batches(tokens, [], finish)))
    parts = run(wanted, batches(tokens, cuts, finish))
    assert joined(parts) == whole
    ended = finish is FinishReason.STOP and tokens[-1] == END and whole["tokens"] == len(tokens)
    full = b"".join(map(TABLE.text_bytes, tokens[:-1] if ended else tokens)).decode(errors="replace")
    assert full.startswith(whole["text"])
    if whole["tokens"] == len(tokens) and whole["finish"] == finish and not stops:
        assert whole["text"] == full
    for stop in stops:
        assert min_tokens > 0 or stop not in whole["text"]
    # What is out is out: a token is told when its text is, in order.
    assert [token.logprob for token in whole["logprobs"]] == [-float(i) for i in range(len(whole["logprobs"]))]


@pytest.mark.parametrize(("completes_with", "counts"), [(2, False), (3, False), (4, True)])
def test_a_stop_string_counts_when_it_completes_behind_min_tokens(completes_with: int, counts: bool):
    (letter,), (stop,) = ids("a"), ids("b")
    tokens = [letter] * (completes_with - 1) + [stop] + [letter] * 3
    whole = joined(run(OutputOptions(stops=("b",), min_tokens=3), batches(tokens, range(1, 9), FinishReason.LENGTH)))
    assert whole["text"] == "a" * (completes_with - 1) + ("" if counts else "baaa")
    assert whole["finish"] is (FinishReason.STOP if counts else FinishReason.LENGTH)


def test_a_stop_string_over_several_tokens():
    pieces = run(
        OutputOptions(stops=("\n\nThe",)), batches(ids("A fox.\n\nThe end"), range(1, 20), FinishReason.LENGTH)
    )
    assert joined(pieces)["text"] == "A fox."
    assert joined(pieces)["finish"] is FinishReason.STOP
    assert pieces[-1].tokens < len(ids("A fox.\n\nThe end"))


def test_tokens_wholly_after_the_stop_are_not_told():
    wanted = OutputOptions(stops=("time",), logprobs=True)
    told = joined(run(wanted, batches(ids("Once upon a time there"), [], FinishReason.LENGTH)))
    assert told["text"] == "Once upon a "
    assert "".join(token.shown for token in told["logprobs"]).startswith("Once upon a")
    assert all(token.offset < len("Once upon a ") for token in told["logprobs"])


def test_a_held_back_beginning_comes_out_when_it_was_none():
    stream = batches(ids("a\nb"), range(1, 9), FinishReason.LENGTH)
    pieces = run(OutputOptions(stops=("\n\n",), logprobs=True), stream)
    assert [piece.text for piece in pieces] == ["a", "", "\nb"]
    assert [len(piece.logprobs) for piece in pieces] == [1, 0, 2]


def test_what_is_held_back_at_the_end_comes_out():
    pieces = run(OutputOptions(stops=("\n\n",)), batches(ids("a\n"), [1], FinishReason.LENGTH))
    assert joined(pieces)["text"] == "a\n"
    assert joined(pieces)["finish"] is FinishReason.LENGTH


def test_the_end_token_is_counted_and_not_shown():
    wanted = OutputOptions(stop_token_ids=frozenset({END, ids("b")[0]}), logprobs=True, token_ids=True)
    for last in (END, ids("b")[0]):
        told = joined(run(wanted, batches([*ids("a"), last], [], FinishReason.STOP)))
        assert told["text"] == "a"
        assert told["tokens"] == 2
        assert len(told["logprobs"]) == 1
        assert told["token_ids"] == [*ids("a"), last]


def test_an_end_token_that_was_to_be_ignored_is_told_but_shows_nothing():
    told = joined(run(OutputOptions(logprobs=True), batches([*ids("a"), END, *ids("b")], [], FinishReason.LENGTH)))
    assert told["text"] == "ab"
    assert [token.shown for token in told["logprobs"]] == ["a", "</s>", "b"]
    assert [token.offset for token in told["logprobs"]] == [0, 1, 1]


def test_minus_infinity_is_a_number():
    batch = TokenBatch(
        tokens=(ids("a")[0],),
        logprobs=(TokenLogprob(ids("a")[0], -math.inf, ((5, -0.1), (6, -math.inf))),),
        finish=FinishReason.LENGTH,
    )
    (piece,) = run(OutputOptions(logprobs=True), [batch])
    (token,) = piece.logprobs
    assert token.logprob == LOWEST_LOGPROB
    assert [top.logprob for top in token.top] == [-0.1, LOWEST_LOGPROB]


@pytest.mark.parametrize("cuts", [[], [1, 2]])
def test_echo_comes_first_with_its_logprobs(cuts: list[int]):
    prompt = ids("Once upon")
    stream = batches(ids(" a time"), cuts, FinishReason.LENGTH)
    first = TokenBatch(
        tokens=stream[0].tokens,
        logprobs=stream[0].logprobs,
        finish=stream[0].finish,
        prompt_logprobs=tuple(TokenLogprob(token, -1.0) for token in prompt[1:]),
    )
    told = joined(
        run(
            OutputOptions(logprobs=True, echo=PromptEcho(text="Once upon", tokens=tuple(prompt)), stops=("up",)),
            [first, *stream[1:]],
        )
    )
    assert told["text"] == "Once upon a time"  # stops are looked for in the answer only
    assert told["logprobs"][0].logprob is None
    assert "".join(token.shown for token in told["logprobs"]) == told["text"]
    for token in told["logprobs"]:
        assert told["text"][token.offset :].startswith(token.shown)


def test_echo_alone():
    wanted = OutputOptions(echo=PromptEcho(text="Once", tokens=tuple(ids("Once"))), prompt_only=True, logprobs=True)
    batch = TokenBatch(tokens=(7,), logprobs=(TokenLogprob(7, -1.0),), finish=FinishReason.LENGTH)
    (piece,) = run(wanted, [batch])
    assert (piece.text, piece.tokens, piece.finish) == ("Once", 0, FinishReason.LENGTH)


def test_offsets_of_a_prompt_whose_tokens_begin_with_a_blank_of_their_own():
    tokenizer = small_tokenizers.sentence_piece()
    table = TokenTable(tokenizer, decoder=tokenizer.decoder.__getstate__(), special=frozenset({1}))
    tokens = [1, *tokenizer.encode("the fox 狐", add_special_tokens=False).ids]
    offsets = prompt_offsets(table, tokens, "the fox 狐")
    assert offsets[:3] == [0, 0, 3]
    assert offsets[-3:] == [8, 8, 8]
