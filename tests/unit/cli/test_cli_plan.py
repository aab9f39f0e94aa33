"""``penstock plan``: the figures, the picture, and what would help."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type

from penstock.bundled import storyteller
from penstock.cli import plan
from penstock.cli.main import main
from penstock.config.facts import GpuFacts, GpuReport, MachineFacts
from penstock.config.resolve import resolve
from penstock.config.schema import ServeConfig
from penstock.kernels.native.backend import NativeOps
from penstock.launch import compose
from penstock.launch.machine import free_memory
from penstock.weights.checkpoint_reader import Checkpoint
from penstock.weights.eagle import inspect_draft_head
from penstock.weights.inspect import inspect_model, read_outline
from penstock.weights.load import load_model
from tiny_adapters import write_adapter
from tiny_gguf import write_gguf
from tiny_models import llama_config, random_tensors

CONFIGS = Path(__file__).parents[2] / "fixtures/configs"


@pytest.fixture
def model(llama_8b: Path) -> str:
    return str(llama_8b)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_arithmetic_adds_up(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = answer(capsys, model, "--devices", "H100")
    assert code == 0
    assert found["fits"]
    assert found["parameters"] == 8_030_261_248
    assert found["weight_bytes"] == pytest.approx(2 * 8_030_261_248, rel=1e-4)
    parts = ("weight_bytes", "activation_bytes", "runtime_bytes", "kv_bytes")
    assert sum(found[part] for part in parts) == found["devices"]["memory_bytes"]
    assert found["kv_tokens"] == found["kv_bytes"] // (2 * 32 * 8 * 128 * 2) // 16 * 16
    assert found["plan"]["stages"][0]["layers"] == [0, 32]


def test_without_devices_it_is_planned_for_what_is_here(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, found = answer(capsys, model)
    assert found["devices"]["name"] == "cpu"
    assert 0 < found["devices"]["memory_bytes"] <= 1.01 * free_memory()


def test_a_gguf_file_is_planned_with_the_bits_of_its_header(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, config = tmp_path / "letters.gguf", llama_config(hidden_size=256, intermediate_size=512)
    write_gguf(path, config, random_tensors(config), {"v_proj": Type.Q6_K, "embed": Type.Q8_0, "": Type.Q4_K})
    _, found = answer(capsys, str(path))
    loaded = load_model(path, inspect_model(path), NativeOps("portable", "bf16"))
    assert found["weight_bytes"] == pytest.approx(loaded.nbytes, rel=0.02)  # vectors aside
    assert [row["plan"] for row in found["plans"]] == ["tp1"]  # codes are not divided


@pytest.mark.parametrize("kept", ["auto", "fp8_e4m3"])
def test_the_plan_of_a_gpu_here_is_what_would_be_served(
    kept: str, model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One arithmetic: pages are what weights, the largest step and the runtime leave of what is free."""
    facts = GpuFacts(name="NVIDIA H200", capability=(9, 0), total_bytes=150 * 10**9, free_bytes=149 * 10**9)
    for module in (plan, compose):
        monkeypatch.setattr(module, "gpu_report", lambda: GpuReport(gpu=facts, reason=""))
    _, found = answer(capsys, model, "--kv-dtype", kept)
    assert found["devices"] == {"count": 1, "name": "NVIDIA H200", "memory_bytes": facts.free_bytes}
    served = compose.resolve_here(ServeConfig(dtype="bf16", kv_dtype=kept), "llama", read_outline(Path(model)).spec)  # type: ignore[arg-type]
    assert served.device == "cuda"
    assert found["kv_tokens"] == pytest.approx(16 * served.scheduler.pages, abs=16)
    assert served.scheduler.pages * served.page_bytes == pytest.approx(found["kv_bytes"], rel=1e-4)


