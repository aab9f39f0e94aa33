"""Embedding models and classifiers, as data: published configurations made small, and transformers' results."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from parity_oracle import Oracle, write_random_model
from shrunk_models import CONFIGS, SMALL
from transformers import AutoModel, AutoModelForSequenceClassification

from tiny_readers import bert_config, write_modules

THREE = {"id2label": {"0": "no", "1": "perhaps", "2": "yes"}, "label2id": {"no": 0, "perhaps": 1, "yes": 2}}
ONE = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def real(name: str, **changes: Any) -> dict[str, Any]:
    """A published config.json, made small."""
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    small = {key: value for key, value in SMALL.items() if key in config or key == "num_key_value_heads"}
    return config | small | {"torch_dtype": "float32"} | changes


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, and how its texts are pooled; labels make it a classifier."""

    config: dict[str, Any]
    pooling: str = ""  # as sentence-transformers calls it; "": it says nothing
    normalise: bool = True
    chunked: bool = False  # a text may be read in pieces
    both_ways: bool = False  # a decoder that reads what stands behind a token too
    second: int | None = None  # where the second text begins
    scores: Callable[[torch.Tensor], torch.Tensor] = field(default=lambda x: x.softmax(-1))

    @property
    def architecture(self) -> str:
        (name,) = self.config["architectures"]
        return str(name)

    @property
    def labels(self) -> bool:
        return self.architecture.endswith("Classification")

    def write(self, folder: Path, seed: int = 0) -> Oracle:
        """A folder that can be served, and transformers' model of it."""
        kind = AutoModelForSequenceClassification if self.labels else AutoModel
        oracle = write_random_model(folder, self.config, seed, kind=kind)
        if self.pooling:
            write_modules(folder, self.pooling, normalise=self.normalise)
        return oracle

    def wanted(self, oracle: Oracle, tokens: list[int]) -> NDArray[np.float64]:
        """The vector, or the scores, that transformers gives one text."""
        given = {"input_ids": torch.tensor([tokens])}
        if self.both_ways:
            given["attention_mask"] = torch.zeros((1, 1, len(tokens), len(tokens)))
        if self.second is not None:
            given["token_type_ids"] = (torch.arange(len(tokens)) >= self.second).long()[None]
        torch.set_num_threads(1)
        with torch.inference_mode():
            told = oracle.model(**given)
        if self.labels:
            return np.asarray(self.scores(told.logits[0].double()).numpy())
        states_TD = told.last_hidden_state[0].double()
        pools = {"cls_token": states_TD[0], "lasttoken": states_TD[-1], "mean_tokens": states_TD.mean(0)}
        encodes = "type_vocab_size" in self.config
        vector = pools[self.pooling or ("mean_tokens" if encodes else "lasttoken")]
        return np.asarray((vector / vector.norm() if self.normalise else vector).numpy())


XLM_R = {"model_type": "xlm-roberta", "type_vocab_size": 1, "pad_token_id": 1, "max_position_embeddings": 66}
QWEN3 = {"head_dim": 24, "max_window_layers": 3}
REWARD = {"architectures": ["Qwen3ForSequenceClassification"], "problem_type": "regression", **ONE}
CASES = {
    "BGE": Case(config=real("bge_large", max_position_embeddings=64), pooling="cls_token"),
    "MiniLM": Case(config=bert_config(), pooling="mean_tokens"),
    "an encoder that says nothing": Case(config=bert_config(), normalise=False, second=9),
    "XLM-R": Case(config=bert_config(**XLM_R, architectures=["XLMRobertaModel"]), pooling="mean_tokens"),
    "E5-Mistral": Case(config=real("e5_mistral_7b", sliding_window=30), pooling="lasttoken", chunked=True),
    "Qwen3-Embedding": Case(config=real("qwen3_embedding_8b", **QWEN3), pooling="lasttoken", chunked=True),
    "a decoder's mean": Case(config=real("qwen3_embedding_8b", **QWEN3), pooling="mean_tokens", chunked=True),
    "GTE-Qwen2": Case(config=real("gte_qwen2_7b", max_window_layers=3), pooling="lasttoken", both_ways=True),
    "BERT with labels": Case(
        config=bert_config(architectures=["BertForSequenceClassification"], **THREE), second=12
    ),
    "BGE-Reranker": Case(
        config=bert_config(**XLM_R, architectures=["XLMRobertaForSequenceClassification"], **ONE),
        scores=torch.sigmoid,
    ),
    "Skywork-Reward": Case(
        config=real("qwen3_embedding_8b", **QWEN3 | REWARD), chunked=True, scores=lambda x: x
    ),
}  # fmt: skip
