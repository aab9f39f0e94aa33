"""Events of responses: their order as a state machine, what joined deltas give, and inputs of custom tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.errors import ErrorResponse
from penstock.api.openai.response_events import CustomInputDecoder, item_id, response_of_item
from penstock.api.openai.responses import EVENTS_PER_TOKEN, ResponsesFormat
from penstock.api.openai.stored_responses import replayed_events
from penstock.api.response_format import CompletedChoice, ResponseHead, StreamEvent, TokenUsage
from penstock.api.response_store import StoredConversation
from penstock.interfaces import OutputDelta, ResponsesRequest, ToolCallDelta, ToolTarget
from penstock.types import FinishReason

NAME = "resp_0123456789abcdef01234567"
HEAD = ResponseHead(id=NAME, created=7, model="m", system_fingerprint="f", seed=3)
TOOLS = {
    "now": ToolTarget(name="now"),
    "patch": ToolTarget(name="patch", text_argument="input"),
    "docs__find": ToolTarget(name="find", namespace="docs"),
}
USED = TokenUsage.of(prompt=5, completion=9, cached=2)


def usage() -> TokenUsage:
    return USED


class Saved:
    """Keeps what a format stores."""

    def __init__(self) -> None:
        self.stored: StoredConversation | None = None

    async def save(self, name: str, response: bytes, deltas: list[list[int]]) -> None:
        self.stored = StoredConversation(id=name, response=response, items=b"[]", deltas=json.dumps(deltas).encode())


def format_of(saved: Any = None, *, summary: bool = False, seals: bool = False) -> ResponsesFormat:
    request = ResponsesRequest(
        chat={}, tools=TOOLS, items=[], echo={}, store=True, summary=summary, seal=str.upper if seals else None
    )
    return ResponsesFormat(request, {"tools": [], "user": "u"}, saved, None)


def streamed(
    pieces: Sequence[OutputDelta], form: ResponsesFormat | None = None, head: ResponseHead = HEAD
) -> list[StreamEvent]:
    encoder = (form or format_of()).stream(head, usage)
    events = list(encoder.begin(0))
    for piece in pieces:
        if piece.text or piece.reasoning or piece.calls or piece.logprobs:
            events += encoder.delta(0, piece)
    assert pieces[-1].finish is not None
    events += encoder.finish(0, pieces[-1])
    return [*events, *encoder.end()]


def check_order(events: Sequence[StreamEvent], *, contiguous: bool = True) -> dict[str, Any]:
    """Runs the documented state machine over a stream.  Returns the last response."""
    parsed = [json.loads(event.data) for event in events]
    assert [event.name.decode() for event in events] == [data["type"] for data in parsed]
    numbers = [data["sequence_number"] for data in parsed]
    assert numbers == (list(range(len(numbers))) if contiguous else sorted(set(numbers)))
    assert [data["type"] for data in parsed[:2]] == ["response.created", "response.in_progress"]
    assert all(data["response"]["output"] == [] and data["response"]["usage"] is None for data in parsed[:2])
    output: list[dict[str, Any]] = []
    item: dict[str, Any] | None = None
    part: dict[str, Any] | None = None
    text, done = "", False
    for data in parsed[2:-1]:
        kind = data["type"].removeprefix("response.")
        assert data["output_index"] == len(output)
        if kind == "output_item.added":
            assert item is None
            item, part, text, done = data["item"], None, "", False
            assert item["status"] == "in_progress"
            assert text_of(item) == ""
            continue
        assert item is not None
        if kind == "output_item.done":
            assert done
            assert part is None
            whole = data["item"]
            assert (whole["id"], whole["type"]) == (item["id"], item["type"])
            assert text_of(whole) == text
            output.append(whole)
            item = None
            continue
        assert data["item_id"] == item["id"]
        if kind.endswith("part.added"):
            assert part is None
            part = data["part"]
            assert part["text"] == ""
        elif kind.endswith("part.done"):
            assert done
            assert part is not None
            assert data["part"]["text"] == text
            assert data["part"]["type"] == part["type"]
            part = None
        elif kind.endswith(".delta"):
            assert not done
            assert data["delta"]
            assert kind.removesuffix(".delta") == FIELDS[item["type"], (part or {}).get("type")][0]
            text += data["delta"]
        else:
            name, field = FIELDS[item["type"], (part or {}).get("type")]
            assert (kind, data[field], done) == (f"{name}.done", text, False)
            done = True
    assert item is None
    response: dict[str, Any] = parsed[-1]["response"]
    assert parsed[-1]["type"] == f"response.{response['status']}"
    assert response["output"] == output
    return response


FIELDS = {
    ("message", "output_text"): ("output_text", "text"),
    ("reasoning", "reasoning_text"): ("reasoning_text", "text"),
    ("reasoning", "summary_text"): ("reasoning_summary_text", "text"),
    ("function_call", None): ("function_call_arguments", "arguments"),
    ("custom_tool_call", None): ("custom_tool_call_input", "input"),
}


def text_of(item: dict[str, Any]) -> str:
    parts = [*item.get("content", ()), *item.get("summary", ())]
    return "".join(part["text"] for part in parts) + item.get("arguments", "") + item.get("input", "")


def call(index: int, name: str | None = None, arguments: str = "") -> ToolCallDelta:
    return ToolCallDelta(index=index, id=None if name is None else f"c{index}", name=name, arguments=arguments)


def several(tokens: int, *parts: OutputDelta) -> OutputDelta:
    """A delta of several kinds, as an output's text came."""
    return OutputDelta(
        text="".join(part.text for part in parts),
        reasoning="".join(part.reasoning for part in parts),
        calls=tuple(one for part in parts for one in part.calls),
        parts=parts,
        tokens=tokens,
    )


