"""``--sparse-attention``: applies its settings to the model, whose numerics class changes with them.

Knows nothing about how blocks are chosen.
"""

from __future__ import annotations

import msgspec

from penstock.config.schema import EngineSettings
from penstock.errors import ConfigError
from penstock.kernels.operands import BLOCK_KEYS, Sparse
from penstock.kv_spec import FULL_ATTENTION
from penstock.types import Task
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.families.registry import DECODERS

_DETAILS = ("sparse_sinks", "sparse_window", "sparse_blocks", "sparse_from")


def with_sparse_attention(spec: ModelSpec, config: EngineSettings) -> ModelSpec:
    """The model with sparse attention as the settings say.  Raises ConfigError if the model cannot have it."""
    if not config.sparse_attention:
        defaults = EngineSettings()
        for name in _DETAILS:
            if getattr(config, name) != getattr(defaults, name):
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag}: only used by --sparse-attention; add that, or leave {flag} out")
        return spec
    if spec.task is not Task.GENERATE:
        raise ConfigError(f"--sparse-attention: {spec.architecture} is not a generative language model")
    if spec.architecture not in DECODERS:
        raise ConfigError(
            f"--sparse-attention: {spec.architecture} is computed by its own code, which has full attention only"
        )
    if FULL_ATTENTION not in spec.kv.reaches:
        raise ConfigError(f"--sparse-attention: every layer of {spec.architecture} has a window; nothing can be saved")
    return msgspec.structs.replace(spec, sparse=sparse_settings(config))


def sparse_settings(config: EngineSettings) -> Sparse:
    """The settings in whole blocks."""
    return Sparse(
        sinks=-(-config.sparse_sinks // BLOCK_KEYS),
        window=-(-config.sparse_window // BLOCK_KEYS),
        chosen=config.sparse_blocks,
        start=config.sparse_from,
    )


def sparse_numerics(spec: ModelSpec, numerics: str) -> str:
    """The numerics class of the model's output: the backend's, with the sparsity."""
    return numerics if spec.sparse is None else f"{numerics}-{spec.sparse.name}"


def sparse_line(sparse: Sparse) -> str:
    """One line for the start-up log."""
    return (
        f"sparse attention: from position {sparse.start} on a token attends to at most {sparse.keys} earlier tokens; "
        "output for long prompts differs from full attention (docs/sparse-attention.md)"
    )
