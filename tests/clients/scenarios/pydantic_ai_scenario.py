"""``pydantic-ai-slim``: ``OpenAIChatModel`` and ``OpenAIResponsesModel``."""

from __future__ import annotations

import asyncio

import openai
import pydantic
from pydantic_ai import Agent, ModelHTTPError, NativeOutput
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from scenario import EXPECTED, MODEL, URL, Cancelled, Town, check_ada, check_joined, flaky, run


def provider(url: str, max_retries: int = 0) -> OpenAIProvider:
    """Of an OpenAI-compatible service."""
    plain = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=max_retries, timeout=60)
    return OpenAIProvider(openai_client=plain)


def model(name: str = MODEL) -> OpenAIChatModel:
    """The service's model."""
    return OpenAIChatModel(name, provider=provider(URL))


def models(name: str = MODEL) -> list[Model]:
    """The same by each API."""
    return [model(name), OpenAIResponsesModel(name, provider=provider(URL))]


class Person(pydantic.BaseModel):
    """A person."""

    name: str
    born: int
    languages: list[str]


def chat() -> None:
    for each in models():
        result = Agent(each).run_sync("Hello")
        assert result.output == EXPECTED["greeting"]
        assert result.usage.output_tokens > 0


def stream() -> None:
    async def pieces() -> list[list[str]]:
        found = []
        for each in models():
            async with Agent(each).run_stream("Hello") as result:
                found.append([piece async for piece in result.stream_text(delta=True, debounce_by=None)])
        return found

    for each in asyncio.run(pieces()):
        check_joined(each, EXPECTED["greeting"])


def tools() -> None:
    for each in models():
        town = Town()
        agent = Agent(each, tools=[town.get_weather, town.get_time])
        town.check(agent.run_sync(EXPECTED["weather_question"]).output)


def structured() -> None:
    for each in models():
        for form in (Person, NativeOutput(Person)):
            found = Agent(each, output_type=form).run_sync(EXPECTED["ada_question"]).output
            check_ada(found.model_dump())


def error() -> None:
    for each in models("nobody"):
        try:
            Agent(each).run_sync("Hello")
        except ModelHTTPError as refused:
            assert refused.status_code == 404
        else:
            raise AssertionError("a model that there is not was found")


def retry() -> None:
    patient = OpenAIChatModel(MODEL, provider=provider(flaky("pydantic_ai"), max_retries=3))
    assert Agent(patient).run_sync("Hello").output == EXPECTED["greeting"]


def cancel() -> None:
    async def begin() -> str:
        async with Agent(model()).run_stream(EXPECTED["endless_question"]) as result:
            async for text in result.stream_text(debounce_by=None):
                if len(text) > 20:
                    return text
        raise AssertionError("it ended")

    with Cancelled():
        text = asyncio.run(begin())
    assert text.startswith(EXPECTED["endless_begins"])


if __name__ == "__main__":
    run(chat, stream, tools, structured, error, retry, cancel)
