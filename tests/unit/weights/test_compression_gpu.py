"""The layout of compressed weights for GPUs: nothing is lost, there and back, and no damage gets through."""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.cli.main import main
from penstock.errors import KernelError, ModelError
from penstock.kernels import native
from penstock.kernels.compressed import MAX_VALUES, GpuCompressedMatrix, compress_for_gpu
from penstock.kernels.native import compression
from penstock.kernels.native.backend import NativeOps, families
from penstock.weights import compression_format
from penstock.weights.checkpoint_reader import Checkpoint
from penstock.weights.compression_format import GPU, OriginalTensor, checksum, pieces
from penstock.weights.inspect import inspect_model
from penstock.weights.load import load_model
from tiny_models import llama_config, write_model

ROOT = Path(__file__).parents[3]


def gaussian(n: int, k: int, seed: int = 0) -> NDArray[np.uint16]:
    values = np.random.default_rng(seed).standard_normal((n, k)) * 0.02
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


def coded(weight: NDArray[np.uint16]) -> GpuCompressedMatrix:
    matrix = compress_for_gpu(weight)
    assert matrix is not None
    return matrix


@settings(max_examples=40, deadline=None)
@given(n=st.integers(20, 300), k=st.integers(100, 1500), seed=st.integers(0, 99), data=st.data())
def test_any_weights_come_back(n: int, k: int, seed: int, data: st.DataObject) -> None:
    """With NaN, infinities, zeros of both signs and anything else strewn in; there, back, and by way of the CPU's."""
    weight = gaussian(n, k, seed)
    rng = np.random.default_rng(seed)
    strange = data.draw(st.lists(st.integers(0, 65535), max_size=12)) or [0]
    places = rng.integers(0, n * k, data.draw(st.integers(0, 200)))
    weight.reshape(-1)[places] = rng.choice(np.array(strange, np.uint16), len(places))
    weight[n // 2] = 0
    matrix = compress_for_gpu(weight)
    if matrix is None:  # padding to whole blocks costs a small matrix more than is gained
        assert -(-n // 16) * -(-k // 64) * 1536 > 0.97 * 2 * n * k
        return
    np.testing.assert_array_equal(matrix.whole(), weight)
    small = compression.cpu_layout(matrix)
    if small is not None:
        again = compression.gpu_layout(small)
        assert again is not None
        for one, other in zip(compression_format.sections(matrix), compression_format.sections(again), strict=True):
            assert bytes(one) == bytes(other)


def test_what_does_not_shrink_stays_plain() -> None:
    assert compress_for_gpu(np.random.default_rng(1).integers(0, 1 << 16, (64, 256), dtype=np.uint16)) is None
    assert compress_for_gpu(gaussian(3, 64)) is None
    assert compress_for_gpu(gaussian(0, 64)) is None
    many = gaussian(64, 1024)
    many[0, : MAX_VALUES + 1] = np.arange(MAX_VALUES + 1) + 1  # more different escapes than a byte tells apart
    assert compress_for_gpu(many) is None


def test_sections_are_checked() -> None:
    matrix = coded(gaussian(64, 128))
    raw = b"".join(map(bytes, compression_format.sections(matrix)))
    again = compression_format.gpu_sections_of(memoryview(raw), (64, 128), matrix.base, "here")
    np.testing.assert_array_equal(again.whole(), matrix.whole())
    for cut in (10, len(raw) - 1, len(raw) - 2):
        with pytest.raises(ModelError, match=r"here: (damaged|\d+ bytes cannot)"):
            compression_format.gpu_sections_of(memoryview(raw)[:cut], (64, 128), matrix.base, "here")
    fewer = matrix.counts_PS.copy()
    fewer[np.flatnonzero(fewer)[0]] -= 1
    with pytest.raises(KernelError, match="sizes of the dictionaries"):
        list(replace(matrix, counts_PS=fewer).decoded())
    with pytest.raises(KernelError, match="not in its dictionary"):
        list(replace(matrix, counts_PS=matrix.counts_PS * 0, values=matrix.values[:0]).decoded())


def test_pieces_cover_every_byte_once() -> None:
    matrix = coded(gaussian(300, 2100))
    original = OriginalTensor(dtype="BF16", shape=(300, 2100), blake3="0" * 64, code=(matrix.base, 1), layout=GPU)
    sections = compression_format.sections(matrix)
    cuts = list(pieces(original, sum(section.nbytes for section in sections)))
    assert [begin for begin, _ in cuts] == [0, *(end for _, end in cuts[:-1])]
    assert cuts[-1][1] == matrix.nbytes
    told = checksum("w", original, sections)
    assert checksum("w", original, [memoryview(b"".join(map(bytes, sections)))]) == told
    other = OriginalTensor(dtype="BF16", shape=(300, 2100), blake3="0" * 64, code=(matrix.base + 1, 1), layout=GPU)
    assert checksum("w", other, sections) != told


def contents(folder: Path) -> dict[str, Any]:
    with Checkpoint(folder) as checkpoint:
        return {n: (checkpoint.info(n).shape, bytes(checkpoint.raw(n))) for n in checkpoint.names}


def test_without_the_extension_a_model_for_processors_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    small = compression.cpu_layout(coded(gaussian(64, 512)))
    assert small is not None
    monkeypatch.delattr(native, "compression")
    monkeypatch.setitem(sys.modules, "penstock.kernels.native.compression", None)
    with pytest.raises(ModelError, match=r"here: compressed for processors, .*--for gpu"):
        list(compression_format.decode_parts(small, "here"))


def test_a_folder_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plain to GPU, to CPU, to GPU again, to plain; and a CPU serves what was made for a GPU."""
    plain, gpu, cpu, again, back = (tmp_path / name for name in ("plain", "gpu", "cpu", "again", "back"))
    write_model(plain, llama_config(intermediate_size=192))
    assert main(["compress", str(plain), str(gpu), "--for", "gpu", "--verify"]) == 0
    assert main(["compress", str(gpu), str(cpu), "--verify"]) == 0
    assert main(["compress", str(cpu), str(again), "--for", "gpu"]) == 0
    assert main(["decompress", str(again), str(back)]) == 0
    assert "verified" in capsys.readouterr().out
    assert contents(plain) == contents(gpu) == contents(cpu) == contents(back)
    assert (gpu / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    assert main(["compress", str(gpu), str(tmp_path / "other"), "--for", "gpu"]) == 2
    assert "is compressed already, for the GPU" in capsys.readouterr().err
    read = runpy.run_path(str(ROOT / "examples/read_compressed.py"))["read"]
    found = {name: (array.shape, array.tobytes()) for name, _, array in read(gpu / "model.safetensors")}
    assert found == contents(plain)
    ops = NativeOps(families()[0], "bf16")
    loaded = [load_model(folder, inspect_model(folder), ops, threads=2) for folder in (cpu, gpu)]
    assert loaded[0].fingerprint == loaded[1].fingerprint
    assert loaded[0].nbytes == loaded[1].nbytes
