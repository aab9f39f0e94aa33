"""``langchain-openai``: ``ChatOpenAI`` over chat completions."""

from __future__ import annotations

import openai
import pydantic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from scenario import EXPECTED, MODEL, URL, Cancelled, Town, check_ada, check_joined, flaky, run

model = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)


class Person(pydantic.BaseModel):
    """A person."""

    name: str
    born: int
    languages: list[str]


def chat() -> None:
    answer = model.invoke("Hello")
    assert answer.content == EXPECTED["greeting"]
    assert answer.usage_metadata["output_tokens"] > 0


def stream() -> None:
    check_joined([chunk.content for chunk in model.stream("Hello") if chunk.content], EXPECTED["greeting"])


def tools() -> None:
    town = Town()
    functions = {name: StructuredTool.from_function(getattr(town, name)) for name in ("get_weather", "get_time")}
    bound = model.bind_tools(list(functions.values()))
    messages = [HumanMessage(EXPECTED["weather_question"])]
    for _ in range(3):
        answer = bound.invoke(messages)
        messages.append(answer)
        for call in answer.tool_calls:
            messages.append(ToolMessage(functions[call["name"]].invoke(call["args"]), tool_call_id=call["id"]))
    town.check(answer.content)


def streamed_tools() -> None:
    town = Town()
    functions = {name: StructuredTool.from_function(getattr(town, name)) for name in ("get_weather", "get_time")}
    bound = model.bind_tools(list(functions.values()))
    messages = [HumanMessage(EXPECTED["weather_question"])]
    for _ in range(3):
        chunks = list(bound.stream(messages))
        answer = sum(chunks[1:], chunks[0])
        messages.append(answer)
        for call in answer.tool_calls:
            messages.append(ToolMessage(functions[call["name"]].invoke(call["args"]), tool_call_id=call["id"]))
    town.check(answer.content)


def structured() -> None:
    for method in ("json_schema", "function_calling", "json_mode"):
        told = " Answer as JSON." if method == "json_mode" else ""
        found = model.with_structured_output(Person, method=method).invoke(EXPECTED["ada_question"] + told)
        check_ada(found.model_dump())


def any_tool() -> None:
    answer = model.bind_tools([Person], tool_choice="any").invoke(EXPECTED["ada_question"])
    check_ada(answer.tool_calls[0]["args"])


def error() -> None:
    try:
        ChatOpenAI(model="nobody", base_url=f"{URL}/v1", api_key="none", max_retries=0).invoke("Hello")
    except openai.NotFoundError:
        pass
    else:
        raise AssertionError("a model that there is not was found")


def retry() -> None:
    patient = ChatOpenAI(model=MODEL, base_url=f"{flaky('langchain')}/v1", api_key="none", max_retries=3)
    assert patient.invoke("Hello").content == EXPECTED["greeting"]


def cancel() -> None:
    with Cancelled():
        chunks = model.stream(EXPECTED["endless_question"])
        text = ""
        for chunk in chunks:
            text += chunk.content
            if len(text) > 20:
                break
        chunks.close()
    assert text.startswith(EXPECTED["endless_begins"])


if __name__ == "__main__":
    run(chat, stream, tools, streamed_tools, structured, any_tool, error, retry, cancel)
