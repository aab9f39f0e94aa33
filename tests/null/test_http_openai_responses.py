"""The Responses API over HTTP: what OpenAI's own client makes of it, what is stored for whom, what is refused."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.api.auth import StaticApiKeys, Tenant
from penstock.api.response_store import SqliteResponseStore, create_response_store
from penstock.config.limits import RequestLimits
from penstock.errors import NoWorkers
from penstock.processing.requests.schemas import request_schemas
from penstock.processing.service import GenerationProcessor
from penstock.types import FinishReason

from .http_stage import MODEL, STORYTELLER, Stage, check, stage
from .streams import NullStreams
from .test_http_bad_inputs import NOT_JSON

PATH = "/v1/responses"
KEY = {"Idempotency-Key": "order-7"}
TEMPLATE = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>"
    "{% endfor %}<|assistant|>{{ '<think></think>' if enable_thinking is false else '<think>\n' }}"
)
TOOLS: list[Any] = [
    {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}, "strict": False},
    {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": {"type": "text"}},
    {
        "type": "namespace",
        "name": "mcp__docs",
        "description": "Documents.",
        "tools": [{"type": "function", "name": "find", "parameters": {"type": "object", "properties": {}}}],
    },
    {"type": "web_search"},
]
SAID = (
    "I think.</think>I look.\n"
    '<tool_call>\n{"name": "now", "arguments": {"zone": "Zürich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "a \\"b\\"\\n+ü"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "mcp__docs__find", "arguments": {}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GenerationProcessor]:
    """The bundled tokenizer under a template of a model that thinks and calls."""
    folder = tmp_path_factory.mktemp("thinker")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((STORYTELLER / name).read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    intake = GenerationProcessor(folder, name=MODEL, max_model_len=8192, limits=RequestLimits(), created=1)
    yield intake
    intake.close()


@asynccontextmanager
async def serving(
    folder: Path, *, limits: RequestLimits | None = None, **options: Any
) -> AsyncIterator[tuple[Stage, openai.AsyncOpenAI]]:
    """A service that stores responses, and OpenAI's client."""
    limits = limits or RequestLimits()
    store = SqliteResponseStore(create_response_store(folder, limits), limits)
    streams = options.pop("streams", None) or NullStreams()
    try:
        async with stage(streams, limits, response_store=store, **options) as on:
            yield (
                on,
                openai.AsyncOpenAI(api_key="none", base_url="http://penstock/v1", http_client=on.client, max_retries=0),
            )
    finally:
        store.close()


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Stage, openai.AsyncOpenAI]]:
    async with serving(tmp_path) as both:
        yield both


async def speak(on: Stage, text: str, finish: FinishReason = FinishReason.STOP) -> None:
    """The model says ``text`` from now on."""
    tokens = (await on.post("/tokenize", {"prompt": text})).json()["tokens"]
    on.streams.script = lambda _: ((*tokens, *([1] if finish is FinishReason.STOP else [])), finish)


