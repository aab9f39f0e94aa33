"""Random LoRA adapters in PEFT's folders, written without peft or torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from penstock.weights.inspect import inspect_model
from penstock.weights.lora import LoraTarget, lora_targets
from tiny_models import DTYPES, Tensors, safetensors_bytes

DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapter_tensors(
    targets: dict[str, LoraTarget], modules: Iterable[str] = DENSE, *, rank: int = 4, seed: int = 0, dtype: str = "fp32"
) -> Tensors:
    """Matrices under which an adapter changes every answer."""
    rng = np.random.default_rng(seed)
    wanted = tuple(modules)
    tensors: Tensors = {}
    for module, target in targets.items():
        if not target.refused and module.rpartition(".")[2] in wanted:
            down = rng.standard_normal((rank, target.k)) / np.sqrt(target.k)
            up = rng.standard_normal((target.n, rank)) / np.sqrt(rank)
            tensors[f"base_model.model.{module}.lora_A.weight"] = down.astype(DTYPES[dtype])
            tensors[f"base_model.model.{module}.lora_B.weight"] = up.astype(DTYPES[dtype])
    return tensors


def write_adapter(
    folder: Path, model: Path, modules: Iterable[str] = DENSE, *, rank: int = 4, seed: int = 0, **config: Any
) -> Path:
    """An adapter for the model in a folder; ``config``: fields of ``adapter_config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = tuple(modules)
    dtype = config.pop("dtype", "fp32")
    tensors = adapter_tensors(lora_targets(inspect_model(model)), wanted, rank=rank, seed=seed, dtype=dtype)
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(wanted)} | config
    (folder / "adapter_config.json").write_text(json.dumps(values))
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors))
    return folder
