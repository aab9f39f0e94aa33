"""Weights reach memory whole, fused as the layout says, with a fingerprint that knows content and nothing else."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.errors import ModelError
from penstock.kernels.operands import COLUMN_UNIT, PackedLinear, segment_ends
from penstock.weights.checkpoint_reader import Checkpoint
from penstock.weights.config_json import ConfigFields
from penstock.weights.families.llama import parse_llama
from penstock.weights.fingerprint import fingerprint
from penstock.weights.inspect import inspect_model
from penstock.weights.load import LoadedModel, load_model
from tiny_models import Tensors, llama_config, random_tensors, write_model, write_weights


class KeepingOps:
    """A backend that packs by keeping a copy."""

    def pack_linear(self, weight_NK: NDArray[Any], *, segments: tuple[int, ...] | None = None) -> PackedLinear:
        assert weight_NK.flags.aligned
        assert weight_NK.flags.c_contiguous
        n, k = weight_NK.shape
        return PackedLinear(n, k, segments or (k,), weight_NK.copy(), weight_NK.nbytes)

    def loading(self, nbytes: int) -> None:
        return

    def vector(self, weight_D: NDArray[Any]) -> NDArray[np.float32]:
        assert weight_D.flags.aligned
        return weight_D.astype(np.float32)


SPEC = parse_llama(ConfigFields(llama_config(), "config.json"))


def load(folder: Path, progress: Any = None) -> LoadedModel:
    return load_model(folder, inspect_model(folder), KeepingOps(), progress)  # type: ignore[arg-type]


def test_weights_are_fused_and_segmented(tmp_path: Path) -> None:
    config = llama_config(head_dim=24, intermediate_size=100)
    tensors = random_tensors(config)
    loaded = load(write_model(tmp_path, config))
    names = ["attention_norm", "qkv", "out", "mlp_norm", "gate_up", "down"]
    assert list(loaded.weights) == ["embed", *(f"{i}.{name}" for i in range(3) for name in names), "norm", "head"]
    layer = "model.layers.1."
    qkv = np.concatenate([tensors[f"{layer}self_attn.{name}_proj.weight"] for name in "qkv"])
    gate_up = np.concatenate([tensors[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up")])
    assert loaded.weights["1.qkv"].data.tobytes() == qkv.tobytes()
    assert loaded.weights["1.gate_up"].data.tobytes() == gate_up.tobytes()
    assert loaded.weights["1.qkv"].segments == (64,)
    assert loaded.weights["1.out"].segments == segment_ends(96, 24)
    assert loaded.weights["1.down"].segments == segment_ends(100, COLUMN_UNIT)
    assert loaded.weights["head"].segments == (64,)
    assert loaded.nbytes == sum(weight.nbytes for name, weight in tensors.items() if "norm" not in name)


def test_a_tied_model_has_one_table(tmp_path: Path) -> None:
    config = llama_config(tie_word_embeddings=True)
    loaded = load(write_model(tmp_path, config))
    assert "head" not in loaded.weights
    stray = {"lm_head.weight": random_tensors(llama_config())["lm_head.weight"]}
    write_weights(tmp_path, random_tensors(config) | stray)
    assert "head" not in load(tmp_path).weights


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    config = llama_config()
    load(write_model(tmp_path, config, shards=3), progress=lambda done, total: seen.append((done, total)))
    total = sum(tensor.nbytes for tensor in random_tensors(config).values())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) > 10


def test_tensors_may_begin_at_any_byte(tmp_path: Path) -> None:
    write_model(tmp_path, llama_config(), dtype="fp32")
    want = load(tmp_path)
    raw = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length] + b" "
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    got = load(tmp_path)
    assert got.fingerprint == want.fingerprint
    assert got.weights["embed"].data.tobytes() == want.weights["embed"].data.tobytes()


def test_parts_of_different_types_are_fused_without_loss(tmp_path: Path) -> None:
    config = llama_config()
    write_model(tmp_path, config)
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors = random_tensors(config)
    tensors[name] = random_tensors(config, seed=1, dtype="fp16")[name]
    write_weights(tmp_path, tensors)
    keys_NK = load(tmp_path).weights["0.qkv"].data[64:96]
    assert keys_NK.dtype == np.float32
    assert (keys_NK == tensors[name].astype(np.float32)).all()


def test_the_peak_is_the_weights_and_one_more(tmp_path: Path) -> None:
    config = llama_config(hidden_size=256, intermediate_size=1024, num_hidden_layers=6, vocab_size=512)
    folder = write_model(tmp_path, config)
    spec = inspect_model(folder)
    tracemalloc.start()
    loaded = load_model(folder, spec, KeepingOps())  # type: ignore[arg-type]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    largest = max(weight.nbytes for weight in loaded.weights.values() if isinstance(weight, PackedLinear))
    assert peak <= loaded.nbytes + largest + 300_000  # names, headers, layout


def digest_of(folder: Path, tensors: Tensors, shards: int = 1) -> str:
    folder.mkdir()
    write_weights(folder, tensors, shards)
    with Checkpoint(folder) as checkpoint:
        return fingerprint(checkpoint, SPEC)


def test_the_fingerprint_does_not_know_shards_or_order(tmp_path: Path) -> None:
    tensors = random_tensors(llama_config())
    backwards = dict(reversed(list(tensors.items())))
    digests = {
        digest_of(tmp_path / "one", tensors),
        digest_of(tmp_path / "four", tensors, shards=4),
        digest_of(tmp_path / "backwards", backwards, shards=2),
    }
    assert len(digests) == 1
    assert len(digests.pop()) == 64


def test_the_fingerprint_knows_every_bit_name_shape_and_type(tmp_path: Path) -> None:
    tensors = random_tensors(llama_config())
    name = "model.layers.2.mlp.down_proj.weight"
    flipped = tensors[name].copy()
    flipped.view(np.uint16)[-1, -1] ^= 1
    variants = {
        "same": tensors,
        "bit": tensors | {name: flipped},
        "shape": tensors | {name: tensors[name].reshape(96, 64)},
        "type": tensors | {name: tensors[name].view(np.float16)},
        "name": {("other" if key == name else key): value for key, value in tensors.items()},
        "less": {key: value for key, value in tensors.items() if key != name},
        "swapped": tensors
        | {
            "model.layers.0.mlp.gate_proj.weight": tensors["model.layers.0.mlp.up_proj.weight"],
            "model.layers.0.mlp.up_proj.weight": tensors["model.layers.0.mlp.gate_proj.weight"],
        },
    }
    digests = {digest_of(tmp_path / case, variant) for case, variant in variants.items()}
    assert len(digests) == len(variants)


def test_the_fingerprint_knows_the_configuration_that_changes_bits(tmp_path: Path) -> None:
    write_weights(tmp_path, random_tensors(llama_config()))
    with Checkpoint(tmp_path) as checkpoint:
        plain = fingerprint(checkpoint, SPEC)
        for change in ({"rms_norm_eps": 1e-6}, {"num_attention_heads": 2}, {"tie_word_embeddings": True}):
            assert fingerprint(checkpoint, parse_llama(ConfigFields(llama_config(**change), ""))) != plain, change
        for change in ({"rope_theta": 5.0}, {"rope_scaling": {"type": "linear", "factor": 2.0}}):
            assert fingerprint(checkpoint, parse_llama(ConfigFields(llama_config(**change), ""))) != plain, change
        assert fingerprint(checkpoint, msgspec.structs.replace(SPEC, eos_ids=(9,), max_positions=64)) == plain


def test_loading_and_hashing_alone_agree(tmp_path: Path) -> None:
    folder = write_model(tmp_path, llama_config(tie_word_embeddings=True), shards=2)
    with Checkpoint(folder) as checkpoint:
        assert load(folder).fingerprint == fingerprint(checkpoint, inspect_model(folder))


def test_files_that_changed_since_the_inspection_are_refused(tmp_path: Path) -> None:
    spec = inspect_model(write_model(tmp_path, llama_config()))
    write_weights(tmp_path, random_tensors(llama_config(intermediate_size=32)))
    with pytest.raises(ModelError, match="it must have"):
        load_model(tmp_path, spec, KeepingOps())  # type: ignore[arg-type]