def asked(given: Any = "Tell me a story.", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": given, "seed": 1, "max_output_tokens": 12} | fields


def events_in(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The id and the data of each event of a whole stream."""
    events: list[tuple[str, dict[str, Any]]] = []
    for block in text[:-2].split("\n\n") if text else []:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = json.loads(fields["data"])
        assert fields["event"] == data["type"]
        events.append((fields.get("id", ""), data))
    return events


def said_by(response: dict[str, Any]) -> dict[str, Any]:
    """What is said in a response, in the words of chats."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for item in response["output"]:
        match item["type"]:
            case "message":
                found["content"] += item["content"][0]["text"]
            case "reasoning":
                found["reasoning"] += (item["content"] or item["summary"])[0]["text"]
            case kind:
                text = item["arguments"] if kind == "function_call" else {"input": item["input"]}
                name = "__".join(filter(None, (item.get("namespace"), item["name"])))
                found["calls"].append((name, json.loads(text) if isinstance(text, str) else text))
    used = response["usage"]
    found["usage"] = (used["input_tokens"], used["output_tokens"], used["input_tokens_details"]["cached_tokens"])
    return found


def said_by_chat(body: dict[str, Any]) -> dict[str, Any]:
    message, used = body["choices"][0]["message"], body["usage"]
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning") or "",
        "calls": calls,
        "usage": (used["prompt_tokens"], used["completion_tokens"], used["prompt_tokens_details"]["cached_tokens"]),
    }


async def test_openais_client_reads_whole_and_streamed_responses(served: Any):
    on, client = served
    await speak(on, "There was a fox.")
    whole = await client.responses.create(model=MODEL, input="Tell me a story.")
    assert (whole.object, whole.status, whole.store) == ("response", "completed", True)
    assert whole.output_text == "There was a fox."
    async with client.responses.stream(model=MODEL, input="Tell me a story.") as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert (final.output_text, final.usage) == (whole.output_text, whole.usage)


@pytest.mark.parametrize("seed", range(4))
async def test_openais_client_assembles_reasoning_and_every_kind_of_call(
    tmp_path: Path, thinker: GenerationProcessor, seed: int
):
    async with serving(tmp_path, intake=thinker) as (on, client):
        await speak(on, SAID)
        on.streams.cuts = random.Random(seed)
        async with client.responses.stream(model=MODEL, input="?", tools=TOOLS) as stream:
            async for event in stream:
                assert event.sequence_number >= 0
            response = await stream.get_final_response()
        kinds = [item.type for item in response.output]
        assert kinds == ["reasoning", "message", "function_call", "custom_tool_call", "function_call"]
        assert said_by(response.model_dump()) | {"usage": None} == {
            "content": "I look.",
            "reasoning": "I think.",
            "calls": [("now", {"zone": "Zürich"}), ("apply_patch", {"input": 'a "b"\n+ü'}), ("mcp__docs__find", {})],
            "usage": None,
        }


CONVERSATIONS: list[tuple[list[Any], list[Any]]] = [
    ([{"role": "user", "content": "Once"}], [{"role": "user", "content": "Once"}]),
    (
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "What now?"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "noon"},
        ],
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What now?"},
            {
                "role": "assistant",
                "reasoning": "Hm.",
                "content": "I look.",
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        ],
    ),
]


@pytest.mark.parametrize("scripted", [False, True])
@pytest.mark.parametrize("case", range(len(CONVERSATIONS)))
@pytest.mark.parametrize("cuts", range(3))
async def test_responses_streamed_or_not_and_chats_give_the_same(
    tmp_path: Path, thinker: GenerationProcessor, scripted: bool, case: int, cuts: int
):
    """For one conversation: the same prompt, tokens and usage, however tokens are batched."""
    items, messages = CONVERSATIONS[case]
    async with serving(tmp_path, intake=thinker, streams=NullStreams(cached=16)) as (on, _):
        if scripted:
            await speak(on, SAID)
        fields: dict[str, Any] = {"tools": TOOLS, "max_output_tokens": 200}
        on.streams.cuts = random.Random(cuts)
        whole = (await on.post(PATH, asked(items, **fields))).json()
        events = events_in((await on.post(PATH, asked(items, stream=True, **fields))).text)
        functions = [
            {"name": "now", "parameters": TOOLS[0]["parameters"], "strict": False},
            {
                "name": "apply_patch",
                "description": "Edits.",
                "parameters": {
                    "type": "object",
                    "properties": {"input": {"type": "string", "description": "The whole input, as plain text."}},
                    "required": ["input"],
                    "additionalProperties": False,
                },
            },
            {
                "name": "mcp__docs__find",
                "description": "Documents.",
                "parameters": TOOLS[2]["tools"][0]["parameters"],
            },
        ]
        tools = [{"type": "function", "function": function} for function in functions]
        chat = (await on.chat(messages=messages, tools=tools, max_tokens=200)).json()
        prompts = [tuple(request.prompt) for request in on.streams.opened]
        assert prompts[0] == prompts[1] == prompts[2]
        last = events[-1][1]["response"]
        assert said_by(whole) == said_by(last) == said_by_chat(chat)
        for kind, field in (("output_text", "text"), ("function_call_arguments", "arguments")):
            joined: dict[str, str] = {}
            for _, data in events:
                if data["type"] == f"response.{kind}.delta":
                    joined[data["item_id"]] = joined.get(data["item_id"], "") + data["delta"]
                if data["type"] == f"response.{kind}.done":
                    assert joined.get(data["item_id"], "") == data[field]


