"""Compression loses nothing, whoever codes and whoever decodes, and no damage gets through."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.errors import ModelError
from penstock.kernels.native import compression
from penstock.kernels.native.backend import NativeOps, families
from penstock.kernels.operands import PackedLinear
from penstock.parallel.stored_cuts import folder_cuts
from penstock.weights import compression_format
from penstock.weights.checkpoint_reader import Checkpoint
from penstock.weights.compression_convert import compress_folder, shard_folder
from penstock.weights.inspect import inspect_model
from penstock.weights.load import load_model
from tiny_models import llama_config, write_model

ROOT = Path(__file__).parents[3]

SHAPES = [(1, 1), (16, 4), (16, 32), (17, 33), (5, 95), (48, 64), (100, 257), (33, 2048)]


def gaussian(n: int, k: int, seed: int = 0) -> NDArray[np.uint16]:
    values = np.random.default_rng(seed).standard_normal((n, k)) * 0.02
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


def any_bits(n: int, k: int) -> NDArray[np.uint16]:
    """NaN, infinities, zeros, all exponents: mostly escapes."""
    return np.random.default_rng(1).integers(0, 1 << 16, (n, k), dtype=np.uint16)


def native(weight: NDArray[np.uint16]) -> Any:
    """The kernels' coder, also where compression does not pay."""
    wanted = compression_format.encode_reference(weight)
    counts, blocks = np.empty_like(wanted.counts), np.empty_like(wanted.blocks)
    escapes = np.empty_like(wanted.escapes)
    compression._native.encode(weight, wanted.base, wanted.step, blocks, escapes, counts)
    return compression.CompressedMatrix(*weight.shape, wanted.base, wanted.step, counts, blocks, escapes)


@pytest.mark.parametrize("make", [gaussian, any_bits])
@pytest.mark.parametrize("shape", SHAPES)
def test_coders_agree_and_decoders_give_back_the_weights(shape: tuple[int, int], make: Any) -> None:
    weight = make(*shape)
    oracle, ours = compression_format.encode_reference(weight), native(weight)
    for section in ("counts", "blocks", "escapes"):
        np.testing.assert_array_equal(getattr(ours, section), getattr(oracle, section), err_msg=section)
    np.testing.assert_array_equal(compression_format.decode_reference(ours), weight)
    for family in families():
        rows = [part.copy() for part in compression.decoded_panels(oracle, family)]
        np.testing.assert_array_equal(np.concatenate(rows), weight, err_msg=family)


@pytest.mark.parametrize("low", [0, 1, 2, 119, 120, 248, 249])
def test_every_window_of_exponents_has_a_code(low: int) -> None:
    exponents = low + np.arange(7, dtype=np.uint16)
    weight = np.resize((exponents << 7) | np.arange(7, dtype=np.uint16) * 0x8009, (32, 64)).astype(np.uint16)
    matrix = native(weight)
    assert not matrix.escapes.size
    assert compression_format.is_exponent_code(matrix.base, matrix.step)
    for family in families():
        np.testing.assert_array_equal(
            np.concatenate([p.copy() for p in compression.decoded_panels(matrix, family)]), weight
        )


@settings(max_examples=60, deadline=None)
@given(data=st.data(), n=st.integers(1, 40), k=st.integers(1, 80))
def test_any_matrix_comes_back(data: st.DataObject, n: int, k: int) -> None:
    pool = data.draw(st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=30))
    weight = np.random.default_rng(n * k).choice(np.array(pool, np.uint16), (n, k))
    matrix = native(weight)
    np.testing.assert_array_equal(np.concatenate([p.copy() for p in compression.decoded_panels(matrix)]), weight)


def test_gaussian_weights_take_at_most_71_percent() -> None:
    for sigma in (0.01, 0.02, 0.0123, 1.0):
        weight = (np.random.default_rng(2).standard_normal((512, 1024)) * sigma).astype(ml_dtypes.bfloat16)
        matrix = compression_format.compress_matrix(weight.view(np.uint16))
        assert matrix is not None
        assert matrix.nbytes <= 0.71 * weight.nbytes


def test_what_would_grow_stays_plain() -> None:
    assert compression_format.compress_matrix(any_bits(64, 64)) is None
    assert compression_format.compress_matrix(np.zeros((0, 4), np.uint16)) is None
    assert compression_format.compress_matrix(gaussian(1, 4)) is None  # one panel of sixteen rows for one


