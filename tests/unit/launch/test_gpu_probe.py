"""Looking for a GPU: a driver of our own making answers, and each thing that may be missing is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.launch import gpu_probe

ANSWER = {
    "name": "NVIDIA H200",
    "count": 2,
    "capability": [9, 0],
    "shared_bytes": 232_448,
    "total_bytes": 150_000_000_000,
    "free_bytes": 149_000_000_000,
}


def test_without_a_driver_nothing_else_is_asked() -> None:
    report = gpu_probe.gpu_report("libno-such-cuda.so.1")
    assert (report.gpu, report.reason, report.remedy) == (None, "there is no CUDA driver", "")


def test_a_driver_without_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_probe, "find_spec", lambda name: None)
    report = gpu_probe.gpu_report("libc.so.6")  # any library will do: it is not asked
    assert report.reason == "there is a CUDA driver, but no torch for it"
    assert report.remedy == "pip install 'penstock[gpu]'"


def test_a_torch_without_cuda_is_no_torch_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Spec:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr(gpu_probe, "find_spec", lambda name: Spec())
    assert gpu_probe.missing_packages().endswith("was built without CUDA")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    assert gpu_probe.missing_packages() == ""


def test_a_library_that_is_no_driver_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child ends with a complaint, which is told."""
    monkeypatch.setattr(gpu_probe, "missing_packages", lambda: "")
    report = gpu_probe.gpu_report("libc.so.6")
    assert report.gpu is None
    assert "cuInit" in report.reason
    assert report.remedy == "see nvidia-smi"


def test_an_answer_becomes_facts() -> None:
    found = gpu_probe.parse_report(json.dumps(ANSWER), "").gpu
    assert found is not None
    assert (found.name, found.count, found.capability) == ("NVIDIA H200", 2, (9, 0))
    assert (found.total_bytes, found.free_bytes) == (150_000_000_000, 149_000_000_000)
    old = gpu_probe.parse_report(json.dumps({**ANSWER, "name": "Tesla V100", "capability": [7, 0]}), "")
    assert old.gpu is None
    assert "Tesla V100 has compute capability 7.0" in old.reason
    small = gpu_probe.parse_report(
        json.dumps({**ANSWER, "name": "L40S", "capability": [8, 9], "shared_bytes": 101_376}), ""
    )
    assert small.gpu is None
    assert small.reason == "L40S has 99 KiB of shared memory for a program, and the kernels need 160"
    complaint = "the CUDA driver finds no device"
    for broken in ("", "{}", "[]", json.dumps({**ANSWER, "capability": []})):
        assert gpu_probe.parse_report(broken, f"noise\n{complaint}\n").reason == complaint
    assert gpu_probe.parse_report("", "").reason == "the CUDA driver gave no answer"
