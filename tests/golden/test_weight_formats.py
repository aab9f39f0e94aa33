"""Folders of quantized weights: every form is read as its makers meant it, computed as it is stored, and keeps law 1.

A random model of a real family, shrunk, is written twice: in the form, and as the numbers that the form's own tools
read out of that.  Both must give the same log-probabilities.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_cases import CASES
from numpy.typing import NDArray
from shrunk_models import LLAMA4
from stored_formats import FORMS, Form, gptq
from whole_rows import TOLERANCE, read_rows

from penstock.kernels.native.backend import NativeOps, families
from penstock.kernels.native.program import RecordedProgram
from penstock.parallel.sizes import WeightFormat as PlanForm
from penstock.parallel.sizes import model_size, weight_encoding
from penstock.types import SamplingParams
from penstock.weights.checkpoint_reader import Checkpoint
from penstock.weights.config_json import ConfigFields
from penstock.weights.families.registry import checkpoint_format
from penstock.weights.inspect import inspect_model, read_outline
from penstock.weights.load import load_model
from penstock.weights.quantization.config import parse_quantization
from runner_bench import RunnerBench
from tiny_adapters import write_adapter
from tiny_models import Tensors, llama_config, write_tokenizer, write_weights

LENGTH = 60
SIZES = {"hidden_size": 64, "intermediate_size": 128}
TWO = {**SIZES, "num_hidden_layers": 2}

MODELS: dict[str, dict[str, Any]] = {
    "llama": llama_config(**TWO, num_attention_heads=2, num_key_value_heads=1),
    "qwen 3": {"config": "qwen_3_4b", **TWO, "intermediate_size": 96, "head_dim": 32},
    "deepseek v3": {"config": "deepseek_v3", **TWO, "moe_intermediate_size": 64, "q_lora_rank": 32, "v_head_dim": 32},
    "kimi k2": {"config": "kimi_k2_bf16", **TWO, "moe_intermediate_size": 64, "q_lora_rank": 32},
    "gpt-oss": {"config": "gpt_oss_20b_bf16", **SIZES},
}
PAIRS = {
    "fp8 in blocks": ("qwen 3", "deepseek v3"),
    "packed int4 of experts": ("kimi k2",),
    "mxfp4": ("gpt-oss",),
}


def config_of(model: str) -> dict[str, Any]:
    changes = MODELS[model]
    name = changes.get("config")
    if name is None:
        return changes
    shrunk = next(case for case in CASES if case.config == name).shrunk()
    return {**shrunk, **{field: value for field, value in changes.items() if field != "config"}}


def random_weights(config: dict[str, Any], seed: int = 0) -> Tensors:
    """Of any family: what its layout asks for, of a size under which nothing is trivial."""
    rng = np.random.default_rng(seed)
    family = checkpoint_format(config["architectures"][0], "")
    tensors: Tensors = {}
    for name, shape in family.layout(family.parse(ConfigFields(config, "config.json"))).shapes.items():
        noise = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            tensors[name] = 0.2 * noise + (0.0 if "bias" in name or "sinks" in name else 1.0)
        elif len(shape) == 2 and "bias" in name:
            tensors[name] = 0.2 * noise
        else:
            tensors[name] = noise * (2.5 if "embed" in name or "head" in name else 1.0) / math.sqrt(shape[1])
    return tensors


def write_folder(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, config["vocab_size"])
    write_weights(folder, tensors)
    return folder


@dataclass(frozen=True)
class Pair:
    """One model in a form, and in plain numbers."""

    form: Form
    stored: Path
    plain: Path
    said: Tensors  # of what is quantized
    sources: dict[str, int]  # bytes of the tensors that make each of them, but for what says where columns are

    @property
    def vocab(self) -> int:
        return int(json.loads((self.plain / "config.json").read_text())["vocab_size"])


def write_pair(folder: Path, form: Form, config: dict[str, Any]) -> Pair:
    quantization = parse_quantization(ConfigFields({"quantization_config": form.config}, "config.json"))
    assert quantization is not None
    stored: Tensors = {}
    said: Tensors = {}
    plain = random_weights(config)
    sources: dict[str, int] = {}
    for name, weight in plain.items():
        module = name.removesuffix(".weight")
        inside = ".layers." in name and weight.ndim == (3 if form.stacks else 2) and "bias" not in name
        if not inside or quantization.scheme_of(module) is None or name.endswith(("mlp.gate.weight", "router.weight")):
            stored[name] = weight
            continue
        tensors, said[name] = form.write(weight)
        stored |= {module + end: value for end, value in tensors.items()}
        beside = (".weight_shape", "g_idx", ".bias", ".input_scale")
        sources[name] = sum(value.nbytes for end, value in tensors.items() if not end.endswith(beside))
    folder_of_codes = write_folder(folder / "stored", {**config, "quantization_config": form.config}, stored)
    return Pair(form, folder_of_codes, write_folder(folder / "plain", config, plain | said), said, sources)


CHOSEN = [(form, model) for form in FORMS for model in PAIRS.get(form, ("llama",))]


@pytest.fixture(scope="module", params=CHOSEN, ids=", ".join)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    form, model = request.param
    return write_pair(tmp_path_factory.mktemp("stored"), FORMS[form], config_of(model))


def tokens_of(pair: Pair) -> list[int]:
    tokens: list[int] = np.random.default_rng(1).integers(0, pair.vocab, LENGTH).tolist()
    return tokens


def test_tensors_say_what_the_formats_own_tools_read(pair: Pair) -> None:
    config = ConfigFields(json.loads((pair.stored / "config.json").read_text()), "config.json")
    with Checkpoint(pair.stored, parse_quantization(config)) as checkpoint:
        assert pair.said
        for name, wanted in pair.said.items():
            coded = checkpoint.quantized_tensor(name)
            assert coded is not None
            assert coded.shape == wanted.shape
            stack = wanted.swapaxes(1, 2) if coded.transposed else wanted[None]
            for index, matrix_NK in enumerate(stack):
                read_NK = coded.matrix(index).dequantized()
                np.testing.assert_allclose(read_NK, matrix_NK, rtol=1e-5, atol=2e-6)


def test_log_probabilities_are_those_of_the_plain_numbers(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="penstock"):
        bench = RunnerBench(pair.stored)
    taken_apart = any("kv_b_proj" in name for name in pair.said)
    assert ("4 quantized matrices are held in the compute type" in caplog.text) == taken_apart
    assert ("held in the compute type" in caplog.text) == taken_apart
    assert ("activations stay in the compute type" in caplog.text) == bool(bench.spec.quantization.activations)
    if bench.ops.numerics.startswith("cpp"):
        assert isinstance(bench.runner.program, RecordedProgram)
    want_TV = read_rows(RunnerBench(pair.plain), tokens_of(pair), LENGTH)
    assert np.abs(read_rows(bench, tokens_of(pair), LENGTH) - want_TV).max() <= TOLERANCE
    assert len(np.unique(want_TV.argmax(1))) > 5


def test_no_bit_depends_on_the_company(pair: Pair) -> None:
    bench = RunnerBench(pair.stored, "bf16", threads=2)
    tokens = tokens_of(pair)
    sampling = SamplingParams(seed=3, max_tokens=4, temperature=0.8, logprobs=5)
    told = []
    for chunk, company in ((LENGTH, 0), (7, 0), (23, 30)):
        request, others = bench.request(tokens, sampling), bench.request(tokens[::-1])
        logprobs: list[Any] = []
        while len(request.output) < 4:
            work = [(request, min(chunk, request.uncomputed))]
            if company:
                work.insert(0, (others, min(company, others.uncomputed) or 1))
            logprobs += bench.step(work)[-1].logprobs
        told.append((tuple(request.output), tuple(logprobs)))
    assert told[0] == told[1] == told[2]


ADAPTED = [
    pytest.param(form, marks=() if form in ("fp8 in blocks", "gptq 4, shuffled") else pytest.mark.long)
    for form in FORMS
]


@pytest.mark.parametrize("form", ADAPTED)
def test_an_adapter_adds_to_codes_what_it_adds_to_numbers(form: str, tmp_path: Path) -> None:
    """Also where columns of a product lie in another order; and, to the bit, in any company."""
    pair = write_pair(tmp_path, FORMS[form], config_of(PAIRS.get(form, ("llama",))[0]))
    adapter = write_adapter(tmp_path / "lora", pair.plain, rank=4, seed=1)
    stored, plain, tokens = RunnerBench(pair.stored), RunnerBench(pair.plain), tokens_of(pair)
    got_TV = read_rows(stored, tokens, LENGTH, adapter=stored.load_adapter(adapter))
    assert np.abs(got_TV - read_rows(plain, tokens, LENGTH, adapter=plain.load_adapter(adapter))).max() <= TOLERANCE
    assert np.abs(got_TV - read_rows(stored, tokens, LENGTH)).max() > 0.1
    bench, told = RunnerBench(pair.stored, "bf16", threads=2), []
    sampling, ref = SamplingParams(seed=3, max_tokens=1, prompt_logprobs=5), bench.load_adapter(adapter)
    for chunk, company in ((LENGTH, 0), (7, 30)):
        request, other = bench.request(tokens, sampling, adapter=ref), bench.request(tokens[::-1])
        read: list[Any] = []
        while request.uncomputed > 1 or not request.output:
            beside = [(other, min(company, other.uncomputed - 1))] if company and other.uncomputed > 1 else []
            drawn = bench.step([*beside, (request, min(chunk, request.uncomputed))])[-1]
            read += drawn.prompt_logprobs
        told.append((tuple(request.output), tuple(read)))
    assert told[0] == told[1]


def test_a_plan_counts_the_bytes_of_the_files(pair: Pair) -> None:
    """Scales are counted as 16 bits where the file may have them in another form."""
    outline = read_outline(pair.stored)
    how = weight_encoding(PlanForm.STORED, outline)
    assert model_size(outline.spec, outline.layout, how).weight_bytes > 0
    counted = dict.fromkeys(pair.sources, 0.0)
    for weight in outline.layout.weights:
        for part in weight.parts:
            if part.tensor in counted and part.groups is None and hasattr(weight, "segments"):
                counted[part.tensor] += how.bits_of_part(weight, part) * part.numbers / 8
    checked = {name: size for name, size in counted.items() if size}
    assert checked
    for name, size in checked.items():
        numbers = pair.said[name].size
        if pair.form.scale_bits:
            assert size == pytest.approx(pair.sources[name], rel=0.1), name
        else:
            assert abs(size - pair.sources[name]) / numbers <= 8 / SIZES["hidden_size"], name


def test_columns_that_differ_from_part_to_part_are_dequantized_with_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of("llama")
    seeds = iter(range(1000))

    def write(weight_NK: NDArray[np.float32]) -> Any:
        return gptq(4, 32, version=1, shuffled=True, seed=next(seeds))(weight_NK)

    each = Form(config=FORMS["gptq 4, shuffled"].config, write=write)
    pair = write_pair(tmp_path, each, config)
    with caplog.at_level(logging.INFO, logger="penstock"):
        bench = RunnerBench(pair.stored)
    assert "4 quantized matrices are held in the compute type" in caplog.text
    assert "0.gate_up, 0.qkv, 1.gate_up, ..." in caplog.text
    got_TV, want_TV = (read_rows(own, tokens_of(pair), LENGTH) for own in (bench, RunnerBench(pair.plain)))
    assert np.abs(got_TV - want_TV).max() <= TOLERANCE


@pytest.mark.parametrize("stacked", ["gpt_oss_20b_bf16", "llama_4_scout_text"])
def test_stacks_are_read_by_several_threads(tmp_path: Path, stacked: str) -> None:
    changes = {**SIZES, **(LLAMA4 if "llama" in stacked else {})}
    config = {**next(case for case in CASES if case.config == stacked).shrunk(), **changes}
    folder = write_folder(tmp_path / "m", config, random_weights(config))
    ops, spec = NativeOps(families()[0], "bf16"), inspect_model(folder)
    one, many = load_model(folder, spec, ops), load_model(folder, spec, ops, threads=3)
    assert one.fingerprint == many.fingerprint
    assert threading.active_count() == 1 or all("ThreadPool" not in thread.name for thread in threading.enumerate())
    x = {k: ops.compute(np.random.default_rng(k).standard_normal((3, k))) for k in (64, 96, 128)}
    for name in ("1.experts.0.gate_up", "1.experts.3.down"):
        wanted, got = (ops.to_numpy(ops.linear(x[m.weights[name].k], m.weights[name])) for m in (one, many))
        np.testing.assert_array_equal(got, wanted)
