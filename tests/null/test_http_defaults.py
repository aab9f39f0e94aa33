"""What a request gets that does not say it: a length of its answer, how tokens are sampled, closed objects; and what
becomes of fields that are not known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.config.limits import RequestLimits
from penstock.config.schema import RequestConfig
from penstock.processing.service import GenerationProcessor

from .http_stage import CHAT, HELLO, MODEL, STORYTELLER, check, events_of, stage
from .streams import NullStreams


async def test_a_chat_that_names_no_length_may_use_what_the_context_leaves():
    streams = NullStreams()
    async with stage(streams) as on:
        answer = await on.chat(max_tokens=None, ignore_eos=True)
    (request,) = streams.opened
    usage = answer.json()["usage"]
    assert usage["total_tokens"] == 2048 == len(request.prompt) + request.sampling.max_tokens
    assert request.open_ended


async def test_default_max_tokens_is_a_length_that_the_operator_has_named():
    streams = NullStreams()
    async with stage(streams, RequestLimits(default_max_tokens=7)) as on:
        answer = await on.chat(max_tokens=None, ignore_eos=True)
        await on.chat(max_tokens=5)
        await on.text(max_tokens=None)
    assert answer.json()["usage"]["completion_tokens"] == 7
    assert [request.sampling.max_tokens for request in streams.opened] == [7, 5, 16]
    assert not any(request.open_ended for request in streams.opened)


@pytest.fixture
def plain_intake() -> Iterator[GenerationProcessor]:
    """The bundled model without the defaults of its generation_config.json."""
    rules = RequestConfig(generation_config="none", unknown_fields="ignore", disable_additional_properties=False)
    intake = GenerationProcessor(
        STORYTELLER, name=MODEL, max_model_len=2048, limits=RequestLimits(), created=1, requests=rules
    )
    yield intake
    intake.close()


async def test_the_models_own_sampling_defaults_are_taken_and_shown():
    """The bundled model's generation_config.json says 0.7 and 0.9."""
    streams = NullStreams()
    async with stage(streams) as on:
        await on.chat()
        await on.text(temperature=0.3, top_p=1)
        shown = (await on.client.get("/v1/models/storyteller")).json()["default_sampling_params"]
    sampled = [(request.sampling.temperature, request.sampling.top_p) for request in streams.opened]
    assert sampled == [(0.7, 0.9), (0.3, 1.0)]
    assert shown == {"temperature": 0.7, "top_p": 0.9}


async def test_generation_config_none_means_openais_defaults(plain_intake: GenerationProcessor):
    streams = NullStreams()
    async with stage(streams, intake=plain_intake) as on:
        await on.chat()
        card = (await on.client.get("/v1/models/storyteller")).json()
    (request,) = streams.opened
    assert (request.sampling.temperature, request.sampling.top_p) == (1.0, 1.0)
    assert "default_sampling_params" not in card


SCHEMA = {"type": "object", "properties": {"who": {"enum": ["fox", "bear"]}}, "required": ["who"]}
NAMED = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


async def test_objects_of_schemas_are_closed_unless_somebody_says_otherwise(plain_intake: GenerationProcessor):
    streams = NullStreams()
    async with stage(streams) as on:
        for form in ({"response_format": NAMED}, {"guided_json": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}):
            await on.chat(**form)
        await on.chat(response_format=NAMED, structured_outputs={"disable_additional_properties": False})
        await on.chat(tools=[TOOL], tool_choice="required")
    async with stage(streams, intake=plain_intake) as on:
        await on.chat(response_format=NAMED)
        await on.chat(response_format=NAMED, structured_outputs={"disable_additional_properties": True})
        await on.chat(tools=[TOOL], tool_choice="required")
    grammars = [request.sampling.grammar for request in streams.opened]
    schemas, call = grammars[:4] + grammars[5:7], (grammars[4], grammars[7])
    assert [grammar.closed for grammar in schemas if grammar] == [True, True, True, False, False, True]
    assert ['"additionalProperties": false' in grammar.text for grammar in call if grammar] == [True, False]


async def test_a_schema_beside_json_object_is_followed():
    """As llama.cpp's server and others have it."""
    streams = NullStreams()
    async with stage(streams) as on:
        assert (await on.chat(response_format={"type": "json_object", "schema": SCHEMA})).status_code == 200
        check(
            await on.chat(response_format={"type": "json_object", "schema": {"uniqueItems": True}}),
            *(400, "invalid_grammar", "Invalid 'response_format.schema': Unimplemented keys: [\"uniqueItems\"]"),
            "response_format.schema",
        )
        wrong = {"type": "json_object", "shcema": SCHEMA}
        words = "Unknown parameter: 'response_format.shcema'"
        check(await on.chat(response_format=wrong), 400, "unknown_parameter", words, "response_format")
    (request,) = streams.opened
    assert request.sampling.grammar is not None
    assert json.loads(request.sampling.grammar.text) == SCHEMA


FOREIGN = [
    ({"repeat_penalty": 1.1}, "supplied: repeat_penalty (repeat_penalty: here repetition_penalty)"),
    ({"num_predict": 1, "x": 1}, "supplied: num_predict, x (num_predict: here max_tokens)"),
    ({"temprature": 1}, "supplied: temprature (temprature: did you mean temperature?)"),
    ({"keep_alive": 1}, "keep_alive: here a catalogue's"),
]


@pytest.mark.parametrize(("fields", "words"), FOREIGN, ids=[next(iter(fields)) for fields, _ in FOREIGN])
async def test_fields_of_other_servers_are_refused_with_a_hint(fields: dict[str, Any], words: str):
    async with stage() as on:
        check(await on.chat(**fields), 400, None, words)


async def test_unknown_fields_are_passed_over_where_the_operator_says_so(plain_intake: GenerationProcessor):
    streams = NullStreams()
    message = {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {}}], "weight": 1}
    async with stage(streams, intake=plain_intake) as on:
        more = {"stream": True, "stream_options": {"x": 1}, "response_format": {"type": "text", "y": 2}}
        assert (await on.chat(messages=[message], keep_alive=5, **more)).status_code == 200
        assert (await on.text(mirostat=2)).status_code == 200
        assert (await on.chat(functions=[{"name": "f"}])).status_code == 400  # known, and nothing is behind it


@pytest.mark.parametrize("count", [0, -1])
async def test_no_tokens_and_no_limit_are_refused_in_one_wording(count: int):
    async with stage() as on:
        chat, named = await on.chat(max_tokens=count), {"max_tokens": None, "max_completion_tokens": count}
        code, want = "integer_below_min_value", "expected an integer >= 1"
        check(chat, 400, code, f"{want} (left out: as many as the context leaves), got {count}", "max_tokens")
        check(await on.chat(**named), 400, code, want, "max_completion_tokens")
        text = await on.text(max_tokens=count)
        check(text, 400, code, f"{want} (left out: 16 at most), got {count}", "max_tokens")


async def test_a_stream_does_not_go_on_with_other_sampling_defaults(plain_intake: GenerationProcessor):
    fields, key = {"stream": True, "seed": None}, {"Idempotency-Key": "one"}
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 8} | fields
    async with stage(event_key=b"shared") as on:
        told = await on.post(CHAT, body, headers=key)
    after = key | {"Last-Event-ID": events_of(told.text)[2].id}
    async with stage(event_key=b"shared") as on:
        assert (await on.post(CHAT, body, headers=after)).status_code == 200
    async with stage(intake=plain_intake, event_key=b"shared") as on:
        assert (await on.post(CHAT, body, headers=after)).status_code == 422
