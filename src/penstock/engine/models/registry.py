"""From an architecture's name to the code that computes it: built-in, or an installed package's.

The other half of a family, how its checkpoints are read, is in ``penstock.weights.families.registry``; an entry point
of the group ``penstock.models`` offers both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from penstock.engine.models import decoder, encoder, whisper
from penstock.engine.models.interface import Model, PoolingModel
from penstock.errors import ModelError
from penstock.kernels.ops import Ops
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.families.registry import DECODERS, ENCODERS, TRANSCRIBERS, installed_plugin
from penstock.weights.load import LoadedModel

ModelBuilder = Callable[[ModelSpec, Mapping[str, Any], Ops, int], Model]
"""(specification, packed weights by name, backend, positions wanted) to a model."""

BUILT_IN: Mapping[str, ModelBuilder] = MappingProxyType(
    {**dict.fromkeys(DECODERS, decoder.build_decoder), **dict.fromkeys(TRANSCRIBERS, whisper.build_whisper)}
)


def build_model(loaded: LoadedModel, ops: Ops, max_positions: int) -> Model:
    """The model over loaded weights.  Made once, before forking; ``ops`` is only asked for rotary tables and to put
    experts together.

    Raises ModelError if no family computes the architecture, or ``max_positions`` is more than the model has.
    """
    spec = loaded.spec
    _check_positions(spec, max_positions)
    build = BUILT_IN.get(spec.architecture)
    if build is None:
        plugin = installed_plugin(spec.architecture)
        if plugin is None:
            raise ModelError(f"no installed package computes the architecture {spec.architecture!r}")
        build = plugin.build
    return build(spec, loaded.weights, ops, max_positions)


def build_pooling_model(loaded: LoadedModel, ops: Ops, max_positions: int) -> PoolingModel:
    """The same for a model that only reads: its specification has a pooler."""
    spec = loaded.spec
    if spec.pooler is None:
        raise ModelError(f"{spec.architecture}: writes text, and gives no vectors")
    if spec.architecture not in ENCODERS:
        return decoder.PoolingDecoder(build_model(loaded, ops, max_positions), spec.pooler, loaded.weights.get("score"))
    _check_positions(spec, max_positions)
    return encoder.build_encoder(spec, loaded.weights)


def _check_positions(spec: ModelSpec, wanted: int) -> None:
    if not 1 <= wanted <= spec.max_positions:
        raise ModelError(f"the model has {spec.max_positions} positions, {wanted} were asked for")