WHOLE = [
    OutputDelta(reasoning="I thi", tokens=1),
    several(3, OutputDelta(reasoning="nk.", tokens=3), OutputDelta(text="Let me", tokens=3)),
    several(5, OutputDelta(text=" look.", tokens=5), OutputDelta(calls=(call(0, "now", "{"),), tokens=5)),
    OutputDelta(calls=(call(0, None, "}"), call(1, "patch", '{"input": "a\\')), tokens=9),
    OutputDelta(calls=(call(1, None, 'n\\"b'),), tokens=10),
    OutputDelta(calls=(call(1, None, '"}'), call(2, "docs__find", "{}"), call(3, "made_up", "")), tokens=14),
    OutputDelta(tokens=15, finish=FinishReason.TOOL_CALLS),
]


def test_the_order_of_events_and_every_kind_of_item():
    response = check_order(streamed(WHOLE))
    assert response["status"] == "completed"
    kinds = [(item["type"], text_of(item)) for item in response["output"]]
    assert kinds == [
        ("reasoning", "I think."),
        ("message", "Let me look."),
        ("function_call", "{}"),
        ("custom_tool_call", 'a\n"b'),
        ("function_call", "{}"),
        ("function_call", ""),
    ]
    find, unknown = response["output"][4:]
    assert (find["name"], find["namespace"], find["call_id"]) == ("find", "docs", "c2")
    assert (unknown["name"], "namespace" in unknown) == ("made_up", False)
    assert response["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 14,
    }
    assert response["user"] == "u"


def test_an_answer_that_is_cut_is_incomplete_and_so_is_its_last_item():
    response = check_order(streamed([*WHOLE[:3], OutputDelta(tokens=6, finish=FinishReason.LENGTH)]))
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in response["output"]] == ["completed", "completed", "incomplete"]


def test_an_answer_without_text_has_an_empty_message():
    response = check_order(streamed([OutputDelta(tokens=1, finish=FinishReason.STOP)]))
    assert [(item["type"], text_of(item)) for item in response["output"]] == [("message", "")]


def test_reasoning_as_a_summary_and_sealed():
    response = check_order(streamed(WHOLE, format_of(summary=True, seals=True)))
    thought = response["output"][0]
    assert thought["summary"] == [{"type": "summary_text", "text": "I think."}]
    assert (thought["content"], thought["encrypted_content"]) == ([], "I THINK.")


def test_text_behind_a_call_is_another_message():
    pieces = [
        several(1, OutputDelta(text="a", tokens=1), OutputDelta(calls=(call(0, "now", "{"),), tokens=1)),
        several(2, OutputDelta(calls=(call(0, None, "}"),), tokens=2), OutputDelta(text="b", tokens=2)),
        OutputDelta(tokens=3, finish=FinishReason.STOP),
    ]
    response = check_order(streamed(pieces))
    assert [(item["type"], text_of(item)) for item in response["output"]] == [
        ("message", "a"),
        ("function_call", "{}"),
        ("message", "b"),
    ]


def test_a_stream_that_breaks_off_ends_with_its_error():
    encoder = format_of().stream(HEAD, usage)
    encoder.begin(0)
    encoder.delta(0, WHOLE[0])
    event = encoder.error(ErrorResponse(status=503, message="No workers.", type="server_error"))
    assert event.name == b"response.failed"
    failed = json.loads(event.data)
    assert failed["sequence_number"] == 5
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["message"] == "No workers."


def split(pieces: Sequence[OutputDelta]) -> list[OutputDelta]:
    """The same answer, in deltas of one character."""
    parts: list[OutputDelta] = []
    for piece in pieces:
        parts += [OutputDelta(reasoning=char, tokens=piece.tokens) for char in piece.reasoning]
        text, calls = piece.text, [part for part in piece.calls if part.name is None]
        for part in [*calls, *(part for part in piece.calls if part.name is not None)]:
            if part.name is not None:
                parts += [OutputDelta(text=char, tokens=piece.tokens) for char in text]
                text = ""
                parts.append(OutputDelta(calls=(call(part.index, part.name),), tokens=piece.tokens))
            parts += [
                OutputDelta(calls=(call(part.index, None, char),), tokens=piece.tokens) for char in part.arguments
            ]
        parts += [OutputDelta(text=char, tokens=piece.tokens) for char in text]
    return [*parts, pieces[-1]]


