"""Quantized GGUF files: every type says what the format's own package reads; models are computed from codes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from penstock.errors import ModelError
from penstock.kernels import _native
from penstock.kernels.native.backend import NativeOps, families
from penstock.kernels.quantization import QuantizedMatrix, dequantized
from penstock.types import SamplingParams
from penstock.weights.checkpoint_reader import Checkpoint
from penstock.weights.gguf.blocks import GGUF_QUANTS
from penstock.weights.inspect import compute_dtype_for, inspect_model
from penstock.weights.load import load_model
from runner_bench import RunnerBench
from tiny_gguf import write_gguf
from tiny_models import llama_config, random_tensors

SIZES: dict[str, Any] = {
    "vocab_size": 130,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
MIXED = {
    "embed_tokens": Type.Q6_K,
    "q_proj": Type.Q4_K,
    "k_proj": Type.Q4_K,
    "v_proj": Type.Q6_K,
    "o_proj": Type.Q4_K,
    "gate_proj": Type.Q4_K,
    "up_proj": Type.Q5_K,
    "down_proj": Type.Q6_K,
    "lm_head": Type.Q8_0,
}
"""As llama.cpp mixes them in Q4_K_M files, and one more."""


HALVES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "MXFP4": (),
    "IQ1_M": (),
}
"""Where blocks have fp16 numbers, if not at their beginning."""


def random_raw(name: str, rows: int, columns: int) -> NDArray[np.uint8]:
    """Rows of random blocks whose numbers are finite: [rows, bytes]."""
    rng, own = np.random.default_rng(0), GGUF_QUANTS[name]
    blocks = rows, columns // own.columns
    raw = rng.integers(0, 256, (*blocks, own.nbytes), dtype=np.uint8)
    for at in HALVES.get(name, (0,)):
        raw[:, :, at : at + 2] = rng.uniform(-1, 1, (*blocks, 1)).astype(np.float16).view(np.uint8)
    if name == "MXFP4":
        raw[:, :, 0] = rng.integers(100, 140, blocks)
    if name == "IQ1_M":  # its fp16 number is in the upper halves of four scales: keep its exponent small
        raw[:, :, 55] = raw[:, :, 55] & 0x8F | 0x20
    return raw.reshape(rows, -1)


def test_every_type_of_the_formats_package_is_known() -> None:
    plain = {"F32", "F16", "F64", "BF16", "I8", "I16", "I32", "I64"}
    not_served = {"Q8_1", "Q8_K"}  # of activations
    newer = {"NVFP4", "Q1_0"}
    assert {kind.name for kind in Type} - newer == {*GGUF_QUANTS, *plain, *not_served}


@pytest.mark.parametrize("name", GGUF_QUANTS)
def test_blocks_say_what_the_formats_package_reads(name: str) -> None:
    own = GGUF_QUANTS[name]
    assert (own.columns, own.nbytes) == gguf.GGML_QUANT_SIZES[Type[name]]
    raw = random_raw(name, 9, 512)
    wanted = gguf.quants.dequantize(raw, Type[name])
    assert np.isfinite(wanted).all()
    np.testing.assert_array_equal(dequantized(own.rows(raw), own.format), wanted)


DEQUANTIZED = {"Q2_K"}
"""Groups of 16 columns with minimums: no kernel computes from these codes."""


@pytest.mark.parametrize("name", GGUF_QUANTS)
def test_kernels_compute_from_every_type(name: str) -> None:
    own, raw = GGUF_QUANTS[name], random_raw(name, 48, 512)
    matrix = QuantizedMatrix(48, 512, own.format, lambda first, stop: own.rows(raw[first:stop]))
    said_NK = gguf.quants.dequantize(raw, Type[name]).astype(np.float64)
    for family in families():
        ops = NativeOps(family, "bf16")
        packed = ops.pack_quantized([matrix])
        if name in DEQUANTIZED:
            assert packed is None
            continue
        assert packed is not None
        assert isinstance(packed.data, _native.QuantWeights)
        x = ops.compute(np.random.default_rng(1).standard_normal((3, 512)))
        wanted = ops.to_numpy(x).astype(np.float64) @ said_NK.T
        near = 1e-5 * np.abs(wanted).max()
        np.testing.assert_allclose(ops.to_numpy(ops.linear(x, packed)), wanted, rtol=1e-4, atol=near)


def test_a_type_without_kernels_is_dequantized_with_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, config = tmp_path / "m.gguf", llama_config(**SIZES, num_hidden_layers=1)
    said = write_gguf(path, config, random_tensors(config), {"q_proj": Type.Q2_K, "up_proj": Type.Q2_K})
    ops = NativeOps(families()[0], "fp32")
    with caplog.at_level(logging.INFO, logger="penstock"):
        loaded = load_model(path, inspect_model(path), ops)
    assert "2 quantized matrices are held in the compute type (1.5 MiB), for no kernel reads them" in caplog.text
    x = ops.compute(np.random.default_rng(1).standard_normal((3, 256)))
    parts = [said[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    wanted = ops.to_numpy(x).astype(np.float64) @ np.concatenate(parts).T.astype(np.float64)
    np.testing.assert_allclose(ops.to_numpy(ops.linear(x, loaded.weights["0.qkv"])), wanted, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("gguf") / "mixed.gguf"
    config = llama_config(**SIZES)
    return path, write_gguf(path, config, random_tensors(config), MIXED)


@pytest.mark.parametrize(("family", "compute"), [(family, "bf16") for family in families()] + [(families()[0], "fp32")])
def test_a_model_is_computed_from_its_codes(mixed: tuple[Path, dict[str, Any]], family: str, compute: str) -> None:
    path, said = mixed
    spec = inspect_model(path)
    assert compute_dtype_for(spec, "auto") == "bf16"
    ops = NativeOps(family, compute)
    loaded = load_model(path, spec, ops, threads=2)
    layer = "model.layers.1"
    parts = {
        "1.qkv": [f"{layer}.self_attn.{part}_proj.weight" for part in "qkv"],
        "1.gate_up": [f"{layer}.mlp.gate_proj.weight", f"{layer}.mlp.up_proj.weight"],
        "1.down": [f"{layer}.mlp.down_proj.weight"],
        "head": ["lm_head.weight"],
    }
    for name, tensors in parts.items():
        packed = loaded.weights[name]
        assert isinstance(packed.data, _native.QuantWeights)
        weight_NK = np.concatenate([said[tensor] for tensor in tensors]).astype(np.float64)
        x = ops.compute(np.random.default_rng(1).standard_normal((3, packed.k)))
        wanted = ops.to_numpy(x).astype(np.float64) @ weight_NK.T
        np.testing.assert_allclose(ops.to_numpy(ops.linear(x, packed)), wanted, rtol=1e-4, atol=2e-4)
    tokens = np.arange(130, dtype=np.int32)
    rows = ops.to_numpy(ops.embed(loaded.weights["embed"], tokens))
    np.testing.assert_array_equal(rows, said["model.embed_tokens.weight"])
    weights = sum(value.size for value in said.values() if value.ndim == 2)
    assert loaded.nbytes * 8 < 6.6 * weights  # of codes, and of no copy


def test_tensors_read_as_arrays_say_the_same(mixed: tuple[Path, dict[str, Any]]) -> None:
    path, said = mixed
    with Checkpoint(path) as checkpoint:
        for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.2.self_attn.v_proj.weight"):
            np.testing.assert_array_equal(checkpoint.array(name), said[name])


def test_types_that_no_kernel_reads_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    config = llama_config(**SIZES)
    write_gguf(path, config, random_tensors(config), Type.F32)
    raw = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = raw.index(name) + len(name) + 4 + 16
    assert raw[at] == Type.F32
    raw[at] = Type.I32
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=r"m\.gguf: tensor 'model.layers.0.mlp.up_proj.weight' has type I32; .* Q4_K"):
        inspect_model(path)


@pytest.mark.parametrize("family", families())
def test_one_answer_recorded_or_not_whole_or_in_chunks_alone_or_not(
    mixed: tuple[Path, dict[str, Any]], family: str
) -> None:
    """Greedy and drawn tokens: the head's picks come from quantized rows too."""
    told: list[list[list[int]]] = []
    for direct, chunk, together in ((False, 64, True), (True, 64, True), (False, 7, False)):
        bench = RunnerBench(mixed[0], "bf16", family=family, direct=direct, threads=2)
        requests = [
            bench.request(
                np.random.default_rng(length).integers(0, 130, length).tolist(),
                SamplingParams(seed=7, max_tokens=12, temperature=temperature),
            )
            for length, temperature in ((40, 0.0), (9, 0.8))
        ]
        for group in [requests] if together else [[request] for request in requests]:
            while any(len(request.output) < 12 for request in group):
                bench.step([(request, min(chunk, request.uncomputed)) for request in group])
        told.append([list(request.output) for request in requests])
    assert told[0] == told[1] == told[2]
