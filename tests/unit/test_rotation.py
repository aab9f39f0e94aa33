"""CI's rotation of long tests: every one runs within eight green runs, and none that found no time is forgotten."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding import Shard, in_turn, parse_shard, shard_of

ROOT = Path(__file__).parents[2]


def load_rotation() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rotation", ROOT / ".ci/rotation.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


rotation = load_rotation()
SHARDS = rotation.SHARDS
records = st.dictionaries(st.integers(0, SHARDS - 1), st.integers(1, 1000) | st.just(rotation.FAILED))


@given(records, st.lists(st.integers(1, 10_000), min_size=SHARDS, max_size=SHARDS))
def test_eight_green_runs_take_every_shard_however_many_commits_each_has(ran: dict[int, int], commits: list[int]):
    taken = []
    for count in commits:
        taken.append(rotation.order(ran, count)[0])
        ran = rotation.after(ran, taken[-1], passed=True)
    assert sorted(taken) == list(range(SHARDS))


@given(records, st.integers(1, 10_000), st.integers(1, 10_000))
def test_a_shard_that_failed_is_the_next(ran: dict[int, int], before: int, later: int):
    ran = {shard: number for shard, number in ran.items() if number != rotation.FAILED}
    shard = rotation.order(ran, before)[0]
    assert rotation.order(rotation.after(ran, shard, passed=False), later)[0] == shard


def test_without_a_record_the_number_of_commits_decides():
    assert [rotation.order({}, commits)[0] for commits in range(16)] == [*range(8), *range(8)]
    assert rotation.order({}, 13) == [5, 6, 7, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("damaged", ["", "{", "[]", '{"a": 1}', '{"1": null}'])
def test_a_damaged_record_is_none(tmp_path: Path, damaged: str):
    record = tmp_path / "shards.json"
    record.write_text(damaged)
    assert rotation.read(record) == {}
    rotation.write(record, rotation.after(rotation.read(record), 3, passed=True))
    assert rotation.read(record) == {3: 1}
    assert list(tmp_path.iterdir()) == [record]


def test_every_test_is_in_one_shard_that_other_tests_do_not_change():
    names = [f"tests/test_a.py::test_{number}" for number in range(100)]
    places = [in_turn(names, Shard(index, 8), ()) for index in range(8)]
    assert sorted(place for shard in places for place in shard) == list(range(100))
    assert [shard_of(name, 8) for name in names[1:]] == [shard_of(name, 8) for name in names][1:]


def test_those_left_over_come_first_and_once():
    names = [f"test_{number}" for number in range(50)]
    shard = Shard(2, 8)
    due = in_turn(names, shard, ())
    stranger = next(place for place in range(50) if place not in due)
    assert in_turn(names, shard, {names[stranger], names[due[-1]], "test_gone"}) == [
        *sorted([stranger, due[-1]]),
        *due[:-1],
    ]


@pytest.mark.parametrize("text", ["8/8", "-1/8", "3", "a/b"])
def test_a_shard_that_is_none_is_refused(text: str):
    with pytest.raises(ValueError):  # noqa: PT011
        parse_shard(text)


MODULE = "import pytest\n" + "".join(f"@pytest.mark.long\ndef test_{n}(): assert 1\n" for n in range(12))


@pytest.mark.long
@pytest.mark.parametrize("spread", [[], ["-n", "2", "--dist", "loadfile"]])
def test_what_found_no_time_is_written_down_and_runs_next(tmp_path: Path, spread: list[str]):
    """In processes side by side, too: all of a shard is left, and run with the next shard."""
    (tmp_path / "test_some.py").write_text(MODULE)
    left = tmp_path / "left"
    first = run_pytest(tmp_path, *spread, "--shard", "1/2", "--left", str(left), "--within", "-1")
    of_shard = set(left.read_text().splitlines())
    assert len(of_shard) == sum(shard_of(f"test_some.py::test_{n}", 2) for n in range(12)) > 0
    assert "NOT RUN, its time was up: test_some.py" in first
    second = run_pytest(tmp_path, *spread, "--shard", "0/2", "--left", str(left), "--within", "600")
    assert "12 passed" in second
    assert left.read_text() == ""


def run_pytest(folder: Path, *arguments: str) -> str:
    """Our options on another folder's tests."""
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "--rootdir", str(folder), "-c", os.devnull, "--long"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", *arguments, "test_some.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in {0, 5}, done.stdout + done.stderr
    return done.stdout
