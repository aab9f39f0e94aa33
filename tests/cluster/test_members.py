"""Workers that come and go while a gateway serves: what a members file and DNS say, with real processes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from penstock.wire.curve_keys import CurveKeys

from .asking import ask, penstock, streaming
from .member_sources import QUICK, MembersFile
from .scaled_fleet import states
from .server import PATIENCE_S, PenstockServer, PenstockWorker, free_port

STREAMS = 24
TOKENS = 200

USED_S = 3.0
"""From a change of the members to the worker's row being ready, as docs/operations.md says."""

PATIENT = "[failover]\nno_path_s = 60.0\n"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("members") / "keys"
    CurveKeys.ephemeral().save(folder)
    return str(folder)


def read_stream(server: PenstockServer, seed: int) -> str:
    with streaming(server, max_tokens=TOKENS, seed=seed) as stream:
        return stream.read()


@contextmanager
def streams(server: PenstockServer) -> Iterator[list[Future[str]]]:
    """So many at once, each with a seed of its own."""
    with ThreadPoolExecutor(STREAMS) as pool:
        yield [pool.submit(read_stream, server, seed) for seed in range(STREAMS)]


def texts(asked: list[Future[str]]) -> list[str]:
    return [one.result() for one in asked]


def wait_used(server: PenstockServer, worker: str, since: float) -> None:
    server.wait_for(lambda: states(server).get(worker) == "ready", PATIENCE_S, "used")
    assert time.monotonic() - since <= USED_S


@pytest.fixture(scope="module")
def place(
    keys: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[PenstockServer, MembersFile, PenstockWorker, PenstockWorker]]:
    """A gateway whose members file names the first of two workers."""
    folder = tmp_path_factory.mktemp("place")
    file = MembersFile(folder / "members.json")
    with ExitStack() as stack:
        one, two = (stack.enter_context(PenstockWorker(["--keys", keys, "--name", name])) for name in ("one", "two"))
        file.write(one)
        flags = ["--keys", keys, "--members", f"file:{file.path}"]
        server = stack.enter_context(PenstockServer(flags, config=PATIENT, folder=folder))
        yield server, file, one, two


@pytest.fixture(scope="module")
def undisturbed(place: tuple[PenstockServer, MembersFile, PenstockWorker, PenstockWorker]) -> list[str]:
    """What one worker answers alone."""
    with streams(place[0]) as asked:
        return texts(asked)


def test_a_worker_is_added_and_another_removed_while_streams_run(
    place: tuple[PenstockServer, MembersFile, PenstockWorker, PenstockWorker], undisturbed: list[str]
) -> None:
    server, file, one, two = place
    with streams(server) as first:
        server.wait_for(lambda: server.worker("one")["running"] > 0, PATIENCE_S, "busy")
        wait_used(server, "two", file.write(one, two, zone="a"))
        assert server.worker("two")["labels"] == {"zone": "a"}
        with streams(server) as second:
            server.wait_for(lambda: server.worker("two")["running"] > 0, PATIENCE_S, "busy")
            file.write(two)
            server.wait_for(lambda: states(server).get("one") != "ready", PATIENCE_S, "left out")
            with streams(server) as third:
                assert texts(third) == undisturbed
            assert texts(second) == undisturbed
        assert texts(first) == undisturbed
    server.wait_for(lambda: states(server) == {"two": "ready"}, PATIENCE_S, "forgotten")
    assert server.metrics()["penstock:resubmissions_total"] == 0, "requests ended where they were"
    assert one.running
    assert "one at" in server.read_log()
    wait_used(server, "one", file.write(one, two))
    with streams(server) as again:
        assert texts(again) == undisturbed


def test_a_file_that_is_broken_or_missing_changes_nothing(
    place: tuple[PenstockServer, MembersFile, PenstockWorker, PenstockWorker], undisturbed: list[str]
) -> None:
    server, file, one, two = place
    file.write(one, two)
    server.wait_for(lambda: states(server) == {"one": "ready", "two": "ready"}, PATIENCE_S, "used")
    whole = file.path.read_bytes()
    with streams(server) as asked:
        file.path.write_bytes(whole[:40])
        server.wait_for(lambda: "truncated" in server.read_log(), PATIENCE_S, "told of")
        assert "truncated" in penstock("status", "--url", server.url).stdout
        file.path.unlink()
        server.wait_for(lambda: "no such file" in server.read_log(), PATIENCE_S, "told of")
        assert texts(asked) == undisturbed
    assert states(server) == {"one": "ready", "two": "ready"}
    assert server.get("/ready").status_code == 200
    file.path.write_bytes(whole)
    server.wait_for(lambda: "are read again" in server.read_log(), PATIENCE_S, "read")


