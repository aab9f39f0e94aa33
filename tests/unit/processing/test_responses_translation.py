"""Bodies of the Responses API as chats: items, tools, names, and what is skipped or refused."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.limits import RequestLimits
from penstock.config.schema import RequestConfig
from penstock.errors import RequestError
from penstock.interfaces import ResponsesRequest, ToolTarget
from penstock.processing.requests.generation import parse_chat
from penstock.processing.requests.responses import sealed_reasoning, translate_with_history
from penstock.processing.requests.sampling import ModelProperties
from penstock.processing.requests.skipped import SkippedKinds
from penstock.weights.config_json import SamplingDefaults

LIMITS = RequestLimits()
FACTS = ModelProperties(
    name="m",
    max_model_len=4096,
    vocabulary=100,
    end_tokens=(1,),
    sees=True,
    sampling=SamplingDefaults(),
    requests=RequestConfig(),
)


def translated(
    given: Any = "Hi",
    *,
    earlier: Any = (),
    referenced: Any = None,
    sees: bool = True,
    limits: RequestLimits = LIMITS,
    **fields: Any,
) -> ResponsesRequest:
    """The translation of a body, which is one that chats accept."""
    body = {"model": "m", "input": given} | fields
    request = translate_with_history(
        body, limits, earlier, referenced or {}, sees=sees, skipped=SkippedKinds("/v1/responses")
    )
    parse_chat(request.chat, limits, FACTS)
    return request


def messages_of(*items: Any, **options: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = translated(list(items), **options).chat["messages"]
    return messages


def said(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


CALL = {"type": "function_call", "call_id": "call_1", "name": "now", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "noon"}
SHOWN = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "original"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def test_text_and_instructions():
    chat = translated("Hi", instructions="Be brief.").chat
    assert chat["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert set(chat) == {"model", "messages"}


def test_reasoning_text_and_calls_of_one_turn_are_one_message():
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    turn = [said("user", "When?"), thought, said("assistant", "I look."), CALL, {**CALL, "call_id": "call_2"}, RESULT]
    messages = messages_of(*turn, said("assistant", "At noon."))
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assistant = messages[1]
    assert (assistant["content"], assistant["reasoning_content"]) == ("I look.", "Hm.")
    assert [call["id"] for call in assistant["tool_calls"]] == ["call_1", "call_2"]
    assert messages[2] == {"role": "tool", "content": "noon", "tool_call_id": "call_1"}


def test_text_behind_calls_and_reasoning_behind_text_begin_other_messages():
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    messages = messages_of(said("user", "?"), CALL, said("assistant", "one"), thought, said("assistant", "two"))
    assert [message["content"] for message in messages] == ["?", None, "one", "two"]
    assert "reasoning_content" not in messages[2]
    assert messages[3]["reasoning_content"] == "Hm."


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"content": [{"type": "reasoning_text", "text": "a"}], "encrypted_content": sealed_reasoning("b")}, "a"),
        ({"encrypted_content": sealed_reasoning("b ü"), "summary": [{"type": "summary_text", "text": "c"}]}, "b ü"),
        ({"encrypted_content": "gAAAA-another-server's", "summary": [{"type": "summary_text", "text": "c"}]}, "c"),
        ({"encrypted_content": "penstock-1.%%%", "summary": [{"type": "summary_text", "text": "c"}]}, "c"),
        ({"encrypted_content": "penstock-1." + "_w==", "summary": []}, None),  # no UTF-8
        ({"encrypted_content": "gAAAA", "summary": []}, None),
    ],
)
def test_reasoning_is_kept_however_a_client_returns_it(item: Any, text: str | None):
    messages = messages_of(said("user", "?"), {"type": "reasoning", **item}, said("assistant", "x"))
    assert messages[1].get("reasoning_content") == text


@given(st.text())
def test_sealed_reasoning_comes_back(text: str):
    item = {"type": "reasoning", "summary": [], "encrypted_content": sealed_reasoning(text)}
    messages = messages_of(said("user", "?"), item, said("assistant", "x"))
    assert messages[1].get("reasoning_content", "") == text


def test_parts_images_and_roles():
    parts = [{"type": "input_text", "text": "a"}, SHOWN, {"type": "input_text", "text": "b"}]
    messages = messages_of({"role": "developer", "content": "D"}, {"role": "user", "content": parts})
    assert messages[0] == {"role": "developer", "content": "D"}
    assert messages[1]["content"] == [{"type": "text", "text": "a"}, IMAGE, {"type": "text", "text": "b"}]


def test_images_of_tools_follow_all_results():
    result = {**RESULT, "output": [{"type": "input_text", "text": "seen"}, SHOWN]}
    other = {"type": "custom_tool_call_output", "call_id": "call_2", "output": [{"type": "output_text", "text": "t"}]}
    items = [said("user", "?"), CALL, {**CALL, "call_id": "call_2"}, result, other, said("user", "Well?")]
    messages = messages_of(*items)
    assert [(message["role"], message["content"]) for message in messages[2:]] == [
        ("tool", "seen"),
        ("tool", "t"),
        ("user", [IMAGE]),
        ("user", "Well?"),
    ]
    assert messages_of(*items[:-1])[-1] == {"role": "user", "content": [IMAGE]}
    blind = messages_of(*items, sees=False)
    assert "omitted" in blind[2]["content"]
    assert [message["role"] for message in blind] == ["user", "assistant", "tool", "tool", "user"]


def test_earlier_items_and_references():
    earlier = [said("user", "one"), said("assistant", "two")]
    stored = {
        "id": "msg_x_0",
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "R"}],
    }
    request = translated(
        [{"type": "item_reference", "id": "msg_x_0"}, {"role": "user", "content": "three"}],
        earlier=earlier,
        referenced={"msg_x_0": stored},
    )
    assert [message["content"] for message in request.chat["messages"]] == ["one", "two", "R", "three"]
    assert request.items[0] is stored
    assert translated(None, earlier=earlier).chat["messages"][-1]["content"] == "two"
    with pytest.raises(RequestError, match="Item with id 'gone' not found"):
        translated([{"id": "gone"}])


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: PATCH"}
TOOLS = [
    {"type": "function", "name": "now", "description": "Tells the time.", "parameters": None, "strict": False},
    {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": GRAMMAR},
    {
        "type": "namespace",
        "name": "mcp__docs",
        "description": "About documents.",
        "tools": [
            {"type": "function", "name": "search", "parameters": {"type": "object", "properties": {}}},
            {"type": "custom", "name": "note"},
        ],
    },
    {"type": "web_search"},
    {"type": "image_generation"},
    {"type": "mcp", "server_label": "x", "server_url": "https://x"},
    {"type": "local_shell"},
    {"type": "of_tomorrow", "name": 7},
]


def test_tools_become_functions_with_reversible_names():
    request = translated(tools=TOOLS)
    functions = {tool["function"]["name"]: tool["function"] for tool in request.chat["tools"]}
    assert list(functions) == ["now", "apply_patch", "mcp__docs__search", "mcp__docs__note"]
    assert request.tools["apply_patch"] == ToolTarget(name="apply_patch", text_argument="input")
    assert request.tools["mcp__docs__search"] == ToolTarget(name="search", namespace="mcp__docs")
    assert functions["apply_patch"]["parameters"]["required"] == ["input"]
    assert functions["apply_patch"]["description"].endswith("(lark):\n\nstart: PATCH")
    assert functions["mcp__docs__search"]["description"] == "About documents."
    assert functions["mcp__docs__note"]["description"] == ""


def test_skipped_tools_leave_the_prompt_as_it_is():
    known = [tool for tool in TOOLS if tool["type"] in ("function", "custom", "namespace")]
    assert translated(tools=TOOLS).chat == translated(tools=known).chat


def test_tools_of_one_flat_name_stay_apart():
    spaces = [
        {"type": "namespace", "name": name, "description": "", "tools": [{"type": "function", "name": "f"}]}
        for name in ("a", "a__", "a b", "a/b" * 60)
    ]
    request = translated(tools=[{"type": "function", "name": "a__f"}, *spaces])
    names = [tool["function"]["name"] for tool in request.chat["tools"]]
    assert names[:4] == ["a__f", "a__f_2", "a__f_3", "a_b__f"]
    assert len(names[4]) == 128
    assert {(target.namespace, target.name) for target in request.tools.values()} == {
        (None, "a__f"),
        *((space["name"], "f") for space in spaces),
    }


def test_calls_of_custom_and_namespaced_tools_go_back_by_the_same_names():
    items = [
        said("user", "?"),
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": 'a "b"\n'},
        {**CALL, "name": "search", "namespace": "mcp__docs"},
        {**CALL, "name": "gone", "namespace": "was"},
    ]
    calls = messages_of(*items, tools=TOOLS)[1]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["apply_patch", "mcp__docs__search", "was__gone"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"input": 'a "b"\n'}


@pytest.mark.parametrize(
    ("choice", "chat"),
    [
        ("auto", "auto"),
        ("required", "required"),
        ("none", "none"),
        ({"type": "function", "name": "now"}, {"type": "function", "function": {"name": "now"}}),
        ({"type": "custom", "name": "apply_patch"}, {"type": "function", "function": {"name": "apply_patch"}}),
        (
            {"type": "function", "name": "search", "namespace": "mcp__docs"},
            {"type": "function", "function": {"name": "mcp__docs__search"}},
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "apply_patch"}]},
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "apply_patch"}}],
                },
            },
        ),
        ({"type": "web_search"}, None),
    ],
)
def test_tool_choices(choice: Any, chat: Any):
    assert translated(tools=TOOLS, tool_choice=choice).chat.get("tool_choice") == chat


def test_a_choice_among_skipped_tools_only_is_none():
    chat = translated(tools=[{"type": "web_search"}], tool_choice="required").chat
    assert not {"tools", "tool_choice"} & set(chat)


def test_other_fields():
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    request = translated(
        max_output_tokens=7,
        temperature=0.5,
        top_logprobs=2,
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}, "verbosity": "low"},
        metadata={"a": "b"},
        prompt_cache_key="k",
        service_tier="flex",
        store=False,
        seed=3,
    )
    chat = request.chat
    assert (chat["max_completion_tokens"], chat["temperature"], chat["seed"]) == (7, 0.5, 3)
    assert (chat["logprobs"], chat["top_logprobs"], chat["reasoning_effort"]) == (True, 2, "low")
    assert chat["response_format"]["json_schema"] == {"name": "n", "schema": schema, "strict": True}
    assert (chat["prompt_cache_key"], chat["service_tier"]) == ("k", "flex")
    assert (request.store, request.summary) == (False, True)
    assert request.seal is not None
    assert request.echo["metadata"] == {"a": "b"}
    assert "service_tier" not in translated(service_tier="of_tomorrow").chat


def test_what_is_not_known_is_skipped_and_logged_once(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    skipped = SkippedKinds("/v1/responses")
    body = {
        "model": "m",
        "client_metadata": {"x": [1]},
        "tools": TOOLS[3:],
        "input": [
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"type": ["odd"]},
            {"type": "compaction", "encrypted_content": "x"},
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "hologram"}, {"type": "input_text", "text": "Hi"}],
            },
        ],
    }
    for _ in range(2):
        request = translate_with_history(body, LIMITS, (), {}, sees=False, skipped=skipped)
        assert request.chat == {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(set(lines)) == 10
    for index in range(5000):
        skipped.note("item", index)
    assert len(caplog.records) <= 1024


USER = {"type": "message", "role": "user", "content": "Hi"}
BAD = [
    ({"input": 7}, "input", "a string or an array of items"),
    ({"input": []}, "input", "at least one item"),
    ({"input": ["Hi"]}, "input[0]", "expected an object"),
    ({"input": None}, "input", "Missing required parameter: 'input'"),
    ({"input": [{"type": "message", "role": "king", "content": "x"}]}, "input[0].role", "one of user"),
    ({"input": [{"role": ["user"], "content": "x"}]}, "input[0].role", "one of user"),
    ({"input": [{"role": "user"}]}, "input[0].content", "an array of parts"),
    ({"input": [{"role": "user", "content": [7]}]}, "input[0].content[0]", "an object"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "a string"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, None, "neither files nor"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, None, "has no files"),
    ({"input": [{**SHOWN, "type": "message", "role": "user", "content": 1.5}]}, "input[0].content", "an array"),
    ({"input": [USER, {"type": "function_call", "name": 3, "arguments": ""}]}, "input[1].name", "a string"),
    ({"input": [USER, {**CALL, "arguments": {}}]}, "input[1].arguments", "a string"),
    ({"input": [USER, {**CALL, "call_id": 9}]}, "input[1].call_id", "a string"),
    ({"input": [USER, {**CALL, "namespace": []}]}, "input[1].namespace", "a string"),
    ({"input": [USER, {**RESULT, "output": 5}]}, "input[1].output", "an array of parts"),
    ({"input": [USER, {"type": "custom_tool_call", "name": "x", "input": None}]}, "input[1].input", "a string"),
    ({"input": [USER, {"type": "reasoning", "summary": "x", "content": 4}]}, "input[1].content", "an array"),
    ({"input": [{"type": "item_reference", "id": 3}]}, "input[0].id", "a string"),
    ({"instructions": ["x"]}, "instructions", "a string"),
    ({"tools": {}}, "tools", "an array"),
    ({"tools": ["x"]}, "tools[0]", "an object"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "letters"),
    ({"tools": [{"type": "function", "name": "a", "parameters": "x"}]}, "tools[0].parameters", "an object"),
    ({"tools": [{"type": "custom", "name": "a", "format": 3}]}, "tools[0].format", "an object"),
    ({"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar"}}]}, None, "a string"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": 3}]}, "tools[0].tools", "an array"),
    ({"tool_choice": 3}, "tool_choice", "a string or an object"),
    ({"tool_choice": "maybe"}, "tool_choice", "'none', 'auto', 'required'"),
    ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name", "one of 'tools'"),
    ({"tools": TOOLS, "tool_choice": {"type": "custom", "name": "x"}}, "tool_choice.name", "one of 'tools'"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "now", "namespace": []}}, None, "a string"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": 3}}, "tool_choice.tools", "an array"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": [], "tools": []}}, None, "'auto' or"),
    ({"max_output_tokens": 0}, "max_output_tokens", "an integer >= 1"),
    ({"max_output_tokens": "9"}, "max_output_tokens", "an integer"),
    ({"top_logprobs": 21}, "top_logprobs", "an integer <= 20"),
    ({"include": "x"}, "include", "an array"),
    ({"include": [1]}, "include[0]", "a string"),
    ({"reasoning": []}, "reasoning", "an object"),
    ({"reasoning": {"effort": 1}}, "reasoning.effort", "a string"),
    ({"reasoning": {"summary": 1}}, "reasoning.summary", "a string"),
    ({"text": "x"}, "text", "an object"),
    ({"text": {"format": "json"}}, "text.format", "an object"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "'json_schema'"),
    ({"text": {"format": {"type": "json_schema", "schema": 1}}}, "text.format.schema", "an object"),
    ({"text": {"format": {"type": "json_schema", "schema": {}, "strict": 1}}}, "text.format.strict", "a boolean"),
    ({"text": {"verbosity": 1}}, "text.verbosity", "a string"),
    ({"truncation": "middle"}, "truncation", "'auto' or 'disabled'"),
    ({"store": "yes"}, "store", "a boolean"),
    ({"metadata": []}, "metadata", "an object"),
    ({"metadata": {"a": 1}}, "metadata.a", "a string"),
    ({"metadata": {"a": "x" * 70_000}}, "metadata", "max_ignored_chars"),
    ({"user": 1}, "user", "a string"),
    ({"max_tool_calls": "x"}, "max_tool_calls", "an integer"),
    ({"service_tier": 1}, "service_tier", "a string"),
    ({"stream_options": 1}, "stream_options", "an object"),
    ({"background": True}, "background", "while their client waits"),
    ({"background": 1}, "background", "a boolean"),
    ({"conversation": "conv_1"}, "conversation", "no conversations"),
    ({"prompt": {"id": "p"}}, "prompt", "no prompt templates"),
]


@pytest.mark.parametrize(("fields", "param", "words"), BAD, ids=[json.dumps(fields)[:60] for fields, _, _ in BAD])
def test_a_known_field_of_a_wrong_type_is_refused_by_its_own_name(fields: Any, param: str | None, words: str):
    with pytest.raises(RequestError) as refused:
        translated(**({"given": fields.pop("input")} if "input" in fields else {}), **fields)
    assert words in refused.value.message
    assert param is None or refused.value.param == param


def test_limits():
    tools = [{"type": "function", "name": f"f{i}"} for i in range(3)]
    space = {"type": "namespace", "name": "n", "description": "", "tools": tools}
    with pytest.raises(RequestError, match="max_tools"):
        translated(tools=[space, {**space, "name": "o"}], limits=RequestLimits(max_tools=5))
    items = [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * 3}] * 2
    with pytest.raises(RequestError, match="max_content_parts"):
        translated(items, limits=RequestLimits(max_content_parts=5))
    with pytest.raises(RequestError, match="at most 2 items"):
        translated([USER] * 3, limits=RequestLimits(max_messages=2))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "role",
                    "content",
                    "text",
                    "name",
                    "id",
                    "call_id",
                    "arguments",
                    "output",
                    "input",
                    "summary",
                    "namespace",
                    "tools",
                    "format",
                    "function",
                    "mode",
                    "image_url",
                    "encrypted_content",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
KINDS = st.sampled_from(
    [
        "message",
        "reasoning",
        "function_call",
        "custom_tool_call",
        "function_call_output",
        "item_reference",
        "function",
        "custom",
        "namespace",
        "allowed_tools",
        "input_text",
        "input_image",
        "grammar",
        "json_schema",
    ]
)


@given(
    st.lists(st.tuples(KINDS, JSON), max_size=3), st.lists(st.tuples(KINDS, JSON), max_size=3), JSON, JSON, JSON, JSON
)
def test_any_json_is_translated_or_refused(items: Any, tools: Any, choice: Any, text: Any, reasoning: Any, other: Any):
    """Nothing but a RequestError, whatever stands where."""

    def typed(pairs: Any) -> list[Any]:
        return [{"type": kind, **value} if isinstance(value, dict) else value for kind, value in pairs]

    body = {
        "model": "m",
        "input": typed(items),
        "tools": typed(tools),
        "tool_choice": choice,
        "text": text,
        "reasoning": reasoning,
        "include": other,
        "metadata": other,
        "max_output_tokens": other,
        "instructions": other,
    }
    try:
        request = translate_with_history(body, LIMITS, (), {}, sees=True, skipped=SkippedKinds("/v1/responses"))
        parse_chat(request.chat, LIMITS, FACTS)
    except RequestError:
        return
    assert request.chat["messages"]
