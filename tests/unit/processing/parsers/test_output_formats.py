"""Every family's way of writing: what is read from whole answers, and that pieces make no difference."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.processing.parsers.incremental import MAX_FAILED, MAX_HELD, ReasoningMarks, ToolSchemas
from penstock.processing.parsers.parser import OutputFormat, OutputParser
from penstock.processing.parsers.registry import CALLS, detect_format

SCHEMA = {
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "deep": {"type": "object"},
        "on": {"type": "boolean"},
    }
}
TOOLS = ToolSchemas({"get_weather": SCHEMA, "now": {}})
THINK = ReasoningMarks("<think>", "</think>")
FORMATS = {name: OutputFormat(name=name, reasoning=THINK, calls=calls) for name, _, calls in CALLS}
FORMATS["harmony"] = OutputFormat(name="harmony", harmony=True)
ARGUMENTS = {"city": 'Zürich "x" <b>\n{[', "days": 3}
WRITTEN = json.dumps(ARGUMENTS, ensure_ascii=False)
CALL = f'{{"name": "get_weather", "arguments": {WRITTEN}}}'
PARAMETERS = CALL.replace("arguments", "parameters")
W, N = ("get_weather", ARGUMENTS), ("now", {})


def read(form: OutputFormat, pieces: list[str], **options: Any) -> dict[str, Any]:
    """The whole message, as a client puts it together."""
    settings = {"tools": TOOLS, "thinking": False, "identity": "x"} | options
    parser = OutputParser(form, **settings)
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for i in range(len(pieces) + 1):
        last = i == len(pieces)
        piece = parser.push("" if last else pieces[i], last=last)
        message["content"] += piece.content
        message["reasoning"] += piece.reasoning
        for call in piece.calls:
            if call.index == len(message["calls"]):
                message["calls"].append({"id": call.id, "name": call.name, "arguments": ""})
            assert (call.id is None) == (call.name is None)
            message["calls"][call.index]["arguments"] += call.arguments
        if parser.done:
            break
    return message


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(call["name"], json.loads(call["arguments"])) for call in message["calls"]]


Expected = tuple[str, str, str, list[tuple[str, Any]]]
XML = "<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>3</parameter>\n</function>"
GLM = "<arg_key>city</arg_key>\n<arg_value>7</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
DS_BEGIN, DS_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
DS_SEP = "<\uff5ctool\u2581sep\uff5c>"
DS_ALL, DS_DONE = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
DS_V3 = f"{DS_BEGIN}function{DS_SEP}{{}}\n```json\n{{}}\n```{DS_END}"
KIMI_ALL, KIMI_DONE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
COMMAND = f'[{{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {WRITTEN}}}]'
TWO_MESSAGES = "<|channel|>commentary<|message|>One.<|end|><|start|>assistant<|channel|>final<|message|>Two.<|return|>"
TO_WEATHER = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
KIMI = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"

SAMPLES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    # format, text, content, calls
    ("hermes", "Just an answer.\n", "Just an answer.\n", []),
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", [W]),
    (
        "hermes",
        f'I look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{{"name": "now"}}</tool_call>',
        "I look.",
        [W, N],
    ),
    ("hermes", f'<tool_call>{{"arguments": {WRITTEN}, "name": "get_weather"}}</tool_call>\n\nThere.', "There.", [W]),
    ("hermes", "<tool_call>{'name': 1}</tool_call>", "<tool_call>{'name': 1}</tool_call>", []),
    ("hermes", f'<tool_call>{{"id": 7, "type": "function", "function": {CALL}}}</tool_call>', "", [W]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [N]),
    ("hermes", f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(WRITTEN)}}}</tool_call>', "", [W]),
    ("hermes", "a <tool_call> that is none", "a <tool_call> that is none", []),
    ("mistral", f"[TOOL_CALLS][{CALL}]", "", [W]),
    ("mistral", f'[TOOL_CALLS] [{CALL}, {{"name": "now", "arguments": {{}}, "id": "123456789"}}]', "", [W, N]),
    (
        "mistral",
        f"Well. [TOOL_CALLS]get_weather[ARGS]{WRITTEN}[TOOL_CALLS]now[CALL_ID]abcdef123[ARGS]{{}}",
        "Well.",
        [W, N],
    ),
    ("granite", f"<|tool_call|>[{CALL}]", "", [W]),
    ("granite", f"<|tool_call|>[{CALL}]<|/tool_call|>", "", [W]),
    ("firefunction", f" functools[{PARAMETERS}]", "", [W]),
    ("firefunction", "import functools", "import functools", []),
    ("nemotron", f'<TOOLCALL>[{CALL}, {{"name": "now"}}]</TOOLCALL>\n', "", [W, N]),
    ("apertus", f'<|tools_prefix|>[{{"get_weather": {WRITTEN}}}, {{"now": {{}}}}]<|tools_suffix|>', "", [W, N]),
    ("command-r7b", f"<|START_ACTION|>{COMMAND}<|END_ACTION|>", "", [W]),
    ("command-r7b", "<|START_RESPONSE|>It is fine.<|END_RESPONSE|>", "It is fine.", []),
    ("command-r", f"Action: ```json\n[\n{PARAMETERS}\n]\n```", "", [W]),
    ("llama3", PARAMETERS, "", [W]),
    ("llama3", f"<|python_tag|>{PARAMETERS}; {PARAMETERS}", "", [W, W]),
    ("llama3", f'{PARAMETERS}\n{{"name": "now", "parameters": {{}}}}', "", [W, N]),
    ("llama3", '{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', []),
    ("llama3", '{"answer": 42}', '{"answer": 42}', []),
    (
        "llama3",
        '<|python_tag|>brave_search.call(query="a \\"b\\" (c)")',
        "",
        [("brave_search", {"query": 'a "b" (c)'})],
    ),
    (
        "llama4",
        "[get_weather(city='Zürich', days=-3, deep={'a': [1, None, true]}), now()]",
        "",
        [("get_weather", {"city": "Zürich", "days": -3, "deep": {"a": [1, None, True]}}), N],
    ),
    ("llama4", "<|python_start|>[now()]<|python_end|>", "", [N]),
    ("llama4", "[1, 2, 3]", "[1, 2, 3]", []),
    ("llama4", "[now(__import__('os'))]", "[now(__import__('os'))]", []),
    ("kimi", KIMI_ALL + KIMI.format("get_weather", 0, WRITTEN) + KIMI.format("now", 1, "{}") + KIMI_DONE, "", [W, N]),
    (
        "deepseek",
        DS_ALL + DS_V3.format("get_weather", WRITTEN) + "\n" + DS_V3.format("now", "{}") + DS_DONE,
        "",
        [W, N],
    ),
    ("deepseek-v3.1", f"Look.{DS_ALL}{DS_BEGIN}get_weather{DS_SEP}{WRITTEN}{DS_END}{DS_DONE}", "Look.", [W]),
    ("functionary-v3.1", f"<function=get_weather>{WRITTEN}</function>", "", [W]),
    ("functionary-v3.2", f"all\nI look.\n>>>get_weather\n{WRITTEN}>>>now\n{{}}", "I look.", [W, N]),
    ("functionary-v3.2", f"get_weather\n{WRITTEN}", "", [W]),
    (
        "qwen-coder",
        f"Sure.\n<tool_call>\n{XML}\n</tool_call>",
        "Sure.",
        [("get_weather", {"city": "Zürich", "days": 3})],
    ),
    ("qwen-coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [N]),
    ("seed", f"<seed:tool_call>\n{XML}\n</seed:tool_call>", "", [("get_weather", {"city": "Zürich", "days": 3})]),
    ("glm", f"<tool_call>get_weather\n{GLM}</tool_call>", "", [("get_weather", {"city": "7", "days": 3})]),
    ("glm", "<tool_call>now\n</tool_call>\n<tool_call>now</tool_call>", "", [N, N]),
    ("harmony", "<|channel|>final<|message|>Hello.", "Hello.", []),
    ("harmony", f"{TO_WEATHER}{WRITTEN}<|call|>", "", [W]),
    ("harmony", f" to=functions.get_weather<|channel|>commentary json<|message|>{WRITTEN}", "", [W]),
    ("harmony", TWO_MESSAGES, "One.\n\nTwo.", []),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), SAMPLES, ids=[f"{s[0]}: {s[1][:30]}" for s in SAMPLES])
def test_what_is_read_from_an_answer(name: str, text: str, content: str, calls: list[tuple[str, Any]]):
    message = read(FORMATS[name], [text])
    assert calls_of(message) == calls
    assert (message["content"], message["reasoning"]) == (content, "")
    assert read(FORMATS[name], list(text)) == message


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"harmony"}))
def test_reasoning_comes_first(name: str):
    for thinking, text in (
        (False, "<think>\nhm <b>\nhm\n</think>\n\nYes.\n"),
        (True, "hm <b>\nhm\n</think>\n\nYes.\n"),
    ):
        message = read(FORMATS[name], list(text), thinking=thinking)
        assert message == {"content": "Yes.\n", "reasoning": "hm <b>\nhm", "calls": []}
    assert read(FORMATS[name], ["cut off, \n"], thinking=True)["reasoning"] == "cut off, \n"


def test_harmonys_analysis_is_reasoning():
    text = "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
    more = "<|start|>assistant<|channel|>final<|message|>Yes."
    message = read(FORMATS["harmony"], [text + more])
    assert message == {"content": "Yes.", "reasoning": "One.\n\nTwo.", "calls": []}
    assert read(FORMATS["harmony"], ["No channels."])["content"] == "No channels."


def test_arguments_are_streamed_while_they_are_written():
    parser = OutputParser(FORMATS["hermes"], tools=TOOLS, thinking=False, identity="x")
    assert parser.push('<tool_call>\n{"name": "get_weather"').calls[0].name == "get_weather"
    assert parser.push(', "arguments": {"ci').calls[0].arguments == '{"ci'
    assert parser.push('ty": "Zür').calls[0].arguments == 'ty": "Zür'
    assert parser.push("ich").calls[0].arguments == "ich"
    assert parser.push('"}}', last=True).calls[0].arguments == '"}'


def test_a_call_that_is_cut_off_is_given_as_far_as_it_goes():
    message = read(FORMATS["hermes"], ['<tool_call>{"name": "get_weather", "arguments": {"city": "Zü'])
    assert (message["calls"][0]["name"], message["calls"][0]["arguments"]) == ("get_weather", '{"city": "Zü')
    assert read(FORMATS["hermes"], ['<tool_call>{"name": "get_w'])["content"] == '<tool_call>{"name": "get_w'


def test_without_tools_calls_are_text():
    text = f"<think>hm</think><tool_call>{CALL}</tool_call>"
    message = read(FORMATS["hermes"], [text], tools=None)
    assert message == {"content": f"<tool_call>{CALL}</tool_call>", "reasoning": "hm", "calls": []}
    assert read(FORMATS["llama3"], [PARAMETERS], tools=None)["content"] == PARAMETERS


def test_where_one_call_is_wanted_the_second_ends_the_answer():
    text = f"<tool_call>{CALL}</tool_call>" * 2
    for pieces in ([text], list(text)):
        parser = OutputParser(FORMATS["hermes"], tools=TOOLS, thinking=False, identity="x", parallel=False)
        got = [parser.push(piece) for piece in pieces]
        assert (parser.done, parser.calls) == (True, 1)
        assert json.loads("".join(call.arguments for piece in got for call in piece.calls)) == ARGUMENTS


def test_ids_of_calls():
    text = f"<tool_call>{CALL}</tool_call>" * 2
    ids = [call["id"] for call in read(FORMATS["hermes"], [text])["calls"]]
    assert ids == [call["id"] for call in read(FORMATS["hermes"], [text])["calls"]]
    assert ids != [call["id"] for call in read(FORMATS["hermes"], [text], identity="y")["calls"]]
    assert len(set(ids)) == 2
    assert all(len(identity) == 29 and identity.startswith("call_") for identity in ids)
    kimi = read(FORMATS["kimi"], [KIMI.format("now", 7, "{}")])
    assert (kimi["calls"][0]["id"], kimi["calls"][0]["name"]) == ("functions.now:7", "now")
    mistral = detect_format("[TOOL_CALLS]")
    first, second = read(mistral, ["[TOOL_CALLS]now[CALL_ID]abcdef123[ARGS]{}[TOOL_CALLS]now[ARGS]{}"])["calls"]
    assert first["id"] == "abcdef123"
    assert len(second["id"]) == 9
    assert second["id"].isalnum()


def soup(name: str) -> list[str]:
    """Words that an answer in this format may be made of, marks and parts of marks among them."""
    form = FORMATS[name]
    marks = form.marks(calls=True)
    halves = [mark[: len(mark) // 2] for mark in marks] + [mark[len(mark) // 2 :] for mark in marks]
    json_words = ["{", "}", "[", "]", '"', ",", ":", '"name"', '"arguments"', '"now"', '"a"', "1", "null", "\\", '\\"']
    words = [
        "get_weather",
        "now",
        "(",
        ")",
        "=",
        "all",
        " ",
        "\n",
        "\n\n",
        "x",
        "狐",
        "'",
        ">>>",
        "```json\n",
        "<",
        ">",
    ]
    whole = [text for form_name, text, _, _ in SAMPLES if form_name == name]
    return [*marks, *halves, *json_words, *words, *whole, CALL, WRITTEN, "function="]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_pieces_make_no_difference(name: str):
    @settings(max_examples=40, deadline=None)
    @given(words=st.lists(st.sampled_from(soup(name)), max_size=14), data=st.data(), thinking=st.booleans())
    def same(words: list[str], data: st.DataObject, thinking: bool) -> None:
        text = "".join(words)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        options = {"thinking": thinking, "parallel": data.draw(st.booleans())}
        whole = read(FORMATS[name], [text], **options)
        assert read(FORMATS[name], pieces, **options) == whole
        assert read(FORMATS[name], list(text), **options) == whole

    same()


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"harmony"}))
def test_plain_text_comes_back_as_it_is(name: str):
    @settings(max_examples=30, deadline=None)
    @given(text=st.text(st.sampled_from("ab {}[]\"'\n狐.:,"), max_size=40))
    def same(text: str) -> None:
        assert read(FORMATS[name], list(text)) == {"content": text, "reasoning": "", "calls": []}

    same()


@pytest.mark.parametrize("name", ["kimi", "deepseek", "hermes", "glm", "functionary-v3.2", "llama4"])
def test_a_model_that_repeats_itself_costs_time_in_proportion(name: str):
    begin = FORMATS[name].calls.begins[0]  # type: ignore[union-attr]

    def took(count: int) -> float:
        text = (begin + '{"a": ') * count
        began = time.process_time()
        assert read(FORMATS[name], [text[i : i + 40] for i in range(0, len(text), 40)])["content"] == text
        return time.process_time() - began

    took(100)
    small, large = min(took(1000) for _ in range(3)), min(took(8000) for _ in range(2))
    assert large < 8 * 6 * max(small, 2e-3)


def test_what_is_undecided_too_long_is_no_call():
    long = '{"arguments": {"a": "' + "x" * MAX_HELD + '"}, "name": "now"}'
    text = f"<tool_call>{long}</tool_call>"
    for pieces in ([text], [text[i : i + 1000] for i in range(0, len(text), 1000)]):
        assert read(FORMATS["hermes"], pieces) == {"content": text, "reasoning": "", "calls": []}
    short = text.replace("x" * 1000, "")
    assert read(FORMATS["hermes"], [short])["calls"][0]["name"] == "now"


def test_marks_beyond_measure_are_content():
    text = "<tool_call>no</tool_call>" * (MAX_FAILED + 1) + f"<tool_call>{CALL}</tool_call>"
    assert read(FORMATS["hermes"], [text])["content"] == text
    text = text.removeprefix("<tool_call>no</tool_call>" * 2)
    assert calls_of(read(FORMATS["hermes"], [text])) == [W]
