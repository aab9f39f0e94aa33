"""``openai-agents``: its default model, which speaks Responses, and the one that speaks chat completions."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pydantic
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from scenario import EXPECTED, MODEL, URL, Cancelled, Town, check_ada, check_joined, flaky, run

set_tracing_disabled(True)  # else it sends traces to a host of its maker
client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)


class Person(pydantic.BaseModel):
    """A person."""

    name: str
    born: int
    languages: list[str]


def models(name: str = MODEL) -> list[Any]:
    """Both."""
    return [kind(model=name, openai_client=client) for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel)]


def ask(agent: Agent, question: str) -> Any:
    """What it says in the end."""

    async def asked() -> Any:
        return (await Runner.run(agent, question)).final_output

    return loop.run_until_complete(asked())


def chat() -> None:
    for model in models():
        assert ask(Agent(name="a", model=model), "Hello") == EXPECTED["greeting"]


def stream() -> None:
    async def pieces(model: Any) -> list[str]:
        result = Runner.run_streamed(Agent(name="a", model=model), "Hello")
        return [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]

    for model in models():
        check_joined(loop.run_until_complete(pieces(model)), EXPECTED["greeting"])


def tools() -> None:
    for model in models():
        town = Town()
        functions = [function_tool(town.get_weather), function_tool(town.get_time)]
        town.check(ask(Agent(name="a", model=model, tools=functions), EXPECTED["weather_question"]))


def structured() -> None:
    for model in models():
        found = ask(Agent(name="a", model=model, output_type=Person), EXPECTED["ada_question"])
        check_ada(found.model_dump())


def error() -> None:
    for model in models("nobody"):
        try:
            ask(Agent(name="a", model=model), "Hello")
        except openai.NotFoundError:
            pass
        else:
            raise AssertionError("a model that there is not was found")


def retry() -> None:
    patient = openai.AsyncOpenAI(base_url=f"{flaky('openai_agents')}/v1", api_key="none", max_retries=3)
    model = OpenAIResponsesModel(model=MODEL, openai_client=patient)
    assert ask(Agent(name="a", model=model), "Hello") == EXPECTED["greeting"]


def cancel() -> None:
    async def begin(model: Any) -> str:
        result = Runner.run_streamed(Agent(name="a", model=model), EXPECTED["endless_question"])
        text = ""
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                text += event.data.delta
                if len(text) > 20:
                    break
        result.cancel()
        async for _ in result.stream_events():
            pass
        return text

    for model in models():
        with Cancelled():
            text = loop.run_until_complete(begin(model))
        assert text.startswith(EXPECTED["endless_begins"])


if __name__ == "__main__":
    loop = asyncio.new_event_loop()
    run(chat, stream, tools, structured, error, retry, cancel)
