from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from penstock.bundled import storyteller
from penstock.cli import doctor
from penstock.cli.doctor import Check, CheckResult
from penstock.cli.main import main
from penstock.config.facts import GpuReport
from penstock.kernels.native.backend import families
from penstock.launch import compose
from penstock.launch.gpu_probe import gpu_report


def machine(root: Path, *, thp: str, available_kib: int) -> Path:
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text(
        "model name\t: Abacus 9000\nmodel\t\t: 7\ncpu family\t: 3\nflags\t\t: fpu avx2 fma\n"
    )
    (root / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {available_kib} kB\n")
    (root / "sys/kernel/mm/transparent_hugepage").mkdir(parents=True)
    (root / "sys/kernel/mm/transparent_hugepage/enabled").write_text(thp)
    return root


def test_a_good_machine(tmp_path: Path):
    root = machine(tmp_path, thp="always [madvise] never", available_kib=8 << 20)
    assert doctor.check_huge_pages(root).verdict is CheckResult.OK
    assert doctor.check_memory(root) == Check("memory", CheckResult.OK, "8GiB available")
    found = doctor.check_processor(root).found
    assert found.startswith("Abacus 9000 (family 3 model 7), ")
    assert found.endswith(", avx2 fma")


def test_a_poor_machine_is_told_what_to_do(tmp_path: Path):
    root = machine(tmp_path, thp="always madvise [never]", available_kib=1024)
    for check in (doctor.check_huge_pages(root), doctor.check_memory(root)):
        assert check.verdict is CheckResult.NOTE
        assert check.mend


def test_an_empty_machine_does_not_confuse(tmp_path: Path):
    assert doctor.check_huge_pages(tmp_path).found == "unknown"
    assert "no vector features" in doctor.check_processor(tmp_path).found


def test_every_facility_works_here():
    assert {check.verdict for check in doctor.check_facilities()} == {CheckResult.OK}


def test_what_a_probe_raises_is_the_finding():
    def probe() -> None:
        raise OSError("Function not implemented")

    check = doctor._tried("memfd", probe, "another kernel")
    assert check == Check("memfd", CheckResult.MISSING, "OSError: Function not implemented", "another kernel")


def test_a_missing_driver_is_no_fault():
    check = doctor.check_gpu(gpu_report("libno-such-cuda.so.1"))
    assert check.verdict is CheckResult.OK
    assert check.found == "there is no CUDA driver; the processor is used"


def test_a_folder_that_there_is_not_is_no_fault_of_the_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(tmp_path / "nope")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.endswith("-> try penstock doctor ~/models/NAME") for line in lines)
    assert lines[-1].startswith("this machine can serve, but not this model: ")


@pytest.mark.parametrize(
    ("decode_s", "advice"), [(0.002, "split (the default): gaps"), (0.06, "decode workers will pre")]
)
def test_long_decode_steps_speak_against_a_split_of_shared_cores(decode_s: float, advice: str) -> None:
    assert doctor.phases_advice(decode_s, budget_s=0.1).startswith(advice)


@pytest.mark.parametrize(
    ("gains", "advice"),
    [
        ({}, "saves disk, not time: avx2 unpacks compressed weights when they are loaded"),
        ({1: 1.2, 8: 1.1, 64: 0.97}, "1.20 with 1, 1.10 with 8, 0.97 with 64; penstock compress 'a model' OUT"),
        (
            {1: 1.2, 8: 0.9, 64: 0.97},
            "for single responses, or with memory for decoded copies: penstock compress 'a model' OUT",
        ),
        ({1: 1.0, 8: 1.1, 64: 0.97}, "0.97 with 64; serve it as it is"),
    ],
)
def test_compressed_weights_are_recommended_where_they_are_faster(gains: dict[int, float], advice: str) -> None:
    assert doctor.compression_advice(gains, "avx2", "a model").endswith(advice)


def test_the_last_line_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(storyteller())]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("ok")][-3:] == ["speed", "phases", "compression"]
    assert lines[-1] == f"ready to serve: penstock serve {storyteller()}"
    missing = [Check("memfd", CheckResult.MISSING, "no"), Check(doctor.MODEL_CHECK, CheckResult.MISSING, "no")]
    assert doctor.last_line(missing, None).startswith(
        "cannot serve: install or change what is missing (memfd, penstock"
    )


def test_kernels_that_do_not_exist_cannot_serve():
    check = doctor.check_kernels("abacus")
    assert check.verdict is CheckResult.MISSING
    assert "PENSTOCK_KERNELS=abacus" in check.found


def test_versions_of_packages(monkeypatch: pytest.MonkeyPatch):
    versions = {"numpy": "1.0", "msgspec": "0.22.0"}

    def version(name: str) -> str:
        try:
            return versions[name]
        except KeyError:
            raise doctor.importlib.metadata.PackageNotFoundError(name) from None

    declared = ["numpy==2.4.6", "msgspec==0.22.0", "torch<2.14,>=2.11; extra == 'gpu'"]
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda _: declared)
    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    (check,) = doctor.check_packages()
    assert (check.verdict, check.found) == (CheckResult.NOTE, "numpy 1.0 instead of 2.4.6")
    del versions["numpy"]
    (check,) = doctor.check_packages()
    assert (check.verdict, check.mend) == (CheckResult.MISSING, "pip install 'numpy==2.4.6'")


@pytest.mark.parametrize(("verdict", "code"), [(CheckResult.OK, 0), (CheckResult.NOTE, 0), (CheckResult.MISSING, 1)])
def test_the_exit_code_says_whether_it_serves(
    verdict: CheckResult, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(doctor, "examine", lambda _: [])
    monkeypatch.setattr(doctor, "plan_of", lambda *_: Check("x", verdict, "found", "mend"))
    assert doctor.run(argparse.Namespace(json=False, model=None)) == code
    assert "-> mend" in capsys.readouterr().out
    assert doctor.run(argparse.Namespace(json=True, model=None)) == code
    told = json.loads(capsys.readouterr().out)
    assert told == {
        "serves": code == 0,
        "checks": [{"name": "x", "verdict": str(verdict), "found": "found", "mend": "mend"}],
    }


def test_this_machine_is_examined_whole():
    assert len({check.name for check in doctor.examine(GpuReport())}) >= 12


def check_plan(model: str | None = None) -> Check:
    plan = doctor.plan_of(model)
    assert isinstance(plan, doctor.ModelPlan)
    return doctor.check_plan(plan)


def test_it_tells_what_would_be_served():
    check = check_plan()
    assert check.verdict is CheckResult.OK
    assert check.found.startswith(
        "would serve storyteller (10.2 M parameters, context 2048) on the processor with prefill-0, "
    )


def test_it_tells_what_decoded_copies_may_take(monkeypatch: pytest.MonkeyPatch, plain_storyteller: Path) -> None:
    """Where weights stay compressed, and of a model that has compressed ones."""
    monkeypatch.setattr(compose, "decoding_families", families)
    assert " of decoded copies of weights for all workers, handed over by" in check_plan().found
    assert "decoded" not in check_plan(str(plain_storyteller)).found
    monkeypatch.setattr(compose, "decoding_families", tuple)
    assert "decoded" not in check_plan().found


@pytest.mark.parametrize(("model", "words"), [("/no/such/folder", "no such folder"), ("org/name", "on the Hub")])
def test_a_model_that_cannot_be_served_is_told(model: str, words: str):
    check = doctor.plan_of(model)
    assert isinstance(check, Check)
    assert check.verdict is CheckResult.MISSING
    assert words in check.found
