"""The ``openai`` package: chat completions and the Responses API."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
from scenario import EXPECTED, MODEL, OPENAI_TOOLS, URL, Cancelled, Town, check_ada, check_joined, flaky, run

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


class Person(pydantic.BaseModel):
    """What is asked for."""

    name: str
    born: int
    languages: list[str]


def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO)
    (choice,) = answer.choices
    assert choice.message.content == EXPECTED["greeting"]
    assert choice.message.reasoning_content == EXPECTED["greeting_reasoning"]
    assert choice.finish_reason == "stop"
    assert answer.usage.prompt_tokens > 0
    assert answer.usage.completion_tokens > 0


def stream() -> None:
    asked = {"model": MODEL, "messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**asked))
    check_joined(
        [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content], EXPECTED["greeting"]
    )
    assert chunks[-1].usage.completion_tokens > 0


def tools() -> None:
    town = Town()
    messages: list[Any] = [{"role": "user", "content": EXPECTED["weather_question"]}]
    for _ in range(3):
        message = client.chat.completions.create(model=MODEL, messages=messages, tools=OPENAI_TOOLS).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = town.call(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    town.check(message.content)


def streamed_tools() -> None:
    town = Town()
    messages: list[Any] = [{"role": "user", "content": EXPECTED["weather_question"]}]
    for _ in range(3):
        with client.chat.completions.stream(model=MODEL, messages=messages, tools=OPENAI_TOOLS) as events:
            message = events.get_final_completion().choices[0].message
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = town.call(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    town.check(message.content)


def structured() -> None:
    asked: list[Any] = [{"role": "user", "content": EXPECTED["ada_question"]}]
    answer = client.chat.completions.parse(model=MODEL, messages=asked, response_format=Person)
    check_ada(answer.choices[0].message.parsed.model_dump())


def error() -> None:
    try:
        client.chat.completions.create(model="nobody", messages=HELLO)
    except openai.NotFoundError as refused:
        assert refused.code == "model_not_found"
    else:
        raise AssertionError("a model that there is not was found")
    try:
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=-1)
    except openai.BadRequestError as refused:
        assert refused.param == "temperature"
    else:
        raise AssertionError("a temperature below zero was taken")


def retry() -> None:
    patient = openai.OpenAI(base_url=f"{flaky('openai')}/v1", api_key="none", max_retries=3)
    answer = patient.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.choices[0].message.content == EXPECTED["greeting"]


def cancel() -> None:
    asked: list[Any] = [{"role": "user", "content": EXPECTED["endless_question"]}]
    with Cancelled():
        events = client.chat.completions.create(model=MODEL, messages=asked, stream=True)
        text = ""
        for chunk in events:
            text += chunk.choices[0].delta.content or ""
            if len(text) > 20:
                break
        events.close()
    assert text.startswith(EXPECTED["endless_begins"])


def responses() -> None:
    answer = client.responses.create(model=MODEL, input="Hello")
    assert answer.output_text == EXPECTED["greeting"]
    assert answer.usage.output_tokens > 0
    again = client.responses.create(model=MODEL, input="Hello", previous_response_id=answer.id)
    assert again.usage.input_tokens > answer.usage.input_tokens
    assert client.responses.retrieve(answer.id).output_text == EXPECTED["greeting"]
    client.responses.delete(answer.id)


def streamed_responses() -> None:
    with client.responses.stream(model=MODEL, input="Hello") as events:
        pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
        final = events.get_final_response()
    check_joined(pieces, EXPECTED["greeting"])
    assert final.output_text == EXPECTED["greeting"]


def tools_of_responses() -> None:
    town = Town()
    functions: list[Any] = [{"type": "function"} | tool["function"] for tool in OPENAI_TOOLS]
    given: Any = EXPECTED["weather_question"]
    previous: Any = openai.omit
    for _ in range(3):
        answer = client.responses.create(model=MODEL, input=given, tools=functions, previous_response_id=previous)
        previous = answer.id
        given = [
            {
                "type": "function_call_output",
                "call_id": item.call_id,
                "output": town.call(item.name, json.loads(item.arguments)),
            }
            for item in answer.output
            if item.type == "function_call"
        ]
        if not given:
            break
    town.check(answer.output_text)


def structured_responses() -> None:
    answer = client.responses.parse(model=MODEL, input=EXPECTED["ada_question"], text_format=Person)
    check_ada(answer.output_parsed.model_dump())


def cancelled_responses() -> None:
    with Cancelled():
        events = client.responses.create(model=MODEL, input=EXPECTED["endless_question"], stream=True)
        text = ""
        for event in events:
            text += event.delta if event.type == "response.output_text.delta" else ""
            if len(text) > 20:
                break
        events.close()
    assert text.startswith(EXPECTED["endless_begins"])


if __name__ == "__main__":
    run(chat, stream, tools, streamed_tools, structured, error, retry, cancel)
    run(responses, streamed_responses, tools_of_responses, structured_responses, cancelled_responses)
