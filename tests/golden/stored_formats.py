"""Plain matrices in every stored form, as the formats' own tools write them, and what those tensors say.

The inverse is the formats' own too: transformers' where it has one that runs here, else torch in the words of the
format's first implementation.  Nothing of Penstock's readers is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

from tiny_models import Tensors

Fp32 = NDArray[np.float32]
Stored = tuple[Tensors, Fp32]
"""Tensors by the ends of their names, and the matrix that they say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A form, and how a matrix [N, K] (or a stack [E, K, N]) is written in it."""

    config: dict[str, Any]  # quantization_config
    write: Callable[[Fp32], Stored]
    scale_bits: int = 16
    stacks: bool = False
    sources: tuple[str, ...] = field(default=())


def grouped(weight_NK: Fp32, group: int) -> NDArray[np.float32]:
    return weight_NK.reshape(len(weight_NK), -1, group)


def into_words(codes: NDArray[np.integer[Any]], bits: int, order: tuple[int, ...] | None = None) -> NDArray[np.int32]:
    """Codes of the last axis, 32 / bits a word; code ``order[i]`` of each lies at place i."""
    each = 32 // bits
    wide = codes.astype(np.uint64).reshape(*codes.shape[:-1], -1, each)
    words = np.zeros(wide.shape[:-1], np.uint64)
    for place, own in enumerate(order or range(each)):
        words |= wide[..., own] << np.uint64(bits * place)
    return words.astype(np.uint32).view(np.int32)


def out_of_words(words: NDArray[np.int32], bits: int) -> torch.Tensor:
    """The lowest first, as torch shifts them; along a new last axis."""
    places = torch.arange(0, 32, bits, dtype=torch.int32)
    return torch.bitwise_right_shift(torch.from_numpy(words)[..., None], places) & (2**bits - 1)


# --- a byte a weight --------------------------------------------------------------------------------------------------


def fp8_blocks(rows: int, columns: int, end: str = ".weight_scale_inv") -> Callable[[Fp32], Stored]:
    def write(weight_NK: Fp32) -> Stored:
        n, k = weight_NK.shape
        padded = np.zeros((-(-n // rows) * rows, -(-k // columns) * columns), np.float32)
        padded[:n, :k] = weight_NK
        blocks = padded.reshape(len(padded) // rows, rows, -1, columns)
        scales = (np.abs(blocks).max((1, 3)) / 448).astype(np.float32)
        codes = (blocks / scales[:, None, :, None]).reshape(padded.shape).astype(ml_dtypes.float8_e4m3fn)
        quantized = torch.from_numpy(codes.view(np.uint8)).view(torch.float8_e4m3fn)
        said = Fp8Dequantize(None)._dequantize_one(quantized, torch.from_numpy(scales), torch.float32).numpy()[:n, :k]
        return {".weight": codes[:n, :k].copy(), end: scales}, said

    return write


def fp8_scaled(by_row: bool) -> Callable[[Fp32], Stored]:
    def write(weight_NK: Fp32) -> Stored:
        scales = np.abs(weight_NK).max(1 if by_row else None, keepdims=True) / 448
        scales = scales.astype(ml_dtypes.bfloat16 if by_row else np.float32)
        codes = (weight_NK / scales.astype(np.float32)).astype(ml_dtypes.float8_e4m3fn)
        said = torch.from_numpy(codes.view(np.uint8)).view(torch.float8_e4m3fn).float()
        said = said * torch.from_numpy(scales.astype(np.float32))
        beside = {} if by_row else {".input_scale": np.ones(1, np.float32)}
        return {".weight": codes, ".weight_scale": scales if by_row else scales.reshape(()), **beside}, said.numpy()

    return write


def int8_rows(weight_NK: Fp32) -> Stored:
    """With zero points, as for activations that are quantized too."""
    low, high = weight_NK.min(1, keepdims=True), weight_NK.max(1, keepdims=True)
    scales = ((high - low) / 255).astype(np.float32)
    zeros = np.clip(np.rint(-128 - low / scales), -128, 127).astype(np.int8)
    codes = np.clip(np.rint(weight_NK / scales) + zeros, -128, 127).astype(np.int8)
    said = (torch.from_numpy(codes).float() - torch.from_numpy(zeros).float()) * torch.from_numpy(scales)
    return {".weight": codes, ".weight_scale": scales, ".weight_zero_point": zeros}, said.numpy()


# --- words ------------------------------------------------------------------------------------------------------------


def packed(group: int, *, symmetric: bool = True, shuffled: bool = False) -> Callable[[Fp32], Stored]:
    """compressed-tensors: integers from -8 on, stored from 0 on."""

    def write(weight_NK: Fp32) -> Stored:
        n, k = weight_NK.shape
        order = np.random.default_rng(k).permutation(k) if shuffled else np.arange(k)
        blocks = grouped(weight_NK[:, order], group)
        low, high = blocks.min(2), blocks.max(2)
        scales = (np.abs(blocks).max(2) / 7 if symmetric else (high - low) / 15).astype(ml_dtypes.bfloat16)
        wide = scales.astype(np.float32)
        zeros = np.zeros_like(wide) if symmetric else np.clip(np.rint(-8 - low / wide), -8, 7)
        codes = np.clip(np.rint(blocks / wide[:, :, None]) + zeros[:, :, None], -8, 7)
        placed = np.empty((n, k), np.int64)
        placed[:, order] = codes.reshape(n, k)
        groups_K = np.empty(k, np.int32)
        groups_K[order] = np.arange(k) // group
        tensors: Tensors = {
            ".weight_packed": into_words(placed + 8, 4),
            ".weight_scale": scales,
            ".weight_shape": np.array([n, k], np.int64),
        }
        if not symmetric:
            tensors[".weight_zero_point"] = into_words((zeros + 8).astype(np.int64).T, 4).T.copy()
        if shuffled:
            tensors[".weight_g_idx"] = groups_K
        unpacked = out_of_words(tensors[".weight_packed"], 4).reshape(n, -1) - 8
        spread = torch.from_numpy(groups_K.astype(np.int64))
        said = (unpacked - torch.from_numpy(zeros)[:, spread]) * torch.from_numpy(wide)[:, spread]
        return tensors, said.float().numpy()

    return write


def gptq(bits: int, group: int, *, version: int, shuffled: bool = False, seed: int = 0) -> Callable[[Fp32], Stored]:
    def write(weight_NK: Fp32) -> Stored:
        n, k = weight_NK.shape
        order = np.random.default_rng(seed + k).permutation(k) if shuffled else np.arange(k)
        groups_K = np.empty(k, np.int32)
        groups_K[order] = np.arange(k) // group
        blocks = grouped(weight_NK[:, order], group)
        most = 2**bits - 1
        low, high = np.minimum(blocks.min(2), 0), np.maximum(blocks.max(2), 0)
        scales_GN = ((high - low) / most).astype(np.float16).T.copy()
        zeros_GN = np.clip(np.rint(-low.T / scales_GN.astype(np.float32)), 1, most).astype(np.int64)
        wide_GN = scales_GN.astype(np.float32)
        codes_KN = np.clip(np.rint(weight_NK.T / wide_GN[groups_K]) + zeros_GN[groups_K], 0, most).astype(np.int64)
        tensors: Tensors = {
            ".qweight": into_words(codes_KN.T, bits).T.copy(),
            ".qzeros": into_words(zeros_GN - (1 if version == 1 else 0), bits),
            ".scales": scales_GN,
            ".g_idx": groups_K,
            ".bias": np.zeros(n, np.float16),  # which the first tools wrote for every module
        }
        return tensors, _gptq_says(tensors, bits, version)

    return write


def _gptq_says(tensors: Tensors, bits: int, version: int) -> Fp32:
    codes_KN = out_of_words(tensors[".qweight"].T.copy(), bits).reshape(len(tensors[".scales"][0]), -1).T
    zeros_GN = out_of_words(tensors[".qzeros"], bits).reshape(len(tensors[".scales"]), -1) + (1 if version == 1 else 0)
    scales_GN, groups = torch.from_numpy(tensors[".scales"]).float(), torch.from_numpy(tensors[".g_idx"]).long()
    return ((codes_KN - zeros_GN[groups]) * scales_GN[groups]).T.contiguous().numpy()


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
AWQ_REVERSE = (0, 4, 1, 5, 2, 6, 3, 7)


def awq(group: int) -> Callable[[Fp32], Stored]:
    def write(weight_NK: Fp32) -> Stored:
        blocks = grouped(weight_NK, group)
        low, high = blocks.min(2), blocks.max(2)
        scales_GN = ((high - low) / 15).astype(np.float16).T.copy()
        wide_GN = np.repeat(scales_GN.astype(np.float32), group, axis=0)
        zeros_GN = np.clip(np.rint(-low.T / scales_GN.astype(np.float32)), 0, 15).astype(np.int64)
        zeros_KN = np.repeat(zeros_GN, group, axis=0)
        codes_KN = np.clip(np.rint(weight_NK.T / wide_GN) + zeros_KN, 0, 15).astype(np.int64)
        tensors: Tensors = {
            ".qweight": into_words(codes_KN, 4, AWQ_ORDER),
            ".qzeros": into_words(zeros_GN, 4, AWQ_ORDER),
            ".scales": scales_GN,
        }
        codes, zeros = (
            out_of_words(tensors[end], 4)[..., list(AWQ_REVERSE)].reshape(len(tensors[end]), -1)
            for end in (".qweight", ".qzeros")
        )
        said = (codes - zeros.repeat_interleave(group, 0)) * torch.from_numpy(wide_GN)
        return tensors, said.float().T.contiguous().numpy()

    return write


def mxfp4(stack_EKN: Fp32) -> Stored:
    blocks = stack_EKN.swapaxes(1, 2).reshape(stack_EKN.shape[0], stack_EKN.shape[2], -1, 32)
    exponents = np.floor(np.log2(np.abs(blocks).max(3))).astype(np.int32) - 2
    scaled = blocks / np.exp2(exponents)[..., None].astype(np.float32)
    codes = np.abs(scaled[..., None] - np.array(FP4_VALUES, np.float32)).argmin(-1).astype(np.uint8)
    tensors: Tensors = {
        "_blocks": codes[..., 0::2] | codes[..., 1::2] << 4,
        "_scales": (exponents + 127).astype(np.uint8),
    }
    parts = (torch.from_numpy(tensors[end]) for end in ("_blocks", "_scales"))
    return tensors, convert_moe_packed_tensors(*parts, dtype=torch.float32).numpy()


# --- as config.json says it -------------------------------------------------------------------------------------------


def scheme(**weights: Any) -> dict[str, Any]:
    """A configuration of compressed-tensors."""
    written, inputs = weights.pop("format"), weights.pop("inputs", None)
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": written,
        "config_groups": {"group_0": group},
        "ignore": weights.pop("ignore", ["lm_head", "re:.*mlp.gate$"]),
    }


EXPERTS_ONLY = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
]
ACTIVATIONS = {"num_bits": 8, "type": "int", "dynamic": True}
INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}

FORMS: dict[str, Form] = {
    "fp8 in blocks": Form(
        config={"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 32]},
        write=fp8_blocks(64, 32),
        scale_bits=32,
    ),
    "fp8, one scale": Form(
        config={"quant_method": "fp8", "activation_scheme": "static"}, write=fp8_scaled(False), scale_bits=0
    ),
    "fp8 rows": Form(
        config=scheme(format="float-quantized", num_bits=8, type="float", strategy="channel", inputs=ACTIVATIONS),
        write=fp8_scaled(True),
        scale_bits=0,
    ),
    "int8 rows": Form(
        config=scheme(format="int-quantized", num_bits=8, strategy="channel", symmetric=False, inputs=ACTIVATIONS),
        write=int8_rows,
        scale_bits=0,
    ),
    "packed int4": Form(config=scheme(format="pack-quantized", **INT4, symmetric=True), write=packed(32)),
    "packed int4 of experts": Form(
        config=scheme(format="pack-quantized", **INT4, symmetric=True, ignore=EXPERTS_ONLY), write=packed(32)
    ),
    "packed int4 with zero points, shuffled": Form(
        config=scheme(format="pack-quantized", **INT4, symmetric=False, actorder="group"),
        write=packed(32, symmetric=False, shuffled=True),
    ),
    "gptq 4, shuffled": Form(
        config={"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False},
        write=gptq(4, 32, version=1, shuffled=True),
    ),
    "gptq 8": Form(
        config={"quant_method": "gptq", "bits": 8, "group_size": 32, "checkpoint_format": "gptq_v2"},
        write=gptq(8, 32, version=2),
    ),
    "awq": Form(config={"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, write=awq(32)),
    "mxfp4": Form(
        config={
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        },
        write=mxfp4,
        scale_bits=8,
        stacks=True,
    ),
}