async def test_a_conversation_goes_on_by_its_id_as_if_it_had_been_sent_whole(
    tmp_path: Path, thinker: GenerationProcessor
):
    async with serving(tmp_path, intake=thinker) as (on, client):
        await speak(on, SAID)
        first = await client.responses.create(model=MODEL, input="?", tools=TOOLS, instructions="Not carried over.")
        calls = [item for item in first.output if item.type in ("function_call", "custom_tool_call")]
        results: list[Any] = [
            {"type": f"{call.type}_output", "call_id": call.call_id, "output": f"result {i}"}
            for i, call in enumerate(calls)
        ]
        await speak(on, "Done.</think>Fine.")
        fields: dict[str, Any] = {"model": MODEL, "tools": TOOLS}
        second = await client.responses.create(input=results, previous_response_id=first.id, **fields)
        third = await client.responses.create(input="And?", previous_response_id=second.id, **fields)
        assert third.previous_response_id == second.id
        output = [item.model_dump(exclude_none=True) for item in (*first.output, *second.output)]
        history = [{"role": "user", "content": "?"}, *output[: len(first.output)], *results]
        history += [*output[len(first.output) :], {"role": "user", "content": "And?"}]
        await client.responses.create(input=history, store=False, **fields)
        assert on.streams.opened[-1].prompt == on.streams.opened[-2].prompt
        refers: Any = [{"type": "item_reference", "id": item["id"]} for item in output]
        refers = [history[0], *refers[: len(first.output)], *results, *refers[len(first.output) :], history[-1]]
        await client.responses.create(input=refers, store=False, **fields)
        assert on.streams.opened[-1].prompt == on.streams.opened[-2].prompt
        listed = await client.responses.input_items.list(third.id, order="asc", limit=3)
        items = [item async for item in listed]
        assert len(items) == len(history)
        assert len({item.id for item in items}) == len(items)
        newest = (await client.responses.input_items.list(third.id)).data[0]
        assert newest.content[0].text == "And?"


async def test_reasoning_survives_a_client_that_returns_only_what_is_sealed(
    tmp_path: Path, thinker: GenerationProcessor
):
    """So does the prefix cache: the prompt of the next turn begins as that of a client that returns everything."""
    async with serving(tmp_path, intake=thinker) as (on, _):
        await speak(on, SAID)
        fields: dict[str, Any] = {"tools": TOOLS, "store": False, "include": ["reasoning.encrypted_content"]}
        for reasoning in ({}, {"summary": "auto"}):
            response = (await on.post(PATH, asked("?", reasoning=reasoning, **fields))).json()
            thought = response["output"][0]
            assert bool(thought["summary"]) is bool(reasoning)
            kept = []
            for item in (thought, thought | {"content": [], "summary": []}):
                history = [{"role": "user", "content": "?"}, item, *response["output"][1:]]
                request = await on.post(PATH, asked([*history, {"role": "user", "content": "!"}], **fields))
                assert request.status_code == 200, request.text
                kept.append(on.streams.opened[-1].prompt)
            assert kept[0] == kept[1]


