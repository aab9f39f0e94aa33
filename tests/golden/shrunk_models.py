"""Published models, made small: what is changed in their ``config.json``, of any model and of kinds of models."""

from __future__ import annotations

import json
from copy import deepcopy
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
    "pad_token_id": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A published model, made small."""

    models: str  # as people call what this entry stands for
    config: str  # file of the real config.json, without suffix
    parameters: int  # of the real model, as its makers count
    features: str  # what this entry proves
    small: dict[str, Any] = field(default_factory=dict)  # further changes; None removes a field
    sizes: dict[str, Any] = field(default_factory=lambda: SMALL)
    inside: str | None = None  # the section of config.json that all of these are in
    around: dict[str, Any] = field(default_factory=lambda: NO_IMAGES)  # what is beside that section
    misnamed: tuple[str, str] | None = None  # transformers writes the first where published files have the second

    @property
    def name(self) -> str:
        """Of the tests."""
        return f"{self.config}: {self.features}"

    @property
    def architecture(self) -> str:
        """As ``config.json`` names it."""
        (name,) = self.real()["architectures"]
        return str(name)

    def real(self) -> dict[str, Any]:
        """The published ``config.json``."""
        values: dict[str, Any] = json.loads((CONFIGS / f"{self.config}.json").read_text())
        return values

    def shrunk(self) -> dict[str, Any]:
        """The same with small sizes."""
        values = self.real()
        if self.inside is None:
            return self._changed(values)
        return values | {self.inside: self._changed(values[self.inside])} | self.around

    def _changed(self, values: dict[str, Any]) -> dict[str, Any]:
        """With other sizes, and without what they say None of.  A copy: transformers changes what it is given."""
        changes = deepcopy(self.sizes | self.small)
        return {name: value for name, value in (values | changes).items() if value is not None or name not in changes}


NO_IMAGES = {
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 28,
        "patch_size": 14,
    }
}
"""The smallest reader of images; only text is served."""


NO_KIMI_IMAGES = {
    "vision_config": {
        "model_type": "kimi_k25_vision",
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "pos_emb_height": 4,
        "pos_emb_width": 4,
    },
    "projection_hidden_size": 32,
}


LLAMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "intermediate_size_mlp": 80,
    "attention_chunk_size": 48,
    "floor_scale": 32,
    "attn_scale": 0.7,
    "num_local_experts": 8,
}

GPT2_SMALL = {
    "vocab_size": 113,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 3,
    "n_positions": 256,
    "n_ctx": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""Its fields have other names."""


LONG = {
    "original_max_position_embeddings": 64,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0],
    },
}
"""Divisors for heads of 16 columns."""


AXES = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "max_window_layers": 3}
VISION: dict[str, Any] = {
    "depth": 2,
    "num_heads": 2,
    "in_chans": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
"""Small readers of images.  Texts without any are tested here, images in ``test_vision.py``."""


MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 18,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "max_position_embeddings": 512,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 128,
    },
}
"""Latent attention, made small."""
