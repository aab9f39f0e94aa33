"""A weight may be part of a tensor, or several parts of several: what reaches the kernels is what the layout says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.errors import ModelError
from penstock.kernels.select import make_ops
from penstock.weights import load
from penstock.weights.architecture.tensor_layout import HeadGroups, Matrix, RowSlice, TensorPart, Vector, WeightLayout
from penstock.weights.config_json import ConfigFields
from penstock.weights.families.llama import parse_llama
from penstock.weights.families.registry import BUILT_IN, CheckpointFormat
from penstock.weights.load import LoadedModel, load_model
from tiny_models import Tensors, llama_config, write_weights

SPEC = parse_llama(ConfigFields(llama_config(), "config.json"))
RNG = np.random.default_rng(0)
TENSORS: Tensors = {
    name: RNG.standard_normal(shape).astype(np.float32)
    for name, shape in {
        "stack": (3, 6, 10),  # experts
        "turned": (10, 12),  # inputs first
        "stacked and turned": (3, 10, 6),
        "norm": (7,),
        "q_bias": (5,),
        "k_bias": (3,),
    }.items()
}
STACK, TURNED, BOTH = TENSORS["stack"], TENSORS["turned"], TENSORS["stacked and turned"]

WEIGHTS: dict[str, tuple[Matrix | Vector, NDArray[Any]]] = {
    "one of a stack": (Matrix("w", (TensorPart("stack", (3, 6, 10), index=1),)), STACK[1]),
    "turned round": (Matrix("w", (TensorPart("turned", (10, 12), transposed=True),)), TURNED.T),
    "every second row, then the others": (
        Matrix(
            "w",
            (
                TensorPart("stack", (3, 6, 10), index=2, rows=RowSlice(0, 6, 2)),
                TensorPart("stack", (3, 6, 10), index=2, rows=RowSlice(1, 6, 2)),
            ),
        ),
        np.concatenate([STACK[2, 0::2], STACK[2, 1::2]]),
    ),
    "outputs 2 to 5 of one of a stack": (
        Matrix("w", (TensorPart("stacked and turned", (3, 10, 6), index=0, transposed=True, rows=RowSlice(2, 5)),)),
        BOTH[0].T[2:5],
    ),
    "rows 1 and 2 of each of two groups": (
        Matrix("w", (TensorPart("stack", (3, 6, 10), index=2, groups=HeadGroups(2, 1, 3)),)),
        STACK[2][[1, 2, 4, 5]],
    ),
    "groups turned round": (
        Matrix("w", (TensorPart("turned", (10, 12), groups=HeadGroups(5, 0, 1, turned=True)),)),
        TURNED[0::2].reshape(60, 1),
    ),
    "a norm that stores w - 1": (Vector("w", (TensorPart("norm", (7,)),), offset=1.0), TENSORS["norm"] + np.float32(1)),
    "a bias of two tensors": (
        Vector("w", (TensorPart("q_bias", (5,)), TensorPart("k_bias", (3,)))),
        np.concatenate([TENSORS["q_bias"], TENSORS["k_bias"]]),
    ),
}


def loaded(folder: Path, weights: tuple[Matrix | Vector, ...], monkeypatch: pytest.MonkeyPatch, kernels: str) -> Any:
    def layout(spec: Any) -> WeightLayout:
        return WeightLayout(weights, re.compile(".*"))

    monkeypatch.setattr(load, "checkpoint_format", lambda *_: CheckpointFormat(parse_llama, layout))
    write_weights(folder, TENSORS)
    model: LoadedModel = load_model(folder, SPEC, make_ops(family=kernels, compute_dtype="fp32"))
    return model.weights


@pytest.mark.parametrize("kernels", ["portable", "reference"])
@pytest.mark.parametrize("case", WEIGHTS)
def test_a_part_is_what_the_layout_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, kernels: str
) -> None:
    weight, want = WEIGHTS[case]
    got = loaded(tmp_path, (weight,), monkeypatch, kernels)["w"]
    ops = make_ops(family=kernels, compute_dtype="fp32")
    if isinstance(weight, Matrix):
        assert (got.n, got.k) == want.shape
        got = ops.embed(got, np.arange(got.n, dtype=np.int32))
    np.testing.assert_array_equal(ops.to_numpy(got), want)


def test_a_tensor_that_is_wanted_as_another_shape_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = TensorPart("stack", (4, 6, 10), index=3)
    with pytest.raises(ModelError, match=r"'stack' has shape \[3, 6, 10\], by config.json it must have \[4, 6, 10\]"):
        loaded(tmp_path, (Matrix("w", (part,)),), monkeypatch, "portable")


def test_every_tensor_counts_once() -> None:
    stack = tuple(Matrix(f"e{i}", (TensorPart("stack", (3, 6, 10), index=i),)) for i in range(3))
    assert WeightLayout((*stack, Vector("v", (TensorPart("norm", (7,)),))), re.compile("")).parameters == 187
    llama = BUILT_IN["LlamaForCausalLM"]
    assert llama.layout(SPEC).parameters == 3 * (64 * (8 * 16 + 64 + 3 * 96 + 2)) + 2 * 128 * 64 + 64
