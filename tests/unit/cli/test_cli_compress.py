"""``penstock compress`` and ``decompress``: whole folders, there and back, also when interrupted."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.errors import PenstockError
from penstock.kernels import _native
from penstock.kernels.native.backend import NativeOps, families
from penstock.weights import compression_convert
from penstock.weights.checkpoint_reader import Checkpoint
from penstock.weights.inspect import inspect_model
from penstock.weights.load import load_model
from tiny_models import llama_config, write_model


@pytest.fixture(params=[1, 3], ids=["one file", "three shards"])
def plain(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_model(tmp_path / "plain", llama_config(), shards=request.param)


def contents(folder: Path) -> dict[str, Any]:
    with Checkpoint(folder) as checkpoint:
        return {
            n: (checkpoint.info(n).dtype, checkpoint.info(n).shape, bytes(checkpoint.raw(n))) for n in checkpoint.names
        }


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_there_and_back(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small, again = tmp_path / "small", tmp_path / "again"
    assert main(["compress", str(plain), str(small), "--verify", "--threads", "2"]) == 0
    report = capsys.readouterr().out
    (gate,) = [line.split() for line in report.splitlines() if "gate_proj" in line]
    assert gate[:2] == ["model.layers.*.mlp.gate_proj.weight", "3"]
    assert "verified: all 30 tensors" in report
    assert size(small) < 0.85 * size(plain)
    assert not list(small.glob("*.partial")) + list(small.glob("*.journal"))
    assert main(["decompress", str(small), str(again)]) == 0
    assert contents(plain) == contents(small) == contents(again)
    assert {path.name for path in plain.iterdir()} == {path.name for path in small.iterdir()}
    for name in ("config.json", "tokenizer.json"):
        assert (small / name).read_bytes() == (plain / name).read_bytes()


def test_every_tensor_is_listed_if_asked_for(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compress", str(plain), str(tmp_path / "small"), "--verbose"]) == 0
    report = capsys.readouterr().out
    assert "bits a weight" in report
    assert sum("gate_proj" in line for line in report.splitlines()) == 3


def test_fingerprint_and_memory(plain: Path, tmp_path: Path) -> None:
    main(["compress", str(plain), str(tmp_path / "small")])
    ops = NativeOps(families()[0], "bf16")
    one, other = (load_model(folder, inspect_model(folder), ops) for folder in (plain, tmp_path / "small"))
    assert one.fingerprint == other.fingerprint
    assert one.spec == other.spec
    if _native.CompressedKernels(families()[0]).in_registers():
        assert other.nbytes < 0.85 * one.nbytes


def test_folders_that_cannot_be(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = tmp_path / "small"
    assert main(["compress", str(tmp_path / "none"), str(small)]) == 2
    assert main(["compress", str(plain), str(plain), "--force"]) == 2
    assert main(["decompress", str(plain), str(small)]) == 2
    assert main(["compress", str(plain), str(small), "--threads", "0"]) == 2
    assert main(["compress", str(plain), str(small)]) == 0
    assert main(["compress", str(plain), str(small)]) == 2
    assert main(["compress", str(plain), str(small), "--force"]) == 0
    assert main(["compress", str(small), str(tmp_path / "twice")]) == 2
    errors = capsys.readouterr().err
    for words in ("no such folder", "another folder", "not compressed", "at least 1", "--force", "compressed already"):
        assert words in errors


def test_an_interrupted_run_goes_on(plain: Path, tmp_path: Path) -> None:
    small, seen = tmp_path / "small", list[str]()

    def stop_after_ten(done: compression_convert.ConvertedTensor) -> None:
        seen.append(done.name)
        if len(seen) == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compression_convert.compress_folder(plain, small, threads=2, report=stop_after_ten)
    journal = next(iter(small.glob("*.journal")))
    lines = journal.read_bytes().split(b"\n")
    assert len(lines) > 2
    journal.write_bytes(b"\n".join(lines[:-1]) + b'\n{"half a li')
    packed: list[str] = []
    original = compression_convert._pack

    def counted(file: Any, info: Any, conversion: Any) -> Any:
        packed.append(info.name)
        return original(file, info, conversion)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compression_convert, "_pack", counted)
        compression_convert.compress_folder(plain, small, threads=1, report=lambda _: None)
    assert len(packed) < 30
    assert contents(small) == contents(plain)


def test_damage_in_what_an_interrupted_run_left_is_noticed(tmp_path: Path) -> None:
    plain, small = write_model(tmp_path / "plain", llama_config()), tmp_path / "small"
    compression_convert.compress_folder(plain, small, threads=1, report=lambda _: None)
    whole = (small / "model.safetensors").read_bytes()

    def stop(done: compression_convert.ConvertedTensor) -> None:
        if done.name == "model.norm.weight":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compression_convert.compress_folder(plain, small, threads=1, report=stop)
    partial = small / "model.safetensors.partial"
    raw = bytearray(partial.read_bytes())
    raw[len(raw) // 2] ^= 1
    partial.write_bytes(raw)
    compression_convert.compress_folder(plain, small, threads=1, report=lambda _: None)
    assert (small / "model.safetensors").read_bytes() == whole


def test_a_full_disk_is_said_and_leaves_no_model(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(compression_convert, "_log", full)
    with pytest.raises(PenstockError, match=r"No space left on device.*run it again"):
        compression_convert.compress_folder(plain, tmp_path / "small", threads=1, report=lambda _: None)
    assert not list((tmp_path / "small").glob("*.safetensors"))


def test_a_plot_needs_matplotlib(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "bits.png"
    try:
        import matplotlib as _  # noqa: F401
    except ImportError:
        assert main(["compress", str(plain), str(tmp_path / "small"), "--plot", str(plot)]) == 2
        assert "pip install 'penstock[plot]'" in capsys.readouterr().err
    else:
        assert main(["compress", str(plain), str(tmp_path / "small"), "--plot", str(plot)]) == 0
        assert plot.stat().st_size > 1000
