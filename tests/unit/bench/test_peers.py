"""The parts of ``bench/peers`` that measure nothing: models, records, orders, ratios, the report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from bench.peers import curve, matrix, plot
from bench.peers.bars import bars
from bench.peers.checkpoint import DEVIATION, write_checkpoint
from bench.peers.places import COMPRESSED, LLAMA, PLAIN, SHAPES, SPLIT, VLLM, Shape
from bench.peers.processes import descendants, memory_bytes, own_environment, spawn, stop
from bench.peers.records import Record, Records
from bench.peers.report import put_into, section
from bench.peers.series import Series, Spread
from bench.peers.steady import LOOKS, Steady
from bench.peers.work import decode_limit, prefill_flops, prefill_limit, weight_bytes
from tokenizers import Tokenizer

from penstock.cli.benchmark.workload import WORDS
from penstock.config.load import load_serve
from penstock.kernels.native.backend import NativeOps
from penstock.weights.inspect import inspect_model
from penstock.weights.load import load_model

TINY = Shape(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=2048, max_positions=512)


def record(system: str, measure: str, number: int, model: str = "1b", **figures: object) -> Record:
    return Record(model=model, round=number, system=system, measure=measure, figures=figures)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peers") / "plain"
    write_checkpoint(folder, TINY, 0, lambda done, total: None)
    return folder


def test_the_shapes_have_the_sizes_that_they_are_named_for():
    assert SHAPES["1b"].parameters == 1_235_814_400  # as the model's card says of Llama-3.2-1B
    assert SHAPES["100m"].parameters == pytest.approx(100e6, rel=0.05)


def test_a_checkpoint_is_one_that_penstock_serves(checkpoint: Path):
    spec = inspect_model(checkpoint)
    assert (spec.parameters, spec.checkpoint_dtype, spec.vocab) == (TINY.parameters, "bf16", TINY.vocab)
    assert load_model(checkpoint, spec, NativeOps("portable", "bf16")).nbytes >= weight_bytes(TINY)


def test_a_seed_is_a_checkpoint(checkpoint: Path, tmp_path: Path):
    told: list[tuple[int, int]] = []
    write_checkpoint(tmp_path, TINY, 0, lambda done, total: told.append((done, total)))
    whole = (tmp_path / "model.safetensors").read_bytes()
    assert whole == (checkpoint / "model.safetensors").read_bytes()
    assert told[-1] == (2 * TINY.parameters, 2 * TINY.parameters)
    values = np.frombuffer(whole[-(2 * 64 + 2 * 64 * 96) : -2 * 64], ml_dtypes.bfloat16).astype(np.float32)
    assert np.std(values) == pytest.approx(DEVIATION, rel=0.05)  # the last matrix, in front of the last norm


def test_every_word_is_one_token_and_every_token_is_text(checkpoint: Path):
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == TINY.vocab
    text = " ".join(WORDS)
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(WORDS)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer.encode("zażółć, 12 oxen!").ids) == "zażółć, 12 oxen!"


def test_penstock_is_driven_through_its_own_loop(checkpoint: Path):
    """The driver puts the engine together by hand: it must follow when the engine's parts change."""
    task = {"model": str(checkpoint), "threads": 1, "prefill": [16, 40], "decode": [1, 3], "steps": 4, "context": 8}
    script = Path(matrix.__file__).parent / "drivers" / "drive_penstock.py"
    command = [sys.executable, str(script), json.dumps({**task, "seed": 0})]
    done = subprocess.run(command, env=own_environment(), capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {key: len(rates) for key, rates in found["prefill"].items()} == {"16": 3, "40": 3}
    assert found["decode"].keys() == {"1", "3"}
    assert all(rate > 0 for rates in found["decode"].values() for rate in rates)


def test_records_survive_a_run_that_was_cut(tmp_path: Path):
    records = Records(tmp_path / "deep" / "results.jsonl")
    first, failed = record(PLAIN, "decode", 0), Record(model="1b", round=0, system=VLLM, measure="start", error="no")
    records.add(first)
    records.add(failed)
    with (tmp_path / "deep" / "results.jsonl").open("a") as file:
        file.write('{"model": "1b", "ro')
    assert list(records) == [first, failed]
    assert records.done() == {("1b", 0, PLAIN, "decode")}  # what failed is tried again


def test_a_record_that_cannot_be_read_is_named(tmp_path: Path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"model": 1}\n' + json.dumps({"model": "1b"}) + "\n")
    with pytest.raises(ValueError, match=r"results\.jsonl:1"):
        list(Records(path))


def test_a_torn_line_does_not_spoil_the_next(tmp_path: Path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"model": "1b", "ro')
    Records(path).add(record(PLAIN, "decode", 0))
    assert path.read_text().count("\n") == 2
    with pytest.raises(ValueError, match=":1"):  # said, not skipped: it is no longer the last
        list(Records(path))


def test_every_system_is_first_once():
    orders = [matrix.turned(matrix.SERVERS, number) for number in range(len(matrix.SERVERS))]
    assert {order[0] for order in orders} == set(matrix.SERVERS)
    assert all(sorted(order) == sorted(matrix.SERVERS) for order in orders)


def test_ratios_are_those_of_one_round():
    """A machine twice as slow in the second round changes no ratio."""
    found = [record(LLAMA, "decode", n, **{"1": [rate]}) for n, rate in enumerate((20.0, 10.0))]
    found += [record(VLLM, "decode", n, **{"1": [rate]}) for n, rate in enumerate((16.0, 8.0))]
    found += [record(COMPRESSED, "decode", n, **{"1": [rate, rate, 1.0]}) for n, rate in enumerate((30.0, 15.0, 99.0))]
    series = Series(found, "1b")
    assert series.best_peer(("decode", "1"), least=False) == LLAMA
    assert series.best_peer(("decode", "1"), least=True) == VLLM
    assert series.against_best(COMPRESSED, ("decode", "1")) == (LLAMA, Spread(1.5, 1.5, 1.5, 2))
    assert series.against_best(COMPRESSED, ("decode", "4")) is None
    assert series.spread(PLAIN, ("decode", "1")) is None


def curve_record(system: str, label: str, rate: float, ttft: float, itl: float) -> Record:
    figures = {"ttft_s": {"p50": ttft}, "itl_s": {"p50": itl / 2, "p99": itl}, "tokens_per_event": 1.0}
    return record(system, f"curve {label}", 0, output_tokens_per_s=rate, **figures)


def test_a_point_is_met_by_one_that_is_nowhere_worse(tmp_path: Path):
    found = [
        curve_record(SPLIT, "50 ms", 100.0, 1.0, 0.05),
        curve_record(SPLIT, "200 ms", 120.0, 0.8, 0.2),
        curve_record(LLAMA, "64 tokens", 90.0, 1.1, 0.05),  # by the first
        curve_record(LLAMA, "256 tokens", 110.0, 0.8, 0.3),  # by the second
        curve_record(VLLM, "256 tokens", 110.0, 1.2, 0.1),  # one is slower, the other one has longer gaps
    ]
    points = curve.points(found, "1b")
    assert [point.system for point in points] == [SPLIT, SPLIT, LLAMA, LLAMA, VLLM]
    rows = [line.split("|")[-2].strip() for line in curve.table(points)[2:]]
    assert rows == ["", "", "split, 50 ms", "split, 200 ms", "**none**"]
    curve.draw(points, tmp_path / "curve.png", "1b")
    assert (tmp_path / "curve.png").stat().st_size > 10_000


def test_a_setting_of_penstock_is_one_that_serve_reads(tmp_path: Path):
    for setting in curve.settings():
        flags = setting.arguments(tmp_path)
        if setting.step_ms is not None:
            assert flags[0] == "--config"
            assert load_serve({}, {}, flags[1]).scheduling.interactive_tpot_ms == setting.step_ms


def test_bars_hold_or_do_not():
    found = [record(LLAMA, "decode", 0, **{"1": [20.0]}), record(COMPRESSED, "decode", 0, **{"1": [25.0]})]
    found += [record("machine", "roofline", 0, read_gbs=80.0, peak_gflops=1000.0)]
    found += [record(PLAIN, "decode", 0, **{"1": [28.0]})]
    found += [record(LLAMA, "start", 0, first_token_s=1.0), record(SPLIT, "start", 0, first_token_s=0.9)]
    held = {(bar.name, bar.against): bar.holds for bar in bars(Series(found, "1b"), "1b")}
    assert held == {
        ("decode, 1 stream, penstock-compressed", LLAMA): False,  # 1.25
        ("decode, 1 stream, compressed", PLAIN): False,
        ("decode, 1 stream, penstock", LLAMA): True,
        ("decode, 1 stream, plain, of the read bandwidth", ""): True,  # 28 x 2.47 GB of 80
        ("start to first token", LLAMA): True,
    }


def test_limits_are_bandwidth_for_few_and_multiplication_for_many():
    shape, ends = SHAPES["1b"], {"read_gbs": 80.0, "peak_gflops": 1000.0}
    one = decode_limit(shape, 1, **ends)
    assert one == pytest.approx(80e9 / weight_bytes(shape))
    assert decode_limit(shape, 4, **ends) == pytest.approx(4 * one)
    assert decode_limit(shape, 1, part=0.5, **ends) == pytest.approx(2 * one)
    assert prefill_limit(shape, 512, **ends) == pytest.approx(512e12 / prefill_flops(shape, 512))


def test_the_report_has_a_row_a_system_and_spread_beside_medians():
    found = [record(LLAMA, "decode", n, **{"1": [20.0 + n], "4": [50.0], "16": [90.0]}) for n in range(3)]
    found.append(Record(model="1b", round=3, system=LLAMA, measure="decode", error="fell over"))
    text = section(found)
    assert "**Decode, tokens/s** (3 rounds)" in text
    assert "| llama.cpp | 21.0 (20.0-22.0) | 50.0 (50.0-50.0) | 90.0 (90.0-90.0) |" in text
    assert "vllm" not in text


def test_only_panels_with_figures_are_drawn():
    decode = record(LLAMA, "decode", 0, **{"1": [20.0]})
    start = record(SPLIT, "start", 0, first_token_s=0.5)
    assert plot.measured(Series([decode], "1b")) == (True, ())
    roofline, panels = plot.measured(Series([decode, start], "1b"))
    assert (roofline, [panel[1] for panel in panels]) == (True, [("start", "first_token_s")])
    assert plot.measured(Series([start], "1b"))[0] is False
    assert plot.measured(Series([], "1b")) == (False, ())


def test_figures_are_put_between_the_marks_of_a_page():
    page = put_into("# A\n\n<!-- peers -->\nold\n<!-- peers -->\n\nend\n", "new\n")
    assert page == "# A\n\n<!-- peers -->\n\nnew\n\n<!-- peers -->\n\nend\n"
    assert put_into(page, "new") == page
    with pytest.raises(ValueError, match="has it 0 times"):
        put_into("# A", "new")


def test_a_machine_that_is_half_as_fast_is_waited_for():
    speeds, pauses = iter([70.0, 35.0, 36.0, 68.0, 40.0, *[40.0] * LOOKS]), list[float]()
    steady = Steady(lambda: next(speeds), pauses.append)
    assert steady.wait() == 70.0
    assert steady.look() == (35.0, False)
    assert steady.wait() == 68.0
    assert len(pauses) == 1
    assert steady.wait() == 40.0  # it never came back
    assert len(pauses) == 1 + LOOKS - 1


def test_a_server_is_ended_with_all_its_children(tmp_path: Path):
    script = "import subprocess, sys, time; subprocess.Popen(['sleep', '60']); print('up', flush=True); time.sleep(60)"
    process = spawn([sys.executable, "-c", script], {}, tmp_path / "log")
    while "up" not in (tmp_path / "log").read_text():
        assert process.poll() is None
    (child,) = descendants(process.pid)
    assert memory_bytes(process.pid)["pss"] > memory_bytes(child)["pss"] > 0
    stop(process)
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.parametrize("command", [[], ["install"], ["models"], ["run"], ["curve"], ["report"]])
def test_every_command_has_help(command: list[str]):
    root = Path(__file__).resolve().parents[3]
    asked = [sys.executable, "-m", "bench.peers", *command, "--help"]
    environment = {"PYTHONPATH": str(root / "src"), "PATH": "/usr/bin", "HOME": "/nowhere"}
    done = subprocess.run(asked, cwd=root, env=environment, capture_output=True, text=True, check=True)
    assert "usage: python -m bench.peers" in done.stdout
