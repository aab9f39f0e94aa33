"""``--activation-dtype``: what it refuses before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from penstock.bundled import storyteller
from penstock.config.load import load_serve
from penstock.config.schema import ServeConfig
from penstock.errors import ConfigError
from penstock.launch.activation_dtype import check_activation_dtype
from penstock.weights.inspect import inspect_model
from stored_formats import FORMS
from test_weight_formats import config_of, write_pair
from tiny_gguf import write_gguf
from tiny_models import llama_config, random_tensors

INT8 = ServeConfig(activation_dtype="int8")


def check(path: Path, config: ServeConfig = INT8) -> None:
    check_activation_dtype(config, path, inspect_model(path))


def test_models_without_quantized_weights_are_refused() -> None:
    check(storyteller(), ServeConfig())
    with pytest.raises(ConfigError, match="--activation-dtype int8: .* has no quantized weights"):
        check(storyteller())


def test_codes_of_gguf_files_and_folders_are_integers(tmp_path: Path) -> None:
    config = llama_config(hidden_size=64, intermediate_size=128)
    write_gguf(tmp_path / "codes.gguf", config, random_tensors(config), {"o_proj": GGMLQuantizationType.Q8_0})
    check(tmp_path / "codes.gguf")
    write_gguf(tmp_path / "plain.gguf", config, random_tensors(config))
    with pytest.raises(ConfigError, match="no quantized weights"):
        check(tmp_path / "plain.gguf")
    check(write_pair(tmp_path / "integers", FORMS["gptq 4, shuffled"], config_of("llama")).stored)


def test_floats_of_eight_bits_are_refused(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, FORMS["fp8 in blocks"], config_of("qwen 3"))
    with pytest.raises(ConfigError, match="floats of 8 bits; it takes integers"):
        check(pair.stored)


def test_it_is_a_setting_of_both_commands() -> None:
    assert load_serve({}, {}).activation_dtype == "auto"
    assert load_serve({"activation_dtype": "int8"}, {}).activation_dtype == "int8"
    with pytest.raises(ConfigError, match="--activation-dtype: .* expected one of auto, int8"):
        load_serve({"activation_dtype": "int4"}, {})
