"""What ``quantization_config`` may say and what tensors must look like: everything else is refused with the reason.

That sound files are read as their makers meant them, tests/golden/test_weight_formats.py proves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from penstock.errors import ModelError
from penstock.weights.config_json import ConfigFields
from penstock.weights.inspect import inspect_model
from penstock.weights.quantization.base import MAX_PATTERN, QuantizedTensor
from penstock.weights.quantization.config import Quantization, parse_quantization
from penstock.weights.safetensors_header import TensorInfo
from tiny_models import NAMES, Tensors, llama_config, random_tensors, write_model, write_weights

FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
MXFP4 = {"quant_method": "mxfp4"}


def packed(weights: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """compressed-tensors with changes of the weights' scheme and of the whole."""
    own = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True} | (weights or {})
    groups = {"group_0": {"targets": ["Linear"], "weights": own}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups} | changes


def parsed(config: dict[str, Any]) -> Quantization:
    found = parse_quantization(ConfigFields({"quantization_config": config}, "config.json"))
    assert found is not None
    return found


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no method": ({}, "quant_method '' is not known; fp8, fbgemm_fp8, gptq, awq, mxfp4, compressed-tensors can be"),
    "another method": ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not known"),
    "e5m2": ({**FP8, "fmt": "e5m2"}, "fmt is 'e5m2'"),
    "experts of fp4": ({**FP8, "expert_dtype": "fp4"}, "expert_dtype is 'fp4'"),
    "a block of one size": ({**FP8, "weight_block_size": [128]}, "weight_block_size must be rows and columns"),
    "a block of nothing": ({**FP8, "weight_block_size": [128, 0]}, "weight_block_size must be rows and columns"),
    "gptq of 3 bits": ({**GPTQ, "bits": 3}, "bits is 3; GPTQ of 4 or 8 bits"),
    "marlin": ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
    "groups of nothing": ({**GPTQ, "group_size": 0}, "group_size must be a positive integer or -1"),
    "other words": ({**GPTQ, "pack_dtype": "int8"}, "pack_dtype is 'int8'"),
    "awq of 8 bits": ({**AWQ, "bits": 8}, "bits is 8; AWQ of 4 bits"),
    "gemv": ({**AWQ, "version": "GEMV"}, "version is 'gemv'; 'gemm' can be served"),
    "int2": (packed({"num_bits": 2}), "int of 2 bits, format 'pack-quantized'; these can be served"),
    "nvfp4": (
        packed({"type": "float"}, format="nvfp4-pack-quantized"),
        "float of 4 bits, format 'nvfp4-pack-quantized'",
    ),
    "no groups": (packed(config_groups={}), "config_groups has 0 groups"),
    "a group without weights": (packed(config_groups={"a": {"targets": ["Linear"]}}), "a: has no weights"),
    "targets of another kind": (
        packed(config_groups={"a": {"targets": [1], "weights": {"num_bits": 4}}}),
        "targets must name modules",
    ),
    "tensors at once": (packed({"strategy": "tensor"}), "strategy is 'tensor'; 'group' and 'channel'"),
    "weights that change": (packed({"dynamic": True}), "dynamic is true"),
    "sparse": (packed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config: format 'sparse-24-bitmask'"),
    "rotated": (packed(transform_config={"config_groups": {"R1": {}}}), "transform_config: rotated weights"),
    "ignoring numbers": (packed(ignore=[7]), "ignore must hold names"),
    "no pattern": (packed(ignore=["re:("]), "names of modules"),
    "a pattern without end": (packed(ignore=["a" * (MAX_PATTERN + 1)]), "too long a name"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configurations_that_are_refused(case: str) -> None:
    config, reason = REFUSED[case]
    with pytest.raises(ModelError, match=reason) as caught:
        parsed(config)
    assert str(caught.value).startswith("config.json: quantization_config")


def test_what_is_known_of_a_configuration() -> None:
    assert parse_quantization(ConfigFields({}, "config.json")) is None
    inner = {"text_config": {"quantization_config": FP8}}
    assert parse_quantization(ConfigFields(inner, "config.json")) == parsed(FP8)
    with pytest.raises(ModelError, match="compression_config"):
        parse_quantization(ConfigFields({"compression_config": {}}, "config.json"))
    names = {"int4": packed(), "fp8": FP8, "gptq-int4": GPTQ, "awq-int4": AWQ, "mxfp4": MXFP4}
    assert {parsed(config).name for config in names.values()} == set(names)
    static = {"num_bits": 8, "type": "float", "dynamic": False}
    groups = {"a": {"weights": {"num_bits": 8, "type": "float"}, "input_activations": static}}
    assert parsed(packed(config_groups=groups, format="float-quantized")).activations == "static float8"


def test_groups_lists_and_skipped_modules() -> None:
    weights = {"num_bits": 4, "group_size": 32}
    groups = {
        "a": {"targets": ["re:.*experts.*"], "weights": weights},
        "b": {"targets": ["q_proj"], "weights": {"num_bits": 8, "strategy": "channel"}, "format": "int-quantized"},
    }
    found = parsed(packed(config_groups=groups, format="mixed-precision", ignore=["re:.*experts.0.*"]))
    bits = {name: found.scheme_of(f"model.layers.0.{name}") for name in ("mlp.experts.1.up", "a.q_proj", "mlp.up")}
    assert [None if scheme is None else scheme.bits_per_weight() for scheme in bits.values()] == [4.5, 8, None]
    assert found.scheme_of("model.layers.0.mlp.experts.0.up") is None
    skipping = parsed({**GPTQ, "dynamic": {"-:.*down_proj": {}, "+:.*up.*": {"bits": 8}}})
    assert skipping.scheme_of("model.layers.0.mlp.down_proj") is None
    assert skipping.scheme_of("model.layers.0.mlp.up_proj") is not None
    listed = parsed({**GPTQ, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]})
    assert listed.scheme_of("model.layers.0.mlp.up_proj") is not None
    assert listed.scheme_of("model.layers.0.mlp.down_proj") is None


class Arrays:
    """``base.StoredTensors`` over arrays."""

    def __init__(self, arrays: Tensors) -> None:
        self.arrays = arrays
        self.names = sorted(arrays)

    def info(self, name: str) -> TensorInfo:
        array = self.arrays[name]
        return TensorInfo(name, NAMES[array.dtype], array.shape, 0, array.nbytes)

    def raw(self, name: str) -> memoryview:
        return memoryview(self.arrays[name].tobytes())

    def path_of(self, name: str) -> Path:
        return Path("w.safetensors")


def found(config: dict[str, Any], **tensors: Any) -> QuantizedTensor:
    """The one tensor that module ``m`` has."""
    names = {"m" + end.replace("__", "."): value for end, value in tensors.items()}
    (coded,) = parsed(config).found_in(Arrays(names)).values()
    return coded


E4M3 = ml_dtypes.float8_e4m3fn
N, K = 16, 64
WORDS = np.zeros((K // 8, N), np.int32)
FP8_M: Tensors = {"__weight": np.zeros((N, K), E4M3), "__weight_scale_inv": np.ones((1, 2), np.float32)}
GPTQ_M: Tensors = {
    "__qweight": WORDS,
    "__qzeros": np.zeros((2, N // 8), np.int32),
    "__scales": np.ones((2, N), np.float16),
}
AWQ_M: Tensors = {**GPTQ_M, "__qweight": np.zeros((K, N // 8), np.int32)}
PACKED_M: Tensors = {
    "__weight_packed": np.zeros((N, K // 8), np.int32),
    "__weight_scale": np.ones((N, 2), np.float16),
    "__weight_shape": np.array([N, K], np.int64),
}
MXFP4_M: Tensors = {"_blocks": np.zeros((3, N, 2, 16), np.uint8), "_scales": np.zeros((3, N, 2), np.uint8)}


def test_sound_tensors_are_found() -> None:
    for config, tensors in ((FP8, FP8_M), (GPTQ, GPTQ_M), (AWQ, AWQ_M), (packed(), PACKED_M)):
        coded = found(config, **tensors)
        assert coded.shape == (N, K)
        assert coded.matrix(0).dequantized().shape == (N, K)
        assert set(coded.sources) == {"m" + end.replace("__", ".") for end in tensors}
    stack = found(MXFP4, **MXFP4_M)
    assert (stack.shape, stack.transposed) == ((3, K, N), True)


WRONG: dict[str, tuple[dict[str, Any], Tensors, str]] = {
    "no scale": (FP8, {"__weight": FP8_M["__weight"]}, "'m.weight': has no 'm.weight_scale_inv' with it"),
    "scales of other blocks": (
        FP8,
        {**FP8_M, "__weight_scale_inv": np.ones((2, 2), np.float32)},
        r"'m.weight_scale_inv': has shape \[2, 2\], in blocks of 32 by 32 it must have \[1, 2\]",
    ),
    "scales of integers": (FP8, {**FP8_M, "__weight_scale_inv": np.ones((1, 2), np.int32)}, "has type I32, it must be"),
    "a stack": (FP8, {**FP8_M, "__weight": np.zeros((2, N, K), E4M3)}, "matrices can be served"),
    "too many scales": (
        {"quant_method": "fp8"},
        {**FP8_M, "__weight_scale_inv": np.ones(3, np.float32)},
        "one scale, or one for each of 16 rows",
    ),
    "ignored": ({**FP8, "modules_to_not_convert": ["m"]}, FP8_M, "names its module as one that is not"),
    "no target": (
        packed(config_groups={"a": {"targets": ["other"], "weights": {"num_bits": 4, "group_size": 32}}}),
        PACKED_M,
        "no group of quantization_config targets it",
    ),
    "other bits": ({**GPTQ, "bits": 8}, GPTQ_M, "is of codes of 4 bits, by quantization_config they have 8"),
    "zeros of another width": (GPTQ, {**GPTQ_M, "__qzeros": np.zeros((2, 3), np.int32)}, "does not fit 16 outputs"),
    "too few groups": ({**GPTQ, "group_size": 16}, GPTQ_M, "has 2 groups; 64 columns in groups of 16 are 4"),
    "no zeros": (GPTQ, {"__qweight": WORDS, "__scales": GPTQ_M["__scales"]}, "has no 'm.qzeros' with it"),
    "too few columns": (GPTQ, {**GPTQ_M, "__g_idx": np.zeros(8, np.int32)}, r"'m.g_idx': has shape \[8\]"),
    "awq with other scales": (AWQ, {**AWQ_M, "__scales": np.ones((1, N), np.float16)}, "'m.scales': has shape"),
    "packed with other scales": (packed(), {**PACKED_M, "__weight_scale": np.ones((N, 1), np.float16)}, "has shape"),
    "no zero points": (packed({"symmetric": False}), PACKED_M, "has no 'm.weight_zero_point' with it"),
    "longer blocks": (MXFP4, {**MXFP4_M, "_blocks": np.zeros((3, N, 1, 32), np.uint8)}, "blocks of 16 bytes"),
    "scales of fewer blocks": (MXFP4, {**MXFP4_M, "_scales": np.zeros((3, N, 1), np.uint8)}, "'m_scales': has shape"),
}


@pytest.mark.parametrize("case", WRONG)
def test_tensors_that_do_not_fit_are_named(case: str) -> None:
    config, tensors, reason = WRONG[case]
    with pytest.raises(ModelError, match=reason) as caught:
        found(config, **tensors)
    assert str(caught.value).startswith("w.safetensors: tensor 'm")


def test_numbers_that_contradict_the_form_are_named_when_they_are_read() -> None:
    coded = found(packed(), **{**PACKED_M, "__weight_shape": np.array([N, 60], np.int64)})
    with pytest.raises(ModelError, match=r"'m.weight_shape': says \[16, 60\], the codes are of \[16, 64\]"):
        coded.matrix(0)
    uneven = np.repeat(np.array([0, 1], np.int32), [K // 2 + 1, K // 2 - 1])
    with pytest.raises(ModelError, match=r"'m.g_idx': does not put 32 columns into each of 2 groups"):
        found(GPTQ, **{**GPTQ_M, "__g_idx": uneven}).matrix(0)
    full = {**GPTQ_M, "__qweight": np.zeros((K // 4, N), np.int32), "__qzeros": np.full((2, N // 4), -1, np.int32)}
    with pytest.raises(ModelError, match=r"'m.qzeros': has a zero point of 256"):
        found({**GPTQ, "bits": 8}, **full).matrix(0)


def test_codes_that_the_configuration_does_not_explain(tmp_path: Path) -> None:
    config = llama_config()
    write_model(tmp_path, config)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = random_tensors(config)
    tensors[name.removesuffix("weight") + "qweight"] = np.zeros((8, 96), np.int32)
    del tensors[name]
    write_weights(tmp_path, tensors)
    with pytest.raises(
        ModelError, match=r"up_proj.weight' is missing; there is .*up_proj.qweight', which config.json's"
    ):
        inspect_model(tmp_path)


def test_what_is_about_a_quantized_cache_is_left_out_and_nothing_else(tmp_path: Path) -> None:
    config = llama_config()
    folder = write_model(tmp_path, {**config, "quantization_config": {"quant_method": "fp8"}})
    more = {"model.layers.0.self_attn.k_scale": np.ones(1, np.float32)}
    write_weights(folder, random_tensors(config) | more)
    assert inspect_model(folder).quantization is not None
    write_weights(folder, random_tensors(config) | {"model.layers.0.self_attn.z_scale": np.ones(1, np.float32)})
    with pytest.raises(ModelError, match="z_scale' is not part of this architecture"):
        inspect_model(folder)
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder, random_tensors(config) | more)
    with pytest.raises(ModelError, match="k_scale' is not part of this architecture"):
        inspect_model(folder)
