"""``penstock ps``: what is shown of services that answer, need a key, or do not answer; and of processes."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import ps
from penstock.cli.console import StatusLine
from penstock.cli.local_service import find_service, last_words, service_failures
from penstock.cli.main import main
from penstock.launch.run_folder import RunFolder, ServiceRecord


class Workers(http.server.BaseHTTPRequestHandler):
    """Answers ``/admin/workers`` to who has the key."""

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        known = self.headers["Authorization"] == "Bearer key"
        body = json.dumps({"workers": [{"running": 3, "queued": 1}, {"running": 2}]} if known else {}).encode()
        self.send_response(200 if known else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Workers) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RunFolder]]:
    """Two run folders, the only ones that are looked at; with a short name, as a socket's path has 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="p") as base:
        monkeypatch.setattr("penstock.launch.run_folder.default_bases", lambda: [Path(base)])
        with closing(RunFolder()) as one, closing(RunFolder()) as other:
            yield [one, other]


def test_no_service_is_said_with_what_starts_one(folders: list[RunFolder], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps"]) == 0
    assert capsys.readouterr().out == f"{ps.NONE_RUNS}\n"
    assert main(["ps", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"services": []}


def test_services_have_a_row_each_also_one_that_does_not_answer(
    folders: list[RunFolder], url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders[0].publish(ServiceRecord(pid=os.getpid(), url=url, model="a", needs_key=True))
    folders[1].publish(ServiceRecord(pid=os.getppid(), url="http://127.0.0.1:9", model=""))
    assert main(["ps", "--api-key", "key"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["MODEL", "URL", "PID", "UP", "WORKERS", "RUNNING", "QUEUED", "MEMORY"]
    shown = {row.split()[0]: row.split() for row in rows}
    assert shown["a"][1:3] == [url, str(os.getpid())]
    assert shown["a"][-4:-1] == ["2", "5", "1"]
    assert shown["(catalogue)"][-4:-1] == ["?", "?", "?"]
    assert rows[-1].startswith("http://127.0.0.1:9: nothing listens at http://127.0.0.1:9")

    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    assert main(["ps", "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["services"]
    (row,) = [row for row in found if row["model"] == "a"]
    assert row["running"] is None
    assert "wants a key" in row["error"]


def test_a_service_is_found_by_name_and_path_unless_it_is_anothers_own(folders: list[RunFolder]) -> None:
    shared = ServiceRecord(pid=1, url="http://127.0.0.1:1", model="a", path="/models/a")
    own = ServiceRecord(pid=2, url="http://127.0.0.1:2", model="b", path="/models/b", stops_with_parent=True)
    folders[0].publish(shared)
    folders[1].publish(own)
    assert [find_service(model) for model in (None, "a", "/models/../models/a")] == [shared] * 3
    assert [find_service(model) for model in ("b", "/models/b", "c")] == [None] * 3
    folders[1].publish(ServiceRecord(pid=2, url="http://127.0.0.1:2", model="embeds", generates=False))
    assert find_service(None) == shared


def test_processes_below_a_process_and_their_memory() -> None:
    script = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input(); held = b\"1\" * (64 << 20); input()'])"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        deadline = time.monotonic() + 60
        while not (below := ps.descendants(process.pid, ps.children_by_parent())):
            assert time.monotonic() < deadline
        before = ps.memory_bytes([process.pid, *below])
        process.stdin.write(b"\n")
        process.stdin.flush()
        while ps.memory_bytes([process.pid, *below]) < before + (60 << 20):
            assert time.monotonic() < deadline
        age = ps.process_age_s(process.pid)
        assert age is not None
        assert 0 <= age < 60
        process.stdin.write(b"\n")
    assert ps.process_age_s(process.pid) is None
    assert ps.resident_sizes(process.pid) == {}


def test_a_wait_is_told_every_ten_seconds_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter([0.0, 4.0, 10.0, 15.0, 20.5])
    with StatusLine("starting a", lambda: next(clock)) as status:
        for text in ("plan", "loading weights: 40 %", "loading weights: 50 %", ""):
            status.show(text)
    assert capsys.readouterr().err == "starting a, 10 s: loading weights: 40 %\nstarting a, 20 s\n"


def test_last_words_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "service.log"
    log.write_text("01:02:03.456 W decode-0    lost\n01:02:03.556 I supervisor  loading weights: 4 %, 1MiB of 2MiB\n")
    assert last_words(log) == "loading weights: 4 %, 1MiB of 2MiB"
    assert service_failures(log) == ["lost"]
    log.write_text("")
    assert last_words(log) == ""
