"""Events that are put together from bytes are those that the API's shape would write, to the byte."""

from __future__ import annotations

import pytest

from penstock.api import sse
from penstock.api.openai.chat import ChatResponseFormat
from penstock.api.openai.completions import CompletionResponseFormat
from penstock.api.response_format import ResponseFormat, ResponseHead, TokenUsage
from penstock.api.sse import EventIds
from penstock.api.streaming import ChoiceCounts, TextEventTemplate, TextOnlyChoice
from penstock.interfaces import OutputDelta
from penstock.processing.detokenizer import IncrementalDetokenizer, OutputOptions
from penstock.processing.tokenizer.token_bytes import TokenTable
from penstock.types import TokenBatch

WORDS = ["Once", ' upon "a"', "\n", "\\ / \x01", " time é", "ö", "</s>", "日本", " the"]
HEAD = ResponseHead(id="chatcmpl-1", created=1, model="a model", system_fingerprint="ps-1", seed=3, include_usage=True)
USAGE = TokenUsage.of(prompt=1, completion=1, cached=0)


class Words:
    """A token for each word; two more for the halves of a character."""

    def id_to_token(self, token: int) -> str | bytes | None:
        return WORDS[token] if token < len(WORDS) else ("é".encode()[token - len(WORDS) :][:1])


TABLE = TokenTable(Words(), decoder=None, special=frozenset({6}))  # type: ignore[arg-type]
FIRST_HALF, SECOND_HALF = len(WORDS), len(WORDS) + 1


@pytest.mark.parametrize("shape", [ChatResponseFormat(), CompletionResponseFormat()], ids=["chat", "completion"])
@pytest.mark.parametrize("stops", [(), ("zzz",)], ids=["no stops", "a stop string"])
@pytest.mark.parametrize("tokens", [(0,), (1,), (2, 3), (4, 5, 7), (6,), (8, 6, 8)])
def test_plain_events_are_those_of_the_shape(shape: ResponseFormat, stops: tuple[str, ...], tokens: tuple[int, ...]):
    slow, fast = (IncrementalDetokenizer(TABLE, OutputOptions(stops=stops)) for _ in range(2))
    piece = slow.push(TokenBatch(tokens=tokens))
    written: list[bytes] = []
    counts = ChoiceCounts()
    encoder = shape.stream(HEAD, lambda: USAGE)
    assert encoder.text_parts(0) is None  # the first event has the seed
    (begun,) = encoder.delta(0, OutputDelta(text="Once", tokens=1))
    assert b"seed" in begun.data
    parts = encoder.text_parts(0)
    assert parts is not None
    plain = TextEventTemplate(TextOnlyChoice(0, fast, counts), parts, lambda data: bool(written.append(data)))
    assert plain.write(tokens) is False
    (event,) = encoder.delta(0, piece)
    expected = sse.sse_event(EventIds().delta_id(0, piece.tokens, last=False), event.data)
    assert written == ([expected] if piece.text else [])
    assert counts.tokens == piece.tokens


def test_what_is_more_than_text_is_not_taken_and_nothing_is_lost_by_it():
    whole = "".join(WORDS[token] for token in (0, 8)) + "é" + WORDS[0]
    text = IncrementalDetokenizer(TABLE, OutputOptions(stops=("the end",)))
    told: list[str] = []
    for token in (0, 8, FIRST_HALF, SECOND_HALF, 0):
        escaped = text.escaped((token,))
        told.append(text.push(TokenBatch(tokens=(token,))).text if escaped is None else escaped.decode())
    assert "".join(told) == whole


@pytest.mark.parametrize(
    "wanted",
    [
        OutputOptions(logprobs=True),
        OutputOptions(token_ids=True),
        OutputOptions(prompt_only=True),
        OutputOptions(special=True),
    ],
)
def test_who_wants_more_than_text_gets_it(wanted: OutputOptions):
    assert IncrementalDetokenizer(TABLE, wanted).escaped((0,)) is None


def test_text_of_special_tokens_is_not_lost():
    text = IncrementalDetokenizer(TABLE, OutputOptions(special=True))
    told: list[str] = []
    for token in (0, 6, 8):
        escaped = text.escaped((token,))
        told.append(text.push(TokenBatch(tokens=(token,))).text if escaped is None else escaped.decode())
    assert "".join(told) == "Once</s> the"
