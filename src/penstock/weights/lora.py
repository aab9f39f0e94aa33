"""LoRA adapters in PEFT's folders (``adapter_config.json``, ``adapter_model.safetensors``): read strictly, checked
against the model that they are for.

Which tensor belongs to which weight follows from the model's layout, so every family is served by the same code.  What
is not computed exactly as PEFT would is refused by name.  Knows nothing of requests.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from penstock.config.schema import NamedAdapter
from penstock.errors import ModelError
from penstock.kernels.lora import LowRank
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.architecture.tensor_layout import Matrix, WeightLayout
from penstock.weights.checkpoint_reader import NUMPY_DTYPES
from penstock.weights.config_json import ConfigFields, read_json_object
from penstock.weights.families.registry import checkpoint_format
from penstock.weights.safetensors_header import LENGTH_BYTES, TensorInfo, header_length, parse_safetensors_header

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
VERSION = 1
"""Part of every fingerprint: a change of what is computed of a file makes all of them new."""

_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_PATTERN_KEY = re.compile(r"\^?[A-Za-z0-9_.]+")
_EXPERTS = re.compile(r"\d+\.experts\.\d+\..*")
_REFUSED = MappingProxyType(
    {
        "use_dora": "DoRA changes the weights' lengths, which is not computed here",
        "modules_to_save": "whole modules in an adapter are not served; merge them into the model",
        "layer_replication": "repeated layers are another model",
        "lora_bias": "biases of adapters are not computed here",
        "trainable_token_indices": "embeddings of an adapter's own are not served",
        "target_parameters": "adapters of bare parameters (experts) are not computed here",
        "megatron_config": "adapters of Megatron layers are not read",
        "use_qalora": "QA-LoRA pools its inputs, which is not computed here",
        "alora_invocation_tokens": "activated LoRA begins in mid-prompt, which is not computed here",
        "arrow_config": "Arrow routes among adapters, which is not computed here",
        "use_bdlora": "block-diagonal adapters are not computed here",
    }
)
"""Fields of the configuration that must be absent, false or empty, and why."""


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """Where a module's product stands: rows ``[first, first + n)`` of a weight [.., k] of the model's layout."""

    weight: str
    first: int
    n: int
    k: int
    refused: str = ""  # why no adapter can be added to it


class LoraFileLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on an adapter's files."""

    max_rank: int
    max_bytes: int  # of its file of tensors


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter as read: what it adds to each of the model's weights, by name."""

    fingerprint: str  # of everything that the bits of its responses depend on, except the model
    rank: int  # the largest
    nbytes: int  # of its file of tensors
    parts: Mapping[str, tuple[LowRank, ...]]


def named_adapter(name: str, folder: Path, adapter: LoraAdapter) -> NamedAdapter:
    """The adapter's name and identity for a gateway."""
    return NamedAdapter(
        name=name,
        folder=str(folder),
        fingerprint=adapter.fingerprint,
        nbytes=adapter.nbytes,
        rank=adapter.rank,
    )


def lora_targets(spec: ModelSpec) -> dict[str, LoraTarget]:
    """The LoRA targets of a model.  Raises ModelError if its family is not known."""
    return layout_lora_targets(checkpoint_format(spec.architecture, spec.architecture).layout(spec))


def layout_lora_targets(layout: WeightLayout) -> dict[str, LoraTarget]:
    """Every matrix of a model by the name of its module (as transformers calls it), and if adapters may add to it."""
    found: dict[str, LoraTarget] = {}
    for names in (*layout.others, layout):
        for weight in names.weights:
            if not isinstance(weight, Matrix):
                continue
            first = 0
            for part in weight.parts:
                n, k = part.shape[-2:][::-1] if part.transposed else part.shape[-2:]
                whole = part.index is None and part.rows is None and part.groups is None
                module = part.tensor.removesuffix(".weight")
                found[module] = LoraTarget(weight.name, first, n, k, _refusal(weight.name, whole=whole))
                first += part.numbers // k
    return found


def _refusal(weight: str, *, whole: bool) -> str:
    if weight in ("embed", "positions", "head"):
        return "adapters of embeddings and of the head are not served"
    if _EXPERTS.fullmatch(weight):
        return "adapters of routed experts are not computed here"
    if not weight.partition(".")[0].isdigit():
        return "only layers of the decoder can have adapters here"
    return "" if whole else "its weight is taken apart here, so no adapter can be added to it"


def read_lora_adapter(folder: Path, targets: Mapping[str, LoraTarget], limits: LoraFileLimits) -> LoraAdapter:
    """The adapter in a folder.  Raises ModelError, naming file and field, for what is not sound or not served."""
    config = ConfigFields(read_json_object(folder / CONFIG), str(folder / CONFIG))
    scales = _Scales.of(config)
    raw = _read(folder, limits.max_bytes)
    where = str(folder / TENSORS)
    length = header_length(raw[:64], len(raw), where)
    tensors = parse_safetensors_header(raw[LENGTH_BYTES : LENGTH_BYTES + length], len(raw), where)
    parts: dict[str, list[LowRank]] = {}
    rank = 0
    for module, (down, up) in _pairs(tensors, where).items():
        target = _target(module, targets, where)
        own = _shapes(module, down, up, target, where)
        scale = scales.of_module(module, own)
        if own > limits.max_rank:
            raise ModelError(f"{where}: {module} has rank {own}, more than max_lora_rank = {limits.max_rank}")
        rank = max(rank, own)
        low = LowRank(_matrix(raw, down, where), _matrix(raw, up, where), target.first, scale)
        parts.setdefault(target.weight, []).append(low)
    if not parts:
        raise ModelError(f"{where}: has no tensors")
    hasher = blake3(msgspec.json.encode((VERSION, scales.canonical())))
    hasher.update(raw)
    return LoraAdapter(hasher.hexdigest(), rank, len(raw), {name: tuple(own) for name, own in parts.items()})


