"""From an architecture's name to the code that computes it: built-in, or an installed package's.

The other half of a family, how its checkpoints are read, is in ``penstock.weights.family``; an entry point of the
group ``penstock.models`` offers both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from penstock.engine.models import decoder
from penstock.engine.models.port import Model
from penstock.errors import ModelError
from penstock.kernels.ops import Ops
from penstock.weights.family import DECODERS, installed_plugin
from penstock.weights.load import LoadedModel
from penstock.weights.spec import ModelSpec

Build = Callable[[ModelSpec, Mapping[str, Any], Ops, int], Model]
"""(specification, packed weights by name, backend, positions wanted) to a model."""

BUILT_IN: Mapping[str, Build] = MappingProxyType(dict.fromkeys(DECODERS, decoder.build))


def build_model(loaded: LoadedModel, ops: Ops, max_positions: int) -> Model:
    """The model over loaded weights.  Made once, before forking; ``ops`` is only asked for rotary tables and to put
    experts together.

    Raises ModelError if no family computes the architecture, or ``max_positions`` is more than the model has.
    """
    spec = loaded.spec
    if not 1 <= max_positions <= spec.max_positions:
        raise ModelError(f"the model has {spec.max_positions} positions, {max_positions} were asked for")
    build = BUILT_IN.get(spec.architecture)
    if build is None:
        plugin = installed_plugin(spec.architecture)
        if plugin is None:
            raise ModelError(f"no installed package computes the architecture {spec.architecture!r}")
        build = plugin.build
    return build(spec, loaded.weights, ops, max_positions)