def test_contradictory_sections_are_refused() -> None:
    matrix = native(gaussian(32, 64))
    raw = b"".join(section.tobytes() for section in (matrix.counts, matrix.blocks, matrix.escapes))
    code = (matrix.base, matrix.step)
    with pytest.raises(ModelError, match="too few"):
        compression_format.sections_of(memoryview(raw[:100]), (32, 64), code, "w")
    with pytest.raises(ModelError, match="its table says"):
        compression_format.sections_of(memoryview(raw[:-1]), (32, 64), code, "w")
    with pytest.raises(ModelError, match="no exponent code"):
        compression_format.sections_of(memoryview(raw), (32, 64), (code[0], 2), "w")
    damaged = bytearray(raw)
    damaged[8 : 8 + 24] = b"\0" * 24  # 64 escapes more
    with pytest.raises(ModelError, match="planes count other escapes"):
        list(
            compression_format.decode_parts(
                compression_format.sections_of(memoryview(damaged), (32, 64), code, "w"), "w"
            )
        )


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model, plain and compressed."""
    base = tmp_path_factory.mktemp("codec")
    config = llama_config(num_hidden_layers=1, vocab_size=64, hidden_size=32, intermediate_size=64)
    plain = write_model(base / "plain", config)
    compress_folder(plain, base / "small", threads=1, report=lambda _: None)
    return plain, base / "small"


@pytest.fixture(scope="module", params=["compressed", "compressed, in slices", "in slices"])
def forms(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model that two ranks can divide, plain and as it is stored with hashes of everything."""
    base = tmp_path_factory.mktemp("forms")
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 64}
    plain = write_model(base / "plain", llama_config(num_hidden_layers=1, vocab_size=64, hidden_size=32, **sizes))
    cuts = folder_cuts(plain) if "slices" in request.param else {}
    if request.param == "in slices":
        shard_folder(plain, base / "small", threads=1, report=lambda _: None, cuts=cuts)
    else:
        compress_folder(plain, base / "small", threads=1, report=lambda _: None, cuts=cuts)
    with Checkpoint(base / "small") as checkpoint:
        assert any(checkpoint.slices(name)[0].axis for name in checkpoint.names) == bool(cuts)
    return plain, base / "small"