def test_codes_take_half_the_pages_bytes(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And a byte for each token's key and value of a head; on processors nobody has kernels for them."""
    _, plain = answer(capsys, model, "--devices", "H100")
    code, coded = answer(capsys, model, "--devices", "H100", "--kv-dtype", "fp8_e4m3")
    assert code == 0
    assert (plain["kv_dtype"], coded["kv_dtype"]) == ("bf16", "fp8_e4m3")
    assert coded["kv_bytes"] == plain["kv_bytes"]
    assert coded["kv_tokens"] == coded["kv_bytes"] // (2 * 32 * 8 * (128 + 1)) // 16 * 16
    small = ("--devices", "18GiB")
    (offered,) = [line for line in answer(capsys, model, *small)[1]["remedies"] if line.startswith("--kv-dtype")]
    assert offered.startswith("--kv-dtype fp8_e4m3 (")
    assert f"({answer(capsys, model, *small, '--kv-dtype', 'fp8_e4m3')[1]['kv_tokens']:,} tokens, other" in offered
    assert main(["plan", model, "--devices", "cpu:64GiB", "--kv-dtype", "fp8_e4m3"]) == 2
    assert "it takes a GPU" in capsys.readouterr().err


def test_two_devices_divide_layers_and_keep_norms_twice(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, one = answer(capsys, model, "--devices", "1x24GiB")
    _, two = answer(capsys, model, "--devices", "2x24GiB")
    assert two["plan"]["tensor"] == 2
    assert one["weight_bytes"] < two["weight_bytes"] < 1.001 * one["weight_bytes"]
    assert two["kv_tokens"] > 2 * one["kv_tokens"]


def test_all_plans_are_shown_with_their_tokens_and_their_speed(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, "--devices", "2xH100"]) == 0
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines() if re.match(r"(tp2|pp2) ", line)]
    (_, found) = answer(capsys, model, "--devices", "2xH100")
    assert [row[0] for row in rows] == [each["plan"] for each in found["plans"]] == ["tp2", "pp2"]
    assert [row[1] == "*" for row in rows] == [True, False]
    assert [row[-1] for row in rows] == [f"{each['token_ms']:.2f}" for each in found["plans"]]
    assert f"{found['plans'][1]['kv_tokens']:,}" in rows[1]
    (_, here) = answer(capsys, model, "--devices", "2x48GiB")
    assert [each["token_ms"] for each in here["plans"]] == [None, None]  # no data sheet


