"""Models of random weights, made on the spot: real shapes through the same layouts and layers as a checkpoint's.

One block of Gaussian numbers is made once and every weight takes its numbers from somewhere in it: making an 8 B model
takes seconds then, and to the hardware (bf16 numbers with full mantissas) it looks like a trained one.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from penstock.engine.models.interface import Model
from penstock.engine.models.registry import build_model
from penstock.kernels.compressed import PANEL_ROWS
from penstock.kernels.ops import Ops
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.architecture.tensor_layout import Matrix, TensorPart, Vector
from penstock.weights.inspect import read_outline, spec_for_length
from penstock.weights.load import LoadedModel

BLOCK = 1 << 24
PART = 1 << 24
"""Numbers of a matrix that are coded at once."""

DEVIATION = 0.02

_LLAMA: Mapping[str, Any] = MappingProxyType(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
)
_MOE: Mapping[str, Any] = MappingProxyType(
    {
        **_LLAMA,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
    }
)


def _sizes(hidden: int, layers: int, heads: tuple[int, int, int], inner: int, vocab: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "intermediate_size": inner,
        "vocab_size": vocab,
        "max_position_embeddings": 131_072,
    }


def _experts(count: int, chosen: int, inner: int) -> dict[str, int]:
    return {"num_experts": count, "num_experts_per_tok": chosen, "moe_intermediate_size": inner}


LLAMA_8B = {**_LLAMA, **_sizes(4096, 32, (32, 8, 128), 14_336, 128_256)}
MOE_30B = {**_MOE, **_sizes(2048, 12, (32, 4, 128), 6144, 151_936), **_experts(128, 8, 768)}
"""The shape of Qwen3-30B-A3B with 12 of its 48 layers: enough to measure, and made in seconds."""

TINY = {**_LLAMA, **_sizes(64, 1, (4, 2, 16), 96, 128), "max_position_embeddings": 512}
TINY_MOE = {**_MOE, **_sizes(64, 1, (4, 2, 16), 64, 128), **_experts(4, 2, 32), "max_position_embeddings": 512}


@dataclass(frozen=True, slots=True)
class Made:
    """A model in the backend's memory."""

    name: str
    spec: ModelSpec
    model: Model
    shapes: Mapping[str, tuple[int, int, bool]]  # of its matrices, by kind: N, K, and whether its sums are a tree
    weight_bytes: int  # that a decode step of one token reads
    flops_per_token: int  # of a prompt's token, attention aside


def make(name: str, config: Mapping[str, Any], ops: Ops, max_positions: int, *, compressed: bool = False) -> Made:
    """The model of this ``config.json``, over random weights; ``compressed``: those of products in the GPU's layout."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(dict(config)), encoding="utf-8")
        outline = read_outline(path)
    spec = spec_for_length(outline.spec, max_positions)
    numbers = Numbers()
    weights: dict[str, Any] = {}
    shapes: dict[str, tuple[int, int, bool]] = {}
    read = flops = 0
    share = _share_read(config)
    for weight in outline.layout.weights:
        if isinstance(weight, Vector):
            weights[weight.name] = ops.vector(np.ones(sum(part.numbers for part in weight.parts), np.float32))
            continue
        n, k = _shape(weight)
        packed = None
        if compressed and weight.name != "embed":
            parts: Any = numbers.compressed(n, k)
            packed = ops.pack_compressed(parts, segments=weight.segments) if parts else None
        if packed is None:
            packed = ops.pack_linear(numbers.matrix(n, k), segments=weight.segments)
        weights[weight.name] = packed
        kind = weight.name.rpartition(".")[2]
        shapes.setdefault(kind, (packed.n, packed.k, len(packed.segments) > 1))
        part = share if ".experts." in weight.name else 1.0
        if weight.name != "embed":
            read += int(packed.nbytes * part)
            flops += int(2 * packed.n * packed.k * part) if weight.name != "head" else 0
    loaded = LoadedModel(spec=spec, weights=weights, fingerprint=name, nbytes=0, weights_hash="")
    return Made(name, spec, build_model(loaded, ops, max_positions), shapes, read, flops)


def _share_read(config: Mapping[str, Any]) -> float:
    """Of the experts, those that a token chooses."""
    return config.get("num_experts_per_tok", 1) / config.get("num_experts", 1)


def _shape(weight: Matrix) -> tuple[int, int]:
    sizes = [_part_shape(part) for part in weight.parts]
    return sum(n for n, _ in sizes), sizes[0][1]


def _part_shape(part: TensorPart) -> tuple[int, int]:
    shape = part.shape if part.index is None else part.shape[1:]
    n, k = (shape[1], shape[0]) if part.transposed else (shape[0], shape[1])
    return (part.rows.count if part.rows is not None else n), k


class Numbers:
    """Gaussian numbers without end."""

    def __init__(self) -> None:
        rng = np.random.default_rng(20)
        block = rng.standard_normal(BLOCK, dtype=np.float32) * np.float32(DEVIATION)
        self._bits = block.astype(ml_dtypes.bfloat16)
        self._begin = 0
        self._compressed: dict[tuple[int, int], list[Any]] = {}

    def compressed(self, n: int, k: int) -> list[Any]:
        """[n, k] in the GPU's layout, as parts one below the other: one that was coded once, as often as it takes.

        Every part's bytes are copied where they are packed, so memory is read as if all were different.
        """
        from penstock.kernels.compressed import compress_for_gpu

        if (n, k) not in self._compressed:
            count = -(-n * k // PART)
            while n % count or (n // count) % PANEL_ROWS:
                count = count + 1 if count < n // PANEL_ROWS else 1
                if count == 1:
                    break
            coded = compress_for_gpu(np.ascontiguousarray(self.matrix(n // count, k)).view(np.uint16))
            self._compressed[n, k] = [] if coded is None else [coded] * count
        return self._compressed[n, k]

    def matrix(self, n: int, k: int) -> NDArray[Any]:
        """[n, k] in bf16; small ones are parts of the block, large ones repeat it."""
        size = n * k
        if size > BLOCK // 2:
            return np.resize(self._bits, size).reshape(n, k)
        self._begin = (self._begin + 1_234_568) % (BLOCK - size)
        return self._bits[self._begin : self._begin + size].reshape(n, k)