def contents(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    with Checkpoint(folder) as checkpoint:
        return {
            name: (info.dtype, info.shape, bytes(checkpoint.raw(name)))
            for name in checkpoint.names
            if (info := checkpoint.info(name))
        }


def mutated(raw: bytes, rng: np.random.Generator) -> bytes:
    """One change: a bit, a byte, a cut, a hole, a copy, or a number of the header."""
    at = int(rng.integers(len(raw)) if rng.random() < 0.5 else rng.integers(min(len(raw), 5000)))
    length = int(rng.integers(1, 64))
    match int(rng.integers(6)):
        case 0:
            return raw[:at] + bytes([raw[at] ^ 1 << int(rng.integers(8))]) + raw[at + 1 :]
        case 1:
            return raw[:at] + bytes([int(rng.integers(256))]) + raw[at + 1 :]
        case 2:
            return raw[:at]
        case 3:
            return raw[:at] + raw[at + length :]
        case 4:
            return raw[:at] + raw[at : at + length] + raw[at:]
        case _:
            return raw[:at] + bytes(rng.integers(0x30, 0x3A, length, dtype=np.uint8)) + raw[at + length :]


def refused(folder: Path, raw: bytes, times: int, seed: int, look: Callable[[], None]) -> int:
    """How often a mutated file in ``folder`` is refused by its name; ``look`` reads each."""
    rng, count = np.random.default_rng(seed), 0
    for _ in range(times):
        (folder / "model.safetensors").write_bytes(mutated(raw, rng))
        try:
            look()
        except ModelError as error:
            count += "model.safetensors" in str(error)
    return count


@pytest.mark.parametrize("times", [500, pytest.param(10_000, marks=pytest.mark.long)])
def test_mutations_never_give_other_weights(forms: tuple[Path, Path], tmp_path: Path, times: int) -> None:
    plain, small = forms
    wanted = contents(plain)

    def look() -> None:
        found = contents(tmp_path)
        foreign = any(dtype == "U8" for dtype, _, _ in found.values())  # not marked as compressed any more
        assert foreign or found == wanted

    assert refused(tmp_path, (small / "model.safetensors").read_bytes(), times, 3, look) > 0.9 * times


def test_no_mutation_is_ever_loaded_as_other_weights(forms: tuple[Path, Path], tmp_path: Path) -> None:
    """The way of a start: checksums instead of decoding everything once more."""
    plain, small = forms
    shutil.copytree(small, tmp_path, dirs_exist_ok=True)
    spec = inspect_model(plain)
    every_id = np.arange(spec.vocab, dtype=np.int32)

    def weights(folder: Path) -> tuple[str, list[bytes]]:
        ops = NativeOps(families()[0], "bf16")
        loaded = load_model(folder, spec, ops)
        matrices = [weight for weight in loaded.weights.values() if isinstance(weight, PackedLinear)]
        return loaded.fingerprint, [ops.embed(one, every_id[: one.n]).tobytes() for one in matrices]

    wanted = weights(plain)
    assert weights(small) == wanted

    def look() -> None:
        assert weights(tmp_path) == wanted

    assert refused(tmp_path, (small / "model.safetensors").read_bytes(), 600, 8, look) > 450


def test_files_without_checksums_are_loaded_and_checked_by_their_hashes(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    plain, small = folders
    shutil.copytree(small, tmp_path, dirs_exist_ok=True)
    raw = (small / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = re.sub(rb',\\"checksum\\":\\"[0-9a-f]{32}\\"', b"", raw[8 : 8 + length]).ljust(length)
    assert b"checksum" not in header
    old = bytearray(raw[:8] + header + raw[8 + length :])
    (tmp_path / "model.safetensors").write_bytes(old)
    spec, ops = inspect_model(plain), NativeOps(families()[0], "bf16")
    assert load_model(tmp_path, spec, ops).fingerprint == load_model(plain, spec, ops).fingerprint
    old[-1] ^= 0x40
    (tmp_path / "model.safetensors").write_bytes(old)
    with pytest.raises(ModelError, match=r"tensor 'lm_head\.weight': damaged"):
        load_model(tmp_path, spec, ops)


def test_a_checksum_for_some_tensors_only_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    raw = (folders[1] / "model.safetensors").read_bytes()
    found = re.search(rb',\\"checksum\\":\\"[0-9a-f]{32}\\"', raw)
    assert found is not None
    one = raw[: found.start()] + raw[found.end() :]
    length = int.from_bytes(raw[:8], "little")
    end = 8 + length - len(found[0])
    (tmp_path / "model.safetensors").write_bytes(one[:end] + b" " * len(found[0]) + one[end:])
    with pytest.raises(ModelError, match="has no checksum, others have"):
        Checkpoint(tmp_path)


def test_a_changed_weight_names_file_and_tensor(folders: tuple[Path, Path], tmp_path: Path) -> None:
    raw = bytearray((folders[1] / "model.safetensors").read_bytes())
    raw[-1] ^= 0x40
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(ModelError, match=r"model\.safetensors: tensor 'lm_head\.weight': damaged"):
        contents(tmp_path)


def test_an_unknown_version_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    raw = (folders[1] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(
        raw.replace(b'"penstock.compression":"1"', b'"penstock.compression":"4"')
    )
    with pytest.raises(ModelError, match="version '4'"):
        Checkpoint(tmp_path)


def test_the_reader_in_the_examples_gives_the_same_bytes(forms: tuple[Path, Path]) -> None:
    read = runpy.run_path(str(ROOT / "examples/read_compressed.py"))["read"]
    found = {name: (dtype, array.shape, array.tobytes()) for name, dtype, array in read(forms[1] / "model.safetensors")}
    assert found == contents(forms[0])


def test_a_compressed_folder_is_inspected_like_the_plain_one(folders: tuple[Path, Path]) -> None:
    assert inspect_model(folders[0]) == inspect_model(folders[1])
    header = (folders[1] / "model.safetensors").read_bytes()
    length = int.from_bytes(header[:8], "little")
    assert json.loads(header[8 : 8 + length])["__metadata__"]["format"] == "pt"
