"""Tensors of a Hugging Face checkpoint that a GGUF file has in another form, made of those that it has.

- Gemma's norms: the file has what is multiplied, transformers that less one.
- gpt-oss's experts: the file has gate and up in a stack each, transformers one stack, inputs first, in which their
  columns alternate.
- DeepSeek's expansion of latent vectors: newer files have its keys, turned round head by head, and its values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from penstock.errors import ModelError
from penstock.kernels.quantization import QuantizedMatrix, QuantRows, dequantized
from penstock.weights.computed_tensor import ComputedTensor
from penstock.weights.gguf.blocks import GGUF_QUANTS, GgufQuant
from penstock.weights.gguf.tensors import GgufTensorNames, hugging_face_name
from penstock.weights.quantization.base import QuantizedTensor
from penstock.weights.safetensors_header import TensorInfo

_NUMBERS: Mapping[str, tuple[str, np.dtype[Any]]] = {
    "BF16": ("bf16", np.dtype(ml_dtypes.bfloat16)),
    "F16": ("fp16", np.dtype(np.float16)),
    "F32": ("fp32", np.dtype(np.float32)),
}


class GgufTensors(Protocol):
    """The stored tensors of all files of a model."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]: ...
    def error(self, name: str, reason: str) -> ModelError: ...
    def rows(self, name: str) -> NDArray[np.uint8]:
        """[rows of all matrices of a stack, bytes]."""
        ...


@dataclass(slots=True)
class AssembledTensors:
    """Tensors by Hugging Face's names: ``coded`` are computed from codes, ``computed`` are held in the compute type."""

    coded: dict[str, QuantizedTensor] = field(default_factory=dict)
    computed: dict[str, ComputedTensor] = field(default_factory=dict)


def assembled_tensors(stored: GgufTensors, architecture: str, names: GgufTensorNames) -> AssembledTensors:
    """What can be made of the stored tensors; nothing of them is read yet.  Raises ModelError for shapes that
    contradict each other."""
    made = AssembledTensors()
    if names.norms_plus_one:
        for name in stored.infos:
            if name.endswith("norm.weight"):
                made.computed[hugging_face_name(name, names)] = _less_one(stored, name)
    if architecture == "gpt-oss":
        _add_stacks(stored, made)
    if architecture == "deepseek2":
        for name in stored.infos:
            if name.endswith(".attn_k_b.weight"):
                target = hugging_face_name(name.replace("attn_k_b", "attn_kv_b"), names)
                made.computed[target] = _expansion(stored, name, name.replace("attn_k_b", "attn_v_b"))
    return made


def _less_one(stored: GgufTensors, name: str) -> ComputedTensor:
    info = stored.infos[name]
    if info.dtype != "F32":
        raise stored.error(name, f"has type {info.dtype}; norms of this architecture must be F32")

    def read(_: int) -> NDArray[np.float32]:
        return stored.rows(name).reshape(-1).view(np.float32).reshape(info.shape) - np.float32(1)

    return ComputedTensor(info.shape, "fp32", (name,), False, read)


def _add_stacks(stored: GgufTensors, made: AssembledTensors) -> None:
    for gate in stored.infos:
        if not gate.endswith(".ffn_gate_exps.weight"):
            continue
        prefix = f"model.layers.{gate.split('.')[1]}.mlp.experts."
        up, down = gate.replace("gate", "up"), gate.replace("gate", "down")
        _add_stack(stored, made, f"{prefix}gate_up_proj", (gate, up))
        _add_stack(stored, made, f"{prefix}down_proj", (down,))
        biases = [name.replace(".weight", ".bias") for name in (gate, up, down)]
        made.computed[f"{prefix}gate_up_proj_bias"] = _biases(stored, biases[:2])
        made.computed[f"{prefix}down_proj_bias"] = _biases(stored, biases[2:])


