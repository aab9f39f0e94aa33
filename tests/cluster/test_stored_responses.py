"""Stored responses of a service of several gateways: found from each, whichever dies, for as long as they are kept."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from .processes import socket_inodes
from .server import PATIENCE_S, PenstockServer
from .test_gateways import both_gateways, inodes_of

ASKED: dict[str, Any] = {"model": "storyteller", "input": "A fox", "max_output_tokens": 8, "seed": 1}
FILE = "responses.sqlite3"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PenstockServer]:
    folder = tmp_path_factory.mktemp("runs")
    with PenstockServer(["--aggregated", "--gateways", "2"], environ={"XDG_RUNTIME_DIR": str(folder)}) as running:
        yield running
        (stored,) = folder.glob(f"penstock-*/{FILE}")
        assert stored.stat().st_mode & 0o777 == 0o600
        running.stop()
        assert list(folder.iterdir()) == [], "nothing is left of a run"


class Connected:
    """A client that stays with one gateway."""

    def __init__(self, server: PenstockServer) -> None:
        self._server = server
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        self.close = self._connection.close

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON of a response."""
        raw = None if body is None else json.dumps(body)
        headers = {} if body is None else {"content-type": "application/json"}
        self._connection.request(method, f"/v1/responses{path}", raw, headers)
        answer = self._connection.getresponse()
        return answer.status, json.loads(answer.read())

    def gateway(self) -> int:
        """The process that has accepted the connection."""
        assert self._connection.sock is not None
        inodes = inodes_of(self._server.port, {self._connection.sock.getsockname()[1]})
        (pid,) = (pid for pid in self._server.gateway_pids(self._server.workers()) if inodes & socket_inodes(pid))
        return pid


def clients_of_both(server: PenstockServer) -> tuple[Connected, Connected]:
    """One client of each gateway."""
    first = Connected(server)
    first.ask("GET", "/resp_none")
    for _ in range(200):
        second = Connected(server)
        second.ask("GET", "/resp_none")
        if second.gateway() != first.gateway():
            return first, second
        second.close()
    raise AssertionError("one gateway accepts everything")


def test_what_one_gateway_stores_the_other_finds_continues_and_deletes(server: PenstockServer) -> None:
    both_gateways(server)
    one, other = clients_of_both(server)
    with closing(one), closing(other):
        status, first = one.ask("POST", "", ASKED)
        assert (status, first["store"]) == (200, True)
        assert other.ask("GET", f"/{first['id']}") == (200, first)
        further = ASKED | {"input": "And then?", "previous_response_id": first["id"]}
        status, second = other.ask("POST", "", further)
        assert status == 200, second
        status, again = one.ask("POST", "", further)
        assert (status, again["output"][0]["content"]) == (200, second["output"][0]["content"])
        assert other.ask("DELETE", f"/{first['id']}")[0] == 200
        assert one.ask("GET", f"/{first['id']}")[0] == 404
        status, refused = one.ask("POST", "", further)
        assert (status, refused["error"]["code"]) == (400, "previous_response_not_found")
        assert one.ask("GET", f"/{second['id']}") == (200, second), "who went on from it has a copy"


def test_a_stored_response_survives_the_death_of_every_gateway(server: PenstockServer) -> None:
    both_gateways(server)
    with closing(Connected(server)) as client:
        _, first = client.ask("POST", "", ASKED)
    for pid in server.gateway_pids(server.workers()):
        os.kill(pid, signal.SIGKILL)
    both_gateways(server)
    with closing(Connected(server)) as client:
        assert client.ask("GET", f"/{first['id']}") == (200, first)
        further = ASKED | {"input": "And then?", "previous_response_id": first["id"]}
        status, second = client.ask("POST", "", further)
        whole = ASKED | {
            "input": [{"role": "user", "content": "A fox"}, *first["output"], {"role": "user", "content": "And then?"}]
        }
        assert (status, second["output"][0]["content"]) == (
            200,
            client.ask("POST", "", whole)[1]["output"][0]["content"],
        )


@pytest.mark.long
def test_with_a_folder_of_its_own_a_store_outlives_the_service(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    flags = ["--aggregated", "--response-store", str(folder)]
    with PenstockServer(flags) as server, closing(Connected(server)) as client:
        _, first = client.ask("POST", "", ASKED)
    with PenstockServer(flags) as server, closing(Connected(server)) as client:
        assert client.ask("GET", f"/{first['id']}") == (200, first)
    assert (folder / FILE).exists()
