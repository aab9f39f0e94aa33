"""Fields that vLLM has beside OpenAI's: special tokens, stop strings that are shown, prompts that are cut."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.types import FinishReason

from .http_stage import CHAT, MODEL, TEXT, Stage, check, events_of, stage
from .streams import NullStreams

END, ASSISTANT = 1, 4  # special tokens of the bundled model
WORDS = "Once upon a time there was a fox"


async def tokens_of(on: Stage, text: str) -> list[int]:
    body = {"model": MODEL, "prompt": text, "add_special_tokens": False}
    return (await on.post("/tokenize", body)).json()["tokens"]


async def told(fields: dict[str, Any], *, ending: tuple[int, ...] = ()) -> dict[str, Any]:
    """The choice of an answer that is ``WORDS``, with a special token in the middle, and then ``ending``."""
    streams = NullStreams()
    async with stage(streams) as on:
        words = await tokens_of(on, WORDS)
        whole = (*words[:3], ASSISTANT, *words[3:], *ending)
        streams.script = lambda request: (whole, FinishReason.STOP if ending else FinishReason.LENGTH)
        answer = await on.text(max_tokens=100, logprobs=0, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]


async def test_special_tokens_are_shown_where_they_are_asked_for():
    assert (await told({}))["text"] == WORDS
    shown = (await told({"skip_special_tokens": False}, ending=(END,)))["text"]
    assert shown.replace("<|assistant|>", "") == WORDS
    assert shown != WORDS
    whole = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert (await told(whole, ending=(END,)))["text"].endswith("fox<|end|>")


async def test_a_stop_string_is_shown_where_it_is_asked_for():
    cut = await told({"stop": " time"})
    shown = await told({"stop": " time", "include_stop_str_in_output": True})
    assert (cut["text"], shown["text"]) == ("Once upon a", "Once upon a time")
    assert "".join(shown["logprobs"]["tokens"]).replace("<|assistant|>", "") == shown["text"]
    assert cut["finish_reason"] == shown["finish_reason"] == "stop"


async def test_a_stop_token_is_shown_where_it_is_asked_for():
    async with stage() as on:
        (fox,) = await tokens_of(on, " fox")
    assert (await told({"stop_token_ids": [fox]}, ending=(fox,)))["text"] == WORDS
    shown = await told({"stop_token_ids": [fox], "include_stop_str_in_output": True}, ending=(fox,))
    assert shown["text"] == WORDS + " fox"


def prompts(streams: NullStreams) -> list[tuple[int, ...]]:
    return [tuple(request.prompt) for request in streams.opened]


async def test_a_prompt_is_cut_to_its_last_tokens():
    streams = NullStreams()
    async with stage(streams) as on:
        whole = (await on.post("/tokenize", {"model": MODEL, "prompt": WORDS})).json()["tokens"]
        answer = await on.text(prompt=WORDS, truncate_prompt_tokens=3, echo=True)
        await on.text(prompt=[list(range(900)) * 4, [7]], truncate_prompt_tokens=5)
        await on.text(prompt="word " * 3000, max_tokens=48, truncate_prompt_tokens=-1)
        await on.chat(messages=[{"role": "user", "content": "word " * 3000}], truncate_prompt_tokens=2000, max_tokens=8)
    assert answer.json()["usage"]["prompt_tokens"] == 3
    cut, ids, short, fits, chat = prompts(streams)
    assert (cut, short) == (tuple(whole[-3:]), (7,))
    assert (len(ids), len(fits), len(chat)) == (5, 2000, 2000)
    assert chat[-1] == ASSISTANT  # it ends as the whole one does


async def test_cuts_that_cannot_be():
    async with stage() as on:
        name = "truncate_prompt_tokens"
        check(await on.text(truncate_prompt_tokens=0), 400, "integer_below_min_value", ">= 1", name)
        check(await on.text(truncate_prompt_tokens=2049), 400, "integer_above_max_value", "<= 2048", name)
        words = "a number of tokens, or -1 together with 'max_tokens'"
        check(await on.chat(truncate_prompt_tokens=-1, max_tokens=None), 400, "invalid_value", words, name)
        check(await on.text(truncate_prompt_tokens=2040, prompt="word " * 3000, max_tokens=9),
              400, "context_length_exceeded", "2049 tokens", "prompt")  # fmt: skip
        code, words = "string_above_max_length", "4194304 characters"
        check(await on.text(truncate_prompt_tokens=9, prompt="x" * 4194305), 400, code, words, "prompt")


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stop", [None, " never"])
async def test_every_event_has_the_usage_so_far_where_it_is_asked_for(path: str, stop: str | None):
    streams = NullStreams(cached=2)
    body = {"model": MODEL, "max_tokens": 12, "n": 2, "stream": True, "ignore_eos": True, "stop": stop, "seed": 1}
    body |= {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "Once upon"}
    async with stage(streams) as on:
        told = {
            asked: [
                event.data["usage"]
                for event in events_of((await on.post(path, body | {"stream_options": options})).text)
                if event.data != "[DONE]"
            ]
            for asked, options in (
                (True, {"include_usage": True, "continuous_usage_stats": True}),
                (False, {"include_usage": True, "continuous_usage_stats": False}),
            )
        }
        silent = await on.post(path, body | {"stream_options": {"continuous_usage_stats": True}})
    counts = [usage["completion_tokens"] for usage in told[True]]
    assert counts == sorted(counts)
    assert (counts[0] <= 5, counts[-1]) == (True, 24)
    assert told[True][-1] == told[False][-1]
    assert {str(usage) for usage in told[False][:-1]} == {"None"}
    assert '"usage"' not in silent.text  # as in vLLM, it needs include_usage


@pytest.mark.parametrize("name", ["skip_special_tokens", "include_stop_str_in_output"])
async def test_switches_are_booleans(name: str):
    async with stage() as on:
        check(await on.post(CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "x"}], name: 1}),
              400, "invalid_type", "a boolean", name)  # fmt: skip
