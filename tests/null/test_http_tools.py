"""Tools and reasoning over HTTP: what OpenAI's own client makes of them, streamed and not."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from penstock.config.limits import RequestLimits
from penstock.processing.service import GenerationProcessor
from penstock.types import FinishReason

from .http_stage import MODEL, STORYTELLER, Stage, events_of, stage
from .streams import NullStreams

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
ASK: Any = [{"role": "user", "content": "What is the weather?"}]
WORDS = "I shall look."
CALLS = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich \\"x\\""}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
WANTED = [("get_weather", {"city": 'Zürich "x"'}), ("now", {})]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GenerationProcessor]:
    """The bundled tokenizer under a template of a model that thinks."""
    folder = tmp_path_factory.mktemp("thinker")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((STORYTELLER / name).read_bytes())
    (folder / "chat_template.jinja").write_text(
        "{{ tools | tojson if tools else '' }}{% for m in messages %}<|user|>{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>"
        "{% endfor %}<|assistant|>{{ '<think></think>' if enable_thinking is false else '<think>\n' }}"
    )
    intake = GenerationProcessor(folder, name=MODEL, max_model_len=2048, limits=RequestLimits(), created=1)
    yield intake
    intake.close()


@asynccontextmanager
async def speaking(
    text: str, finish: FinishReason = FinishReason.STOP, intake: GenerationProcessor | None = None
) -> AsyncIterator[tuple[Stage, openai.AsyncOpenAI]]:
    """A model that says ``text``."""
    async with stage(NullStreams(), intake=intake) as on:
        tokens = (await on.post("/tokenize", {"prompt": text})).json()["tokens"]
        end = [1] if finish is FinishReason.STOP else []
        on.streams.script = lambda _: ((*tokens, *end), finish)
        client = openai.AsyncOpenAI(api_key="none", base_url="http://penstock/v1", http_client=on.client, max_retries=0)
        yield on, client


def message_of(choice: Any) -> dict[str, Any]:
    """What counts of an answer that was not streamed."""
    message = choice.message
    return {
        "content": message.content or "",
        "reasoning": getattr(message, "reasoning_content", None) or "",
        "calls": [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()],
        "finish": choice.finish_reason,
    }


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> dict[str, Any]:
    """The same of one that was."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "finish": None}
    calls: list[list[str]] = []
    async for chunk in await client.chat.completions.create(model=MODEL, stream=True, **fields):
        (choice,) = chunk.choices
        delta = choice.delta
        message["content"] += delta.content or ""
        message["reasoning"] += getattr(delta, "reasoning_content", None) or ""
        assert getattr(delta, "reasoning", None) == getattr(delta, "reasoning_content", None)
        for part in delta.tool_calls or ():
            assert part.function is not None
            if part.id is not None:
                assert (part.index, part.type) == (len(calls), "function")
                calls.append([part.id, part.function.name or "", ""])
            calls[part.index][2] += part.function.arguments or ""
        if choice.finish_reason is not None:
            assert not delta.model_dump(exclude_none=True), "the last chunk has an empty delta"
            message["finish"] = choice.finish_reason
    return message | {"calls": [tuple(call) for call in calls]}


def called(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for _, name, arguments in message["calls"]]


@pytest.mark.parametrize("seed", range(4))
async def test_calls_reach_openais_client(seed: int):
    async with speaking(f"{WORDS}\n{CALLS}") as (on, client):
        on.streams.cuts = random.Random(seed)
        fields: Any = {"messages": ASK, "tools": [WEATHER, NOW], "tool_choice": "auto"}
        whole = await client.chat.completions.create(model=MODEL, **fields)
        message = message_of(whole.choices[0])
        assert (message["content"], message["finish"]) == (WORDS, "tool_calls")
        assert called(message) == WANTED
        other = await streamed(client, **fields)
        assert [part[1:] for part in other["calls"]] == [part[1:] for part in message["calls"]]
        assert {name: other[name] for name in ("content", "finish")} == {"content": WORDS, "finish": "tool_calls"}


async def test_content_is_null_beside_calls_alone():
    async with speaking(CALLS) as (on, _):
        body = (await on.chat(tools=[WEATHER])).json()
        (choice,) = body["choices"]
        assert choice["message"]["content"] is None
        assert set(choice["message"]["tool_calls"][0]) == {"id", "type", "function"}


