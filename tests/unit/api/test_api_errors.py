"""Every error of the tree has an answer, and no other error tells anything."""

from __future__ import annotations

import inspect
import json

import pytest

from penstock import errors
from penstock.api.errors import error_response, logged_error_response
from penstock.errors import CapacityError, PenstockError, RequestError, WorkerError

TREE = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, PenstockError)]
MADE = {
    errors.BadField: lambda: errors.BadField("f", got=1, want="2"),
    errors.PromptTooLong: lambda: errors.PromptTooLong(prompt_tokens=1, max_tokens=2, limit=2),
    errors.InputTooLong: lambda: errors.InputTooLong("input", tokens=3, limit=2),
    errors.WrongTask: lambda: errors.WrongTask("a", "writes no text", "/b"),
    errors.UnknownModel: lambda: errors.UnknownModel("a", ["b"]),
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
