"""Bodies of Anthropic's Messages API become chats: what is known is translated, what is not leaves no trace."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from penstock.config.limits import RequestLimits
from penstock.errors import BadField, RequestError
from penstock.processing.requests.anthropic import MessagesOptions, messages_chat
from penstock.processing.requests.skipped import SkippedKinds

LIMITS = RequestLimits()
HI = [{"role": "user", "content": "Hi"}]
READ = {"name": "read", "description": "Reads.", "input_schema": {"type": "object", "properties": {"path": {}}}}
BILLING = "x-anthropic-billing-header: cc_version=2.1.197; cch=00a1f;"


def chat(*, sees: bool = False, strip: bool = True, **body: Any) -> dict[str, Any]:
    """The chat of a body, with the fields that a test is not about filled in."""
    options = MessagesOptions(SkippedKinds("/v1/messages"), 2048, strip_billing_header=strip)
    return messages_chat({"model": "m", "max_tokens": 9, "messages": HI} | body, LIMITS, sees=sees, options=options)


def messages(**body: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = chat(**body)["messages"]
    return found


def test_fields_become_those_of_a_chat() -> None:
    given = chat(stop_sequences=["END"], temperature=0.5, top_k=3, stream=True, service_tier="standard_only", seed=7)
    assert given == {
        "model": "m",
        "max_tokens": 9,
        "messages": HI,
        "stop": ["END"],
        "temperature": 0.5,
        "top_k": 3,
        "stream": True,
        "service_tier": "default",
        "seed": 7,
    }


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("Be brief.", "Be brief."),
        ([{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}], "Be brief."),
        ([{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}], "One.\n\nTwo."),
        ([{"type": "text", "text": BILLING}, {"type": "text", "text": "You code."}], "You code."),
        (f"{BILLING}\nYou code.", "You code."),
        ([{"type": "hologram", "data": "?"}, {"type": "text", "text": "Be brief."}], "Be brief."),
    ],
)
def test_a_system_prompt_comes_first(system: Any, expected: str) -> None:
    assert messages(system=system) == [{"role": "system", "content": expected}, *HI]


def test_the_billing_header_stays_where_the_operator_wants_it() -> None:
    assert messages(system=f"{BILLING}\nYou code.", strip=False)[0]["content"] == f"{BILLING}\nYou code."
    quoted = f"Explain this line:\n{BILLING}"
    assert messages(messages=[{"role": "user", "content": quoted}]) == [{"role": "user", "content": quoted}]


def test_a_system_message_amid_the_chat_keeps_its_place() -> None:
    turns = [*HI, {"role": "assistant", "content": "Yes?"}, {"role": "system", "content": "Be brief."}, *HI]
    assert [turn["role"] for turn in messages(messages=turns)] == ["user", "assistant", "system", "user"]


def test_a_turn_with_tools_becomes_messages_of_a_chat() -> None:
    turns: Any = [
        {"role": "user", "content": "Read both."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Two files.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I read."},
                {"type": "tool_use", "id": "call_a", "name": "read", "input": {"path": "ä"}},
                {"type": "tool_use", "id": "call_b", "name": "read", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_a", "content": [{"type": "text", "text": "A"}]},
                {"type": "tool_result", "tool_use_id": "call_b", "content": "no such file", "is_error": True},
                {"type": "text", "text": "Well?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    function = {"name": "read", "arguments": '{"path": "ä"}'}
    assert messages(messages=turns) == [
        {"role": "user", "content": "Read both."},
        {
            "role": "assistant",
            "content": "I read.",
            "reasoning_content": "Two files.",
            "tool_calls": [
                {"type": "function", "id": "call_a", "function": function},
                {"type": "function", "id": "call_b", "function": {"name": "read", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "content": "A", "tool_call_id": "call_a"},
        {"role": "tool", "content": "Error: no such file", "tool_call_id": "call_b"},
        {"role": "user", "content": "Well?"},
    ]


PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


def test_images_are_parts_and_those_of_results_follow_in_the_users_message() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [PICTURE, {"type": "text", "text": "a plot"}]}
    turns = [{"role": "user", "content": [result]}]
    assert messages(messages=turns, sees=True) == [
        {"role": "tool", "content": "a plot", "tool_call_id": "c"},
        {"role": "user", "content": [part]},
    ]
    (blind,) = messages(messages=turns)
    assert "An image was omitted" in blind["content"]


def test_turns_of_one_role_that_follow_one_another_are_one() -> None:
    """As Anthropic combines them; many templates take nothing else."""
    text = [{"type": "text", "text": "b"}]
    result = {"type": "tool_result", "tool_use_id": "c", "content": "r"}
    call = {"type": "tool_use", "id": "c", "name": "read", "input": {}}
    turns = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": text},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"}]},
        {"role": "assistant", "content": "One, "},
        {"role": "assistant", "content": [{"type": "text", "text": "two."}, call]},
        {"role": "user", "content": "and"},
        {"role": "user", "content": [result]},
        {"role": "system", "content": "s1"},
        {"role": "system", "content": "s2"},
    ]
    function = {"name": "read", "arguments": "{}"}
    assert messages(messages=turns) == [
        {"role": "user", "content": [{"type": "text", "text": "a"}, *text]},
        {
            "role": "assistant",
            "content": "One, two.",
            "reasoning_content": "t",
            "tool_calls": [{"type": "function", "function": function, "id": "c"}],
        },
        {"role": "tool", "content": "r", "tool_call_id": "c"},
        {"role": "user", "content": "and"},
        {"role": "system", "content": "s1\n\ns2"},
    ]


def test_thinking_that_was_not_displayed_is_read_from_its_signature() -> None:
    signature = "penstock-thinking:SG0uw7w="
    block = {"type": "thinking", "thinking": "", "signature": signature}
    turns = [*HI, {"role": "assistant", "content": [block, {"type": "text", "text": "a"}]}, *HI]
    assert messages(messages=turns)[1] == {"role": "assistant", "content": "a", "reasoning_content": "Hm.ü"}


def test_a_tool_that_was_skipped_is_not_chosen_either() -> None:
    search = {"type": "web_search_20260101", "name": "web_search"}
    chosen = {"type": "tool", "name": "web_search"}
    assert chat(tools=[search, READ], tool_choice=chosen) == chat(tools=[READ])
    assert chat(tools=[search], tool_choice=chosen) == chat()


def test_documents_that_are_not_read_leave_a_note() -> None:
    pdf = {"type": "document", "title": "Plan", "source": {"type": "base64", "media_type": "application/pdf"}}
    (told,) = messages(messages=[{"role": "user", "content": [pdf]}])
    assert told["content"] == "Plan\n[A document was omitted: only documents of text are read here.]"


def test_images_within_documents_are_seen() -> None:
    inner = [{"type": "text", "text": "before"}, PICTURE, {"type": "text", "text": "behind"}]
    document = {"type": "document", "title": "T", "source": {"type": "content", "content": inner}}
    (told,) = messages(messages=[{"role": "user", "content": [document]}], sees=True)
    assert [part.get("text", "image") for part in told["content"]] == ["T\nbefore", "image", "behind"]


def test_documents_are_text() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "Once."}
    turns = [{"role": "user", "content": [{"type": "document", "title": "Tale", "source": source}]}]
    assert messages(messages=turns) == [{"role": "user", "content": "Tale\nOnce."}]


def test_what_is_not_known_is_skipped_logged_once_and_leaves_the_prompt_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    options = MessagesOptions(SkippedKinds("/v1/messages"), 2048)
    plain = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}
    odd: dict[str, Any] = {
        **plain,
        "wormhole": 1,
        "tools": [{"type": "web_search_20260101", "name": "web_search"}],
        "tool_choice": {"type": "any"},
        "messages": [
            {
                "role": "user",
                "mood": "gay",
                "content": [{"type": "smell", "x": [1]}, {"type": "text", "text": "Hi", "y": {}}],
            }
        ],
    }
    for _ in range(2):
        assert messages_chat(odd, LIMITS, sees=False, options=options) == messages_chat(
            plain, LIMITS, sees=False, options=options
        )
    assert sorted(record.getMessage().split(": ")[1] for record in caplog.records) == [
        "content 'smell' (logged once)",
        "field 'wormhole' (logged once)",
        "field of a block of text 'y' (logged once)",
        "field of a message 'mood' (logged once)",
        "tool 'web_search_20260101' (logged once)",
    ]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "read"}, {"tool_choice": {"type": "function", "function": {"name": "read"}}}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"tool_choice": "auto", "parallel_tool_calls": False}),
    ],
)
def test_tools_and_their_choice(choice: Any, expected: dict[str, Any]) -> None:
    given = chat(tools=[READ], tool_choice=choice)
    function = {"name": "read", "description": "Reads.", "parameters": READ["input_schema"]}
    assert given["tools"] == [{"type": "function", "function": function}]
    assert {name: given[name] for name in ("tool_choice", "parallel_tool_calls") if name in given} == expected


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        *(
            (
                {"thinking": {"type": "enabled", "budget_tokens": budget}},
                {"enable_thinking": True, "thinking": True, "thinking_budget": budget, "reasoning_effort": effort},
            )
            for budget, effort in ((2000, "low"), (10_000, "medium"), (31_999, "high"))
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 31_999}, "output_config": {"effort": "medium"}},
            {"enable_thinking": True, "thinking": True, "thinking_budget": 31_999, "reasoning_effort": "medium"},
        ),
        ({"thinking": {"type": "between_tools"}, "output_config": {"effort": "max"}}, {"reasoning_effort": "high"}),
        ({"thinking": {"type": "of_tomorrow"}, "output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
    ],
)
def test_thinking_is_told_to_the_template(fields: dict[str, Any], arguments: dict[str, Any]) -> None:
    assert chat(**fields)["chat_template_kwargs"] == arguments


def test_a_last_message_of_the_assistant_is_continued() -> None:
    given = chat(messages=[*HI, {"role": "assistant", "content": "Once"}])
    assert (given["continue_final_message"], given["add_generation_prompt"]) == (True, False)


def test_a_schema_of_the_output() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    assert chat(output_config={"format": {"type": "json_schema", "schema": schema}})["response_format"] == wanted
    assert chat(output_format={"type": "json_schema", "schema": schema})["response_format"] == wanted


ID = "5f0c2a52-6c3e-4a0e-9a53-0c5a4e3f9b11"


@pytest.mark.parametrize(
    ("user", "session"),
    [
        (json.dumps({"device_id": "d" * 64, "account_uuid": "", "session_id": ID}), ID),
        (f"user_{'a' * 64}_account_{ID[::-1]}_session_{ID}", ID),
        ("somebody", None),
        ("u" * 5000, None),
        ('{"device_id": "d"}', None),
        ('{"session_id": 3}', None),
        ("{not JSON", None),
        ("user_a_session_", None),
    ],
)
def test_the_user_id_names_a_session_where_it_is_that_of_claude_code(user: str, session: str | None) -> None:
    assert chat(metadata={"user_id": user}).get("prompt_cache_key") == session
    assert chat(metadata={"user_id": user}, prompt_cache_key="own")["prompt_cache_key"] == "own"


def test_a_session_name_that_is_too_long_is_refused() -> None:
    with pytest.raises(BadField, match="metadata"):
        chat(metadata={"user_id": f"user_session_{'s' * 300}"})


def test_counting_needs_no_length_and_has_the_prompt_of_the_message() -> None:
    options = MessagesOptions(SkippedKinds("/v1/messages"), 2048)
    body = {"model": "m", "messages": HI, "system": "S", "tools": [READ], "thinking": {"type": "disabled"}}
    counted = messages_chat(body, LIMITS, sees=False, options=options, counts=True)
    whole = messages_chat(body | {"max_tokens": 1}, LIMITS, sees=False, options=options)
    assert counted | {"max_tokens": 1} == whole


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "a", "input": []}]}]},
         "messages[0].content[0].input"),
        ({"system": 3}, "system"),
        ({"stream": "yes"}, "stream"),
        ({"temperature": 3}, "temperature"),
        ({"stop_sequences": [1]}, "stop_sequences[0]"),
        ({"tools": [READ], "tool_choice": {"type": "tool", "name": "write"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [{"name": 1}]}, "tools[0].name"),
        ({"thinking": {"type": 1}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": "many"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": 1}}, "thinking.display"),
        ({"tools": [{"type": 1, "name": "a"}]}, "tools[0].type"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": 1}}]}]},
         "messages[0].content[0].source.type"),
        ({"messages": [{"role": "user", "content": [{"type": "of_tomorrow"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": [
            {"type": "thinking", "thinking": "", "signature": "penstock-thinking:%"}]}]},
         "messages[0].content[0].signature"),
        ({"metadata": {"user_id": 3}}, "metadata.user_id"),
    ],
)  # fmt: skip
def test_a_known_field_of_a_wrong_type_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        chat(**fields)
    assert refused.value.param == param


def test_content_blocks_are_bounded_in_sum() -> None:
    limits = RequestLimits(max_content_parts=3)
    block = {"type": "text", "text": "a"}
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": [block, block]}] * 2}
    with pytest.raises(RequestError, match="max_content_parts"):
        messages_chat(body, limits, sees=False, options=MessagesOptions(SkippedKinds("/v1/messages"), 2048))
