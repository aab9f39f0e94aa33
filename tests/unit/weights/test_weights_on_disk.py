"""What is written to disk, or hashed into a name on disk, has the bytes that it had in 0.1.0.

Names of classes and fields stand in files and in fingerprints: a renamed one keeps its stored form (``tag=``,
``rename=``).  The goldens were made by the code of 0.1.0 before its classes were renamed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from blake3 import blake3

from penstock.kernels.operands import Sparse
from penstock.weights import compression_convert
from penstock.weights.architecture.spec import ModelSpec, PoolerConfig, PoolingType, ScoreFunction
from penstock.weights.checkpoint_reader import Checkpoint
from penstock.weights.compression_convert import ConvertedTensor, JournalHeader, compress_folder
from penstock.weights.compression_format import GPU, OriginalTensor
from penstock.weights.config_json import ConfigFields
from penstock.weights.families.registry import checkpoint_format
from penstock.weights.files import FileStamp
from penstock.weights.fingerprint import Fingerprint, fingerprint
from penstock.weights.inspect import inspect_model
from penstock.weights.lora import LoraFileLimits, lora_targets, read_lora_adapter
from penstock.weights.manifest import FileRecord, Manifest, ManifestStore
from penstock.weights.quantization.config import parse_quantization
from tiny_models import Tensors, llama_config, safetensors_bytes, write_tokenizer

FIXTURES = Path(__file__).parents[2] / "fixtures"
FINGERPRINTS: dict[str, str] = json.loads((FIXTURES / "fingerprints.json").read_text())

_COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
QUANTIZED: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": ["lm_head"]},
    "fbgemm": {"quant_method": "fbgemm_fp8"},
    "gptq": {"quant_method": "gptq", "bits": 8, "group_size": 32, "checkpoint_format": "gptq_v2"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32},
    "mxfp4": {"quant_method": "mxfp4"},
    "packed": _COMPRESSED
    | {
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
            }
        }
    },
}


def spec_of(name: str) -> ModelSpec:
    config = json.loads((FIXTURES / f"configs/{name}.json").read_text())
    (architecture,) = config["architectures"]
    return checkpoint_format(architecture, name).parse(ConfigFields(config, name))


def variants() -> dict[str, ModelSpec]:
    """Every model of the fixtures, and one with each other thing that a fingerprint covers."""
    found = {path.stem: spec_of(path.stem) for path in sorted((FIXTURES / "configs").glob("*.json"))}
    plain = found["llama_3_2_1b"]
    for name, stored in QUANTIZED.items():
        quantization = parse_quantization(ConfigFields({"quantization_config": stored}, name))
        found[f"quantized: {name}"] = msgspec.structs.replace(plain, quantization=quantization)
    pooler = PoolerConfig(pooling=PoolingType.MEAN, causal=False, labels=3, scores=ScoreFunction.SOFTMAX, dense=True)
    found["pooler"] = msgspec.structs.replace(plain, pooler=pooler)
    found["sparse"] = msgspec.structs.replace(plain, sparse=Sparse(sinks=1, window=2, chosen=3, start=4))
    return found


def test_models_have_the_fingerprints_that_they_had() -> None:
    found = {name: Fingerprint().hexdigest(spec) for name, spec in variants().items()}
    assert found == FINGERPRINTS


def bits(name: str, *shape: int) -> np.ndarray[Any, Any]:
    """Numbers of about 0.02 that no release of a library changes."""
    raw = np.frombuffer(blake3(name.encode()).digest(length=2 * int(np.prod(shape))), np.uint16).reshape(shape)
    return ((raw & 0x80FF) | 0x3C00).view(ml_dtypes.bfloat16)


CONFIG = llama_config(num_hidden_layers=1, vocab_size=64, hidden_size=64, intermediate_size=96)


def tensors() -> Tensors:
    shapes = {
        "model.embed_tokens": (64, 64),
        "model.layers.0.input_layernorm": (64,),
        "model.layers.0.self_attn.q_proj": (64, 64),
        "model.layers.0.self_attn.k_proj": (32, 64),
        "model.layers.0.self_attn.v_proj": (32, 64),
        "model.layers.0.self_attn.o_proj": (64, 64),
        "model.layers.0.post_attention_layernorm": (64,),
        "model.layers.0.mlp.gate_proj": (96, 64),
        "model.layers.0.mlp.up_proj": (96, 64),
        "model.layers.0.mlp.down_proj": (64, 96),
        "model.norm": (64,),
        "lm_head": (64, 64),
    }
    return {f"{name}.weight": bits(name, *shape) for name, shape in shapes.items()}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_tokenizer(folder, 64)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors()))
    return folder


def test_weights_have_the_fingerprint_that_they_had(model: Path) -> None:
    with Checkpoint(model) as checkpoint:
        assert fingerprint(checkpoint, inspect_model(model)) == (
            "cdc0df173a013f27e6fdb6e6f35e5c4ecf1a897d74ebba7d4ec7271e3873c9f0"
        )


COMPRESSED = {
    "": "5899055c9c9c6eed748aa23261f481f1f2c33dafe0255034fdad5ba8b9efbba2",
    GPU: "0d0dbe9a4dcf66a193cc8773d76efdfb781f788896a35d919a3780ee9bc03653",
}


@pytest.mark.parametrize("layout", COMPRESSED, ids=["cpu", "gpu"])
def test_compressed_files_have_the_bytes_that_they_had(model: Path, tmp_path: Path, layout: str) -> None:
    compress_folder(model, tmp_path / "packed", threads=1, report=lambda done: None, layout=layout)
    assert blake3((tmp_path / "packed/model.safetensors").read_bytes()).hexdigest() == COMPRESSED[layout]


def test_an_interrupted_compression_goes_on_from_a_journal_of_before(model: Path, tmp_path: Path) -> None:
    """The journal as 0.1.0 wrote it, with its first tensor done: only the others are compressed again."""
    target = tmp_path / "packed"
    done = compress_folder(model, target, threads=1, report=lambda done: None)
    whole = target / "model.safetensors"
    start = 8 + int.from_bytes(whole.read_bytes()[:8], "little")
    with Checkpoint(model) as checkpoint:
        started = JournalHeader(compression_convert._identity(checkpoint.files[0]), start)
    first = done[0]
    lines = [
        f'{{"source":"{started.source}","data_start":{start},"layout":""}}',
        f'{{"name":"{first.name}","original":{msgspec.json.encode(first.original).decode()},'
        f'"original_bytes":{first.original_bytes},"begin":0,"nbytes":{first.nbytes}}}',
    ]
    journal = "".join(f"{line}\n" for line in lines)
    assert journal.encode() == b"".join(msgspec.json.encode(line) + b"\n" for line in (started, first))
    shutil.move(whole, target / "model.safetensors.partial")
    (target / "model.safetensors.journal").write_text(journal)
    reported: list[ConvertedTensor] = []
    again = compress_folder(model, target, threads=1, report=reported.append)
    assert again == done
    assert blake3(whole.read_bytes()).hexdigest() == COMPRESSED[""]


def test_a_manifest_has_the_form_that_it_had() -> None:
    entry = OriginalTensor(dtype="BF16", shape=(2, 3), blake3="ab" * 32, code=(118, 1), checksum="cd" * 16, layout=GPU)
    record = FileRecord(FileStamp(size=1, mtime_ns=2, ctime_ns=3, inode=4), 5, {"a": entry})
    raw = msgspec.json.encode(Manifest(1, "/models/a", {"model.safetensors": record}))
    assert raw.decode() == (
        '{"version":1,"folder":"/models/a","files":{"model.safetensors":{"stamp":{"size":1,"mtime_ns":2,"ctime_ns":3,'
        f'"inode":4}},"hashed_ns":5,"tensors":{{"a":{{"dtype":"BF16","shape":[2,3],"blake3":"{"ab" * 32}",'
        f'"code":[118,1],"checksum":"{"cd" * 16}","layout":"gpu"}}}}}}}}}}'
    )


def test_a_manifest_lies_where_it_lay(model: Path, tmp_path: Path) -> None:
    with Checkpoint(model) as checkpoint:
        memory = ManifestStore(tmp_path / "cache").open(checkpoint)
        memory.verify_and_save(
            {name: OriginalTensor(dtype="BF16", shape=(1,), blake3="0" * 64) for name in checkpoint.names}
        )
    name = blake3(str(model.resolve()).encode()).hexdigest()[:32]
    body, _, check = (tmp_path / f"cache/manifests/{name}.json").read_bytes().partition(b"\n")
    assert check == blake3(body).hexdigest().encode() + b"\n"
    assert json.loads(body)["folder"] == str(model.resolve())


def test_an_adapter_has_the_fingerprint_that_it_had(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "alpha_pattern": {"q_proj": 4}, "target_modules": []}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    parts: Tensors = {}
    for name in ("q_proj", "o_proj"):
        module = f"base_model.model.model.layers.0.self_attn.{name}"
        parts[f"{module}.lora_A.weight"] = bits(f"{name} A", 2, 64)
        parts[f"{module}.lora_B.weight"] = bits(f"{name} B", 64, 2)
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(parts))
    adapter = read_lora_adapter(
        folder, lora_targets(inspect_model(model)), LoraFileLimits(max_rank=8, max_bytes=1 << 20)
    )
    assert adapter.fingerprint == "ff5c55a182a74f6173402111f879b1f9e346dbf37c2f359fe50802288bd5cd43"
