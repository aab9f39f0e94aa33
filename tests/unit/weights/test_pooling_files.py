"""What a folder is for: told by its architecture and by the files of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ModelError
from penstock.types import Task
from penstock.weights.architecture.encoder import NO_KV
from penstock.weights.architecture.spec import PoolerConfig, PoolingType, ScoreFunction
from penstock.weights.compression_convert import compress_folder
from penstock.weights.inspect import inspect_model
from tiny_models import llama_config, write_model
from tiny_readers import bert_config, write_modules, write_reader

LABELS = {"id2label": {"0": "no", "1": "yes"}}
CLASSIFIER = {"architectures": ["BertForSequenceClassification"], **LABELS}


def test_modules_say_how_texts_are_pooled(tmp_path: Path) -> None:
    for pooling, mode in (
        ("cls_token", PoolingType.CLS),
        ("mean_tokens", PoolingType.MEAN),
        ("lasttoken", PoolingType.LAST),
    ):
        write_modules(tmp_path, pooling, normalise=mode is not PoolingType.MEAN, max_seq_length=50)
        write_reader(tmp_path, bert_config())
        spec = inspect_model(tmp_path)
        assert spec.pooler == PoolerConfig(pooling=mode, causal=False, normalised=mode is not PoolingType.MEAN)
        assert (spec.task, spec.max_positions, spec.kv) == (Task.EMBED, 50, NO_KV)
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    assert inspect_model(tmp_path).pooler == PoolerConfig(pooling=PoolingType.MEAN, causal=False, normalised=True)


def test_a_decoder_that_writes_and_one_that_reads(tmp_path: Path) -> None:
    write_model(tmp_path, llama_config())
    assert inspect_model(tmp_path).task is Task.GENERATE
    write_modules(tmp_path, "lasttoken")
    spec = inspect_model(tmp_path)
    assert spec.pooler == PoolerConfig(pooling=PoolingType.LAST, normalised=True)
    assert spec.kv.layers == 3


@pytest.mark.parametrize(
    ("changes", "scores", "labels"),
    [
        ({}, ScoreFunction.SOFTMAX, 2),
        ({"id2label": None}, ScoreFunction.SOFTMAX, 2),
        ({"problem_type": "multi_label_classification"}, ScoreFunction.SIGMOID, 2),
        ({"problem_type": "regression"}, ScoreFunction.RAW, 2),
        ({"id2label": {"0": "x"}}, ScoreFunction.SIGMOID, 1),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, ScoreFunction.RAW, 2),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, ScoreFunction.SIGMOID, 2),
    ],
)
def test_labels_and_what_is_made_of_their_scores(
    tmp_path: Path, changes: dict[str, Any], scores: ScoreFunction, labels: int
) -> None:
    write_reader(tmp_path, bert_config(**CLASSIFIER | changes))
    pooler = PoolerConfig(pooling=PoolingType.CLS, causal=False, labels=labels, scores=scores, dense=True)
    assert inspect_model(tmp_path).pooler == pooler


def refused(folder: Path, words: str) -> None:
    with pytest.raises(ModelError) as error:
        inspect_model(folder)
    assert words in str(error.value)
    assert str(folder) in str(error.value)


def test_what_is_not_computed_is_refused_by_file_and_name(tmp_path: Path) -> None:
    write_modules(tmp_path)
    write_reader(tmp_path, bert_config())
    pooling, modules = tmp_path / "1_Pooling/config.json", tmp_path / "modules.json"
    for values, words in (
        ({"pooling_mode_max_tokens": True}, "pools by pooling_mode_max_tokens"),
        ({}, "pools by nothing"),
        ({"pooling_mode_cls_token": True, "include_prompt": False}, "include_prompt is false"),
    ):
        pooling.write_text(json.dumps(values))
        refused(tmp_path, words)
    pooling.unlink()
    refused(tmp_path, "is missing, though modules.json names it")
    kinds = [{"type": f"sentence_transformers.models.{kind}", "path": "../.."} for kind in ("Transformer", "Pooling")]
    modules.write_text(json.dumps(kinds))
    refused(tmp_path, "'../..' is no folder next to it")
    modules.write_text(json.dumps([*kinds, {"type": "sentence_transformers.models.Dense"}]))
    refused(tmp_path, "modules are Transformer, Pooling, Dense")
    modules.write_text("{}")
    refused(tmp_path, "expected a JSON array of objects")
    modules.unlink()
    for changes, words in (
        ({"position_embedding_type": "relative_key"}, "only 'absolute'"),
        ({"is_decoder": True}, "is_decoder is true"),
        ({"hidden_size": 66}, "num_attention_heads"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(bert_config(**changes)))
        refused(tmp_path, words)


def test_causal_models_need_a_last_token(tmp_path: Path) -> None:
    write_model(tmp_path, llama_config())
    write_modules(tmp_path, "cls_token")
    refused(tmp_path, "that token reads nothing of it")
    (tmp_path / "modules.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(llama_config(is_causal=False)))
    refused(tmp_path, "is_causal is false")


def test_a_compressed_folder_is_still_for_the_same(tmp_path: Path) -> None:
    write_modules(tmp_path / "plain", "lasttoken")
    write_model(tmp_path / "plain", llama_config())
    compress_folder(tmp_path / "plain", tmp_path / "small", threads=1, report=lambda _: None)
    assert inspect_model(tmp_path / "small").pooler == PoolerConfig(pooling=PoolingType.LAST, normalised=True)