@dataclass(frozen=True, slots=True)
class _Scales:
    """alpha over rank, or over its root (arXiv:2312.03732), which patterns may change for some modules."""

    where: str
    rank: int
    alpha: float
    root: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    @classmethod
    def of(cls, config: ConfigFields) -> _Scales:
        kind = config.get("peft_type", str)
        if kind != "LORA":
            raise config.error(f"peft_type {kind!r} is not LORA")
        for name, reason in _REFUSED.items():
            if config.values.get(name):
                raise config.error(f"{name}: {reason}")
        if config.get("bias", str, "none") != "none":
            raise config.error(f"bias {config.values['bias']!r}: adapters that train biases are not served")
        return cls(
            config.where,
            config.positive_int("r"),
            config.positive_float("lora_alpha", 8.0),
            config.get("use_rslora", bool, default=False),
            {
                key: _pattern(config, "rank_pattern").positive_int(key)
                for key in _pattern(config, "rank_pattern").values
            },
            {
                key: _pattern(config, "alpha_pattern").positive_float(key)
                for key in _pattern(config, "alpha_pattern").values
            },
        )

    def of_module(self, module: str, rank: int) -> float:
        """The factor of the product.  Raises ModelError if the file has another rank than its configuration."""
        wanted = _matching(self.ranks, module, self.rank)
        if rank != wanted:
            raise ModelError(f"{self.where}: {module} has rank {rank} in its tensors, {wanted} by r and rank_pattern")
        alpha: float = _matching(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.root else rank)

    def canonical(self) -> tuple[object, ...]:
        """The part of the configuration that changes results."""
        return self.rank, self.alpha, self.root, sorted(self.ranks.items()), sorted(self.alphas.items())


def _pattern(config: ConfigFields, name: str) -> ConfigFields:
    section = config.section(name)
    if section is None:
        return ConfigFields({}, config.where)
    for key in section.values:
        if not _PATTERN_KEY.fullmatch(key):
            raise section.error(f"{key!r} is a regular expression; only names of modules are read")
    return section


def _matching(by_name: Mapping[str, Any], module: str, default: Any) -> Any:
    """PEFT's rule: the first key that is the module's name or the end of it, at a dot; after ^ the whole name."""
    for key, value in by_name.items():
        if module == key.removeprefix("^") or (not key.startswith("^") and module.endswith("." + key)):
            return value
    return default


def _read(folder: Path, max_bytes: int) -> bytes:
    """The whole file, at once: what is checked is what is computed with, whatever happens to the file."""
    path = folder / TENSORS
    if not path.exists() and (folder / PICKLED).exists():
        raise ModelError(f"{folder}: has {PICKLED} only, which is a program (pickle); save it as {TENSORS}")
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from error
    if len(raw) > max_bytes:
        raise ModelError(f"{path}: larger than lora_memory = {max_bytes} bytes")
    return raw


def _pairs(tensors: Mapping[str, TensorInfo], where: str) -> dict[str, tuple[TensorInfo, TensorInfo]]:
    sides: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        match = _TENSOR.fullmatch(name.removeprefix(_PREFIX))
        if match is None:
            raise ModelError(f"{where}: tensor {name!r} is not one of a LoRA adapter's ({_kind(name)})")
        sides.setdefault(match["module"], {})[match["side"]] = info
    for module, pair in sides.items():
        if len(pair) < 2:
            missing = "B" if "A" in pair else "A"
            raise ModelError(f"{where}: {module} has no lora_{missing}")
    return {module: (sides[module]["A"], sides[module]["B"]) for module in sorted(sides)}


def _kind(name: str) -> str:
    if "lora_embedding" in name:
        return "adapters of embeddings are not served"
    if "lora_magnitude_vector" in name:
        return "DoRA is not computed here"
    return "expected MODULE.lora_A.weight and MODULE.lora_B.weight"


def _target(module: str, targets: Mapping[str, LoraTarget], where: str) -> LoraTarget:
    target = targets.get(module)
    if target is None:
        raise ModelError(f"{where}: the model has no module {module!r} that adapters can add to")
    if target.refused:
        raise ModelError(f"{where}: {module}: {target.refused}")
    return target


def _shapes(module: str, down: TensorInfo, up: TensorInfo, target: LoraTarget, where: str) -> int:
    """The rank."""
    if len(down.shape) != 2 or len(up.shape) != 2 or not 1 <= down.shape[0] == up.shape[1]:
        raise ModelError(f"{where}: {module}: {list(down.shape)} and {list(up.shape)} are not two matrices of one rank")
    if down.shape[1] != target.k or up.shape[0] != target.n:
        raise ModelError(
            f"{where}: {module} is from {down.shape[1]} to {up.shape[0]} values, "
            f"in the model from {target.k} to {target.n}: the adapter was made for another one"
        )
    return down.shape[0]


def _matrix(raw: bytes, info: TensorInfo, where: str) -> NDArray[Any]:
    dtype = NUMPY_DTYPES.get(info.dtype)
    if dtype is None:
        raise ModelError(f"{where}: tensor {info.name!r} has type {info.dtype}; expected {', '.join(NUMPY_DTYPES)}")
    return np.frombuffer(raw[info.start : info.stop], dtype).reshape(info.shape)
