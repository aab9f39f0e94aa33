"""Decoded copies of a model's compressed weights: measured in a child, shared, and no answer changes."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import runner_bench
from penstock.bundled import storyteller
from penstock.config.decoded_weights import DecodedWeightsBudget
from penstock.kernels import _native
from penstock.kernels.decoded_copies import MEASURED_ROWS, ChosenCopies, ProductTimes, ShapeTimes
from penstock.kernels.native.backend import families
from penstock.kernels.native.decoded_copies import shape_of
from penstock.kernels.native.memory import WeightArena
from penstock.kernels.operands import PackedLinear
from penstock.launch.decoded_weights import add_decoded_copies, copies_line
from penstock.weights.inspect import inspect_model
from penstock.weights.load import LoadedModel, load_model
from runner_bench import RunnerBench
from sharded_bench import CompressedOps

PROMPT = list(range(3, 103))
EVERYTHING = DecodedWeightsBudget(nbytes=1 << 40, all_or_none=True)


def gaining(weights: Sequence[PackedLinear]) -> Mapping[tuple[int, ...], ShapeTimes]:
    """Plain weights are faster from 16 rows on."""
    by_rows = {rows: ProductTimes(2.0 if rows >= 16 else 0.5, 1.0) for rows in MEASURED_ROWS}
    return {shape_of(weight): ShapeTimes(1000, by_rows) for weight in weights}


def losing(weights: Sequence[PackedLinear]) -> Mapping[tuple[int, ...], ShapeTimes]:
    by_rows = {rows: ProductTimes(1.0, 1.0) for rows in MEASURED_ROWS}
    return {shape_of(weight): ShapeTimes(1000, by_rows) for weight in weights}


def loaded() -> LoadedModel:
    return load_model(storyteller(), inspect_model(storyteller()), CompressedOps(families()[0], "bf16"))


def copied_names(model: LoadedModel) -> set[str]:
    weights = {name: own.data for name, own in model.weights.items() if isinstance(own, PackedLinear)}
    return {name for name, data in weights.items() if getattr(data, "decoded_from", None) is not None}


def test_all_matrices_that_gain_have_copies_or_none() -> None:
    model = loaded()
    assert isinstance(model.weights["embed"].data, _native.CompressedWeights)
    nbytes = 2 * sum(own.n * own.k for own in model.weights.values() if isinstance(own, PackedLinear))
    for budget in (EVERYTHING, DecodedWeightsBudget(nbytes=1 << 40)):
        assert add_decoded_copies([model], families()[0], budget, losing)[0].nbytes == model.nbytes
    for budget in (DecodedWeightsBudget(nbytes=nbytes - 1, all_or_none=True), DecodedWeightsBudget(nbytes=0)):
        assert add_decoded_copies([model], families()[0], budget, gaining)[0].nbytes == model.nbytes
    assert copied_names(model) == set()
    (more,) = add_decoded_copies([model], families()[0], EVERYTHING, gaining, threads=2)
    assert copied_names(more) == {name for name, own in model.weights.items() if isinstance(own, PackedLinear)}
    assert more.nbytes == model.nbytes + nbytes


def test_with_less_memory_the_head_is_the_last() -> None:
    model = loaded()
    embed = model.weights["embed"]
    nbytes = 2 * sum(own.n * own.k for own in model.weights.values() if isinstance(own, PackedLinear))
    budget = DecodedWeightsBudget(nbytes=nbytes - 2 * embed.n * embed.k)
    add_decoded_copies([model], families()[0], budget, gaining)
    assert "embed" not in copied_names(model)
    assert len(copied_names(model)) > 10


def test_parts_that_share_weights_share_their_copies() -> None:
    model = loaded()
    both = add_decoded_copies([model, model], families()[0], EVERYTHING, gaining)
    assert both[0].nbytes == both[1].nbytes > model.nbytes


def test_plain_weights_have_no_copies(caplog: pytest.LogCaptureFixture, plain_storyteller: Path) -> None:
    spec = inspect_model(plain_storyteller)
    model = load_model(plain_storyteller, spec, CompressedOps(families()[0], "bf16"))
    caplog.set_level(logging.INFO)
    assert add_decoded_copies([model], families()[0], EVERYTHING, gaining)[0] is model
    assert not caplog.messages
    assert add_decoded_copies([model], families()[0], DecodedWeightsBudget(nbytes=5), gaining)[0] is model
    assert caplog.messages == ["decoded copies: none, as no weights are held compressed"]


def test_a_model_is_served_without_copies_where_there_is_no_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(*_: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    model = loaded()
    monkeypatch.setattr(WeightArena, "reserve", none_left)
    (same,) = add_decoded_copies([model], families()[0], EVERYTHING, gaining)
    assert same is model
    assert copied_names(model) == set()
    assert "cannot be had" in caplog.text


@pytest.mark.parametrize("direct", [False, True], ids=["recorded", "direct"])
def test_an_answer_is_the_same_with_copies(monkeypatch: pytest.MonkeyPatch, *, direct: bool) -> None:
    """Prompts in chunks on both sides of the threshold, then tokens one by one."""
    monkeypatch.setattr(runner_bench, "make_ops", lambda **_: CompressedOps(families()[0], "bf16", threads=2))
    answers = []
    for copies in (False, True):

        def load(folder: Path, spec: Any, ops: Any, *, copies: bool = copies) -> LoadedModel:
            model = load_model(folder, spec, ops)
            return add_decoded_copies([model], ops.family, EVERYTHING, gaining)[0] if copies else model

        monkeypatch.setattr(runner_bench, "load_model", load)
        bench = RunnerBench(storyteller(), "bf16", direct=direct)
        for chunk in (100, 40, 15):
            request = bench.request(PROMPT)
            answer = list(bench.read(request, chunk).tokens)
            for _ in range(12):
                answer += bench.step([(request, 1)])[0].tokens
            answers.append(answer)
    _native.set_threads(1)
    assert all(answer == answers[0] for answer in answers)


def test_a_child_measures_and_the_parent_has_no_thread() -> None:
    """With weights that stay compressed here; which gain by copies depends on the machine."""
    script = """