def test_a_worker_that_moves_to_another_port_is_found_there(
    keys: str, place: tuple[PenstockServer, MembersFile, PenstockWorker, PenstockWorker], undisturbed: list[str]
) -> None:
    server, file, one, two = place
    file.write(one, two)
    server.wait_for(lambda: states(server) == {"one": "ready", "two": "ready"}, PATIENCE_S, "used")
    with streams(server) as asked:
        server.wait_for(lambda: server.worker("two")["running"] > 0, PATIENCE_S, "busy")
        two.kill()
        with PenstockWorker(["--keys", keys, "--name", "two"]) as moved:
            since = file.write(one, moved)
            pid = moved.worker_pid()
            server.wait_for(lambda: pid in [row["pid"] for row in server.workers()], PATIENCE_S, "found")
            wait_used(server, "two", since)
            assert texts(asked) == undisturbed
            assert set(states(server)) == {"one", "two"}
            file.write(one)
            server.wait_for(lambda: states(server) == {"one": "ready"}, PATIENCE_S, "forgotten")


def test_a_worker_that_is_named_by_another_address_goes_on(
    keys: str, place: tuple[PenstockServer, MembersFile, PenstockWorker, PenstockWorker], undisturbed: list[str]
) -> None:
    """The same process, as before: its requests are submitted to it again."""
    server, file = place[:2]
    port = free_port()
    with PenstockWorker(["--keys", keys, "--name", "wide", "--listen", f"tcp://0.0.0.0:{port}"], port=port) as wide:
        wait_used(server, "wide", file.write(wide))
        server.wait_for(lambda: states(server) == {"wide": "ready"}, PATIENCE_S, "alone")
        pid = server.worker("wide")["pid"]
        with streams(server) as asked:
            server.wait_for(lambda: server.worker("wide")["running"] > 0, PATIENCE_S, "busy")
            text = file.path.read_text()
            file.path.write_text(text.replace("127.0.0.1", "127.0.0.2"))
            server.wait_for(lambda: "127.0.0.2" in server.read_log(), PATIENCE_S, "joined")
            assert texts(asked) == undisturbed
        assert states(server) == {"wide": "ready"}
        assert server.worker("wide")["pid"] == pid
        file.path.write_text('{"members": []}')
        server.wait_for(lambda: states(server) == {}, PATIENCE_S, "forgotten")


def test_a_gateway_without_members_waits_for_them(keys: str, tmp_path: Path) -> None:
    path = tmp_path / "members.json"
    server = PenstockServer(["--keys", keys, "--members", f"file:{path}"])
    with ExitStack() as stack:
        server.start()
        stack.callback(server.kill)
        waits = f"waiting for those of file:{path} to join"
        server.wait_for(lambda: waits in server.read_log(), PATIENCE_S, "up")
        server.wait_for(lambda: "no such file" in server.read_log(), PATIENCE_S, "told of")
        answer = server.get("/ready")
        assert answer.status_code == 503
        assert f"{path}: no such file" in answer.json()["reason"]
        worker = stack.enter_context(PenstockWorker(["--keys", keys, "--name", "w"]))
        MembersFile(path).write(worker)
        server.wait_for(lambda: "ready: 1 of 1 workers joined" in server.read_log(), PATIENCE_S, "ready")
        assert len(ask(server, max_tokens=20)) > 5
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("words", "because"),
    [
        (["--members", "file:x"], "--members needs --keys DIR"),
        (["--join", "tcp://10.0.0.1:9000", "--keys", "~nosuchuser/k"], "~nosuchuser has no home folder on this host"),
        (["--kv-disk", "~nosuchuser/kv"], "--kv-disk ~nosuchuser/kv: ~nosuchuser has no home folder on this host"),
        (["--members", "workers:9000", "--keys", "KEYS"], "expected file:PATH, fleet:FLEET_FILE, dns:NAME:PORT"),
        (["--members", "file:x", "--join", "tcp://127.0.0.1:1", "--keys", "KEYS"], "exclude each other"),
        (["--members", "file:x", "--decode", "2", "--keys", "KEYS"], "--members starts no workers here"),
    ],
)
def test_refusals(keys: str, words: list[str], because: str) -> None:
    told = penstock("serve", *(keys if word == "KEYS" else word for word in words))
    assert told.returncode == 2
    (line,) = told.stderr.splitlines()
    assert because in line