async def test_stored_responses_are_returned_replayed_and_deleted(served: Any):
    on, client = served
    text = (await on.post(PATH, asked(stream=True, metadata={"a": "b"}))).text
    last = events_in(text)[-1][1]["response"]
    found = await on.client.get(f"{PATH}/{last['id']}")
    assert found.json() == last
    replayed = await on.client.get(f"{PATH}/{last['id']}?stream=true")
    assert replayed.headers["content-type"].startswith("text/event-stream")
    assert replayed.text == re.sub(r"(?m)^id: .*\n", "", text)
    after = await on.client.get(f"{PATH}/{last['id']}?stream=true&starting_after=5")
    assert [data["sequence_number"] for _, data in events_in(after.text)] == list(range(6, len(events_in(text))))
    stream = await client.responses.retrieve(last["id"], stream=True, starting_after=3)
    assert (await anext(aiter(stream))).sequence_number == 4
    refused = await on.post(f"{PATH}/{last['id']}/cancel")
    check(refused, 400, "response_not_cancellable", "background")
    await client.responses.delete(last["id"])
    for answer in (
        await on.client.get(f"{PATH}/{last['id']}"),
        await on.client.get(f"{PATH}/{last['id']}/input_items"),
        await on.client.delete(f"{PATH}/{last['id']}"),
        await on.post(f"{PATH}/{last['id']}/cancel"),
    ):
        check(answer, 404, "response_not_found", "not found", "response_id")
    gone = await on.post(PATH, asked(previous_response_id=last["id"]))
    check(gone, 400, "previous_response_not_found", "not found", "previous_response_id")


async def test_what_is_not_to_be_stored_is_not(served: Any, tmp_path: Path):
    on, _ = served
    one = (await on.post(PATH, asked(store=False))).json()
    assert one["store"] is False
    check(await on.client.get(f"{PATH}/{one['id']}"), 404, "response_not_found", "not found", "response_id")
    async with stage() as bare:  # a service that stores nothing
        one = (await bare.post(PATH, asked())).json()
        assert one["store"] is False
        again = await bare.post(PATH, asked(previous_response_id=one["id"]))
        check(again, 400, "previous_response_not_found", "stores no responses", "previous_response_id")
        check(await bare.client.get(f"{PATH}/{one['id']}"), 404, "response_not_found", "not found", "response_id")


async def test_a_response_is_its_tenants(tmp_path: Path):
    def owned(**tenants: Tenant) -> StaticApiKeys:
        return StaticApiKeys({hashlib.sha256(key.encode()).digest(): tenant for key, tenant in tenants.items()})

    ring = owned(ann=Tenant(id="a"), bob=Tenant(id="b"))
    async with serving(tmp_path, ring=ring) as (on, _):

        def key(name: str) -> dict[str, str]:
            return {"Authorization": f"Bearer {name}"}

        one = (await on.post(PATH, asked(), headers=key("ann"))).json()
        for method, path in (
            ("GET", ""),
            ("GET", "?stream=true"),
            ("GET", "/input_items"),
            ("DELETE", ""),
            ("POST", "/cancel"),
        ):
            answer = await on.client.request(method, f"{PATH}/{one['id']}{path}", headers=key("bob"))
            check(answer, 404, "response_not_found", "not found", "response_id")
            assert (await on.client.request(method, f"{PATH}/{one['id']}{path}")).status_code == 401
        for fields in (
            {"previous_response_id": one["id"]},
            {"given": [{"type": "item_reference", "id": one["output"][0]["id"]}]},
        ):
            refused = await on.post(PATH, asked(**fields), headers=key("bob"))
            assert refused.status_code == 400
            assert "not found" in refused.json()["error"]["message"]
            assert (await on.post(PATH, asked(**fields), headers=key("ann"))).status_code == 200
        assert (await on.client.get(f"{PATH}/{one['id']}", headers=key("ann"))).json() == one


async def test_a_repeat_with_its_key_is_the_same_response(served: Any):
    on, _ = served
    fields = {k: v for k, v in asked().items() if k != "seed"}
    first = (await on.post(PATH, fields, headers=KEY)).json()
    second = (await on.post(PATH, fields, headers=KEY)).json()
    assert (first["id"], first["output"]) == (second["id"], second["output"])
    assert [one["usage"]["penstock"]["repeated"] for one in (first, second)] == [False, True]
    changed = await on.post(PATH, asked("Else"), headers=KEY)
    check(changed, 422, "idempotency_key_reused", "another request")


