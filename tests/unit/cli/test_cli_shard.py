"""``penstock shard``: a folder in slices and back, what is refused, and an interrupted run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.kernels.native.backend import NativeOps, families
from penstock.parallel.stored_cuts import folder_cuts
from penstock.weights import compression_convert
from penstock.weights.checkpoint_reader import Checkpoint
from penstock.weights.compression_convert import compress_folder, shard_folder, verify_folder
from penstock.weights.inspect import inspect_model
from penstock.weights.load import load_model
from tiny_models import llama_config, write_model

SIZES: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "intermediate_size": 256}


@pytest.fixture(params=[1, 3], ids=["one file", "three shards"])
def plain(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_model(tmp_path / "plain", llama_config(**SIZES), shards=request.param)


def sliced(folder: Path) -> dict[str, str]:
    """Along what each tensor that is in slices is cut."""
    with Checkpoint(folder) as checkpoint:
        return {name: axis for name in checkpoint.names if (axis := checkpoint.slices(name)[0].axis)}


def test_there_and_back(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    assert main(["shard", str(plain), str(out), "--verify", "--threads", "2"]) == 0
    report = capsys.readouterr().out
    lines = {line.split()[0]: line.split()[1:] for line in report.splitlines() if line.startswith("model.")}
    assert lines["model.layers.*.self_attn.q_proj.weight"] == ["3", "0.1", "4", "of", "rows"]
    assert lines["model.layers.*.mlp.down_proj.weight"] == ["3", "0.2", "4", "of", "columns"]
    assert lines["model.norm.weight"] == ["1", "0.0", "whole"]
    assert "verified: all 30 tensors have the bytes of" in report
    assert {path.name for path in plain.iterdir()} == {path.name for path in out.iterdir()}
    ops = NativeOps(families()[0], "bf16")
    one, other = (load_model(folder, inspect_model(folder), ops) for folder in (plain, out))
    assert (one.fingerprint, one.nbytes) == (other.fingerprint, other.nbytes)
    assert main(["decompress", str(out), str(again)]) == 0
    assert verify_folder(plain, again) == 30
    assert not sliced(again)


def test_compressed_weights_stay_so(plain: Path, tmp_path: Path) -> None:
    """A folder of before, in which every matrix is whole, becomes what compression writes now."""
    before, after, now = tmp_path / "before", tmp_path / "after", tmp_path / "now"
    compress_folder(plain, before, threads=1, report=lambda _: None)
    assert not sliced(before)
    assert main(["shard", str(before), str(after)]) == 0
    assert main(["compress", str(plain), str(now)]) == 0
    assert len(sliced(after)) == 3 * 7 + 1
    for path in sorted(now.glob("*.safetensors")):
        assert (after / path.name).read_bytes() == path.read_bytes()


def test_what_cannot_be(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, gpu = tmp_path / "out", tmp_path / "gpu"
    one_head = write_model(tmp_path / "small", llama_config(num_attention_heads=1, num_key_value_heads=1))
    compress_folder(plain, gpu, threads=1, report=lambda _: None, layout="gpu")
    assert main(["shard", str(tmp_path / "none"), str(out)]) == 2
    assert main(["shard", str(plain), str(out), "--threads", "0"]) == 2
    assert main(["shard", str(one_head), str(out)]) == 2
    assert main(["shard", str(gpu), str(out)]) == 2
    assert main(["shard", str(plain), str(out)]) == 0
    assert main(["shard", str(plain), str(out)]) == 2
    assert main(["shard", str(plain), str(out), "--force"]) == 0
    assert main(["shard", str(out), str(tmp_path / "twice")]) == 2
    errors = capsys.readouterr().err.splitlines()
    words = (
        "no such folder",
        "at least 1",
        "1 heads cannot be divided over 2 ranks; tp1 would work",
        "compressed for GPUs",
        "--force",
        "in slices already",
    )
    assert len(errors) == len(words)
    for line, word in zip(errors, words, strict=True):
        assert word in line


def test_what_ranks_cannot_divide_is_compressed_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one_head = write_model(tmp_path / "small", llama_config(num_attention_heads=1, num_key_value_heads=1))
    assert main(["compress", str(one_head), str(tmp_path / "out"), "--verbose"]) == 0
    assert "1 heads cannot be divided over 2 ranks" in capsys.readouterr().out
    assert not sliced(tmp_path / "out")


def test_an_interrupted_run_goes_on_and_no_other_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, out = write_model(tmp_path / "plain", llama_config(**SIZES)), tmp_path / "out"
    cuts = folder_cuts(plain)

    def stop_after_ten(done: compression_convert.ConvertedTensor) -> None:
        if done.name == "model.layers.0.mlp.down_proj.weight":
            raise KeyboardInterrupt

    packed: list[str] = []
    original = compression_convert._pack

    def counted(file: Any, info: Any, conversion: Any) -> Any:
        packed.append(info.name)
        return original(file, info, conversion)

    with pytest.raises(KeyboardInterrupt):
        shard_folder(plain, out, threads=1, report=stop_after_ten, cuts=cuts)
    monkeypatch.setattr(compression_convert, "_pack", counted)
    shard_folder(plain, out, threads=1, report=lambda _: None, cuts=cuts)
    assert 0 < len(packed) < 30
    assert verify_folder(plain, out) == 30
    with pytest.raises(KeyboardInterrupt):
        shard_folder(plain, out, threads=1, report=stop_after_ten, cuts=cuts)
    packed.clear()
    compress_folder(plain, out, threads=1, report=lambda _: None)  # the journal is that of another conversion
    assert len(packed) == 30