async def test_calls_and_results_go_back():
    async with speaking(CALLS) as (on, client):
        answer = (await client.chat.completions.create(model=MODEL, messages=ASK, tools=[WEATHER])).choices[0].message
        calls = answer.tool_calls or []
        results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny <|end|>"} for call in calls]
        back: Any = [*ASK, answer.model_dump(), *results]
        again = await client.chat.completions.create(model=MODEL, messages=back, tools=[WEATHER])
        assert again.choices[0].finish_reason == "tool_calls"
        prompt = tuple(on.streams.opened[-1].prompt)
        text = (await on.post("/detokenize", {"tokens": list(prompt)})).json()["prompt"]
        assert "sunny <|end|>" in text
        assert '{"name": "get_weather", "arguments": {"city": "Zürich' in text
        assert prompt.count(1) == 4  # one a message, all of them the template's


async def test_no_text_within_tools_becomes_a_control_token():
    parameters = {"type": "object", "properties": {"<|end|>": {"type": "string", "description": "<|assistant|>"}}}
    odd = {"type": "function", "function": {"name": "odd", "description": "<|end|>", "parameters": parameters}}
    async with speaking("Yes.") as (on, _):
        for tools in ([NOW], [odd]):
            assert (await on.chat(tools=tools)).status_code == 200
        plain, guarded = (tuple(request.prompt) for request in on.streams.opened)
        assert [(plain.count(token), guarded.count(token)) for token in range(6)] == [
            (plain.count(token),) * 2 for token in range(6)
        ]


async def test_being_cut_off_beats_having_called():
    async with speaking(CALLS[:-20], FinishReason.LENGTH) as (_, client):
        whole = await client.chat.completions.create(model=MODEL, messages=ASK, tools=[WEATHER])
        assert whole.choices[0].finish_reason == "length"
        assert len(whole.choices[0].message.tool_calls or ()) == 2


async def test_one_call_where_no_more_are_wanted():
    async with speaking(CALLS) as (on, client):
        fields: Any = {"messages": ASK, "tools": [WEATHER, NOW], "parallel_tool_calls": False}
        message = message_of((await client.chat.completions.create(model=MODEL, **fields)).choices[0])
        assert (called(message), message["finish"]) == (WANTED[:1], "tool_calls")
        assert on.streams.ended_by_caller
        assert called(await streamed(client, **fields)) == WANTED[:1]


@pytest.mark.parametrize("fields", [{}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}])
async def test_without_tools_calls_are_content(fields: Any):
    async with speaking(CALLS) as (_, client):
        whole = await client.chat.completions.create(model=MODEL, messages=ASK, **fields)
        assert message_of(whole.choices[0]) | {"finish": ""} == {
            "content": CALLS, "reasoning": "", "calls": [], "finish": ""
        }  # fmt: skip
        assert whole.choices[0].finish_reason == "stop"


async def test_tools_of_unknown_kinds_are_passed_over():
    async with speaking(CALLS) as (on, _):
        tools = [{"type": "web_search"}, {"type": "custom", "custom": {"name": "x"}}, WEATHER]
        assert (await on.chat(tools=tools)).json()["choices"][0]["finish_reason"] == "tool_calls"
        assert (await on.chat(tools=tools[:2])).json()["choices"][0]["finish_reason"] == "stop"
        assert (await on.chat(tools=tools[:2], tool_choice="required")).status_code == 200


async def test_allowed_tools_are_those_that_the_prompt_tells_of():
    async with speaking("Yes.") as (on, _):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NOW]}}
        assert (await on.chat(tools=[WEATHER, NOW], tool_choice=choice)).status_code == 200
        text = (await on.post("/detokenize", {"tokens": list(on.streams.opened[-1].prompt)})).json()["prompt"]
        assert '"now"' in text
        assert "get_weather" not in text