# --- DNS --------------------------------------------------------------------------------------------------------------


def wait_asked(server: PenstockServer, names: object, more: int) -> None:
    """Until the name server was asked so many more times."""
    before = names.asked  # type: ignore[attr-defined]
    server.wait_for(lambda: names.asked >= before + more, PATIENCE_S, "asked")  # type: ignore[attr-defined]


def test_srv_records_name_workers_and_a_name_server_that_fails_loses_none(keys: str, tmp_path: Path) -> None:
    pytest.importorskip("dns", reason="the extra dns is not installed")
    from .name_server import NameServer

    with (
        NameServer("_penstock._tcp.workers.test", "SRV", ("127.0.0.1", 0)) as names,
        PenstockWorker(["--keys", keys, "--name", "one"]) as one,
        PenstockWorker(["--keys", keys, "--name", "two"]) as two,
    ):
        names.records = [f"0 0 {one.port} localhost."]
        config = PATIENT + QUICK + f'name_server = "127.0.0.1:{names.address[1]}"\n'
        flags = ["--keys", keys, "--members", "dns:_penstock._tcp.workers.test"]
        with PenstockServer(flags, config=config, folder=tmp_path) as server:
            whole = ask(server, max_tokens=TOKENS)
            names.records = [f"0 0 {worker.port} localhost." for worker in (one, two)]
            wait_used(server, "two", time.monotonic())
            names.fault = "servfail"
            wait_asked(server, names, 2)
            assert states(server) == {"one": "ready", "two": "ready"}
            assert ask(server, max_tokens=TOKENS) == whole
            names.fault = None
            names.records = [f"0 0 {two.port} localhost."]
            server.wait_for(lambda: states(server) == {"two": "ready"}, PATIENCE_S, "forgotten")
            assert ask(server, max_tokens=TOKENS) == whole
            names.fault = "nxdomain"
            wait_asked(server, names, 2)
            assert states(server) == {"two": "ready"}
            server.wait_for(lambda: states(server) == {}, PATIENCE_S, "believed")
            assert server.get("/ready").status_code == 503


def can_mount() -> bool:
    return subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode == 0


def test_addresses_of_a_name_are_workers_and_a_silent_name_server_holds_up_nothing(keys: str, tmp_path: Path) -> None:
    """With the system's resolver, which asks at port 53: the gateway has an /etc/resolv.conf of its own."""
    pytest.importorskip("dns", reason="the extra dns is not installed")
    from .name_server import NameServer

    if not can_mount():
        pytest.skip("a mount namespace cannot be made here")
    try:
        names = NameServer("workers.test", "A", ("127.53.0.1", 53))
    except PermissionError:
        pytest.skip("port 53 cannot be bound here")
    resolv = tmp_path / "resolv.conf"
    resolv.write_text("nameserver 127.53.0.1\noptions timeout:1 attempts:1\n")
    port = free_port()
    with ExitStack() as stack:
        stack.enter_context(names)
        for name, address in (("one", "127.0.0.2"), ("two", "127.0.0.3")):
            worker = PenstockWorker(["--keys", keys, "--name", name, "--listen", f"tcp://{address}:{port}"])
            stack.enter_context(worker)
        names.records = ["127.0.0.2"]
        server = PenstockServer(
            ["--keys", keys, "--members", f"dns:workers.test:{port}"], config=PATIENT + QUICK, folder=tmp_path
        )
        mount = f'mount --bind {resolv} "$(readlink -f /etc/resolv.conf)" && exec "$@"'
        server.launcher = ["unshare", "--mount", "sh", "-ec", mount, "sh"]
        stack.enter_context(server)
        whole = ask(server, max_tokens=TOKENS)
        names.records = ["127.0.0.3", "127.0.0.2"]
        wait_used(server, "two", time.monotonic())
        with streaming(server, max_tokens=TOKENS) as stream:
            stream.read(10)
            names.fault = "silent"
            server.wait_for(lambda: "cannot be resolved" in server.read_log(), PATIENCE_S, "told of")
            assert stream.read() == whole
        assert ask(server, max_tokens=TOKENS) == whole
        assert states(server) == {"one": "ready", "two": "ready"}
        names.fault, names.records = None, ["127.0.0.3"]
        server.wait_for(lambda: states(server) == {"two": "ready"}, PATIENCE_S, "forgotten")
        assert ask(server, max_tokens=TOKENS) == whole
