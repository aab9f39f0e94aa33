"""``llama-index-llms-openai-like``: ``OpenAILike``."""

from __future__ import annotations

import gc

import openai
import pydantic
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from scenario import EXPECTED, MODEL, URL, Cancelled, Town, check_ada, check_joined, flaky, run


def llm_at(url: str, model: str = MODEL, max_retries: int = 0) -> OpenAILike:
    """The model as this package sees it."""
    return OpenAILike(
        model=model,
        api_base=f"{url}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        context_window=65_536,
        max_retries=max_retries,
        timeout=60,
    )


llm = llm_at(URL)


class Person(pydantic.BaseModel):
    """A person."""

    name: str
    born: int
    languages: list[str]


def chat() -> None:
    assert llm.chat([ChatMessage(role="user", content="Hello")]).message.content == EXPECTED["greeting"]
    assert llm.complete("Hello").text == EXPECTED["greeting"]


def stream() -> None:
    pieces = [piece.delta for piece in llm.stream_chat([ChatMessage(role="user", content="Hello")]) if piece.delta]
    check_joined(pieces, EXPECTED["greeting"])


def tools() -> None:
    town = Town()
    functions = {name: FunctionTool.from_defaults(getattr(town, name)) for name in ("get_weather", "get_time")}
    history = [ChatMessage(role="user", content=EXPECTED["weather_question"])]
    for _ in range(3):
        answer = llm.chat_with_tools(list(functions.values()), chat_history=history, allow_parallel_tool_calls=True)
        history.append(answer.message)
        for call in llm.get_tool_calls_from_response(answer, error_on_no_tool_call=False):
            result = functions[call.tool_name].call(**call.tool_kwargs)
            history.append(
                ChatMessage(role="tool", content=str(result), additional_kwargs={"tool_call_id": call.tool_id})
            )
    town.check(answer.message.content)


def structured() -> None:
    found = llm.as_structured_llm(Person).complete(EXPECTED["ada_question"])
    check_ada(found.raw.model_dump())


def error() -> None:
    try:
        llm_at(URL, model="nobody").complete("Hello")
    except openai.NotFoundError:
        pass
    else:
        raise AssertionError("a model that there is not was found")


def retry() -> None:
    assert llm_at(flaky("llama_index"), max_retries=3).complete("Hello").text == EXPECTED["greeting"]


def cancel() -> None:
    with Cancelled():
        pieces = llm.stream_complete(EXPECTED["endless_question"])
        for piece in pieces:
            text = piece.text
            if len(text) > 20:
                break
        del pieces, piece  # its streams have no way to be closed
        gc.collect()
    assert text.startswith(EXPECTED["endless_begins"])


if __name__ == "__main__":
    run(chat, stream, tools, structured, error, retry, cancel)
