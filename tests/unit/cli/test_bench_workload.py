from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.cli.benchmark.workload import RandomLengths, RequestSpec, arrivals, fitting, of_trace, scale_request
from penstock.errors import ConfigError


def test_random_lengths_stay_in_their_range_and_repeat_with_their_seed():
    lengths = RandomLengths(input_len=100, output_len=10, range_ratio=0.5)
    drawn = lengths.draw(500, seed=1)
    inputs = [w.input_len for w in drawn]
    assert (min(inputs), max(inputs)) == (50, 150)
    assert {w.output_len for w in drawn} == set(range(5, 16))
    assert drawn == lengths.draw(500, seed=1)
    assert drawn != lengths.draw(500, seed=2)


def test_without_a_ratio_all_lengths_are_alike():
    assert set(RandomLengths(7, 3).draw(5, seed=0)) == {RequestSpec(input_len=7, output_len=3)}


def test_a_shared_prefix_comes_on_top():
    (wanted,) = RandomLengths(7, 3, prefix_len=16).draw(1, seed=0)
    assert (wanted.input_len, wanted.blocks, wanted.block_tokens) == (23, (0,), 16)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 10.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float):
    due = np.asarray(arrivals(20_000, rate=5.0, burstiness=burstiness, seed=3))
    waits = np.diff(due)
    assert due[0] == 0
    assert waits.min() >= 0
    assert waits.mean() == pytest.approx(0.2)
    assert waits.std() / waits.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_short_runs_have_the_rate_too(count: int):
    due = arrivals(count, rate=4.0, burstiness=1.0, seed=0)
    assert len(due) == count
    assert due[-1:] == ([pytest.approx((count - 1) / 4)] if count else [])


def test_an_infinite_rate_has_all_due_at_once():
    assert arrivals(3, rate=float("inf"), burstiness=1.0, seed=0) == [0.0, 0.0, 0.0]


MOONCAKE = """\
{"timestamp": 500, "input_length": 1030, "output_length": 500, "hash_ids": [0, 1, 7]}

{"timestamp": 2000, "input_length": 7, "output_length": 0, "hash_ids": [0]}"""
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:16:46.9305901,396,109"
)


def test_rows_of_a_trace_are_requests(tmp_path: Path):
    path = tmp_path / "trace"
    path.write_text(MOONCAKE)
    wanted = [
        RequestSpec(input_len=1030, output_len=500, at=0.0, blocks=(0, 1, 7), block_tokens=512),
        RequestSpec(input_len=7, output_len=1, at=1.5, blocks=(0,), block_tokens=512),
    ]
    assert of_trace(path, "mooncake", 10) == wanted
    assert of_trace(path, "mooncake", 1) == wanted[:1]
    path.write_text(AZURE)
    first, second = of_trace(path, "azure", 10)
    assert first == RequestSpec(input_len=374, output_len=44, at=0.0)
    assert (second.input_len, second.output_len) == (396, 109)
    assert second.at == pytest.approx(60.25, abs=1e-6)


@pytest.mark.parametrize(("kind", "found"), [("azure", MOONCAKE), ("mooncake", AZURE)])
def test_a_trace_of_the_other_kind_is_refused(tmp_path: Path, kind: str, found: str):
    path = tmp_path / "trace"
    path.write_text(found)
    with pytest.raises(ConfigError, match=f"not '{kind}'"):
        of_trace(path, kind, 1)


def test_scaling_keeps_shared_blocks_shared():
    wanted = RequestSpec(input_len=1024, output_len=3, at=10.0, blocks=(1, 2), block_tokens=512)
    small = scale_request(wanted, length=0.1, time=0.5)
    assert small == RequestSpec(input_len=102, output_len=1, at=5.0, blocks=(1, 2), block_tokens=51)


def test_what_does_not_fit_is_left_out():
    wanted = [RequestSpec(input_len=n, output_len=10) for n in (80, 90, 91)]
    assert fitting(wanted, 100) == wanted[:2]
    assert fitting(wanted, None) == wanted
