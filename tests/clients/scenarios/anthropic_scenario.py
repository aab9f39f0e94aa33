"""The ``anthropic`` package: Messages, count_tokens, models."""

from __future__ import annotations

from typing import Any

import anthropic
import pydantic
from scenario import (
    DESCRIPTIONS,
    EXPECTED,
    MODEL,
    PARAMETERS,
    URL,
    Cancelled,
    Town,
    check_ada,
    check_joined,
    flaky,
    run,
)

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=60)
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
TOOLS: list[Any] = [
    {"name": name, "description": DESCRIPTIONS[name], "input_schema": schema} for name, schema in PARAMETERS.items()
]
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 2048}


class Person(pydantic.BaseModel):
    """What is asked for."""

    name: str
    born: int
    languages: list[str]


def text_of(message: Any) -> str:
    """Its text blocks, joined."""
    return "".join(block.text for block in message.content if block.type == "text")


def chat() -> None:
    message = client.messages.create(messages=HELLO, **ASKED)
    assert text_of(message) == EXPECTED["greeting"]
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens > 0


def thinking() -> None:
    asked = ASKED | {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    message = client.messages.create(messages=HELLO, **asked)
    assert [block.thinking for block in message.content if block.type == "thinking"] == [EXPECTED["greeting_reasoning"]]


def count() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens
    usage = client.messages.create(messages=HELLO, **ASKED).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).display_name


def stream() -> None:
    with client.messages.stream(messages=HELLO, **ASKED) as events:
        pieces = list(events.text_stream)
        message = events.get_final_message()
    check_joined(pieces, EXPECTED["greeting"])
    assert text_of(message) == EXPECTED["greeting"]
    assert message.usage.output_tokens > 0


def _tools(*, streamed: bool) -> None:
    town = Town()
    messages: list[Any] = [{"role": "user", "content": EXPECTED["weather_question"]}]
    for _ in range(3):
        if streamed:
            with client.messages.stream(messages=messages, tools=TOOLS, **ASKED) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(messages=messages, tools=TOOLS, **ASKED)
        messages.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            break
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": town.call(block.name, block.input)}
            for block in message.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
    town.check(text_of(message))


def tools() -> None:
    _tools(streamed=False)


def streamed_tools() -> None:
    _tools(streamed=True)


def structured() -> None:
    """By a tool that must be called, and by an output format."""
    question: list[Any] = [{"role": "user", "content": EXPECTED["ada_question"]}]
    schema = Person.model_json_schema()
    tool = {"name": "person", "description": "A person.", "input_schema": schema}
    must = {"type": "tool", "name": "person"}
    message = client.messages.create(messages=question, tools=[tool], tool_choice=must, **ASKED)
    check_ada(message.content[-1].input)
    parsed = client.messages.parse(messages=question, output_format=Person, **ASKED)
    check_ada(parsed.parsed_output.model_dump())


def error() -> None:
    try:
        client.messages.create(messages=HELLO, **ASKED | {"model": "nobody"})
    except anthropic.NotFoundError as refused:
        assert refused.body["error"]["type"] == "not_found_error"
    else:
        raise AssertionError("a model that there is not was found")
    try:
        client.messages.create(messages=HELLO, extra_body={"temperature": -1}, **ASKED)
    except anthropic.BadRequestError as refused:
        assert refused.body["error"]["type"] == "invalid_request_error"
    else:
        raise AssertionError("a temperature below zero was taken")


def retry() -> None:
    patient = anthropic.Anthropic(base_url=flaky("anthropic"), api_key="none", max_retries=3)
    assert text_of(patient.messages.create(messages=HELLO, **ASKED)) == EXPECTED["greeting"]


def cancel() -> None:
    question: list[Any] = [{"role": "user", "content": EXPECTED["endless_question"]}]
    with Cancelled(), client.messages.stream(model=MODEL, max_tokens=60_000, messages=question) as events:
        text = ""
        for piece in events.text_stream:
            text += piece
            if len(text) > 20:
                break
    assert text.startswith(EXPECTED["endless_begins"])


if __name__ == "__main__":
    run(chat, thinking, count, models, stream, tools, streamed_tools, structured, error, retry, cancel)
