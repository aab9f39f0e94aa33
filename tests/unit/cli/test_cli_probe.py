"""``penstock probe``: what counts as progress."""

from __future__ import annotations

import queue
import resource
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from node_folder import NodeFolder
from penstock.cli.main import main
from penstock.cli.probe import ProgressMark, _read_mark, _write_mark, judge_progress, request_report
from penstock.types import ModelIdentity, Role, WorkerId, WorkerState
from penstock.wire.curve_keys import CurveKeys
from penstock.wire.gateway_messages import WorkerReport
from penstock.wire.node_keys import NodeKeys
from penstock.wire.zeromq import ZmqTransport

STILL_S = 120.0


def report(**more: Any) -> WorkerReport:
    fields: dict[str, Any] = {
        "worker": WorkerId("decode-0"),
        "incarnation": 7,
        "role": Role.DECODE,
        "state": WorkerState.READY,
        "pid": 1,
        "identity": ModelIdentity(fingerprint="f", numerics="n"),
        "max_model_len": 64,
        "steps": 10,
        "running": 1,
    }
    return WorkerReport(**(fields | more))


def mark_of(first: WorkerReport, at: float) -> ProgressMark:
    return judge_progress(None, first, at, STILL_S).mark


def test_a_worker_with_requests_that_makes_no_step_is_not_alive_after_a_while() -> None:
    mark = mark_of(report(), 100.0)
    for now in (110.0, 160.0, 220.0):
        verdict = judge_progress(mark, report(), now, STILL_S)
        assert (verdict.problem, verdict.mark) == (None, mark), "the time since its last step goes on"
    problem = judge_progress(mark, report(), 221.0, STILL_S).problem
    assert problem == "decode-0 has 1 requests and has made no step for 121 s"


@pytest.mark.parametrize(
    "later",
    [
        pytest.param({"steps": 11}, id="a step"),
        pytest.param({"counters": {"pages_received": 1.0}}, id="a page of a prompt that another worker computes"),
        pytest.param({"counters": {"image_slices": 1.0}}, id="a piece of an image"),
        pytest.param({"incarnation": 8}, id="another process"),
        pytest.param({"running": 0}, id="nothing to do"),
    ],
)
def test_progress_begins_the_time_anew(later: dict[str, Any]) -> None:
    verdict = judge_progress(mark_of(report(), 100.0), report(**later), 1000.0, STILL_S)
    assert verdict.problem is None
    assert verdict.mark.since == 1000.0


def test_queued_prompts_count_as_requests_and_counters_of_nothing_do_not() -> None:
    queued = {"running": 0, "queued": 3, "prompt_tokens": 40}
    noise = {"counters": {"dropped_frames": 9.0, "requests_cancelled": 2.0}}
    mark = mark_of(report(**queued), 0.0)
    assert judge_progress(mark, report(**queued, **noise), 500.0, STILL_S).problem is not None


def test_a_mark_of_an_earlier_boot_is_not_believed() -> None:
    verdict = judge_progress(mark_of(report(), 9e6), report(), 50.0, STILL_S)
    assert (verdict.problem, verdict.mark.since) == (None, 50.0)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["10.0.0.1:9000"], 2, "expected tcp://HOST:PORT of a worker, or http://HOST:PORT of a gateway"),
        (["tcp://127.0.0.1:9000"], 2, "add --keys DIR"),
        (["--ready", "--timeout-s", "0.2", "--keys", "KEYS", "tcp://127.0.0.1:1"], 1, "no answer within 0.2 s"),
        (["http://127.0.0.1:1"], 1, "connection refused"),
    ],
)
def test_what_does_not_answer_is_named(
    words: list[str], code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CurveKeys.ephemeral().save(tmp_path / "keys")
    assert main(["probe", *(word.replace("KEYS", str(tmp_path / "keys")) for word in words)]) == code
    said = capsys.readouterr()
    assert says in said.out + said.err


def _answer(keys: NodeKeys, endpoints: queue.Queue[str], ended: threading.Event) -> None:
    """A worker that only says how it is."""
    with closing(ZmqTransport(keys)) as transport:
        listener = transport.listen("tcp://127.0.0.1:0")
        endpoints.put(listener.endpoint)
        while not ended.is_set():
            transport.wait(0.01, [listener])
            while (received := listener.recv()) is not None:
                listener.send(received.peer, report(worker=WorkerId(f"{keys.node}-decode-0")))


@pytest.mark.parametrize("asking", ["n13", "g"])
def test_a_worker_is_found_whichever_of_many_keys_it_has(tmp_path: Path, asking: str) -> None:
    """Its own node begins with the right one."""
    folder = NodeFolder(tmp_path, g="gateway", **{f"n{number:02}": "worker" for number in range(14)})
    folder.deliver_registry()
    endpoints, ended = queue.Queue[str](), threading.Event()
    worker = threading.Thread(target=_answer, args=(folder.keys("n13"), endpoints, ended))
    worker.start()
    try:
        found = request_report(endpoints.get(timeout=10), folder.keys(asking), 2.5)
    finally:
        ended.set()
        worker.join()
    assert isinstance(found, WorkerReport), found
    assert found.worker == "n13-decode-0"


def test_a_mark_for_which_there_is_no_space_leaves_no_file_behind(tmp_path: Path) -> None:
    path, mark = tmp_path / "mark", ProgressMark(incarnation=1, counts=(1.0,), since=2.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # a file can be made and not written, as on a full disk
    try:
        _write_mark(path, mark)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    _write_mark(path, mark)
    assert _read_mark(path) == mark
