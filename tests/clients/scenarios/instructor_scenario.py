"""``instructor`` in its modes with a schema: as a tool, as tools in parallel, as JSON, as a strict JSON schema."""

from __future__ import annotations

from collections.abc import Iterable

import instructor
import openai
import pydantic
from instructor.core.exceptions import InstructorRetryException
from scenario import EXPECTED, MODEL, URL, Cancelled, check_ada, check_joined, flaky, run


def client_at(url: str, mode: instructor.Mode, max_retries: int = 0) -> instructor.Instructor:
    """A client in one mode."""
    plain = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=max_retries, timeout=60)
    return instructor.from_openai(plain, mode=mode)


ASKED = [{"role": "user", "content": EXPECTED["ada_question"]}]


class Person(pydantic.BaseModel):
    """A person."""

    name: str
    born: int
    languages: list[str]


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: str


def chat() -> None:
    client = client_at(URL, instructor.Mode.TOOLS)
    check_ada(client.chat.completions.create(model=MODEL, messages=ASKED, response_model=Person).model_dump())


def json_schema() -> None:
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
        client = client_at(URL, mode)
        check_ada(client.chat.completions.create(model=MODEL, messages=ASKED, response_model=Person).model_dump())


def stream() -> None:
    client = client_at(URL, instructor.Mode.TOOLS)
    seen = list(client.chat.completions.create_partial(model=MODEL, messages=ASKED, response_model=Person))
    check_ada(seen[-1].model_dump())
    assert len(seen) > 2
    plain = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
    chunks = instructor.from_openai(plain).chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}], response_model=None, stream=True
    )
    check_joined(
        [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content], EXPECTED["greeting"]
    )


def tools() -> None:
    client = client_at(URL, instructor.Mode.PARALLEL_TOOLS)
    question = [{"role": "user", "content": EXPECTED["weather_question"]}]
    found = list(client.chat.completions.create(model=MODEL, messages=question, response_model=Iterable[Weather]))
    assert {one.city for one in found} == {"Paris", "Oslo"}


def error() -> None:
    client = client_at(URL, instructor.Mode.TOOLS)
    try:
        client.chat.completions.create(model="nobody", messages=ASKED, response_model=Person, max_retries=1)
    except InstructorRetryException as refused:
        assert "nobody" in str(refused)
    else:
        raise AssertionError("a model that there is not was found")


def retry() -> None:
    client = client_at(flaky("instructor"), instructor.Mode.TOOLS, max_retries=3)
    check_ada(client.chat.completions.create(model=MODEL, messages=ASKED, response_model=Person).model_dump())


def cancel() -> None:
    client = client_at(URL, instructor.Mode.TOOLS)
    endless = [{"role": "user", "content": EXPECTED["endless_question"]}]
    with Cancelled():
        chunks = client.chat.completions.create(model=MODEL, messages=endless, response_model=None, stream=True)
        text = ""
        for chunk in chunks:
            text += chunk.choices[0].delta.content or ""
            if len(text) > 20:
                break
        chunks.close()
    assert text.startswith(EXPECTED["endless_begins"])


if __name__ == "__main__":
    run(chat, json_schema, stream, tools, error, retry, cancel)
