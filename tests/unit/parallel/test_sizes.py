"""Bytes counted from a configuration are the bytes of the files, and each form codes what it says it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.bundled import storyteller
from penstock.errors import ModelError
from penstock.kv.page_memory import KvLayout
from penstock.kv_spec import max_pages, tokens_that_fit
from penstock.parallel.plan import Devices, ModelSize, plan_for_tensor
from penstock.parallel.sizes import STEP_TOKENS, WeightFormat, model_size, stored_encoding, weight_encoding
from penstock.weights.architecture.tensor_layout import Matrix
from penstock.weights.checkpoint_reader import Checkpoint
from penstock.weights.config_json import ConfigFields
from penstock.weights.inspect import ModelOutline, read_outline
from tiny_models import llama_config, write_model

CONFIGS = Path(__file__).parents[2] / "fixtures/configs"


def outline_of(folder: Path, **changes: Any) -> ModelOutline:
    path = folder / "config.json"
    path.write_text(json.dumps(llama_config(**changes)))
    return read_outline(path)


def size_in(outline: ModelOutline, form: WeightFormat) -> ModelSize:
    return model_size(outline.spec, outline.layout, weight_encoding(form, outline))


def test_the_bytes_are_those_of_the_file(tmp_path: Path) -> None:
    write_model(tmp_path, llama_config(), dtype="bf16")
    with Checkpoint(tmp_path) as checkpoint:
        stored = sum(checkpoint.info(name).nbytes for name in checkpoint.names)
        vectors = sum(checkpoint.info(n).nbytes for n in checkpoint.names if len(checkpoint.info(n).shape) == 1)
    size = size_in(read_outline(tmp_path), WeightFormat.STORED)
    assert size.weight_bytes == stored + vectors, "norms are held in fp32, twice their bytes"


def test_states_are_counted_with_the_cells_that_a_step_enters() -> None:
    """Of Qwen3-Next: 36 layers of 2 MiB and some inputs, five cells of 512 tokens in a step of 2048, and one more."""
    outline = read_outline(CONFIGS / "qwen_3_next_80b_a3b.json")
    size, layout = size_in(outline, WeightFormat.BF16), KvLayout.for_shape(outline.spec.kv, "bf16")
    states = layout.shape.kept_states
    assert states.nbytes == 36 * (32 * 128 * 128 + 3 * 8192) * 4
    cells = max_pages(layout.shape.reaches, 1 << 40, ahead=STEP_TOKENS, page_tokens=16) - (1 << 36)
    assert cells == 6 * layout.shape.state_parts == 6 * 201
    fixed = [layer.cache.fixed for layer in size.layers]
    assert [index for index, own in enumerate(fixed) if not own] == list(range(3, 48, 4))
    assert sum(fixed) == pytest.approx(cells * layout.page_bytes, rel=1e-6)


def test_the_bundled_model_is_counted_as_it_was_before_it_was_compressed() -> None:
    outline = read_outline(Path(storyteller()))
    assert outline.layout.parameters == 10_163_520
    plain, lossless = size_in(outline, WeightFormat.BF16), size_in(outline, WeightFormat.LOSSLESS)
    assert 0.70 < lossless.weight_bytes / plain.weight_bytes < 0.71


def test_tables_stay_plain_where_a_form_is_for_layers_only(tmp_path: Path) -> None:
    outline = outline_of(tmp_path, tie_word_embeddings=False)
    plain, fp8, int4 = (size_in(outline, form) for form in (WeightFormat.BF16, WeightFormat.FP8, WeightFormat.INT4))
    assert plain.embedding == fp8.embedding == int4.embedding == plain.head
    for layers, share in ((fp8, 8 + 32 / 128**2), (int4, 4.5)):
        for coded, whole in zip(layers.layers, plain.layers, strict=True):
            assert coded.divided == pytest.approx(whole.divided * share / 16, abs=1)
            assert coded.whole == whole.whole


@pytest.mark.parametrize(
    ("stored", "bits"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 16384),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, 4 + 20 / 64),
        ({"quant_method": "mxfp4"}, 4.25),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}},
            },
            4.5,
        ),
    ],
)
def test_stored_forms_are_read_from_the_configuration(stored: dict[str, Any], bits: float) -> None:
    assert stored_encoding(ConfigFields({"quantization_config": stored}, "config.json")).bits == bits


def test_modules_that_are_not_converted_stay_plain(tmp_path: Path) -> None:
    ignored = ["re:.*self_attn.*", "lm_head", "layers.1.mlp.down_proj"]
    stored = {"quant_method": "awq", "bits": 4, "group_size": -1, "modules_to_not_convert": ignored}
    outline = outline_of(tmp_path, num_hidden_layers=2, quantization_config=stored)
    how = weight_encoding(WeightFormat.STORED, outline)
    by_name = {weight.name: weight for weight in outline.layout.weights}
    bits = {
        name: [how.bits_of_part(w, part) for part in w.parts] for name, w in by_name.items() if isinstance(w, Matrix)
    }
    assert bits["0.qkv"] == [16.0] * 3
    assert bits["0.down"] == [4.0]
    assert bits["1.down"] == [16.0]
    assert bits["head"] == [16.0]
    plain, coded = size_in(outline, WeightFormat.BF16), size_in(outline, WeightFormat.STORED)
    assert plain.layers[1].divided > coded.layers[1].divided > coded.layers[0].divided


def test_parts_of_latent_attention_are_held_plain(tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "deepseek_v3.json").read_text())
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))
    outline = read_outline(tmp_path)
    how = weight_encoding(WeightFormat.STORED, outline)
    matrices = [weight for weight in outline.layout.weights if isinstance(weight, Matrix)]
    bits = {weight.name: how.bits_of_part(weight, weight.parts[0]) for weight in matrices}
    assert bits["5.absorb"] == bits["5.values"] == bits["5.router"] == 16
    assert bits["5.q"] == bits["5.experts.7.down"] == 8 + 32 / 16384
    size = model_size(outline.spec, outline.layout, how)
    assert size.weight_bytes == pytest.approx(671.0e9 + 0.9e9 * 3, rel=5e-3)  # tables and what is taken apart: 16 bits


def test_an_unknown_form_names_the_flag_that_helps() -> None:
    with pytest.raises(ModelError, match=r"quant_method 'squeeze' is not known; .*; give --weights"):
        stored_encoding(ConfigFields({"quantization_config": {"quant_method": "squeeze"}}, "config.json"))


@pytest.mark.parametrize(("sliding", "layers"), [(0, 4), (2, 4), (3, 4), (4, 4), (23, 34)])
def test_tokens_of_a_plan_are_those_that_the_pages_hold(tmp_path: Path, sliding: int, layers: int) -> None:
    """Of a model with windows, without and with empty places in its pages."""
    outline = outline_of(
        tmp_path,
        architectures=["SmolLM3ForCausalLM"],
        model_type="smollm3",
        num_hidden_layers=layers,
        use_sliding_window=True,
        sliding_window=100,
        layer_types=["sliding_attention"] * sliding + ["full_attention"] * (layers - sliding),
    )
    size, layout = size_in(outline, WeightFormat.BF16), KvLayout.for_shape(outline.spec.kv, "bf16")
    for room in (1 << 20, 5 << 20, 40 << 20):
        bare = plan_for_tensor(size, Devices(count=1, name="cpu", memory_bytes=1 << 40, is_cpu=True), 1)
        memory = room + (1 << 40) - bare.kv_bytes
        plan = plan_for_tensor(size, Devices(count=1, name="cpu", memory_bytes=memory, is_cpu=True), 1)
        assert plan.kv_bytes == room
        pages = room // layout.page_bytes
        held = tokens_that_fit(layout.shape.reaches, pages, 1 << 40, ahead=STEP_TOKENS, page_tokens=16)
        if layers == len(layout.shape.reaches) * layout.shape.page_layers:
            assert plan.kv_tokens == held
        assert 0.98 * held - 16 <= plan.kv_tokens <= held
