"""The ``openai`` Python client against a real ``penstock serve``, split and aggregated: what its users rely on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest

from .clients import openai_client
from .one_answer import TRUSTING
from .server import PenstockServer

MODEL = "storyteller"
STORY = [{"role": "user", "content": "Tell me a story about a little fox who was lost."}]


@pytest.fixture(scope="module", params=["split", pytest.param("aggregated", marks=pytest.mark.long)])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PenstockServer]:
    flags = ["--aggregated"] if request.param == "aggregated" else []
    with PenstockServer(flags, config=TRUSTING, folder=tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def client(server: PenstockServer) -> Iterator[openai.OpenAI]:
    with openai_client(server) as made:
        yield made


def test_models_tell_the_context(client: openai.OpenAI):
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert model.max_model_len == 2048
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_chat_answer(client: openai.OpenAI):
    answer = client.chat.completions.create(model=MODEL, messages=STORY, max_tokens=40, temperature=0)
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 40
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 40
    assert answer.system_fingerprint.startswith("ps-")


def test_streamed_and_not_streamed_are_one_answer(client: openai.OpenAI):
    ask = {"model": MODEL, "messages": STORY, "max_tokens": 60, "temperature": 0.8, "seed": 11}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert len([c for c in chunks if c.choices and c.choices[0].delta.content]) > 5  # it really streams
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_seed_reported_reproduces_the_answer(client: openai.OpenAI):
    ask = {"model": MODEL, "messages": STORY, "max_tokens": 30}
    first = client.chat.completions.create(**ask)
    seed = first.model_extra["penstock"]["seed"]
    again = client.chat.completions.create(**ask, seed=seed)
    assert again.choices[0].message.content == first.choices[0].message.content
    (chunk, *_) = client.chat.completions.create(**ask, stream=True)
    assert isinstance(chunk.model_extra["penstock"]["seed"], int)


def test_n_choices_differ_and_are_each_reproducible(client: openai.OpenAI):
    ask = {"model": MODEL, "messages": STORY, "max_tokens": 24, "seed": 5, "n": 4}
    answer = client.chat.completions.create(**ask)
    texts = [choice.message.content for choice in sorted(answer.choices, key=lambda c: c.index)]
    assert len(set(texts)) == 4
    streamed = [""] * 4
    for chunk in client.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    assert answer.usage.completion_tokens == 96


def test_chat_logprobs(client: openai.OpenAI):
    answer = client.chat.completions.create(
        model=MODEL, messages=STORY, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 8
    assert "".join(item.token for item in content) == answer.choices[0].message.content
    for item in content:
        assert item.logprob <= 0
        assert len(item.top_logprobs) == 3
        assert item.top_logprobs[0].token == item.token  # greedy takes the likeliest
        assert bytes(item.bytes).decode() == item.token
        assert sum(math.exp(other.logprob) for other in item.top_logprobs) <= 1.0001


def test_completions_with_echo_and_logprobs(client: openai.OpenAI):
    answer = client.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=5, temperature=0, echo=True, logprobs=2
    )
    (choice,) = answer.choices
    assert choice.text.startswith("Once upon a time")
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
    assert len(choice.logprobs.tokens) == answer.usage.total_tokens
    assert "".join(choice.logprobs.tokens) == choice.text


def test_a_batch_of_prompts_and_token_ids(client: openai.OpenAI):
    texts = client.completions.create(
        model=MODEL, prompt=["Once upon a time", "The little fox"], max_tokens=6, temperature=0, n=2
    )
    assert [choice.index for choice in texts.choices] == [0, 1, 2, 3]
    assert texts.choices[0].text == texts.choices[1].text  # greedy
    ids = client.completions.create(model=MODEL, prompt=[[10, 20, 30], [40, 50]], max_tokens=3, temperature=0)
    assert len(ids.choices) == 2
    assert ids.usage.prompt_tokens == 5


def test_stop_strings_end_the_answer_before_them(client: openai.OpenAI):
    free = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=60, temperature=0)
    text = free.choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 4]
    held = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=60, temperature=0, stop=[stop])
    assert held.choices[0].text == text[: text.index(stop)]
    assert held.choices[0].finish_reason == "stop"
    streamed = "".join(
        chunk.choices[0].text
        for chunk in client.completions.create(
            model=MODEL, prompt="Once upon a time", max_tokens=60, temperature=0, stop=[stop], stream=True
        )
    )
    assert streamed == held.choices[0].text


def test_usage_tells_cached_tokens(client: openai.OpenAI):
    prompt = [(7 * i) % 4000 + 10 for i in range(200)]
    ask = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0}
    cold = client.completions.create(**ask)
    warm = client.completions.create(**ask)
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.usage.prompt_tokens_details.cached_tokens == 192
    assert warm.choices[0].text == cold.choices[0].text


def test_errors_are_those_the_client_knows(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-9", messages=STORY)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt=[10] * 2000, max_tokens=100)
    assert long.value.code == "context_length_exceeded"
    assert "2048" in str(long.value)
    assert "2100" in str(long.value)
    with pytest.raises(openai.BadRequestError) as hot:
        client.chat.completions.create(model=MODEL, messages=STORY, temperature=3)
    assert hot.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="Unrecognized request argument"):
        client.chat.completions.create(model=MODEL, messages=STORY, extra_body={"no_such_field": 1})


def test_an_unfinished_stream_can_be_closed(client: openai.OpenAI, server: PenstockServer):
    stream = client.completions.create(
        model=MODEL, prompt=[10, 11, 12], max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    server.wait_idle()  # both legs are free


class Flaky(httpx.HTTPTransport):
    """A network that answers 429 a few times before it lets a request through."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures
        self.seen = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.seen += 1
        if self.seen <= self.failures:
            return httpx.Response(429, headers={"retry-after-ms": "1"}, json={"error": {"message": "later"}})
        return super().handle_request(request)


