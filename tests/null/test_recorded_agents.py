"""What each coding agent's package asks of a service (``clients.recorded``) is answered, with events in their order."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clients.recorded import GENERATION, Recorded, read_recording, recordings
from penstock.config.limits import RequestLimits
from penstock.processing.service import GenerationProcessor
from penstock.types import FinishReason, ValidRequest
from scripted_model.conversation import END, Conversation
from scripted_model.folder import CONTEXT, agent_tokenizer, write_agent_model
from scripted_model.script import reply_to

from .http_stage import stage
from .streams import NullStreams

MODEL = "scripted"
RECORDED = [pytest.param(name, marks=pytest.mark.long if "session" in name else ()) for name in recordings()]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> GenerationProcessor:
    """Prompts and texts of the scripted model."""
    folder = write_agent_model(tmp_path_factory.mktemp("scripted") / MODEL)
    return GenerationProcessor(folder, name=MODEL, max_model_len=CONTEXT, limits=RequestLimits(), created=1)


def scripted_tokens(request: ValidRequest) -> tuple[tuple[int, ...], FinishReason]:
    """What the scripted model writes."""
    tokenizer = agent_tokenizer()
    conversation = Conversation.read(request.prompt, tokenizer)
    text = reply_to(conversation).text_of_model(thinks=conversation.thinks)
    return (*tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.token_to_id(END)), FinishReason.STOP


def events_of(body: str) -> list[dict[str, Any]]:
    """The data of a stream's events, but for OpenAI's last."""
    data = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"]


def check_messages(events: list[dict[str, Any]]) -> None:
    """Blocks open, grow and close one after another between the message's start and end."""
    events = [event for event in events if event["type"] != "ping"]
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    expected = "content_block_start"
    for event, kind in zip(events[1:-2], kinds[1:-2], strict=True):
        if expected == "content_block_start":
            assert kind == expected
            block, expected = event["index"], "inside"
        else:
            assert kind in ("content_block_delta", "content_block_stop")
            assert event["index"] == block
            expected = "content_block_start" if kind == "content_block_stop" else "inside"
    assert expected == "content_block_start", "a block was not closed"
    assert events[-2]["delta"]["stop_reason"] in ("end_turn", "tool_use")


def check_responses(events: list[dict[str, Any]]) -> None:
    """Events are numbered, each item is added before it is done, and the last event has them all."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[1], kinds[-1]) == ("response.created", "response.in_progress", "response.completed")
    added = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["output_index"] for event in events if event["type"] == "response.output_item.done"]
    assert added == done == list(range(len(events[-1]["response"]["output"])))


def check_chat(events: list[dict[str, Any]]) -> None:
    """The role first, one finish reason at the end."""
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert choices[0]["delta"]["role"] == "assistant"
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons[-1] in ("stop", "tool_calls")
    assert not any(reasons[:-1])


def check_whole(route: str, answer: dict[str, Any]) -> None:
    """A response that was not streamed ended by itself."""
    if route == "/v1/messages":
        assert answer["stop_reason"] in ("end_turn", "tool_use")
    elif route == "/v1/responses":
        assert answer["status"] == "completed"
    else:
        assert answer["choices"][0]["finish_reason"] in ("stop", "tool_calls")


CHECKS = {"/v1/messages": check_messages, "/v1/responses": check_responses, "/v1/chat/completions": check_chat}


@pytest.mark.parametrize("name", RECORDED)
async def test_what_an_agent_asks_is_answered(name: str, scripted: GenerationProcessor) -> None:
    recording = read_recording(name)
    assert any(request.route in GENERATION for request in recording)
    streams = NullStreams(script=scripted_tokens)
    async with stage(streams, intake=scripted) as on:
        for request in recording:
            answer = await on.client.request(
                request.method,
                request.path,
                json=request.body,
                headers={**request.headers, "accept-encoding": "identity"},
            )
            assert answer.status_code == 200, f"{request.method} {request.path}: {answer.text}"
            _check(
                request, answer.text, streamed=answer.headers.get("content-type", "").startswith("text/event-stream")
            )
    assert streams.open == set()


def _check(request: Recorded, text: str, *, streamed: bool) -> None:
    if request.route not in GENERATION:
        return
    assert request.body is not None
    assert streamed == bool(request.body.get("stream"))
    if streamed:
        CHECKS[request.route](events_of(text))
    else:
        check_whole(request.route, json.loads(text))
