"""``litellm``: ``completion`` as an OpenAI-compatible provider and as ``hosted_vllm``, and ``responses``."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks a host for prices

import litellm
import pydantic
from scenario import EXPECTED, MODEL, OPENAI_TOOLS, URL, Cancelled, Town, check_ada, check_joined, flaky, run

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
HERE: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "num_retries": 0}


class Person(pydantic.BaseModel):
    """What is asked for."""

    name: str
    born: int
    languages: list[str]


def chat() -> None:
    answer = litellm.completion(messages=HELLO, **HERE)
    assert answer.choices[0].message.content == EXPECTED["greeting"]
    assert answer.choices[0].message.reasoning_content == EXPECTED["greeting_reasoning"]
    assert answer.usage.completion_tokens > 0


def hosted_vllm() -> None:
    answer = litellm.completion(messages=HELLO, **HERE | {"model": f"hosted_vllm/{MODEL}"})
    assert answer.choices[0].message.content == EXPECTED["greeting"]


def stream() -> None:
    chunks = list(litellm.completion(messages=HELLO, stream=True, **HERE))
    check_joined([c.choices[0].delta.content for c in chunks if c.choices[0].delta.content], EXPECTED["greeting"])


def tools() -> None:
    town = Town()
    messages: list[Any] = [{"role": "user", "content": EXPECTED["weather_question"]}]
    for _ in range(3):
        message = litellm.completion(messages=messages, tools=OPENAI_TOOLS, **HERE).choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            result = town.call(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    town.check(message.content)


def structured() -> None:
    asked: list[Any] = [{"role": "user", "content": EXPECTED["ada_question"]}]
    answer = litellm.completion(messages=asked, response_format=Person, **HERE)
    check_ada(json.loads(answer.choices[0].message.content))


def error() -> None:
    try:
        litellm.completion(messages=HELLO, **HERE | {"model": "openai/nobody"})
    except litellm.NotFoundError:
        pass
    else:
        raise AssertionError("a model that there is not was found")
    try:
        litellm.completion(messages=[{"role": "user", "content": "word " * 140_000}], **HERE)
    except litellm.ContextWindowExceededError:
        pass
    else:
        raise AssertionError("more than the context was taken")


def retry() -> None:
    patient = HERE | {"api_base": f"{flaky('litellm')}/v1", "num_retries": 3}
    answer = litellm.completion(messages=HELLO, **patient)
    assert answer.choices[0].message.content == EXPECTED["greeting"]


def cancel() -> None:
    asked: list[Any] = [{"role": "user", "content": EXPECTED["endless_question"]}]
    with Cancelled():
        events = litellm.completion(messages=asked, stream=True, **HERE)
        text = ""
        for chunk in events:
            text += chunk.choices[0].delta.content or ""
            if len(text) > 20:
                break
        events.completion_stream.close()
    assert text.startswith(EXPECTED["endless_begins"])


def responses() -> None:
    answer = litellm.responses(input="Hello", **HERE)
    assert answer.output_text == EXPECTED["greeting"]
    pieces = [
        event.delta
        for event in litellm.responses(input="Hello", stream=True, **HERE)
        if event.type == "response.output_text.delta"
    ]
    check_joined(pieces, EXPECTED["greeting"])


def messages() -> None:
    """Its Anthropic provider."""
    there = HERE | {"model": f"anthropic/{MODEL}", "api_base": URL}
    assert litellm.completion(messages=HELLO, **there).choices[0].message.content == EXPECTED["greeting"]


if __name__ == "__main__":
    run(responses, messages, chat, hosted_vllm, stream, tools, structured, error, retry, cancel)
