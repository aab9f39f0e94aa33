"""From start to end: starting, refusing, restarting, draining, and leaving nothing behind."""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from penstock.bundled import storyteller

from .asking import ask, body, penstock, streaming
from .conftest import Serve
from .server import PATIENCE_S, START_S, PenstockServer, free_port

FIELDS = {
    "id",
    "role",
    "pid",
    "state",
    "running",
    "queued",
    "kv_pages_used",
    "kv_pages_free",
    "kv_pages_leaked",
}


TRIES = 10
"""On a busy machine anything may take long now and then, and an answer be over before it was interrupted."""


@pytest.fixture(scope="module")
def one_for_many() -> Iterator[PenstockServer]:
    with PenstockServer() as server:
        yield server


@pytest.fixture
def standing(one_for_many: PenstockServer) -> PenstockServer:
    """A service that others have used, and that is whole: it is to be left so."""
    one_for_many.wait_all_ready()
    one_for_many.wait_idle()
    return one_for_many


def test_without_a_key_it_takes_no_requests_of_web_sites(standing: PenstockServer):
    assert standing.get("/v1/models", host="localhost").status_code == 200
    rebound = standing.get("/v1/models", host="evil.example", origin="http://evil.example")
    assert (rebound.status_code, rebound.json()["error"]["code"]) == (403, "host_not_allowed")
    page = standing.get("/admin/workers", origin="https://evil.example")
    assert (page.status_code, page.json()["error"]["code"]) == (403, "origin_not_allowed")


# --- starting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "roles"),
    [
        ((), {"prefill-0": "prefill", "decode-0": "decode"}),
        pytest.param(("--aggregated",), {"both-0": "both"}, marks=pytest.mark.long),
        pytest.param(
            ("--prefill", "1", "--decode", "2", "--transfer", "tcp"),
            {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"},
            marks=pytest.mark.long,
        ),
    ],
)
def test_it_starts_answers_and_ends(serve: Serve, flags: tuple[str, ...], roles: dict[str, str]) -> None:
    server = serve(*flags)
    whole = {worker: (role, "ready") for worker, role in roles.items()}  # it answers before every worker is ready
    server.wait_for(
        lambda: {row["id"]: (row["role"], row["state"]) for row in server.workers()} == whole, START_S, "whole"
    )
    assert all(row.keys() >= FIELDS for row in server.workers())
    assert len(ask(server, max_tokens=40)) > 20
    server.wait_idle()
    assert all(row["kv_pages_leaked"] == 0 for row in server.workers())
    assert len(server.processes()) == 2 + len(roles)
    server.assert_nothing_has_a_name()


def test_the_log_says_what_runs_where_and_how_to_talk_to_it(serve: Serve) -> None:
    server = serve()
    server.wait_for(lambda: "curl" in server.read_log(), PATIENCE_S, "announced")
    log = server.read_log()
    for row in server.workers():
        assert f"{row['id']}: pid {row['pid']}" in log
    for part in ("only tells short stories", "penstock serve PATH", f"penstock chat --url {server.url}", "KV pages"):
        assert part in log
    assert len(log.splitlines()) < 20


def test_log_lines_can_be_json(serve: Serve) -> None:
    server = serve("--log-json")
    server.wait_for(lambda: "curl" in server.read_log(), PATIENCE_S, "announced")
    lines = [json.loads(line) for line in server.read_log().splitlines()]
    assert {"supervisor"} <= {line["process"] for line in lines}


def test_status_for_people_and_for_scripts(standing: PenstockServer) -> None:
    told = penstock("status", "--url", standing.url, "--json")
    assert told.returncode == 0, told.stderr
    rows = json.loads(told.stdout)["workers"]
    assert {row["id"]: row["state"] for row in rows} == {"prefill-0": "ready", "decode-0": "ready"}
    assert all(row.keys() >= FIELDS for row in rows)
    table = penstock("status", PENSTOCK_URL=standing.url).stdout
    assert "decode-0" in table
    assert "ready" in table


def test_status_says_in_one_line_that_nothing_listens() -> None:
    told = penstock("status", "--url", f"http://127.0.0.1:{free_port()}")
    assert told.returncode == 1
    assert told.stderr.startswith("penstock: error: nothing listens at http://127.0.0.1:")
    assert told.stderr.count("\n") == 1


# --- refusing --------------------------------------------------------------------------------------------------------


