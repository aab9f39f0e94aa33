"""Random tiny models that only read, written as Hugging Face folders without transformers or torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from penstock.weights.config_json import ConfigFields
from penstock.weights.families.registry import checkpoint_format
from penstock.weights.model_files import model_files
from penstock.weights.pooling_config import with_pooler
from tiny_models import Tensors, write_weights

WORDS = ["the", "a", "fox", "dog", "cat", "was", "is", "in", "forest", "lost", "old", "quick", "lazy", "moon", "river"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def bert_config(**changes: Any) -> dict[str, Any]:
    """A ``config.json`` of an encoder with 2 layers; ``changes`` replace fields, None removes one."""
    config: dict[str, Any] = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 64,
        "type_vocab_size": 2,
        "pad_token_id": 0,
    }
    config.update(changes)
    return {name: value for name, value in config.items() if value is not None}


def word_pieces() -> Tokenizer:
    """Words and letters, with BERT's tokens around a text and between two."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [*SPECIAL, *WORDS, *(c for c in letters if c not in WORDS), *(f"##{c}" for c in letters)]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def write_modules(folder: Path, pooling: str = "mean_tokens", *, normalise: bool = True, **sentences: Any) -> None:
    """What sentence-transformers puts beside a model."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalise else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": paths[i], "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{mode}": mode == pooling for mode in ("cls_token", "mean_tokens", "lasttoken")}
    (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 64} | modes))
    (folder / "sentence_bert_config.json").write_text(json.dumps(sentences))


def write_reader(folder: Path, config: dict[str, Any], *, seed: int = 0) -> Path:
    """A folder that can be served; ``write_modules`` before it, where there are to be some."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    word_pieces().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    (architecture,) = config["architectures"]
    family, fields = checkpoint_format(architecture, "config.json"), ConfigFields(config, "config.json")
    spec = with_pooler(family.parse(fields), architecture, fields, model_files(folder))
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}
    for name, shape in family.layout(spec).shapes.items():
        noise = rng.standard_normal(shape)
        tensors[name] = (noise * 2 / np.sqrt(shape[-1]) if len(shape) > 1 else 0.2 * noise).astype(np.float32)
        if name.endswith(("LayerNorm.weight", "norm.weight")):
            tensors[name] += 1
    write_weights(folder, tensors)
    return folder