async def test_a_stream_goes_on_from_any_event_in_any_batches(served: Any):
    on, _ = served
    body = asked(stream=True, max_output_tokens=10)
    events = events_in((await on.post(PATH, body, headers=KEY)).text)
    for at, (name, _) in enumerate(events):
        if not name:
            continue  # nobody can resume there
        on.streams.cuts = random.Random(at)
        resumed = events_in((await on.post(PATH, body, headers=KEY | {"Last-Event-ID": name})).text)
        together = [data for _, data in (*events[: at + 1], *resumed)]
        numbers = [data["sequence_number"] for data in together]
        assert numbers == sorted(set(numbers)), "numbers only grow"
        deltas = "".join(data["delta"] for data in together if data["type"] == "response.output_text.delta")
        last = together[-1]["response"]
        assert deltas == last["output"][0]["content"][0]["text"]
        assert last["output"] == events[-1][1]["response"]["output"]


async def test_a_failure_is_told_in_the_stream_and_nothing_is_stored(served: Any):
    on, _ = served
    on.streams.fail_at = {3: NoWorkers("All workers are gone.")}
    events = events_in((await on.post(PATH, asked(stream=True))).text)
    failed = events[-1][1]
    assert failed["type"] == "response.failed"
    assert (failed["response"]["status"], failed["response"]["error"]["code"]) == ("failed", "server_error")
    assert failed["response"]["error"]["message"] == "All workers are gone."
    name = failed["response"]["id"]
    check(await on.client.get(f"{PATH}/{name}"), 404, "response_not_found", "not found", "response_id")
    on.streams.fail_at = {0: NoWorkers("All workers are gone.")}
    check(await on.post(PATH, asked(stream=True)), 503, "service_unavailable", "gone", says_param=False)


async def test_limits_of_what_is_stored(tmp_path: Path):
    limits = RequestLimits(max_stored_response_bytes=2000, max_pending_response_bytes=9000, max_referenced_responses=2)
    async with serving(tmp_path, limits=limits) as (on, _):
        large = [{"role": "user", "content": "word " * 500}]
        refused = await on.post(PATH, asked(large))
        check(refused, 400, "response_too_large", "max_stored_response_bytes", "store")
        assert (await on.post(PATH, asked(large, store=False))).status_code == 200
        refers = [{"type": "item_reference", "id": f"msg_{i}_0"} for i in range(3)]
        check(await on.post(PATH, asked(refers)), 400, "array_above_max_length", "max_referenced_responses", "input")
    tight = RequestLimits(max_pending_response_bytes=300)
    async with serving(tmp_path, limits=tight) as (on, _):
        medium = [{"role": "user", "content": "word " * 80}]
        refused = await on.post(PATH, asked(medium))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "max_pending_response_bytes" in refused.json()["error"]["message"]
        assert [(await on.post(PATH, asked())).status_code for _ in range(8)] == [200] * 8, (
            "what is reserved is released"
        )


async def test_long_conversations_are_stored_and_parsed_on_threads(served: Any):
    """Also with numbers that no machine word holds, which come back as they were."""
    on, _ = served
    odd = {"type": "of_tomorrow", "number": 10**30, "nested": [[{"a": [1.5, None]}]]}
    items = [odd, *({"role": "user", "content": "a"} for _ in range(200))]
    first = (await on.post(PATH, asked(items, metadata={"k": "v"}))).json()
    second = await on.post(PATH, asked("And?", previous_response_id=first["id"]))
    assert second.status_code == 200, second.text
    listed = (await on.client.get(f"{PATH}/{second.json()['id']}/input_items?order=asc&limit=1")).json()
    assert {key: listed["data"][0][key] for key in odd} == odd
    whole = [*items, *first["output"], {"role": "user", "content": "And?"}]
    assert (await on.post(PATH, asked(whole, store=False))).status_code == 200
    assert on.streams.opened[-1].prompt == on.streams.opened[-2].prompt
    nested = [{"type": "of_tomorrow", "a": [[]] * 200_000}, {"role": "user", "content": "Hi"}]
    check(await on.post(PATH, asked(nested)), 400, None, "max_json_containers")


