"""The safetensors reader gives what was written, and refuses everything that is not sound."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ModelError
from penstock.weights.checkpoint_reader import INDEX, SINGLE, Checkpoint
from penstock.weights.safetensors_header import header_length, parse_safetensors_header
from tiny_models import llama_config, random_tensors, safetensors_bytes, write_weights

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4, dtype=np.float16),
    "c": np.arange(5, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(5, 1),
    "empty": np.zeros((0, 3), np.float32),
}


def file_of(header: Any, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def entry(dtype: str = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize("shards", [1, 3])
def test_what_was_written_is_read(tmp_path: Path, shards: int) -> None:
    write_weights(tmp_path, TENSORS, shards)
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.names == sorted(TENSORS)
        for name, value in TENSORS.items():
            assert checkpoint.array(name).dtype == value.dtype
            assert checkpoint.array(name).tobytes() == value.tobytes()
            assert checkpoint.array(name).shape == value.shape
            assert not checkpoint.array(name).flags.writeable
            checkpoint.drop_pages(name)
            assert bytes(checkpoint.raw(name)) == value.tobytes()


def test_views_outlive_the_checkpoint(tmp_path: Path) -> None:
    write_weights(tmp_path, TENSORS)
    with Checkpoint(tmp_path) as checkpoint:
        view = checkpoint.array("a")
    assert view.tobytes() == TENSORS["a"].tobytes()


def test_a_file_of_the_formats_own_library(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"x": TENSORS["a"], "y": TENSORS["b"]}, str(tmp_path / SINGLE), metadata={"format": "pt"})
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.array("x").tobytes() == TENSORS["a"].tobytes()
        assert checkpoint.array("y").tobytes() == TENSORS["b"].tobytes()


UNSOUND: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated"),
    "seven bytes": (b"1234567", "truncated"),
    "git lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
    "a pickle": (b"\x80\x02}q\x00(X\x05\x00\x00\x00modelq\x01", "not a safetensors file"),
    "header beyond the file": ((100).to_bytes(8, "little") + b"{}", "truncated, a header of 100"),
    "huge header": ((1 << 62).to_bytes(8, "little") + b"{}", "not a safetensors file"),
    "header over 32 MiB": (((32 << 20) + 1).to_bytes(8, "little") + b"{}", "its header would have 33554433 bytes"),
    "not an object": (file_of(b"[]"), "does not begin with"),
    "not JSON": (file_of(b"{nonsense}"), "not valid JSON"),
    "not UTF-8": (file_of(b'{"\xff": 1}'), "not valid JSON"),
    "NaN": (file_of(b'{"a": NaN}'), "not valid JSON"),
    "a key twice": (file_of(b'{"a": 1, "a": 2}'), "stands twice"),
    "nested too deep": (file_of(b'{"a":' * 100_000), "not valid JSON"),
    "metadata not text": (file_of({"__metadata__": {"a": 1}}), "__metadata__"),
    "entry no object": (file_of({"a": 1}), "'a': expected exactly"),
    "entry with a stranger": (file_of({"a": {**entry(), "x": 1}}, b"1234"), "'a': expected exactly"),
    "unknown dtype": (file_of({"a": entry(dtype="F12")}, b"1234"), "'a': unknown dtype 'F12'"),
    "negative shape": (file_of({"a": entry(shape=(-1,))}, b"1234"), "'a': bad shape"),
    "shape of truth": (file_of({"a": entry(shape=(True,))}, b"1234"), "'a': bad shape"),
    "shape of floats": (file_of({"a": entry(shape=(1.0,))}, b"1234"), "'a': bad shape"),
    "offsets backwards": (file_of({"a": entry(shape=(0,), offsets=(4, 0))}, b"1234"), "'a': bad data_offsets"),
    "three offsets": (file_of({"a": entry(offsets=(0, 4, 8))}, b"1234"), "'a': bad data_offsets"),
    "size and shape differ": (file_of({"a": entry(shape=(2,))}, b"1234"), r"needs 8 bytes, its data_offsets give 4"),
    "overflowing shape": (file_of({"a": entry(shape=(1 << 62, 4))}, b"1234"), "needs"),
    "overlap": (file_of({"a": entry(), "b": entry(offsets=(2, 6))}, b"123456"), "'b' overlaps"),
    "gap": (file_of({"a": entry(), "b": entry(offsets=(6, 10))}, b"1234567890"), "'b' leaves a gap of 2"),
    "data cut off": (file_of({"a": entry()}, b"123"), "truncated, the tensors end"),
    "data left over": (file_of({"a": entry()}, b"12345"), "longer than its tensors"),
}


@pytest.mark.parametrize("case", UNSOUND)
def test_unsound_files_are_refused_by_name(tmp_path: Path, case: str) -> None:
    raw, reason = UNSOUND[case]
    (tmp_path / SINGLE).write_bytes(raw)
    with pytest.raises(ModelError, match=reason) as caught:
        Checkpoint(tmp_path)
    assert str(tmp_path / SINGLE) in str(caught.value)
    if "truncated" in reason:
        assert "download or copy the file again" in str(caught.value)


SOUND = safetensors_bytes(random_tensors(llama_config(num_hidden_layers=1, hidden_size=8, intermediate_size=4)))
HEADER_END = 8 + int.from_bytes(SOUND[:8], "little")


@settings(max_examples=300, deadline=None)
@given(st.integers(0, HEADER_END - 1), st.integers(1, 255))
def test_a_changed_header_is_refused_or_still_in_bounds(place: int, flip: int) -> None:
    raw = bytearray(SOUND)
    raw[place] ^= flip
    try:
        length = header_length(bytes(raw[:64]), len(raw), "file")
        tensors = parse_safetensors_header(bytes(raw[8 : 8 + length]), len(raw), "file")
    except ModelError:
        return
    spans = sorted((info.start, info.stop) for info in tensors.values())
    assert spans[0][0] == 8 + length
    assert spans[-1][1] == len(raw)
    assert all(first[1] == second[0] for first, second in itertools.pairwise(spans))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, len(SOUND) - 1))
def test_a_truncated_file_is_refused(length: int) -> None:
    raw = SOUND[:length]
    with pytest.raises(ModelError):
        parse_safetensors_header(raw[8 : 8 + header_length(raw[:64], len(raw), "file")], len(raw), "file")


def rewrite(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index)
        (folder / INDEX).write_text(json.dumps(index))

    return apply


BAD_INDEX: dict[str, tuple[Callable[[Path], object], str]] = {
    "no map": (rewrite(lambda index: index.pop("weight_map")), "has no weight_map"),
    "parent folder": (rewrite(lambda index: index["weight_map"].update(a="../x.safetensors")), "is not the name"),
    "absolute": (rewrite(lambda index: index["weight_map"].update(a="/etc/x.safetensors")), "is not the name"),
    "windows path": (rewrite(lambda index: index["weight_map"].update(a="..\\x.safetensors")), "is not the name"),
    "a pickle": (rewrite(lambda index: index["weight_map"].update(a="pytorch_model.bin")), "is not the name"),
    "not text": (rewrite(lambda index: index["weight_map"].update(a=3)), "is not the name"),
    "shard missing": (lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(), "cannot be read"),
    "tensor missing": (
        rewrite(lambda index: index["weight_map"].update(z="model-00001-of-00002.safetensors")),
        "'z' is missing",
    ),
    "wrong shard": (
        rewrite(lambda index: index["weight_map"].update(a="model-00002-of-00002.safetensors")),
        "'a' is missing, model.safetensors.index.json says it is here",
    ),
    "tensor not listed": (rewrite(lambda index: index["weight_map"].pop("a")), "'a' is not in model.safetensors.index"),
    "tensor twice": (
        lambda folder: (folder / "model-00002-of-00002.safetensors").write_bytes(safetensors_bytes(TENSORS)),
        "is also in model-00001",
    ),
}


@pytest.mark.parametrize("case", BAD_INDEX)
def test_unsound_indexes_are_refused(tmp_path: Path, case: str) -> None:
    change, reason = BAD_INDEX[case]
    write_weights(tmp_path, TENSORS, shards=2)
    change(tmp_path)
    with pytest.raises(ModelError, match=reason):
        Checkpoint(tmp_path)


def test_types_that_are_no_weights_are_refused_when_asked_for(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(file_of({"a": entry(dtype="I32")}, b"1234"))
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(ModelError, match="'a' has type I32; weights in bf16"):
        checkpoint.array("a")


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("pytorch_model.bin", "a pickle"),
        ("consolidated.00.pth", "a pickle"),
        ("m.gguf", "GGUF"),
        ("x.txt", "no weights"),
    ],
)
def test_other_formats_get_a_hint(tmp_path: Path, file: str, reason: str) -> None:
    (tmp_path / file).write_bytes(b"")
    with pytest.raises(ModelError, match=reason):
        Checkpoint(tmp_path)
