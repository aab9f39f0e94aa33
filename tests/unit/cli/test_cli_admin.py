"""``penstock admin``: what it asks the service for, and how it words what came of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

from penstock.cli.main import main


class Service(HTTPServer):
    """Two workers that do as they are told, and come back with the next look when they restart."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.told: list[tuple[str, Any, str | None]] = []
        self.refusal: tuple[int, Any] | None = None
        self.incarnations = {"decode-0": 1, "prefill-0": 1}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def row(self, worker: str) -> dict[str, Any]:
        return {"id": worker, "role": "decode", "state": "ready", "incarnation": self.incarnations[worker]}


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_GET(self) -> None:
        self.answer(200, {"workers": [self.server.row(worker) for worker in self.server.incarnations]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.told.append((self.path, body, self.headers["Authorization"]))
        if self.server.refusal is not None:
            self.answer(*self.server.refusal)
            return
        worker, verb = self.path.split("/")[-2:]
        if verb == "restart":
            self.server.incarnations[worker] += 1
        self.answer(200, self.server.row(worker))

    def answer(self, status: int, body: Any) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as own:
        thread = Thread(target=own.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield own
        own.shutdown()
        thread.join()


def test_a_role_is_asked_for_with_the_key(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["admin", "role", "decode-0", "prefill", "--url", service.url, "--api-key", "secret"]
    assert main(words) == 0
    assert service.told == [("/admin/workers/decode-0/role", {"role": "prefill"}, "Bearer secret")]
    assert capsys.readouterr().out.startswith("decode-0: decode, ready (0.")


def test_several_are_drained_one_after_the_other(service: Service) -> None:
    assert main(["admin", "drain", "decode-0", "prefill-0", "--force", "--url", service.url]) == 0
    assert service.told == [(f"/admin/workers/{w}/drain", {"force": True}, None) for w in ("decode-0", "prefill-0")]


def test_a_rolling_restart_waits_for_each(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["admin", "restart", "--all", "--url", service.url]) == 0
    assert [path.split("/")[-2] for path, *_ in service.told] == ["decode-0", "prefill-0"]
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main(["admin", "restart", "--url", service.url]) == 2
    assert "name the workers, or say --all" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "code"), [(404, 2), (409, 2), (503, 1)])
def test_refusals_are_said_in_the_services_words(
    service: Service, status: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    service.refusal = status, {"error": {"message": "It is the last one."}}
    assert main(["admin", "drain", "decode-0", "--url", service.url]) == code
    assert capsys.readouterr().err == "penstock: error: It is the last one.\n"


def test_the_last_worker_of_a_role_is_insisted_on_with_a_flag(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the words of ``router.admin``, whose request field is a flag here."""
    text = 'Give another worker the role decode or both first, or insist with "force": true.'
    service.refusal = 409, {"error": {"message": text, "code": "last_of_its_role"}}
    assert main(["admin", "drain", "decode-0", "--url", service.url]) == 2
    assert capsys.readouterr().err.endswith("the role decode or both first, or add --force.\n")


def test_a_key_that_is_wanted_and_an_answer_that_is_none(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    service.refusal = 401, {}
    assert main(["admin", "resume", "decode-0", "--url", service.url]) == 2
    assert "wants a key: add --api-key KEY" in capsys.readouterr().err
    service.refusal = 200, ["strange"]
    assert main(["admin", "resume", "decode-0", "--url", service.url]) == 1
    assert "not as a Penstock does" in capsys.readouterr().err


def test_a_key_that_is_not_enough_is_told_from_none(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    service.refusal = 403, {"error": {"message": "This needs the key of an operator."}}
    assert main(["admin", "resume", "decode-0", "--url", service.url, "--api-key", "tenants"]) == 2
    error = capsys.readouterr().err
    assert "This needs the key of an operator." in error
    assert "add --api-key" not in error


def test_a_role_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["admin", "role", "decode-0", "reader"])
    assert end.value.code == 2
    assert "invalid choice: 'reader'" in capsys.readouterr().err