import sys
from penstock.bundled import storyteller
from penstock.config.cpu_cores import RankCores
from penstock.kernels.native.backend import families
from penstock.kernels.native.decoded_copies import compressed_weights
from penstock.launch.decoded_weights import measure_in_child
from penstock.launch.fork_server import thread_count
from penstock.weights.inspect import inspect_model
from penstock.weights.load import load_model
from sharded_bench import CompressedOps

model = load_model(storyteller(), inspect_model(storyteller()), CompressedOps(families()[0], "bf16"), threads=2)
weights = list(compressed_weights(model.weights).values())
watched = []
found = measure_in_child(families()[0], weights, RankCores(threads=2, cpus=()), lambda: watched.append(1), 20.0)
assert {weight.k for weight in weights} >= {shape[0] for shape in found}, found
assert found and watched and thread_count() == 1
assert measure_in_child("none-such", weights, RankCores(threads=1, cpus=()), lambda: None) == {}
print("measured", len(found))
"""
    tests = Path(runner_bench.__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tests, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("measured")


@pytest.mark.parametrize(
    ("chosen", "budget", "measured", "line"),
    [
        (({"a": 32}, 2 << 30, 2 << 30), 9 << 30, True, "2GiB, for products of 32 rows and more"),
        (
            ({"a": 8, "b": 64}, 1 << 30, 2 << 30),
            1 << 30,
            True,
            "1GiB of 2GiB, for products of 8 (some: 64) rows",
        ),
        (
            ({}, 0, 2 << 30),
            1 << 30,
            True,
            "none, as all would take 2GiB and 1GiB are free beside all else",
        ),
        (({}, 0, 0), 1 << 30, True, "none, as compressed weights are as fast in steps of any size here"),
        (({}, 0, 0), 1 << 30, False, "none, as products could not be measured"),
    ],
)
def test_one_line_says_what_was_done(
    chosen: tuple[dict[str, int], int, int], budget: int, measured: bool, line: str
) -> None:
    said = copies_line(ChosenCopies(*chosen), DecodedWeightsBudget(nbytes=budget, all_or_none=True), measured=measured)
    assert said.startswith(f"decoded copies: {line}")