async def test_stored_conversations_have_no_more_values_than_bodies(tmp_path: Path):
    """A conversation that many bodies have made together is not larger than one may be."""
    async with serving(tmp_path, limits=RequestLimits(max_json_containers=4000)) as (on, _):
        nested = [{"type": "of_tomorrow", "a": ["x" * 9, *([[]] * 3000)]}, {"role": "user", "content": "Hi"}]
        first = (await on.post(PATH, asked(nested))).json()
        refused = await on.post(PATH, asked(nested, previous_response_id=first["id"]))
        check(refused, 400, None, "max_json_containers")


async def test_logprobs_and_structured_output(served: Any):
    on, _ = served
    fields = asked(include=["message.output_text.logprobs"], top_logprobs=2)
    whole = (await on.post(PATH, fields)).json()
    (part,) = whole["output"][0]["content"]
    assert len(part["logprobs"]) == 12
    assert len(part["logprobs"][0]["top_logprobs"]) == 2
    events = events_in((await on.post(PATH, fields | {"stream": True})).text)
    streamed = [one for _, data in events if data["type"].endswith("text.delta") for one in data["logprobs"]]
    assert streamed == part["logprobs"]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    assert (await on.post(PATH, asked(text={"format": form}))).status_code == 200
    grammar = on.streams.opened[-1].sampling.grammar
    assert grammar is not None
    assert json.loads(grammar.text) == schema


@pytest.mark.parametrize(("raw", "words"), NOT_JSON.values(), ids=NOT_JSON.keys())
async def test_what_is_not_strict_json(raw: bytes, words: str):
    async with stage() as on:
        answer = await on.client.post(PATH, content=raw, headers={"content-type": "application/json"})
        check(answer, 400, None, words)
        assert on.streams.opened == []


BAD = [  # of responses: fields, status, code, field, words
    ({"model": None}, 400, "missing_required_parameter", "model", "model"),
    ({"model": 7}, 400, "invalid_type", "model", "a string"),
    ({"model": "other"}, 404, "model_not_found", "model", "storyteller"),
    ({"input": []}, 400, "empty_array", "input", "at least one item"),
    ({"input": [{"type": "of_tomorrow"}]}, 400, "empty_array", "input", "at least one message"),
    ({"input": [{"role": "user", "content": 7}]}, 400, "invalid_type", "input[0].content", "array"),
    ({"input": "word " * 9000}, 400, "context_length_exceeded", "input", "maximum context length"),
    ({"max_output_tokens": 0}, 400, "integer_below_min_value", "max_output_tokens", ">= 1"),
    ({"max_output_tokens": 9999}, 400, "context_length_exceeded", "max_output_tokens", "'max_output_tokens'"),
    ({"temperature": 3}, 400, "decimal_above_max_value", "temperature", "<= 2"),
    ({"top_p": "x"}, 400, "invalid_type", "top_p", "a number"),
    ({"stream": "yes"}, 400, "invalid_type", "stream", "a boolean"),
    ({"previous_response_id": 7}, 400, "invalid_type", "previous_response_id", "a string"),
    ({"previous_response_id": "resp_x"}, 400, "previous_response_not_found", "previous_response_id", "not found"),
    ({"prompt_cache_key": "x" * 300}, 400, "string_above_max_length", "prompt_cache_key", "256"),
    ({"text": {"format": {"type": "json_schema", "name": "a b"}}}, 400, "invalid_value", "text.format.name", "letters"),
    (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "nonsense"}}}},
        400,
        "invalid_grammar",
        "text.format.schema",
        "'text.format.schema'",
    ),
    ({"background": True}, 400, "unsupported_value", "background", "background"),
    ({"reasoning": {"effort": "x" * 40}}, 400, "string_above_max_length", "reasoning.effort", "32"),
    ({"metadata": {"a": 1}}, 400, "invalid_type", "metadata.a", "a string"),
]