def refused(because: str, *words: str) -> None:
    """Refused at once, in one line, with exit code 2."""
    told = penstock("serve", *words)
    assert told.returncode == 2, told.stderr
    assert told.stderr.splitlines()[-1].startswith("penstock: error: ")
    assert because in told.stderr.splitlines()[-1]
    assert "Traceback" not in told.stderr


def all_refused(*cases: tuple[str, ...]) -> None:
    """The same, two at a time: why, and the words."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert len(list(pool.map(lambda case: refused(*case), cases))) == len(cases)


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(f"port {port} on 127.0.0.1 is taken", "--port", str(port))


def test_a_model_that_cannot_be_served_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    empty, mamba = tmp_path / "empty", tmp_path / "mamba"
    for folder in (empty, mamba):
        folder.mkdir()
    (mamba / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}', encoding="utf-8")
    (mamba / "tokenizer.json").write_text("{}", encoding="utf-8")
    all_refused(
        ("no such folder", "./no-such-model"), ("has no config.json", str(empty)), ("MambaForCausalLM", str(mamba))
    )


def test_a_hub_name_without_network() -> None:
    told = penstock("serve", "org/no-such-model", HF_HUB_OFFLINE="1")
    assert told.returncode == 2
    (line,) = told.stderr.splitlines()
    assert line.startswith("penstock: error: org/no-such-model: the model is not in the local cache")


def test_settings_that_cannot_be() -> None:
    all_refused(
        ("needs a key", "--host", "0.0.0.0"),
        ("has 2048 positions", "--max-model-len", "4096"),
        ("--kv-memory", "--kv-memory", "4KiB"),
        ("this machine and build have", "--kernels", "abacus"),
        ("leave out --prefill", "--aggregated", "--prefill", "2"),
    )


def test_a_tokenizer_that_cannot_be_read_ends_it_at_once(tmp_path: Path) -> None:
    shutil.copytree(storyteller(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").write_text('{"model": "what?"}', encoding="utf-8")
    told = penstock("serve", str(tmp_path), "--port", str(free_port()))
    assert told.returncode == 1
    assert told.stderr.splitlines()[-1].startswith("penstock: error: gateway-0 cannot start: ")
    assert "restarting" not in told.stderr
    assert "tokenizer.json" in told.stderr.splitlines()[-1]


def test_with_a_key_nothing_is_told_without_it(serve: Serve) -> None:
    server = serve("--api-key", "correct horse")
    assert server.get("/v1/models").status_code == 401
    assert server.get("/admin/workers").status_code == 401
    assert server.get("/v1/models", Authorization="Bearer correct horse").status_code == 200
    told = penstock("status", "--url", server.url)
    assert told.returncode == 2
    assert "wants a key" in told.stderr
    told = penstock("status", "--url", server.url, "--json", PENSTOCK_API_KEY="correct horse")
    assert len(json.loads(told.stdout)["workers"]) == 2
    assert "correct horse" not in server.read_log()


# --- restarting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("worker", [pytest.param("prefill-0", marks=pytest.mark.long), "decode-0"])
def test_a_killed_worker_is_back_with_the_same_id(standing: PenstockServer, worker: str) -> None:
    pid = standing.worker(worker)["pid"]
    os.kill(pid, signal.SIGKILL)

    def back() -> bool:
        row = standing.worker(worker)
        return row["state"] == "ready" and row["pid"] != pid

    standing.wait_for(back, PATIENCE_S, "back")
    assert len(ask(standing, max_tokens=20)) > 5


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_an_answer_survives_the_end_of_its_worker(standing: PenstockServer, signum: int) -> None:
    undisturbed = ask(standing, max_tokens=400)
    with streaming(standing, max_tokens=400) as stream:
        had = len(stream.read(50))
        pid = standing.worker("decode-0")["pid"]
        os.kill(pid, signum)
        assert stream.read() == undisturbed
    assert had < len(undisturbed)
    standing.wait_for(lambda: pid not in standing.processes(), PATIENCE_S, "ended")  # the next test stops another


def test_a_stopped_worker_is_replaced(standing: PenstockServer) -> None:
    """How long it is given to go on is for ``unit/launch/test_restart.py``, whose clock is virtual."""
    pid = standing.worker("decode-0")["pid"]
    os.kill(pid, signal.SIGSTOP)
    standing.wait_for(lambda: standing.worker("decode-0")["pid"] != pid, PATIENCE_S, "replaced")
    standing.wait_all_ready()
    assert pid not in standing.processes()
    assert len(ask(standing, max_tokens=20)) > 5


def test_a_killed_gateway_is_back(standing: PenstockServer) -> None:
    workers = {row["id"]: row["pid"] for row in standing.workers()}
    gateway = standing.gateway_pid()
    os.kill(gateway, signal.SIGKILL)
    standing.wait_for(lambda: gateway not in standing.processes(), PATIENCE_S, "dead")
    standing.wait_ready()
    assert {row["id"]: row["pid"] for row in standing.workers()} == workers
    assert len(ask(standing, max_tokens=20)) > 5


def test_a_stopped_gateway_is_replaced(standing: PenstockServer) -> None:
    gateway = standing.gateway_pid()
    os.kill(gateway, signal.SIGSTOP)
    standing.wait_for(lambda: gateway not in standing.processes(), PATIENCE_S, "ended")
    standing.wait_ready()
    assert len(ask(standing, max_tokens=20)) > 5


def test_what_a_dead_gateway_asked_for_is_forgotten(standing: PenstockServer) -> None:
    with streaming(standing, max_tokens=1500) as one, streaming(standing, max_tokens=1500, seed=6) as other:
        one.read(20)
        other.read(20)
        os.kill(standing.gateway_pid(), signal.SIGKILL)
    standing.wait_ready()
    standing.wait_idle()
    assert all(row["kv_pages_leaked"] == 0 for row in standing.workers())


def test_a_client_that_goes_away_frees_everything_within_a_second(standing: PenstockServer) -> None:
    def leave_a_stream() -> None:
        with streaming(standing, max_tokens=1500) as stream:
            stream.read(20)

    def leave_before_the_answer() -> None:
        patience = httpx.Timeout(60, read=0.2)
        with httpx.Client(timeout=patience, trust_env=False) as client, pytest.raises(httpx.ReadTimeout):
            client.post(f"{standing.url}/v1/chat/completions", json=body(max_tokens=1500, n=4))

    for leave in (leave_a_stream, leave_before_the_answer):
        took_s = []
        while not took_s or min(took_s) >= 1.0:
            assert len(took_s) < TRIES, f"after {took_s} s"
            leave()
            left = time.monotonic()
            standing.wait_idle()
            took_s.append(time.monotonic() - left)
    assert all(row["kv_pages_leaked"] == 0 for row in standing.workers())


# --- ending ----------------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_it(serve: Serve) -> None:
    server = serve()
    server.interrupt()
    assert server.wait_end() == 0
    assert "Traceback" not in server.read_log()


def test_sigterm_lets_a_running_answer_finish(serve: Serve) -> None:
    server = serve()
    undisturbed = ask(server, max_tokens=500)
    with streaming(server, max_tokens=500) as stream:
        assert len(stream.read(20)) < len(undisturbed)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: "finishing what runs" in server.read_log(), PATIENCE_S, "draining")
        assert stream.read() == undisturbed
    assert server.wait_end() == 0


def test_a_second_signal_ends_it_at_once(serve: Serve) -> None:
    server = serve(config="[failover]\nmax_attempts = 1000\n")
    with streaming(server, max_tokens=1500) as stream:
        stream.read(20)
        for row in server.workers():  # nothing more will come, so draining alone would not end
            os.kill(row["pid"], signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: "finishing what runs" in server.read_log(), PATIENCE_S, "draining")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_end(20.0) == 0  # draining alone has 30


def test_sigkill_of_the_supervisor_leaves_nothing(serve: Serve) -> None:
    server = serve()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        running = [pool.submit(_ask_until_it_breaks, server) for _ in range(4)]
        server.wait_for(lambda: any(row["running"] for row in server.workers()), PATIENCE_S, "busy")
        server.kill()
        server.assert_nothing_left()
        assert all(future.result(timeout=60) for future in running)


def _ask_until_it_breaks(server: PenstockServer) -> bool:
    try:
        while True:
            ask(server, max_tokens=1500)
    except httpx.TransportError:
        return True


def test_it_can_be_ended_while_it_starts() -> None:
    server = PenstockServer()
    server.start()
    try:
        server.wait_for(lambda: "model storyteller" in server.read_log(), PATIENCE_S, "starting")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_end() == 0
        server.assert_nothing_left()
    finally:
        server.kill()


@pytest.mark.long
def test_it_can_be_started_many_times_on_one_port() -> None:
    port = free_port()
    for _ in range(2):
        with PenstockServer(port=port) as server:
            assert server.get("/ready").status_code == 200
