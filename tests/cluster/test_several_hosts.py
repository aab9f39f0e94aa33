"""Workers that are joined over TCP, as on several hosts: the same answers, through restarts, and only with the keys."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from penstock.wire.curve_keys import CurveKeys

from .asking import ask, penstock, streaming
from .server import PATIENCE_S, PenstockServer, PenstockWorker, free_port

TOKENS = 900
"""An answer that takes long enough to be hit in the middle."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("several") / "keys"
    CurveKeys.ephemeral().save(folder)
    return str(folder)


PATIENT = '[failover]\nno_path_s = 60.0\n[routing]\nsplit = "always"\n'
"""However long a worker takes to start anew, answers wait for it; and whatever steps take, both workers are used."""

SCENES = 5
"""How often a worker is killed to hit an answer: on a busy machine it may be over before that."""


@pytest.fixture(scope="module")
def fleet(
    keys: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[PenstockServer, PenstockWorker, PenstockWorker]]:
    """A gateway, and a prefill and a decode worker that it joins: who ends one of them for good stands last."""
    with ExitStack() as stack:
        prefill = stack.enter_context(PenstockWorker(["--role", "prefill", "--keys", keys, "--name", "p"]))
        decode = stack.enter_context(PenstockWorker(["--role", "decode", "--keys", keys, "--name", "d"]))
        flags = ["--keys", keys, "--join", prefill.endpoint, "--join", decode.endpoint]
        server = PenstockServer(flags, config=PATIENT, folder=tmp_path_factory.mktemp("fleet"))
        yield stack.enter_context(server), prefill, decode


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """What one host answers."""
    with PenstockServer() as server:
        return ask(server, max_tokens=TOKENS)


Fleet = tuple[PenstockServer, PenstockWorker, PenstockWorker]


def test_joined_workers_answer_as_one_host_does(fleet: Fleet, undisturbed: str) -> None:
    server, prefill, decode = fleet
    assert {row["id"]: row["role"] for row in server.workers()} == {"p": "prefill", "d": "decode"}
    assert server.worker("d")["pid"] == decode.worker_pid()
    assert server.worker("p")["pid"] == prefill.worker_pid()
    assert ask(server, max_tokens=TOKENS) == undisturbed
    server.wait_counted("kv_transfer_pages_total")
    server.wait_idle()
    assert all(row["kv_pages_leaked"] == 0 for row in server.workers())


@pytest.mark.parametrize(
    "victim", [pytest.param(1, id="prefill", marks=pytest.mark.long), pytest.param(2, id="decode")]
)
def test_an_answer_survives_the_death_of_a_joined_worker(fleet: Fleet, undisturbed: str, victim: int) -> None:
    server = fleet[0]
    pid = fleet[victim].worker_pid()
    with streaming(server, max_tokens=TOKENS) as stream:
        stream.read(50)
        os.kill(pid, signal.SIGKILL)
        assert stream.read() == undisturbed
    server.wait_for(lambda: pid not in [row["pid"] for row in server.workers()], PATIENCE_S, "joined again")
    assert ask(server, max_tokens=TOKENS) == undisturbed


@pytest.mark.long
def test_two_gateways_share_one_worker(keys: str) -> None:
    with PenstockWorker(["--keys", keys, "--role", "both"]) as worker:
        flags = ["--keys", keys, "--join", worker.endpoint]
        with PenstockServer(flags) as one, PenstockServer(flags) as other:
            with streaming(one, max_tokens=600) as stream:
                stream.read(20)
                assert len(ask(other, max_tokens=40)) > 20
            other.wait_idle()


def test_without_the_right_keys_nobody_comes_in(keys: str, tmp_path: Path) -> None:
    others = tmp_path / "others"
    CurveKeys.ephemeral().save(others)
    with PenstockWorker(["--keys", keys]) as worker, ExitStack() as stack:
        stranger = PenstockServer(["--keys", str(others), "--join", worker.endpoint])
        stranger.start()
        stack.callback(stranger.kill)
        stranger.wait_for(lambda: "talk to it" in stranger.read_log(), PATIENCE_S, "up")
        with PenstockServer(["--keys", keys, "--join", worker.endpoint]) as friend:
            assert len(ask(friend, max_tokens=20)) > 5
        assert stranger.get("/ready").status_code == 503
        assert stranger.workers() == []
        answer = httpx.post(
            f"{stranger.url}/v1/completions", json={"model": "storyteller", "prompt": "x"}, timeout=60, trust_env=False
        )
        assert answer.status_code == 503
        assert stranger.stop() == 0