@pytest.mark.parametrize(
    ("fields", "status", "code", "param", "words"), BAD, ids=[str(fields)[:50] for fields, *_ in BAD]
)
async def test_bad_fields_are_refused_in_the_words_of_this_api(
    served: Any, fields: Any, status: int, code: str, param: str, words: str
):
    on, _ = served
    check(await on.post(PATH, asked() | fields), status, code, words, param)
    assert on.streams.opened == [], "a bad request got to the workers"
    assert (await on.post(PATH, asked())).status_code == 200, "the service does not go on"


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("?stream=true&starting_after=x", "starting_after"),
        ("?stream=true&starting_after=-1", "starting_after"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=101", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=nothing", "after"),
        ("?" + "&".join(f"a{i}=1" for i in range(99)), "parameters"),
    ],
)
async def test_bad_queries(served: Any, query: str, words: str):
    on, _ = served
    one = (await on.post(PATH, asked())).json()
    answer = await on.client.get(f"{PATH}/{one['id']}{query}")
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


async def test_what_the_client_of_tomorrow_sends_is_skipped(served: Any):
    on, _ = served
    plain = await on.post(PATH, asked())
    strange = asked(
        client_metadata={"a": 1},
        access_programs={"cyber": "standard"},
        tools=[{"type": "telepathy", "name": {}}],
        tool_choice={"type": "telepathy"},
        service_tier="warp",
        include=["of.tomorrow"],
        stream_options={"include_obfuscation": False, "x": 1},
        reasoning={"context": "all_turns", "mode": "pro"},
        prompt_cache_key="a session",
    )
    answer = await on.post(PATH, strange)
    assert answer.status_code == 200, answer.text
    assert on.streams.opened[-1].session == "a session"
    await on.post(PATH, strange, headers={"x-session-affinity": "another"})
    assert on.streams.opened[-1].session == "another"
    assert answer.json()["output"][0]["content"] == plain.json()["output"][0]["content"]


async def test_a_vanished_client_frees_what_it_held_and_stores_nothing(served: Any):
    on, _ = served
    sent = {"type": "http.request", "body": json.dumps(asked()).encode(), "more_body": False}
    messages = iter([sent, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(messages)

    async def send(_: Any) -> None:
        raise AssertionError("nobody listens")

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": PATH,
        "raw_path": PATH.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"penstock")],
        "client": None,
        "server": None,
        "scheme": "http",
    }
    await on.application(scope, receive, send)
    await on.streams.until(none_open=True)


async def test_models_are_described_for_codex_beside_the_list(served: Any):
    on, client = served
    body = (await on.client.get("/v1/models")).json()
    (model,) = body["models"]
    assert (model["slug"], model["context_window"], model["input_modalities"]) == (MODEL, 2048, ["text"])
    assert {"display_name", "supported_reasoning_levels", "shell_type", "visibility", "priority"} <= set(model)
    assert model["base_instructions"]
    assert [one.id async for one in client.models.list()] == [MODEL], "other clients are not confused"


async def test_the_api_is_described():
    async with stage(schemas=lambda: request_schemas(RequestLimits())) as on:
        document = (await on.client.get("/openapi.json")).json()
    body = document["paths"][PATH]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["required"] == ["model"]
    assert body["additionalProperties"] is True
    assert {"input", "tools", "previous_response_id", "store"} <= set(body["properties"])
    assert {"get", "delete"} == set(document["paths"]["/v1/responses/{name}"])


async def test_wrong_methods_and_near_paths():
    async with stage() as on:
        check(await on.client.get(PATH), 405, "method_not_allowed", "Allowed: POST", says_param=False)
        near = await on.post("/v1/response", asked())
        check(near, 404, "unknown_url", PATH, says_param=False)