@pytest.mark.parametrize("seed", range(3))
async def test_reasoning_goes_out_under_both_names(thinker: GenerationProcessor, seed: int):
    async with speaking(f"Let me\nsee. \n</think>\n\n{WORDS}\n{CALLS}", intake=thinker) as (on, client):
        on.streams.cuts = random.Random(seed)
        fields: Any = {"messages": ASK, "tools": [WEATHER, NOW]}
        whole = (await client.chat.completions.create(model=MODEL, **fields)).choices[0]
        message = message_of(whole)
        assert (message["reasoning"], message["content"]) == ("Let me\nsee. ", WORDS)
        assert whole.message.reasoning == "Let me\nsee. "  # type: ignore[attr-defined]
        assert called(message) == WANTED
        other = await streamed(client, **fields)
        assert (other["reasoning"], other["content"]) == ("Let me\nsee. ", WORDS)
        assert called(other) == WANTED


async def test_reasoning_can_be_switched_off(thinker: GenerationProcessor):
    async with speaking("Yes.", intake=thinker) as (_, client):
        off = await client.chat.completions.create(model=MODEL, messages=ASK, reasoning_effort="none")
        assert message_of(off.choices[0]) == {"content": "Yes.", "reasoning": "", "calls": [], "finish": "stop"}
        on = await client.chat.completions.create(model=MODEL, messages=ASK)
        assert message_of(on.choices[0]) == {"content": "", "reasoning": "Yes.", "calls": [], "finish": "stop"}


async def test_reasoning_that_comes_back_is_accepted(thinker: GenerationProcessor):
    async with speaking("Yes.", intake=thinker) as (on, _):
        for name in ("reasoning", "reasoning_content"):
            messages = [*ASK, {"role": "assistant", "content": None, name: "hm"}, *ASK]
            assert (await on.chat(messages=messages)).status_code == 200


async def test_logprobs_of_calls_are_those_of_all_tokens():
    async with speaking(CALLS) as (on, _):
        fields: Any = {"tools": [WEATHER, NOW], "logprobs": True, "return_token_ids": True}
        whole = (await on.chat(**fields)).json()["choices"][0]
        chunks = [event.data for event in events_of((await on.chat(**fields, stream=True)).text)]
        parts = [chunk["choices"][0] for chunk in chunks if chunk != "[DONE]" and chunk["choices"]]
        told = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert told == whole["logprobs"]["content"]
        assert len(told) == len(whole["token_ids"]) - 1  # the end token is not shown


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
async def test_a_call_that_is_demanded_is_a_grammar(choice: Any):
    async with speaking(CALLS) as (on, _):
        answer = await on.chat(tools=[WEATHER, NOW], tool_choice=choice, ignore_eos=True)
        assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"
        sampling = on.streams.opened[-1].sampling
        assert sampling.grammar is not None
        assert '"now"' in sampling.grammar.text
        assert ('"get_weather"' in sampling.grammar.text) == (choice == "required")
        assert 1 in sampling.stop_token_ids
        await on.chat(tools=[WEATHER, NOW])
        assert on.streams.opened[-1].sampling.grammar is None


async def test_a_schema_that_cannot_be_followed_is_no_reason_to_refuse():
    schema = {"type": "object", "minProperties": 3}
    tool = {"type": "function", "function": {"name": "odd", "parameters": schema}}
    async with speaking(CALLS) as (on, _):
        assert (await on.chat(tools=[tool], tool_choice="required")).status_code == 200
        grammar = on.streams.opened[-1].sampling.grammar
        assert grammar is not None
        assert '"odd"' in grammar.text
        assert "minProperties" not in grammar.text


async def test_an_answer_under_a_grammar_begins_at_once(thinker: GenerationProcessor):
    async with speaking('{"name": "now"}', intake=thinker) as (on, client):
        form: Any = {"type": "json_object"}
        fields: Any = {"messages": ASK, "tools": [WEATHER], "response_format": form}
        answer = (await client.chat.completions.create(model=MODEL, **fields)).choices[0]
        assert message_of(answer) == {"content": '{"name": "now"}', "reasoning": "", "calls": [], "finish": "stop"}
        prompt = (await on.post("/detokenize", {"tokens": list(on.streams.opened[-1].prompt)})).json()["prompt"]
        assert prompt.endswith("<|assistant|><think></think>")
        forced = {**fields, "extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
        await client.chat.completions.create(model=MODEL, **forced)
        prompt = (await on.post("/detokenize", {"tokens": list(on.streams.opened[-1].prompt)})).json()["prompt"]
        assert prompt.endswith("<|assistant|><think>\n</think>\n\n")
