"""What can be served is recognised, what cannot is refused with the reason and what would do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import ConfigError, ModelError
from penstock.kernels.operands import KvShape
from penstock.weights.architecture.decoder import AttentionConfig, DecoderConfig, LayerConfig, MlpConfig, NormConfig
from penstock.weights.architecture.rope import LinearRopeScaling, Llama3RopeScaling, RopeConfig
from penstock.weights.architecture.spec import ModelDetails, ModelSpec, SamplingDefaults
from penstock.weights.config_json import ConfigFields
from penstock.weights.families.fields import at_length
from penstock.weights.families.llama import parse_llama
from penstock.weights.inspect import compute_dtype_for, inspect_model
from tiny_models import llama_config, random_tensors, write_model, write_weights

BUNDLED = Path(__file__).parents[3] / "src/penstock/bundled/storyteller"

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def spec_of(**changes: Any) -> ModelSpec:
    return parse_llama(ConfigFields(llama_config(**changes), "config.json"))


def attention_of(spec: ModelSpec) -> AttentionConfig:
    """Of the first layer."""
    return spec.details_as(DecoderConfig).layers[0].attention


def linear(field: str, factor: float) -> dict[str, Any]:
    return {"rope_scaling": {field: "linear", "factor": factor}}


def test_the_bundled_model() -> None:
    spec = inspect_model(BUNDLED)
    assert (spec.vocab, spec.hidden, spec.layers, spec.tied, spec.max_positions) == (4096, 320, 8, True, 2048)
    assert spec.kv == KvShape(layers=8, kv_heads=1, key_dim=64, value_dim=64)
    attention = AttentionConfig(
        heads=5, kv_heads=1, head_dim=64, scale=0.125, rope=RopeConfig(theta=10000.0, columns=64)
    )
    assert spec.details_as(DecoderConfig) == DecoderConfig(
        layers=(LayerConfig(attention=attention, mlp=MlpConfig(intermediate=896)),) * 8, norm=NormConfig(eps=1e-5)
    )
    assert (spec.eos_ids, spec.bos_id, spec.checkpoint_dtype) == ((1,), 0, "bf16")
    assert spec.sampling == SamplingDefaults(temperature=0.7, top_p=0.9)
    assert spec.parameters == 10_163_520


def test_both_dialects_of_the_rotary_fields() -> None:
    old = spec_of(rope_theta=500000.0, rope_scaling=LLAMA3, torch_dtype="bfloat16")
    new = spec_of(rope_theta=None, rope_parameters={**LLAMA3, "rope_theta": 500000.0}, dtype="bfloat16")
    assert old == new
    scaling = Llama3RopeScaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
    assert attention_of(old).rope == RopeConfig(theta=500000.0, columns=16, scaling=scaling)


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_theta": None}, RopeConfig(theta=10000.0, columns=16)),
        ({"rope_theta": 1000000}, RopeConfig(theta=1e6, columns=16)),
        ({"rope_scaling": None, "head_dim": 40}, RopeConfig(theta=10000.0, columns=40)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, RopeConfig(theta=7.0, columns=16)),
        (linear("type", 2), RopeConfig(theta=10000.0, columns=16, scaling=LinearRopeScaling(factor=2.0))),
        (linear("rope_type", 4.0), RopeConfig(theta=10000.0, columns=16, scaling=LinearRopeScaling(factor=4.0))),
        ({"partial_rotary_factor": 0.5}, RopeConfig(theta=10000.0, columns=8)),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, RopeConfig(theta=10000.0, columns=16)),
    ],
)
def test_rotary_recipes(changes: dict[str, Any], rope: RopeConfig) -> None:
    assert attention_of(spec_of(**changes)).rope == rope


YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 40 for i in range(40)],
    "long_factor": [1.0 + i for i in range(40)],
    "original_max_position_embeddings": 4096,
}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn, ramp by fractions": {**YARN, "truncate": False, "beta_fast": 20, "beta_slow": 2, "attention_factor": 1.25},
    "yarn, two scales": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0},
    "longrope": LONG,
    "longrope, factor given": {**LONG, "factor": 8.0},
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_frequencies_are_those_of_transformers(kind: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = llama_config(head_dim=80, rope_scaling=SCALINGS[kind], rope_theta=500000.0, max_position_embeddings=131072)
    spec = parse_llama(ConfigFields(config, "config.json"))
    for length in (4096, 131072):
        oracle = LlamaRotaryEmbedding(LlamaConfig.from_dict(config))
        oracle(torch.zeros(1), torch.tensor([[length - 1]]))  # chooses the frequencies
        rope = attention_of(at_length(spec, length)).rope
        assert rope is not None
        got = rope.inv_freq()
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, oracle.inv_freq.numpy(), rtol=3e-6)  # theirs are computed in fp32
        assert rope.attention_factor == pytest.approx(oracle.attention_scaling, rel=1e-6)


def test_only_what_stretches_with_the_length_is_another_model_at_another_length() -> None:
    changes = {"rope_scaling": LONG, "head_dim": 80, "max_position_embeddings": 131072}
    long = spec_of(**changes)
    assert at_length(long, 4097) == long == at_length(at_length(long, 4096), 8000)
    assert at_length(long, 4096) != long
    assert at_length(spec_of(rope_scaling=LLAMA3), 16) == spec_of(rope_scaling=LLAMA3)


def test_the_context_of_yarn_is_the_stretched_one() -> None:
    assert spec_of(rope_scaling=YARN, max_position_embeddings=8192).max_positions == 131072
    assert spec_of(rope_scaling=YARN, max_position_embeddings=262144).max_positions == 262144


def test_head_size_is_explicit_or_follows() -> None:
    assert spec_of(hidden_size=80).kv.key_dim == 20
    assert spec_of(head_dim=24).kv.value_dim == 24
    assert spec_of(num_key_value_heads=None).kv.kv_heads == 4


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"architectures": ["OtherForCausalLM"]}, "'OtherForCausalLM' cannot be served; these"),
    "no architecture": ({"architectures": None}, "architectures must name one"),
    "another type": ({"model_type": "mistral"}, "model_type is 'mistral'"),
    "code of its own": ({"auto_map": {"AutoModelForCausalLM": "modeling.X"}}, "never run"),
    "quantized, it is not said how": ({"quantization_config": {"quant_method": "gptq"}}, "has no bits"),
    "quantized in another way": ({"quantization_config": {"quant_method": "x"}}, "quant_method 'x' is not known; fp8"),
    "activation": ({"hidden_act": "sin"}, "hidden_act is 'sin'; these can be served: silu, swish, gelu"),
    "attention bias": ({"attention_bias": True}, "'model.layers.0.self_attn.q_proj.bias' is missing"),
    "mlp bias": ({"mlp_bias": True}, "'model.layers.0.mlp.gate_proj.bias' is missing"),
    "heads do not divide": ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
    "hidden does not divide": ({"hidden_size": 66}, "no multiple of num_attention_heads"),
    "odd head": ({"head_dim": 15}, "head_dim must be even"),
    "huge head": ({"head_dim": 4096}, "head_dim must be even and at most"),
    "missing size": ({"hidden_size": None}, "has no hidden_size"),
    "text for a size": ({"hidden_size": "64"}, "hidden_size must be int"),
    "truth for a size": ({"num_hidden_layers": True}, "num_hidden_layers must be int"),
    "zero layers": ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive"),
    "a million layers": ({"num_hidden_layers": 1000000}, "num_hidden_layers must be at most"),
    "negative eps": ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a positive number"),
    "axial": ({"rope_scaling": {"rope_type": "axial", "factor": 2.0}}, "rope_type 'axial' cannot be served; these can"),
    "dynamic": ({"rope_scaling": {"type": "dynamic"}}, "has no factor"),
    "betas crossed": ({"rope_scaling": {**YARN, "beta_slow": 64}}, r"beta_fast \(32.0\) must not be below"),
    "too few divisors": ({"rope_scaling": LONG}, "short_factor must have 8 numbers, one a pair .* not 40"),
    "no number": ({"rope_scaling": {**LONG, "short_factor": [1.0] * 7 + [None]}}, "must hold positive numbers only"),
    "no factor": ({"rope_scaling": {"rope_type": "linear"}}, "has no factor"),
    "factors crossed": ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "must be above low_freq_factor"),
    "odd rotation": ({"partial_rotary_factor": 0.9375}, "partial_rotary_factor 0.9375 of heads of 16 is no even"),
    "more than whole": ({"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5 of heads of 16"),
    "rope by layer": ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differs from layer to layer"),
    "eos outside": ({"eos_token_id": 128}, "eos_token_id 128 is outside"),
    "eos no id": ({"eos_token_id": "x"}, "eos_token_id must be a token id"),
    "untied without head": ({"tie_word_embeddings": False}, "'lm_head.weight' is missing"),
    "another shape": ({"intermediate_size": 97}, r"'model.layers.0.mlp.gate_proj.weight' has shape \[96, 64\]"),
    "a layer more": ({"num_hidden_layers": 4}, "'model.layers.3.input_layernorm.weight' is missing"),
    "a layer less": ({"num_hidden_layers": 2}, "'model.layers.2.input_layernorm.weight' is not part"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_is_refused_with_the_reason(tmp_path: Path, case: str) -> None:
    changes, reason = REFUSED[case]
    write_model(tmp_path, llama_config(tie_word_embeddings=True))
    (tmp_path / "config.json").write_text(json.dumps(llama_config(**{"tie_word_embeddings": True, **changes})))
    with pytest.raises(ModelError, match=reason) as caught:
        inspect_model(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_bias_in_the_files_is_refused_even_if_the_configuration_hides_it(tmp_path: Path) -> None:
    config = llama_config()
    write_model(tmp_path, config)
    bias = {"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)}
    write_weights(tmp_path, random_tensors(config) | bias)
    with pytest.raises(ModelError, match=r"q_proj.bias' is not part of this architecture"):
        inspect_model(tmp_path)


@pytest.mark.parametrize(
    ("file", "reason"), [("config.json", "has no config.json"), ("tokenizer.json", "has no vocabulary")]
)
def test_missing_files(tmp_path: Path, file: str, reason: str) -> None:
    write_model(tmp_path, llama_config())
    (tmp_path / file).unlink()
    with pytest.raises(ModelError, match=reason):
        inspect_model(tmp_path)


def test_no_folder_and_broken_json(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        inspect_model(tmp_path / "nowhere")
    write_model(tmp_path, llama_config())
    (tmp_path / "config.json").write_text('{"a": 1, "a": 2}')
    with pytest.raises(ModelError, match="stands twice"):
        inspect_model(tmp_path)


def test_generation_config_wins_over_config(tmp_path: Path) -> None:
    write_model(tmp_path, llama_config(eos_token_id=1))
    generation = {"eos_token_id": [5, 6, 5], "do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 0}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    spec = inspect_model(tmp_path)
    assert spec.eos_ids == (5, 6)
    assert spec.sampling == SamplingDefaults(temperature=0.6, top_p=0.9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": "warm"}))
    spec = inspect_model(tmp_path)
    assert spec.eos_ids == (1,)
    assert spec.sampling == SamplingDefaults()


@pytest.mark.parametrize(("dtype", "auto"), [("bf16", "bf16"), ("fp16", "fp32"), ("fp32", "fp32")])
def test_compute_type_follows_the_tensors_not_the_configuration(tmp_path: Path, dtype: str, auto: str) -> None:
    write_model(tmp_path, llama_config(torch_dtype="float64"), dtype=dtype, shards=2)
    spec = inspect_model(tmp_path)
    assert spec.checkpoint_dtype == dtype
    assert compute_dtype_for(spec, "auto") == auto
    assert compute_dtype_for(spec, "bf16") == "bf16"
    assert compute_dtype_for(spec, "fp32") == "fp32"
    with pytest.raises(ConfigError, match="fp8"):
        compute_dtype_for(spec, "fp8")


def test_mixed_types_need_fp32(tmp_path: Path) -> None:
    config = llama_config()
    write_model(tmp_path, config)
    tensors = random_tensors(config)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.float16)
    write_weights(tmp_path, tensors)
    assert inspect_model(tmp_path).checkpoint_dtype == "fp32"


def test_details_are_asked_for_by_the_family_that_made_them() -> None:
    class Other(ModelDetails):
        pass

    with pytest.raises(TypeError, match="LlamaForCausalLM: details are DecoderConfig, not Other"):
        spec_of().details_as(Other)