def test_ranks_of_a_host_are_shown_with_the_commands_that_serve_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has a core: what is printed is carried out without a warning."""
    here = MachineFacts(cpus=tuple(range(4)), cores=4, memory_bytes=64 << 30, kernel_families=("avx2",))
    monkeypatch.setattr(plan, "machine_facts", lambda _: here)
    path = str(CONFIGS / "llama_3_2_1b.json")
    _, found = answer(capsys, path, "--devices", "cpu:64GiB")
    assert [each["plan"] for each in found["plans"]] == ["tp1", "tp2", "tp4", "pp2", "tp2,pp2", "pp4"]
    one, two, *_ = found["plans"]
    assert one["kv_tokens"] == two["kv_tokens"] == found["kv_tokens"]  # all ranks are in one memory
    assert 0.5 < two["weight_bytes"] / one["weight_bytes"] < 0.75  # half, but for the embedding
    for each in found["plans"]:
        assert each["command"].startswith(f"penstock serve {path} --device cpu")
        words = each["command"].split()[3:]
        asked = dict(zip(words, [*words[1:], ""], strict=True)).get("--parallel")
        facts = compose.model_facts("llama", read_outline(Path(path)).spec)
        made = resolve(ServeConfig(aggregated="--aggregated" in words, parallel=asked, device="cpu"), here, facts)
        assert (made.workers[0].mesh.name, made.warnings) == (each["plan"], ())
    assert main(["plan", path, "--devices", "cpu:64GiB"]) == 0
    assert f"{two['token_ms']:.2f}  {two['command']}" in capsys.readouterr().out
    _, lossless = answer(capsys, path, "--devices", "cpu:64GiB", "--weights", "lossless")
    assert (
        0.7 < lossless["plans"][1]["weight_bytes"] / two["weight_bytes"] < 0.71
    )  # they stay compressed where they are cut
    assert lossless["plans"][1]["kv_tokens"] == lossless["kv_tokens"] > found["kv_tokens"]
    _, bundled = answer(capsys, "--devices", "cpu:64GiB", "--speculate", "auto")
    assert [each["plan"] for each in bundled["plans"]] == ["tp1"]  # with a draft head nothing is divided
    _, latent = answer(capsys, str(CONFIGS / "deepseek_v2_lite.json"), "--devices", "cpu:64GiB")
    assert [each["plan"] for each in latent["plans"]] == ["tp1"]


def test_what_does_not_fit_says_what_would_help(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["plan", model, "--devices", "1x14GiB"])
    shown = " ".join(capsys.readouterr().out.split())
    assert code == 1
    assert "does not fit" in shown
    assert "too much on a device" in shown
    assert "--weights lossless (" in shown
    assert re.search(r"--devices 4x14GiB \([\d,]+ tokens, a plan only\)", shown)
    code, found = answer(capsys, model, "--devices", "1x14GiB", "--weights", "lossless", "--max-model-len", "8192")
    assert code == 0
    assert found["kv_tokens"] >= 8192


@pytest.mark.parametrize(
    ("devices", "reason"),
    [
        ("1xH100", ""),
        ("cpu:64GiB", ""),
        ("8xH100", "one model runs on one GPU"),
        ("1xRTX4090", "RTX4090 has too little shared memory"),
        ("1xMI300X", "MI300X has no CUDA"),
    ],
)
def test_the_plan_tells_what_serve_can_use_today(
    devices: str, reason: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = answer(capsys, model, "--devices", devices)
    assert found["servable"] == (not reason)
    assert found["why_not_servable"].startswith(reason)
    assert bool(found["command"]) == (not reason)
    main(["plan", model, "--devices", devices])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("a plan only: `penstock serve` cannot use" if reason else "serve it: penstock serve ")
    assert reason in last


def test_the_command_serves_what_was_planned(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(model).parent
    asked = ("--devices", "1xH100", "--kv-dtype", "fp8_e4m3", "--max-model-len", "9000")
    _, found = answer(capsys, model, *asked)
    assert found["command"] == f"penstock serve {folder} --device cuda --max-model-len 9000 --kv-dtype fp8_e4m3"
    _, found = answer(capsys, str(folder), "--devices", "1xH100", "--weights", "lossless")
    out = f"{folder.name}-compressed"
    assert found["command"] == f"penstock compress {folder} {out} && penstock serve {out} --device cuda"
    assert answer(capsys, model, "--devices", "1xH100", "--weights", "int4")[1]["command"] == ""


def test_requests_at_once(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, found = answer(capsys, model, "--devices", "H100", "--max-model-len", "8192")
    assert found["requests_at_once"] == found["kv_bytes"] // (2 * 32 * 8 * 128 * 2 * 8192)
    assert main(["plan", model, "--devices", "H100", "--max-model-len", "8192"]) == 0
    shown = capsys.readouterr().out
    assert f"fits: {found['requests_at_once']:,} requests of 8,192 tokens at once" in shown
    (bar,) = [line for line in shown.splitlines() if line.endswith(" for KV")]
    assert set(bar.split()[0]) == {"w", "a", "r", "k"}, "without colors the parts differ by letter"


@pytest.mark.parametrize("words", [[], ["storyteller"], ["storyteller", "--devices", "cpu"]])
def test_the_bundled_model_on_this_host(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "serve it: penstock serve --device cpu"


def test_an_encoder_has_no_kv_pages(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(CONFIGS / "bge_large.json")
    assert main(["plan", path, "--devices", "cpu:64GiB"]) == 0
    assert capsys.readouterr().out.startswith("fits: 334.1 M parameters, 0.6 GiB of bf16 weights on cpu with 64.0 GiB")
    code, found = answer(capsys, path, "--devices", "cpu:0.5GiB")
    assert (code, found["fits"], found["weight_bytes"] // 334_092_288) == (1, False, 2)


def test_a_smaller_context_is_offered_when_that_is_what_fits(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, "--devices", "1x20GiB"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "fits, but not with all its positions" in shown
    assert "--max-model-len" in shown
    assert "the same answers)" in shown


def test_what_is_loaded_beside_the_model_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = storyteller()
    adapter = write_adapter(tmp_path / "tales", model)
    words = (str(model), "--devices", "cpu:1GiB")
    _, alone = answer(capsys, *words)
    _, found = answer(capsys, *words, "--speculate", "auto", "--lora", f"tales={adapter}")
    spec = inspect_model(model)
    head = inspect_draft_head(model / "head", spec)
    with Checkpoint(model / "head") as checkpoint:
        assert head.parameters == sum(
            math.prod(checkpoint.info(name).shape) for name in checkpoint.names if name not in ("d2t", "t2d")
        )
    a_token = 2 * 2 * head.attention.kv_heads * head.attention.head_dim
    size = (adapter / "adapter_model.safetensors").stat().st_size
    assert found["beside"] == [
        {"name": "draft head", "bytes": 2 * head.parameters + 2 * 16 * 1024 * a_token},
        {"name": "LoRA adapters", "bytes": size},
    ]
    assert alone["kv_bytes"] - found["kv_bytes"] == found["beside_bytes"] == sum(b["bytes"] for b in found["beside"])
    _, more = answer(capsys, *words, "--lora", f"tales={adapter}", "--allow-lora-updating", "--lora-memory", "32MiB")
    assert more["beside_bytes"] == size + 2 * ((32 << 20) - size)
    _, drafted = answer(capsys, *words, "--speculate", "draft", "--draft-model", str(model))
    assert drafted["beside_bytes"] > 2 * spec.parameters
    assert main(["plan", *words, "--speculate", "head"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"M weights in bf16; in each worker 16 contexts of 1,024 tokens, {a_token} bytes each" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{model}", "--devices", "H100", "--speculate", "draft"], "--speculate draft needs --draft-model"),
        (["{model}", "--devices", "H100", "--speculate", "head"], "has no folder head; name a head"),
        (["{model}", "--devices", "H100", "--draft-model", "x"], "--draft-model x: only used by --speculate head"),
        (["{model}", "--devices", "H100", "--speculate", "yes"], "--speculate: "),
        (["missing/", "--devices", "H100"], "no such file or folder"),
        (["{model}", "--devices", "8xH900"], "device 'H900' is not known; expected COUNTxNAME"),
        (["{model}", "--devices", "2xcpu:64GiB"], "the processors of one host share its memory"),
        (["{model}", "--devices", "H100", "--max-model-len", "0"], "--max-model-len must be at least 1"),
        (["{folder}", "--devices", "H100"], "architecture 'NoSuchModel' cannot be served"),
    ],
)
def test_bad_words_are_refused(
    words: list[str], said: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"architectures": ["NoSuchModel"]}))
    assert main(["plan", *(word.format(model=model, folder=other) for word in words)]) == 2
    assert said in capsys.readouterr().err


GPT_OSS_BYTES = 13_761_264_768
"""``total_size`` in the published index of openai/gpt-oss-20b."""

GPT_OSS_STORED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def test_gpt_oss_has_the_bytes_of_its_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    config = json.loads((CONFIGS / "gpt_oss_20b_bf16.json").read_text())
    path.write_text(json.dumps({**config, "quantization_config": GPT_OSS_STORED}))
    _, found = answer(capsys, str(path), "--devices", "L40S")
    assert found["weights"] == "mxfp4"
    assert found["weight_bytes"] == pytest.approx(GPT_OSS_BYTES, rel=2e-3)


def test_llama_4_scout_on_two_h200(capsys: pytest.CaptureFixture[str]) -> None:
    """Only a quarter of the layers read everything; the others keep one chunk of 8,192 tokens.

    And what one step may compute behind it, 2,048 tokens, and a page that is given back with the next.
    """
    _, found = answer(capsys, str(CONFIGS / "llama_4_scout.json"), "--devices", "2xH200")
    assert found["fits"]
    assert found["kv_bytes"] > 76 << 30
    assert found["kv_tokens"] >= 1_630_000
    assert [each["plan"] for each in found["plans"]] == ["tp2", "pp2"]
    _, lossless = answer(capsys, str(CONFIGS / "llama_4_scout.json"), "--devices", "2xH200", "--weights", "lossless")
    assert lossless["kv_tokens"] >= 2_900_000
    a_layer = 2 * 8 * 128 * 2
    assert found["kv_bytes"] == pytest.approx(a_layer * (12 * found["kv_tokens"] + 36 * (8192 + 2048 + 16)), rel=1e-4)


KIMI_STORED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "strategy": "group"}}},
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
}


@pytest.mark.long
def test_kimi_on_eight_h100(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As K2.5 is stored: a model with eyes around a text model, of which the routed experts have 4 bits."""
    inner = json.loads((CONFIGS / "kimi_k2_bf16.json").read_text())
    path = tmp_path / "config.json"
    inner["quantization_config"] = KIMI_STORED
    whole = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": inner}
    path.write_text(json.dumps(whole))
    code, found = answer(capsys, str(path), "--devices", "8xH100", "--max-model-len", "131072")
    assert (code, found["weights"], found["plan"]["tensor"]) == (0, "int4", 8)
    assert found["parameters"] == pytest.approx(1.026e12, rel=1e-3)
    assert found["weight_bytes"] == pytest.approx(555.6 * (1 << 30), rel=1e-3)
    assert found["kv_bytes"] > 30 << 30
    a_token = 61 * (512 + 64) * 2 * 8  # the latent vector is kept by every device
    assert found["kv_tokens"] == found["kv_bytes"] // a_token // 16 * 16
    assert [each["plan"] for each in found["plans"]] == ["tp8", "tp4,pp2", "tp2,pp4", "pp8"]
    assert [each["token_ms"] for each in found["plans"]] == sorted(each["token_ms"] for each in found["plans"])
    assert found["plans"][0]["kv_tokens"] == found["kv_tokens"] < found["plans"][-1]["kv_tokens"]
    assert main(["plan", str(path), "--devices", "8xH100", "--weights", "bf16"]) == 1
    assert "--weights int4 (" in " ".join(capsys.readouterr().out.split())