def without_times(response: dict[str, Any]) -> dict[str, Any]:
    return {**response, "completed_at": None}


async def test_however_an_answer_comes_its_response_is_the_same_and_its_stream_can_be_replayed():
    saved = Saved()
    events = streamed(WHOLE, form := format_of(saved))
    await form.persist()
    assert saved.stored is not None
    assert replayed_events(saved.stored) == events
    fine = streamed(split(WHOLE))
    assert without_times(check_order(fine)) == without_times(check_order(events))
    calls = [call(0, "now", "{}"), call(1, "patch", '{"input": "a\\n\\"b"}'), call(2, "docs__find", "{}")]
    choice = CompletedChoice(
        text="Let me look.",
        reasoning="I think.",
        calls=[*calls, call(3, "made_up")],
        logprobs=(),
        token_ids=(),
        finish=FinishReason.TOOL_CALLS,
        deltas=WHOLE,
    )
    whole = json.loads((form := format_of(saved)).complete(HEAD, [choice], USED))
    assert without_times(whole) == without_times(check_order(events))
    await form.persist()
    replayed = replayed_events(saved.stored)
    assert without_times(check_order(replayed)) == without_times(whole)
    await form.persist()  # nothing is left to store
    assert saved.stored.response == json.dumps(whole, separators=(",", ":")).encode()


def test_numbers_of_a_resumed_stream_are_above_all_that_its_client_can_have():
    """Whatever batches the first stream came in, and the second."""
    first = streamed(split(WHOLE))
    head = ResponseHead(id=NAME, created=9, model="m", system_fingerprint="f", seed=3, resumed=True)
    coarse = streamed(WHOLE, head=head)
    check_order(coarse, contiguous=False)
    had = {tokens: EVENTS_PER_TOKEN * tokens + 2 for tokens in range(16)}
    encoder = format_of().stream(head, usage)
    encoder.begin(0)
    for piece in WHOLE[:-1]:
        numbers = [json.loads(event.data)["sequence_number"] for event in encoder.delta(0, piece)]
        assert min(numbers) >= had[piece.tokens - 1]
    assert len(first) < had[15]


def test_item_ids_lead_to_their_response():
    for kind in ("message", "reasoning", "function_call", "custom_tool_call"):
        assert response_of_item(item_id(kind, NAME, 12)) == NAME
    for other in ("", "msg", "msg_", "msg_x", "msg__1", "in_abc_1", "call_abc_1", "msg_abc_x"):
        assert response_of_item(other) is None


# --- inputs of custom tools ------------------------------------------------------------------------------------------


def decoded(arguments: str, cuts: Sequence[int] = ()) -> str:
    decoder = CustomInputDecoder("input")
    places = [0, *sorted(min(cut, len(arguments)) for cut in cuts), len(arguments)]
    parts = [decoder.push(arguments[begin:end]) for begin, end in pairwise(places)]
    return "".join(parts) + decoder.finish()


@given(st.text(), st.booleans(), st.sampled_from(["", " ", "\n  "]), st.lists(st.integers(0, 200), max_size=8))
def test_an_input_is_decoded_however_it_is_escaped_and_cut(text: str, ascii_only: bool, space: str, cuts: list[int]):
    quoted = json.dumps(text, ensure_ascii=ascii_only)
    arguments = f'{space}{{{space}"input"{space}:{space}{quoted}{space}}}'
    assert decoded(arguments, cuts) == text


@given(st.text(max_size=20), st.lists(st.integers(0, 60), max_size=8))
def test_any_arguments_are_decoded_alike_however_they_are_cut(arguments: str, cuts: list[int]):
    for text in (arguments, f'{{"input": "{arguments}', f'{{"input": "{arguments}"}}'):
        assert decoded(text, cuts) == decoded(text)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"patch": "x"}', "x"),
        ('{"patch": "x", "n": 1}', "x"),
        ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
        ("{}", "{}"),
        ("plain words", "plain words"),
        ('"x"', '"x"'),
        ('{"input": 7}', '{"input": 7}'),
        ('{"input": "cut off \\', "cut off "),
        ('{"input": "\\ud83d\\ude00!"}', "\U0001f600!"),
        ('{"input": "\\ud83d!\\ude00\\ud83d\\n"}', "\ufffd!\ufffd\ufffd\n"),
        ('{"input": "a", "more": "b"}', "a"),
        ('{"inp', ""),
        ("", ""),
    ],
)
def test_arguments_of_other_forms(arguments: str, text: str):
    for cut in range(len(arguments) + 1):
        assert decoded(arguments, [cut]) == text