@pytest.mark.long
def test_nobody_there_is_said_with_the_reason_and_ready_only_when_it_is(keys: str) -> None:
    port = free_port()
    worker = PenstockWorker(["--keys", keys], port=port)
    server = PenstockServer(["--keys", keys, "--join", worker.endpoint])
    with ExitStack() as stack:
        server.start()
        stack.callback(server.kill)
        server.wait_for(lambda: "connection refused" in server.read_log(), PATIENCE_S, "told of")
        reason = f"waiting for {worker.endpoint}: connection refused"
        assert reason in server.read_log()
        assert reason in server.get("/ready").json()["reason"]
        shown = penstock("status", "--url", server.url).stdout
        assert "waiting for workers to join" in shown
        assert f"{worker.endpoint}  connection refused" in shown
        assert "ready: " not in server.read_log()
        stack.enter_context(worker)
        server.wait_for(lambda: "ready: 1 of 1 workers joined" in server.read_log(), PATIENCE_S, "ready")
        assert server.get("/ready").status_code == 200
        assert f"join it: penstock serve --keys {keys} --join {worker.endpoint}" in worker.read_log()
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("words", "because"),
    [
        (["worker"], "needs --keys DIR"),
        (["worker", "--keys", "/no/such/folder"], "`penstock host-keys` makes keys on one host"),
        (["worker", "--keys", "KEYS", "--listen", "ipc://@x"], "expected tcp://HOST:PORT"),
        (["worker", "--keys", "KEYS", "--listen", "tcp://nowhere"], "is not an endpoint"),
        (["worker", "--keys", "KEYS", "--listen", "tcp://127.0.0.1:0"], "choose a port"),
        (["worker", "--keys", "KEYS", "--role", "reader"], "invalid enum value 'reader'"),
        (["serve", "--join", "tcp://127.0.0.1:1"], "--join needs --keys DIR"),
        (["serve", "--keys", "KEYS"], "--keys is for --join"),
        (["serve", "--keys", "KEYS", "--join", "tcp://127.0.0.1:1", "--decode", "2"], "--decode belongs to them"),
    ],
)
def test_refusals(keys: str, words: list[str], because: str) -> None:
    told = penstock(*(keys if word == "KEYS" else word for word in words))
    assert told.returncode == 2
    (line,) = told.stderr.splitlines()
    assert because in line


@pytest.mark.long
def test_a_mailbox_that_is_taken_is_refused(fleet: Fleet, keys: str) -> None:
    told = penstock("worker", "--keys", keys, "--listen", fleet[1].endpoint)
    assert told.returncode == 2
    assert f"port {fleet[1].port} on 127.0.0.1 is taken" in told.stderr


@pytest.mark.long
def test_a_worker_is_joined_again_when_it_is_started_anew_and_dead_when_it_ends(fleet: Fleet, undisturbed: str) -> None:
    server, _, decode = fleet
    before = server.metrics()["penstock:resubmissions_total"]
    with ExitStack() as stack:
        alive: PenstockWorker = decode
        for _ in range(SCENES):
            with streaming(server, max_tokens=TOKENS) as stream:
                stream.read(50)
                alive.kill()
                alive = stack.enter_context(PenstockWorker(decode.flags, port=decode.port))
                assert stream.read() == undisturbed
            pid = alive.worker_pid()
            server.wait_for(lambda pid=pid: server.worker("d")["pid"] == pid, PATIENCE_S, "joined again")
            if server.metrics()["penstock:resubmissions_total"] > before:
                break
        else:
            pytest.fail("the answer was over each time before its worker was killed")
        assert alive.stop() == 0
        server.wait_for(lambda: server.worker("d")["state"] == "dead", PATIENCE_S, "dead")
        assert server.get("/ready").status_code == 503