def _add_stack(stored: GgufTensors, made: AssembledTensors, target: str, names: tuple[str, ...]) -> None:
    """A stack with inputs first, of which one, or two whose rows alternate, are stored with outputs first."""
    infos = [_found(stored, name) for name in names]
    shape = infos[0].shape
    if len(shape) != 3 or any(info.shape != shape for info in infos):
        raise stored.error(names[0], f"has shape {list(shape)}; stacks of experts must be alike and have three axes")
    experts, rows, columns = shape
    wanted = (experts, columns, rows * len(names))
    kind = GGUF_QUANTS.get(infos[0].dtype)
    same = len({info.dtype for info in infos}) == 1

    def of_expert(index: int, first: int, stop: int) -> list[NDArray[np.uint8]]:
        return [stored.rows(name)[index * rows + first : index * rows + stop] for name in names]

    def matrix(index: int) -> QuantizedMatrix:
        assert kind is not None

        def read(first: int, stop: int) -> QuantRows:
            low = first // len(names)
            raw = _alternating(of_expert(index, low, -(-stop // len(names))))
            return kind.rows(raw[first - low * len(names) : stop - low * len(names)])

        return QuantizedMatrix(wanted[2], columns, kind.format, read)

    if same and kind is not None:
        made.coded[target] = QuantizedTensor(wanted, names, matrix, transposed=True)
        return

    def values(index: int) -> NDArray[Any]:
        parts = [_values(raw, info, stored) for raw, info in zip(of_expert(index, 0, rows), infos, strict=True)]
        if not same:
            parts = [part.astype(np.float32) for part in parts]
        return _alternating(parts).T

    quantized = any(info.dtype in GGUF_QUANTS for info in infos)
    dtype = _short(infos[0], stored) if same else "bf16" if quantized else "fp32"
    made.computed[target] = ComputedTensor(wanted, dtype, names, quantized, values)


def _biases(stored: GgufTensors, names: list[str]) -> ComputedTensor:
    infos = [_found(stored, name) for name in names]
    shape = infos[0].shape
    if len(shape) != 2 or any((info.shape, info.dtype) != (shape, "F32") for info in infos):
        raise stored.error(names[0], "biases of experts must be F32, in tensors of one shape with two axes")

    def read(_: int) -> NDArray[np.float32]:
        parts = [stored.rows(name).reshape(-1).view(np.float32).reshape(shape).T for name in names]
        return _alternating(parts).T

    return ComputedTensor((shape[0], shape[1] * len(names)), "fp32", tuple(names), False, read)


def _expansion(stored: GgufTensors, keys: str, values: str) -> ComputedTensor:
    """[heads (key columns + value columns), rank] of keys [heads, rank, columns] and values [heads, columns, rank]."""
    key, value = _found(stored, keys), _found(stored, values)
    if len(key.shape) != 3 or len(value.shape) != 3 or (key.shape[0], key.shape[1]) != (value.shape[0], value.shape[2]):
        raise stored.error(keys, f"has shape {list(key.shape)}, which does not fit {values!r} of {list(value.shape)}")
    heads, rank, columns = key.shape
    quantized = key.dtype in GGUF_QUANTS or value.dtype in GGUF_QUANTS
    same = key.dtype == value.dtype

    def read(_: int) -> NDArray[Any]:
        of_keys = _values(stored.rows(keys), key, stored).reshape(heads, rank, columns).swapaxes(1, 2)
        of_values = _values(stored.rows(values), value, stored).reshape(value.shape)
        both = [part if same else part.astype(np.float32) for part in (of_keys, of_values)]
        return np.concatenate(both, axis=1).reshape(-1, rank)

    dtype = "bf16" if quantized else _short(key, stored) if same else "fp32"
    return ComputedTensor((heads * (columns + value.shape[1]), rank), dtype, (keys, values), quantized, read)


def _alternating(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """The first row of each, then the second of each, and so on."""
    if len(parts) == 1:
        return parts[0]
    both: NDArray[Any] = np.stack(parts, axis=1)
    return both.reshape(-1, both.shape[2])


def _values(raw_NB: NDArray[np.uint8], info: TensorInfo, stored: GgufTensors) -> NDArray[Any]:
    """Rows as numbers: fp32 for codes, else as they are stored."""
    kind: GgufQuant | None = GGUF_QUANTS.get(info.dtype)
    if kind is not None:
        return dequantized(kind.rows(raw_NB), kind.format)
    _short(info, stored)
    return np.ascontiguousarray(raw_NB).view(_NUMBERS[info.dtype][1])


def _short(info: TensorInfo, stored: GgufTensors) -> str:
    if info.dtype in GGUF_QUANTS:
        return "bf16"
    if info.dtype not in _NUMBERS:
        raise stored.error(info.name, f"has type {info.dtype}; F32, F16, BF16 or a quantized type can be served")
    return _NUMBERS[info.dtype][0]


def _found(stored: GgufTensors, name: str) -> TensorInfo:
    info = stored.infos.get(name)
    if info is None:
        raise stored.error(name, "is missing")
    return info
