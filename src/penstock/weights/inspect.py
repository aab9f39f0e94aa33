"""Whether a model can be served, and as what, from ``config.json`` and the headers of its files.  Weights are not read.

``inspect_model`` is for serving: every refusal gives the reason and what would work.  ``read_outline`` needs
``config.json`` only (or a GGUF file's header), so it works where weights are missing or in a form that cannot be loaded
here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from penstock.errors import ConfigError, ModelError
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.architecture.tensor_layout import WeightLayout
from penstock.weights.checkpoint_reader import Checkpoint
from penstock.weights.config_json import ConfigFields, read_json_object, sampling_defaults
from penstock.weights.families.registry import architecture_of, checkpoint_format, known_architectures
from penstock.weights.gguf.header import is_gguf
from penstock.weights.model_files import CONFIG, GENERATION_CONFIG, TOKENIZER, ModelFiles, load_json, model_files
from penstock.weights.pooling_config import with_pooler
from penstock.weights.quantization.config import parse_quantization
from penstock.weights.quantization.fp8_mxfp4 import EightBitScheme

ComputeDtype = Literal["bf16", "fp32"]

VOCABULARIES = (
    *("tokenizer.json", "tekken.json", "tiktoken.model", "*.tiktoken", "tokenizer.model", "spiece.model"),
    *("vocab.json", "encoder.json"),
)
"""Files of which one must be there; the intake reads them before any process starts."""


def inspect_model(path: str | Path) -> ModelSpec:
    """The specification of the model in a Hugging Face folder or a GGUF file.

    Raises ModelError if it cannot be served: unknown architecture, a variant that is not computed here, missing or
    damaged files, tensors of other names, shapes or types than the configuration promises.
    """
    folder = Path(path)
    files = model_files(folder)
    fields = _fields(files, CONFIG)
    _check_files(folder, files)
    if fields is None:
        raise ModelError(f"{folder}: has no {CONFIG}")
    architecture = architecture_of(fields)
    family, quantization = checkpoint_format(architecture, fields.where), parse_quantization(fields)
    spec = with_pooler(family.parse(fields), architecture, fields, files)
    with Checkpoint(folder, quantization) as checkpoint:
        layout = family.layout(spec).found_in(checkpoint)
        layout.check(checkpoint)
        dtype = layout.widest_dtype(checkpoint)
    generation = _fields(files, GENERATION_CONFIG)
    return msgspec.structs.replace(
        spec,
        checkpoint_dtype=dtype,
        parameters=layout.parameters,
        eos_ids=_end_ids(spec, fields, generation),
        bos_id=next(iter(fields.token_ids("bos_token_id")), None),
        sampling=sampling_defaults({} if generation is None else generation.values),
        quantization=quantization,
    )


def spec_for_length(spec: ModelSpec, max_model_len: int) -> ModelSpec:
    """The specification of the model for contexts of at most ``max_model_len`` tokens.

    Most are the same for any length; some stretch their positions for longer ones, and have another fingerprint then.
    """
    return checkpoint_format(spec.architecture, spec.architecture).at_length(spec, max_model_len)


def compute_dtype_for(spec: ModelSpec, wanted: str) -> ComputeDtype:
    """The compute type for ``--dtype``: "auto" is bf16 for bf16 checkpoints and fp32 for all others.

    Raises ConfigError for a type that there is not.
    """
    match wanted:
        case "auto":
            return "bf16" if spec.checkpoint_dtype == "bf16" else "fp32"
        case "bf16":
            return "bf16"
        case "fp32":
            return "fp32"
        case _:
            raise ConfigError(f"dtype {wanted!r} is not known; expected auto, bf16 or fp32")


def check_integer_weights(path: Path, spec: ModelSpec, flag: str) -> None:
    """Raises ConfigError, which names the flag, unless the model has quantized matrices and all are integers."""
    schemes = [] if spec.quantization is None else [group.scheme for group in spec.quantization.groups]
    if any(isinstance(scheme, EightBitScheme) and scheme.kind == "e4m3" for scheme in schemes):
        raise ConfigError(f"{flag}: the weights of {path} are floats of 8 bits; it takes integers: leave it out")
    if not has_quantized_weights(path, spec):
        raise ConfigError(f"{flag}: {path} has no quantized weights, and only their inputs are quantized; leave it out")


def has_quantized_weights(path: Path, spec: ModelSpec) -> bool:
    """Whether some matrices are stored as codes.  A GGUF file has no configuration that says so."""
    if spec.quantization is not None:
        return bool(spec.quantization.groups)
    with Checkpoint(path) as checkpoint:
        return any(checkpoint.quantized_tensor(name) is not None for name in checkpoint.names)


def has_compressed_weights(path: Path) -> bool:
    """Whether some matrices are stored as ``penstock compress`` writes them.  Raises ModelError."""
    with Checkpoint(path) as checkpoint:
        return any(file.is_compressed for file in checkpoint.files)


def _check_files(folder: Path, files: ModelFiles) -> None:
    if is_gguf(folder):
        files.read(TOKENIZER)  # refused here if it is not known
        return
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder")
    if not (folder / CONFIG).exists():
        raise ModelError(f"{folder}: has no {CONFIG}; expected a Hugging Face model folder{_models_in(folder)}")
    if not any(True for pattern in VOCABULARIES for _ in folder.glob(pattern)):
        raise ModelError(
            f"{folder}: has no vocabulary; copy it from the model's release: one of {', '.join(VOCABULARIES)}"
        )


def _models_in(folder: Path) -> str:
    """Models that lie in it, for the error of somebody who named the folder around them."""
    inside = sorted(
        [*folder.glob("*.gguf"), *(path.parent for path in folder.glob(f"*/{CONFIG}"))],
        key=lambda path: path.name,
    )
    return f"; did you mean {inside[0]}?" if inside else ""


def _fields(files: ModelFiles, name: str) -> ConfigFields | None:
    values = load_json(files, name)
    return None if values is None else ConfigFields(values, files.path_of(name))


def _end_ids(spec: ModelSpec, config: ConfigFields, generation: ConfigFields | None) -> tuple[int, ...]:
    """``generation_config.json`` wins: chat models name their end-of-turn token there only."""
    source = generation if generation is not None and generation.has("eos_token_id") else config
    ids = source.token_ids("eos_token_id")
    for token in ids:
        if token >= spec.vocab:
            raise source.error(f"eos_token_id {token} is outside the vocabulary of {spec.vocab}")
    return ids


CONFIG_FILE = "config.json"
STORAGE = ("quantization_config", "compression_config", "auto_map")
"""Fields about how weights are stored, or which code made them: an outline does not depend on them."""


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """A model without its weights."""

    name: str
    spec: ModelSpec
    layout: WeightLayout
    config: ConfigFields  # of the part that writes text, with how its weights are stored
    coded_bits: Mapping[str, float] = field(default_factory=dict)  # of a number, by tensor of a GGUF file


def read_outline(path: Path) -> ModelOutline:
    """The outline of a folder, a ``config.json`` or a GGUF file.

    Raises ModelError if no family knows the architecture.
    """
    if is_gguf(path):
        return _gguf_outline(path)
    file = path / CONFIG_FILE if path.is_dir() else path
    if not file.is_file():
        raise ModelError(f"{path}: has no {CONFIG_FILE}")
    config = _text_part(ConfigFields(read_json_object(file), str(file)))
    architecture = architecture_of(config)
    family = checkpoint_format(architecture, config.where)
    plain = ConfigFields({k: v for k, v in config.values.items() if k not in STORAGE}, config.where)
    spec = with_pooler(family.parse(plain), architecture, plain, _beside(file))
    layout = family.layout(spec)
    name = path.resolve().name if path.is_dir() else path.name
    return ModelOutline(name, msgspec.structs.replace(spec, parameters=layout.parameters), layout, config)


def _gguf_outline(path: Path) -> ModelOutline:
    config = _fields(model_files(path), CONFIG)
    assert config is not None
    architecture = architecture_of(config)
    family = checkpoint_format(architecture, config.where)
    spec = family.parse(config)
    with Checkpoint(path) as checkpoint:
        layout = family.layout(spec).found_in(checkpoint)
        coded = {name: _coded_bits(checkpoint, name) for name in checkpoint.names if checkpoint.quantized_tensor(name)}
    return ModelOutline(path.name, msgspec.structs.replace(spec, parameters=layout.parameters), layout, config, coded)


def _coded_bits(checkpoint: Checkpoint, name: str) -> float:
    info = checkpoint.info(name)
    return 8 * info.nbytes / math.prod(info.shape)


def _beside(config: Path) -> ModelFiles | None:
    return model_files(config.parent) if config.name == CONFIG_FILE else None


def _text_part(config: ConfigFields) -> ConfigFields:
    """The language model of a model that also sees or hears, if only that one is known here."""
    inner = config.section("text_config")
    if inner is None or architecture_of(config) in known_architectures() or not inner.has("architectures"):
        return config
    storage = {name: config.values[name] for name in STORAGE if config.has(name)}
    return ConfigFields({**storage, **inner.values}, inner.where)
