"""``--activation-dtype``: what it refuses before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType
from msgspec import structs

from penstock.bundled import storyteller
from penstock.config.load import load_serve
from penstock.errors import ConfigError
from penstock.weights.config_json import ConfigFields
from penstock.weights.inspect import check_integer_weights, inspect_model
from penstock.weights.quantization.config import parse_quantization
from tiny_gguf import write_gguf
from tiny_models import llama_config, random_tensors

FLAG = "--activation-dtype int8"


def check(path: Path) -> None:
    check_integer_weights(path, inspect_model(path), FLAG)


def test_models_without_quantized_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--activation-dtype int8: .* has no quantized weights"):
        check(storyteller())


def test_codes_of_gguf_files_are_integers(tmp_path: Path) -> None:
    config = llama_config(hidden_size=64, intermediate_size=128)
    write_gguf(tmp_path / "codes.gguf", config, random_tensors(config), {"o_proj": GGMLQuantizationType.Q8_0})
    check(tmp_path / "codes.gguf")
    write_gguf(tmp_path / "plain.gguf", config, random_tensors(config))
    with pytest.raises(ConfigError, match="no quantized weights"):
        check(tmp_path / "plain.gguf")


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def check_folder(quantization: dict[str, Any]) -> None:
    read = parse_quantization(ConfigFields({"quantization_config": quantization}, "config.json"))
    spec = structs.replace(inspect_model(storyteller()), quantization=read)
    check_integer_weights(storyteller(), spec, FLAG)


def test_folders_have_integers_or_floats() -> None:
    check_folder(GPTQ)
    with pytest.raises(ConfigError, match="floats of 8 bits; it takes integers"):
        check_folder(FP8)


def test_it_is_a_setting_of_both_commands() -> None:
    assert load_serve({}, {}).activation_dtype == "auto"
    assert load_serve({"activation_dtype": "int8"}, {}).activation_dtype == "int8"
    with pytest.raises(ConfigError, match=r"--activation-dtype: .* expected one of auto, int8"):
        load_serve({"activation_dtype": "int4"}, {})