def test_the_clients_own_retries_reach_the_same_answer(server: PenstockServer):
    transport = Flaky(failures=2)
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=2, http_client=httpx.Client(transport=transport)
    ) as client:
        answer = client.completions.create(model=MODEL, prompt="Once", max_tokens=3, temperature=0)
    assert transport.seen == 3
    assert answer.usage.completion_tokens == 3


async def test_the_async_client_streams_many_at_once(server: PenstockServer):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        async def one(seed: int) -> str:
            stream = await client.chat.completions.create(
                model=MODEL, messages=STORY, max_tokens=20, seed=seed, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        import asyncio

        first = await asyncio.gather(*(one(seed) for seed in range(12)))
        again = [await one(seed) for seed in range(12)]
    assert first == again


class Pet(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    name: str = pydantic.Field(max_length=24)
    kind: Literal["fox", "dog", "owl"]
    age: int | None
    friends: list[Literal["Anna", "Ben"]] = pydantic.Field(max_length=2)


def test_parse_gives_the_type_that_was_asked_for(client: openai.OpenAI):
    answer = client.chat.completions.parse(
        model=MODEL, messages=STORY, response_format=Pet, max_tokens=300, seed=3, n=3, temperature=0.8
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Pet)


def test_a_stream_is_parsed_too_and_is_the_same_answer(client: openai.OpenAI):
    ask = {"model": MODEL, "messages": STORY, "response_format": Pet, "max_tokens": 300, "seed": 4}
    whole = client.chat.completions.parse(**ask).choices[0].message.parsed
    with client.chat.completions.stream(**ask) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert len(pieces) > 5
    assert final.choices[0].message.parsed == whole


def test_an_answer_that_is_too_long_is_cut_and_says_so(client: openai.OpenAI):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=STORY, response_format=Pet, max_tokens=5)
    answer = client.chat.completions.create(
        model=MODEL, messages=STORY, response_format={"type": "json_object"}, max_tokens=6
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content.startswith("{")


def test_one_of_several_choices(client: openai.OpenAI):
    answer = client.completions.create(
        model=MODEL, prompt="Is it? ", n=8, temperature=2, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert {choice.text for choice in answer.choices} <= {"yes", "no"}
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


def test_a_schema_that_cannot_be_followed_is_refused(client: openai.OpenAI):
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
        client.chat.completions.create(model=MODEL, messages=STORY, response_format=form)
    assert refused.value.param == "response_format.json_schema.schema"
    assert refused.value.code == "invalid_grammar"


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "tell",
            "description": "Tells a story.",
            "parameters": {
                "type": "object",
                "properties": {"about": {"enum": ["a fox", "a dog"]}, "words": {"type": "integer", "minimum": 10}},
                "required": ["about"],
                "additionalProperties": False,
            },
        },
    }
]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "tell"}}])
def test_a_demanded_call_is_made_streamed_and_not(client: openai.OpenAI, choice: Any):
    asked: Any = {"model": MODEL, "messages": STORY, "tools": TOOLS, "tool_choice": choice, "seed": 3}
    asked |= {"max_tokens": 200, "parallel_tool_calls": False}
    answer = client.chat.completions.create(**asked).choices[0]
    (call,) = answer.message.tool_calls or ()
    arguments = json.loads(call.function.arguments)
    assert (answer.finish_reason, call.function.name) == ("tool_calls", "tell")
    assert arguments["about"] in ("a fox", "a dog")
    parts = [chunk.choices[0].delta for chunk in client.chat.completions.create(stream=True, **asked)]
    functions = [tool.function for part in parts for tool in part.tool_calls or ()]
    assert "".join(function.arguments or "" for function in functions) == call.function.arguments
    assert not any(part.content for part in parts)
