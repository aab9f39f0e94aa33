"""Tiny GGUF files, written by the format's own package (``gguf``), which Penstock does not read them with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from bench.peers.drivers.to_gguf import CONTROL, NORMAL, add_settings, own_name, paired
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from tiny_models import Tensors


def add_bytes_tokenizer(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """As many tokens as the vocabulary has: control tokens, then letters, then pairs of them (at least one)."""
    letters = [chr(code) for code in range(33, 127)]
    size = config["vocab_size"]
    pairs = [(left, right) for left in letters for right in letters][: size - 2 - len(letters)]
    words = ["<s>", "</s>", *letters, *map("".join, pairs)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(words)
    writer.add_token_types([CONTROL, CONTROL] + [NORMAL] * (size - 2))
    writer.add_token_merges(list(map(" ".join, pairs)))
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def of_byte_level(source: dict[str, Any], pre: str) -> dict[str, Any]:
    """What a converter writes of a byte-level tokenizer.json."""
    vocabulary, added = source["model"]["vocab"], source["added_tokens"]
    tokens = dict.fromkeys(range(max([*vocabulary.values(), *(token["id"] for token in added)]) + 1), "")
    tokens |= {index: token for token, index in vocabulary.items()}
    tokens |= {token["id"]: token["content"] for token in added}
    control = {token["id"] for token in added if token["special"]}
    merges = source["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": list(tokens.values()),
        "tokenizer.ggml.token_type": [3 if index in control else 1 for index in tokens],
        "tokenizer.ggml.merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in merges],
    }


def write_gguf(
    path: Path,
    config: dict[str, Any],
    tensors: Tensors,
    kinds: dict[str, Type] | Type = Type.F32,
    *,
    alignment: int | None = None,
    parts: int = 1,
) -> dict[str, NDArray[np.float32]]:
    """A Llama; returns what its matrices say, by Hugging Face's names, as the package's own decoder has it.

    ``kinds``: of matrices, by a part of Hugging Face's name or for all; F32 where none fits, as for norms.
    ``parts``: files, of which the first is called PATH-00001-of-0000N.
    """
    writer = gguf.GGUFWriter(str(path), "llama", split_max_tensors=-(-len(tensors) // parts) if parts > 1 else 0)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    add_settings(writer, config)
    add_bytes_tokenizer(writer, config)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    said = {}
    for name, value in tensors.items():
        wide = value.astype(np.float32)
        if wide.ndim == 1:
            writer.add_tensor(own_name(name), wide)
            said[name] = wide
            continue
        kind = kinds if isinstance(kinds, Type) else next((k for part, k in kinds.items() if part in name), Type.F32)
        raw, said[name] = encoded(wide, kind)
        count = next((count for part, count in heads.items() if part in name), None)
        writer.add_tensor(own_name(name), raw if count is None else paired(raw, count), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return said


def encoded(weight_NK: NDArray[np.float32], kind: Type) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """The matrix in a type of GGUF, and what that says; types that the package cannot write become random blocks."""
    if kind is Type.F32:
        return weight_NK, weight_NK
    try:
        raw = gguf.quants.quantize(weight_NK, kind)
    except NotImplementedError:
        raw = random_blocks(weight_NK, kind)
    return raw, np.asarray(gguf.quants.dequantize(raw, kind), np.float32)


_SCALES = {
    Type.Q2_K: ((80, 3.0), (82, 2.0)),
    Type.Q4_K: ((0, 15.0), (2, 7.0)),
    Type.Q5_K: ((0, 31.0), (2, 7.0)),
    Type.Q6_K: ((208, 32.0),),
}
"""Where a block keeps its fp16 numbers, and by what a weight's size is divided to find one."""


def random_blocks(weight_NK: NDArray[np.float32], kind: Type) -> NDArray[np.uint8]:
    """Blocks of the right shape whose weights have about the size of these ones; every code and scale occurs."""
    columns, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(weight_NK.size)
    rows, k = weight_NK.shape
    raw = rng.integers(0, 256, (rows, k // columns, nbytes), dtype=np.uint8)
    for offset, divisor in _SCALES[kind]:
        steps = 32.0 if kind is not Type.Q6_K else 64.0
        size = float(np.abs(weight_NK).mean()) / divisor / steps
        own = (size * rng.uniform(0.5, 1.5, (rows, k // columns, 1))).astype(np.float16)
        raw[:, :, offset : offset + 2] = own.view(np.uint8)
    return raw.reshape(rows, -1)
