"""A model's outline: what it is and which tensors it has, from ``config.json`` alone, also where weights are missing or
in a form that cannot be loaded here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.errors import ModelError
from penstock.weights.family import checkpoint_format, installed_names, named_architecture
from penstock.weights.fields import Fields
from penstock.weights.layout import WeightLayout
from penstock.weights.pooling import read_with
from penstock.weights.small_files import SmallFiles, small_files
from penstock.weights.spec import ModelSpec
from penstock.weights.strict_json import read_object

CONFIG = "config.json"
STORAGE = ("quantization_config", "compression_config", "auto_map")
"""Fields about how weights are stored, or which code made them: an outline does not depend on them."""


@dataclass(frozen=True, slots=True)
class Outline:
    """A model without its weights."""

    name: str
    spec: ModelSpec
    layout: WeightLayout
    config: Fields  # of the part that writes text, with how its weights are stored


def read_outline(path: Path) -> Outline:
    """Of a folder or of a ``config.json``.  Raises ModelError if no family knows the architecture."""
    file = path / CONFIG if path.is_dir() else path
    if not file.is_file():
        raise ModelError(f"{path}: has no {CONFIG}")
    config = _text_part(Fields(read_object(file), str(file)))
    architecture = named_architecture(config)
    family = checkpoint_format(architecture, config.where)
    plain = Fields({k: v for k, v in config.values.items() if k not in STORAGE}, config.where)
    spec = read_with(family.parse(plain), architecture, plain, _beside(file))
    layout = family.layout(spec)
    name = path.resolve().name if path.is_dir() else path.name
    return Outline(name, msgspec.structs.replace(spec, parameters=layout.parameters), layout, config)


def _beside(config: Path) -> SmallFiles | None:
    return small_files(config.parent) if config.name == CONFIG else None


def _text_part(config: Fields) -> Fields:
    """The language model of a model that also sees or hears, if only that one is known here."""
    inner = config.section("text_config")
    if inner is None or named_architecture(config) in installed_names() or not inner.has("architectures"):
        return config
    storage = {name: config.values[name] for name in STORAGE if config.has(name)}
    return Fields({**storage, **inner.values}, inner.where)
