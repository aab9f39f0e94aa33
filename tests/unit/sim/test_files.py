"""Traces and fleet files: what is read, and how what cannot be read is refused."""

from __future__ import annotations

import gzip
import time
from pathlib import Path

import msgspec
import pytest

from penstock.config.fleet_file import NAMES, SimRankTimes, WorkerGroup
from penstock.errors import ConfigError
from penstock.sim.fleet import check_fleet, fleet_toml, load_fleet, parse_workers
from penstock.sim.trace import read_trace
from penstock.types import Role

MOONCAKE = """\
{"timestamp": 3000, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 1000, "input_length": 512, "output_length": 0, "hash_ids": [0]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:15:46.6805900,374,44\r
2023-11-16 18:15:50.6805900,396,109"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace"


@pytest.mark.parametrize("packed", [False, True])
def test_mooncake_is_read_in_order_of_arrival(file: Path, packed: bool) -> None:
    file.write_bytes(gzip.compress(MOONCAKE.encode()) if packed else MOONCAKE.encode())
    trace = read_trace(file)
    assert [(job.at, job.prompt, job.output, job.blocks) for job in trace.requests] == [
        (0.0, 512, 1, (0,)),
        (2.0, 1030, 5, (0, 1, 2)),
    ]
    assert (trace.block_tokens, trace.span_s) == (512, 2.0)


def test_azure_is_read_and_shares_nothing(file: Path) -> None:
    file.write_text(AZURE)
    trace = read_trace(file)
    assert [(job.at, job.prompt, job.output) for job in trace.requests] == [(0.0, 374, 44), (4.0, 396, 109)]
    assert trace.block_tokens == 0
    assert len(read_trace(file, 1).requests) == 1


def test_the_clock_of_a_trace_is_utc_or_what_it_says(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ("2024-03-10 01:59:59,1,1", "2024-03-10 03:00:01,1,1", "2024-03-10 06:00:02+02:00,1,1")
    file.write_text("\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows)))
    monkeypatch.setenv("TZ", "America/New_York")  # where the second hour of that day did not exist
    time.tzset()
    try:
        assert [job.at for job in read_trace(file).requests] == [0.0, 3602.0, 7203.0]
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("content", "because"),
    [
        (b"", "unknown format"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,x,1\n", "line 2"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,-5,1\n", "line 2"),
        (b'{"timestamp": 1, "input_length": 600, "output_length": 5, "hash_ids": [0]}', "which are 2 blocks of 512"),
        (b'{"timestamp": 1, "input_length": 600, "output_length": 5}', "hash_ids"),
        (b'{"timestamp": -1, "input_length": 1, "output_length": 5, "hash_ids": [0]}', "timestamp"),
        (gzip.compress(MOONCAKE.encode(), mtime=0)[:40], "ended"),
        (gzip.compress(MOONCAKE.encode(), mtime=0)[:10] + b"\xff" * 40, "invalid block type"),
    ],
)
def test_what_is_no_trace_is_refused_with_file_and_reason(file: Path, content: bytes, because: str) -> None:
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=because) as refusal:
        read_trace(file)
    assert str(file) in str(refusal.value)


@pytest.mark.parametrize("name", NAMES)
def test_fleets_of_the_package_say_where_they_come_from(name: str) -> None:
    fleet = load_fleet(name)
    assert fleet.source.startswith("given, not measured")
    assert fleet.count > 0


def test_the_default_fleet_is_the_bars() -> None:
    fleet = load_fleet("default")
    assert fleet.workers == (WorkerGroup(role=Role.BOTH, count=16),)
    steps, memory, links = fleet.steps, fleet.memory, fleet.links
    assert (steps.step_s, steps.row_s, steps.context_s * 1000) == (0.012, 5e-5, pytest.approx(1e-6))
    assert (1 / steps.token_s, steps.pair_s, steps.read_step_s) == (pytest.approx(20_000), 0, 0)
    assert (memory.token_bytes, memory.device_bytes) == (128 << 10, 60 << 30)
    assert (memory.host_bytes, memory.disk_bytes) == (512 << 30, 4 << 40)
    assert (links.worker_bytes_s, links.disk_bytes_s) == (25e9, 5e9)


def test_a_fleet_file_is_written_as_it_is_read(tmp_path: Path) -> None:
    fleet = load_fleet("h100").with_groups(*parse_workers("3:1"))
    (tmp_path / "fleet.toml").write_text(fleet_toml(fleet))
    assert load_fleet(str(tmp_path / "fleet.toml")) == fleet


def test_a_fleet_file_names_the_ranks_of_its_workers(tmp_path: Path) -> None:
    groups = tuple(
        WorkerGroup(role=role, count=2, group=group, stages=stages)
        for role, group, stages in ((Role.PREFILL, "pp2", (0.4, 0.6)), (Role.DECODE, "tp2", ()))
    )
    fleet = msgspec.structs.replace(load_fleet("h100"), workers=groups, ranks=SimRankTimes(layers=32, join_s=1e-5))
    (tmp_path / "fleet.toml").write_text(fleet_toml(fleet))
    found = load_fleet(str(tmp_path / "fleet.toml"))
    assert found == fleet
    assert [own.stage_shares for own in found.workers] == [(0.4, 0.6), (1.0,)]
    assert [own.mesh.ranks for own in found.workers] == [2, 2]
    more = found.with_groups(*parse_workers("5:7"))
    assert [(own.count, own.group) for own in more.workers] == [(5, "pp2"), (7, "tp2")]


@pytest.mark.parametrize(
    ("group", "stages", "layers", "because"),
    [
        ("tp3", (), 32, "group: tp3: tensor parallelism takes 1, 2, 4 or 8 ranks"),
        ("ep2", (), 32, "expert parallelism is not supported yet"),
        ("pp2", (1.0,), 32, "stages has 1 shares, but pp2 has 2 stages"),
        ("pp2", (0.5, 0.6), 32, "the shares add up to 1.1, not to 1"),
        ("tp2", (), 0, "tp2 needs ranks.layers"),
    ],
)
def test_ranks_that_cannot_be_are_refused(group: str, stages: tuple[float, ...], layers: int, because: str) -> None:
    own = WorkerGroup(count=1, group=group, stages=stages)
    fleet = msgspec.structs.replace(load_fleet("h100"), workers=(own,), ranks=SimRankTimes(layers=layers))
    with pytest.raises(ConfigError, match="fleet .*workers of role both: .*" + because):
        check_fleet(fleet)


@pytest.mark.parametrize(
    ("change", "because"),
    [
        (("token_s = 3e-05", ""), "token_s"),
        (("token_s = 3e-05", "token_s = -1.0"), "token_s"),
        (("token_s = 3e-05", "tokens_s = 1.0"), "tokens_s"),
        (('role = "both"', 'role = "decode"'), "no request can be served"),
        (('role = "both"', 'role = "encode"'), "no images"),
        (("count = 8", "count = 0"), "count"),
        (("[profile.default.links]", "[profile.default.links"), "not TOML"),
    ],
)
def test_a_wrong_fleet_file_is_refused_with_its_field(tmp_path: Path, change: tuple[str, str], because: str) -> None:
    path = tmp_path / "fleet.toml"
    text = fleet_toml(load_fleet("h100"))
    assert change[0] in text
    path.write_text(text.replace(*change))
    with pytest.raises(ConfigError, match=because):
        load_fleet(str(path))


@pytest.mark.parametrize("text", ["", "0", "x", "1:2:3", "4:", "-1", "5000"])
def test_wrong_numbers_of_workers_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a number"):
        parse_workers(text)


def test_a_fleet_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(ConfigError, match="default, h100, h200"):
        load_fleet("nowhere.toml")
