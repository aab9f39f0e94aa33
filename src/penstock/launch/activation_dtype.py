"""``--activation-dtype``: refuses models whose products cannot have inputs of 8 bits, before anything is loaded.

Knows nothing about how inputs are quantized.
"""

from __future__ import annotations

from pathlib import Path

from penstock.config.schema import EngineSettings
from penstock.errors import ConfigError
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.checkpoint_reader import Checkpoint
from penstock.weights.quantization.fp8_mxfp4 import EightBitScheme


def check_activation_dtype(config: EngineSettings, path: Path, spec: ModelSpec) -> None:
    """Raises ConfigError unless all quantized matrices of the model are integers, and there are some."""
    if config.activation_dtype == "auto":
        return
    flag = f"--activation-dtype {config.activation_dtype}"
    schemes = [] if spec.quantization is None else [group.scheme for group in spec.quantization.groups]
    if any(isinstance(scheme, EightBitScheme) and scheme.kind == "e4m3" for scheme in schemes):
        raise ConfigError(f"{flag}: the weights of {path} are floats of 8 bits; it takes integers: leave it out")
    if not schemes and not _has_codes(path):
        raise ConfigError(f"{flag}: {path} has no quantized weights, and only their inputs are quantized; leave it out")


def _has_codes(path: Path) -> bool:
    """Whether a file without a configuration of its codes, as GGUF, has quantized matrices."""
    with Checkpoint(path) as checkpoint:
        return any(checkpoint.quantized_tensor(name) is not None for name in checkpoint.names)
