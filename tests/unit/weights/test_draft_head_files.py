"""Heads are taken as their makers meant them, or refused with file, field and reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from penstock.errors import ModelError
from penstock.kernels.select import make_ops
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.eagle import LoadedDraftHead, inspect_draft_head, is_draft_head, load_draft_head
from penstock.weights.inspect import inspect_model
from tiny_heads import head_config, head_tensors, write_head
from tiny_models import Tensors, llama_config, write_model

MODEL = llama_config(num_hidden_layers=8)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return inspect_model(write_model(tmp_path_factory.mktemp("model"), MODEL))


def loaded(folder: Path, spec: ModelSpec, tensors: Tensors | None = None, **changes: Any) -> LoadedDraftHead:
    config = head_config(MODEL, **changes)
    write_head(folder, config, head_tensors(config) if tensors is None else tensors)
    return load_draft_head(folder, inspect_draft_head(folder, spec), "ab" * 32, make_ops(compute_dtype="bf16"))


def test_layers_are_counted_as_either_file_counts_them(tmp_path: Path, spec: ModelSpec) -> None:
    name = "eagle_aux_hidden_state_layer_ids"
    for number, (changes, wanted) in enumerate((
        ({}, (0, 2, 1)),
        ({name: None, "eagle_config": {name: [1, 4, 6]}}, (2, 5, 7)),
        ({name: None}, (2, 4, 5)),
    )):  # fmt: skip
        folder = write_head(tmp_path / str(number), head_config(MODEL, **changes), {})
        assert is_draft_head(folder)
        assert inspect_draft_head(folder, spec).tapped == wanted


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures must be"),
        ({"hidden_size": 32}, "hidden_size is 32, the model's is 64: this is another model's head"),
        ({"vocab_size": 64}, "vocab_size is 64, the model's is 128"),
        ({"target_hidden_size": 128}, "target_hidden_size is 128"),
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1, got 2"),
        ({"draft_vocab_size": 200}, "draft_vocab_size 200 is more than"),
        ({"norm_before_residual": True}, "norm_before_residual is true"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 8]}, "must name layers of the model, which has 8"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 2]}, "names a layer twice"),
        ({"eagle_aux_hidden_state_layer_ids": list(range(40))}, "must name layers"),
        ({"hidden_act": "tan"}, "hidden_act is 'tan'"),
    ],
)
def test_what_cannot_be_a_head_of_this_model_is_refused(
    tmp_path: Path, spec: ModelSpec, changes: dict[str, Any], reason: str
) -> None:
    write_head(tmp_path, head_config(MODEL, **changes), {})
    with pytest.raises(ModelError, match=reason) as error:
        inspect_draft_head(tmp_path, spec)
    assert str(error.value).startswith(str(tmp_path))


def test_a_head_of_other_weights_is_refused(tmp_path: Path, spec: ModelSpec) -> None:
    loaded(tmp_path / "own", spec, penstock={"target": "ab" * 32})
    with pytest.raises(ModelError, match="was trained for a model with the weights cdcd"):
        loaded(tmp_path / "other", spec, penstock={"target": "cd" * 32})


def test_tensors_are_those_of_a_head(tmp_path: Path, spec: ModelSpec) -> None:
    config = head_config(MODEL)
    whole = head_tensors(config)
    assert loaded(tmp_path / "0", spec, head_tensors(config, layer="layers.0.")).ids_V is None
    short = {name: value for name, value in whole.items() if name != "fc.weight"}
    with pytest.raises(ModelError, match=r"fc\.weight"):
        loaded(tmp_path / "1", spec, short)
    with pytest.raises(ModelError, match="'extra' is not part of an EAGLE-3 head"):
        loaded(tmp_path / "2", spec, whole | {"extra": whole["norm.weight"]})
    with pytest.raises(ModelError, match=r"'norm\.weight' has shape \[3\], by config\.json it must have \[64\]"):
        loaded(tmp_path / "3", spec, whole | {"norm.weight": whole["norm.weight"][:3]})


def test_a_part_of_the_vocabulary_is_named_by_what_is_added(
    tmp_path: Path, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("tiny_models").NAMES, np.dtype(np.int64), "I64")
    config = head_config(MODEL, draft_vocab_size=4)
    tensors = head_tensors(config) | {"lm_head.weight": np.zeros((4, 64), ml_dtypes.bfloat16)}
    named = tensors | {"d2t": np.array([3, 3, 10, 124], np.int64)}
    ids = loaded(tmp_path / "0", spec, named, draft_vocab_size=4).ids_V
    assert ids is not None
    assert ids.tolist() == [3, 4, 12, 127]
    with pytest.raises(ModelError, match="leads out of the vocabulary of 128"):
        loaded(tmp_path / "1", spec, tensors | {"d2t": np.array([3, 3, 10, 125], np.int64)}, draft_vocab_size=4)
    with pytest.raises(ModelError, match="there is no tensor 'd2t'"):
        loaded(tmp_path / "2", spec, tensors, draft_vocab_size=4)
    with pytest.raises(ModelError, match="must be 4 numbers of type I64"):
        loaded(tmp_path / "3", spec, tensors | {"d2t": np.zeros(5, np.int64)}, draft_vocab_size=4)
