"""Every error of the tree has an answer, and no other error tells anything."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest

from penstock import errors
from penstock.api.errors import error_format_of, error_response, logged_error_response
from penstock.errors import CapacityError, PenstockError, RequestError, WorkerError

TREE = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, PenstockError)]
MADE = {
    errors.BadField: lambda: errors.BadField("f", got=1, want="2"),
    errors.PromptTooLong: lambda: errors.PromptTooLong(prompt_tokens=1, max_tokens=2, limit=2),
    errors.InputTooLong: lambda: errors.InputTooLong("input", tokens=3, limit=2),
    errors.WrongTask: lambda: errors.WrongTask("a", "writes no text", "/b"),
    errors.UnknownModel: lambda: errors.UnknownModel("a", ["b"]),
    errors.ModelNotAllowed: lambda: errors.ModelNotAllowed("a", ["b"]),
    errors.TooManyConcurrentRequests: lambda: errors.TooManyConcurrentRequests(2),
    errors.UnknownWorker: lambda: errors.UnknownWorker("a", "b, c"),
    errors.ProtocolVersionError: lambda: errors.ProtocolVersionError(1, expected=2),
    errors.MethodNotAllowed: lambda: errors.MethodNotAllowed("GET", "/", allow="POST"),
}


@pytest.mark.parametrize("kind", TREE, ids=[kind.__name__ for kind in TREE])
def test_every_error_is_answered(kind: type[PenstockError]):
    error = MADE.get(kind, lambda: kind("the message"))()
    answer = error_response(error)
    body = json.loads(answer.body)["error"]
    headers = dict(answer.headers)
    if issubclass(kind, RequestError):
        assert 400 <= answer.status < 500
        assert answer.status == kind.status
        assert body["type"] == "invalid_request_error"
        assert body["message"] == str(error)
    elif issubclass(kind, CapacityError):
        assert answer.status == kind.status
        assert answer.status in (429, 503)
        assert int(headers[b"retry-after"]) >= 1
    elif issubclass(kind, WorkerError):
        assert answer.status == 503
        assert headers[b"retry-after"] == b"1"
    else:
        assert answer.status == 500
        assert "the message" not in body["message"]


def test_what_nobody_foresaw_is_logged_and_not_told(caplog: pytest.LogCaptureFixture):
    answer = logged_error_response(RuntimeError("a secret"))
    assert answer.status == 500
    assert b"secret" not in answer.body
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert caplog.records[0].exc_info is not None


def test_what_clients_do_wrong_is_no_line_in_the_log(caplog: pytest.LogCaptureFixture):
    logged_error_response(errors.BadField("f", got="what they wrote", want="x"))
    logged_error_response(errors.QueueFull("full"))
    assert caplog.records == []


OPERATOR = "The model itself has 4000 tokens: its operator may allow more with --max-model-len."


def too_long(prompt: int, answer: int, **more: Any) -> errors.PromptTooLong:
    return errors.PromptTooLong(prompt_tokens=prompt, max_tokens=answer, limit=100, **more)


@pytest.mark.parametrize(
    ("error", "chat", "responses", "messages"),
    [
        (
            too_long(90, 20, model_len=100),
            "Set 'max_tokens' to 10 or less, keep the end of the prompt with 'truncate_prompt_tokens', or shorten the "
            "conversation (agents: /compact).",
            "Set 'max_output_tokens' to 10 or less, or shorten the conversation (agents: /compact).",
            "Shorten the conversation (agents: /compact).",
        ),
        (
            too_long(120, 1, model_len=4000),
            "Keep the end of the prompt with 'truncate_prompt_tokens', or shorten the conversation (agents: /compact). "
            + OPERATOR,
            f"Shorten the conversation (agents: /compact). {OPERATOR}",
            f"Shorten the conversation (agents: /compact). {OPERATOR}",
        ),
        (too_long(90, 20, cuts=False, at_least=True), *["Shorten the conversation (agents: /compact)."] * 3),
    ],
    ids=["the response", "the prompt", "no way to cut it"],
)
def test_a_context_that_is_too_long_says_what_helps_in_each_api(
    error: errors.PromptTooLong, chat: str, responses: str, messages: str
) -> None:
    for path, advice, param in (
        ("/v1/chat/completions", chat, "messages"),
        ("/v1/responses", responses, "input"),
        ("/v1/messages", messages, None),
    ):
        told = json.loads(error_format_of(path)(error_response(error)))["error"]
        numbers = f"({error.prompt_tokens} in the prompt, {error.max_tokens} in the answer)"
        assert told["message"].endswith(f"{numbers}. {advice}")
        assert told.get("param") == param
    assert told["message"].startswith(f"prompt is too long: {error.prompt_tokens} tokens > 100 maximum. ")
