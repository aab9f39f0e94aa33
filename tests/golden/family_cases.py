"""What can be served, as data: one entry a family and feature, tested by ``test_families.py``, printed into
docs/models.md by ``family_table.py``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parents[1] / "fixtures/configs"

SMALL = {
    "vocab_size": 113,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A published model, made small."""

    models: str  # as people call what this entry stands for
    config: str  # file of the real config.json, without suffix
    parameters: int  # of the real model, as its makers count
    features: str  # what this entry proves
    small: dict[str, Any] = field(default_factory=dict)  # changes beside ``SMALL``; None removes a field

    def real(self) -> dict[str, Any]:
        """The published ``config.json``."""
        values: dict[str, Any] = json.loads((CONFIGS / f"{self.config}.json").read_text())
        return values

    def shrunk(self) -> dict[str, Any]:
        """The same with small sizes."""
        changed = self.real() | SMALL | self.small
        return {name: value for name, value in changed.items() if value is not None}


CASES = (
    Case(
        models="Llama 2",
        config="llama_2_7b",
        parameters=6_738_415_616,
        features="a key-value head each",
        small={"num_key_value_heads": 4},
    ),
    Case(
        models="Llama 3, 3.1, 3.2, 3.3",
        config="llama_3_2_1b",
        parameters=1_235_814_400,
        features="grouped queries, stretched rotary positions (llama3), tied embeddings",
        small={"head_dim": 16},
    ),
)
