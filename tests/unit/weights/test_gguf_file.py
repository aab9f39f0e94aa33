"""GGUF files: what is sound is read as its makers meant it, what is not is refused with file and reason."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from bench.peers.drivers.to_gguf import add_settings
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFWriter, PoolingType

from penstock.errors import ModelError
from penstock.kernels.native.backend import NativeOps, families
from penstock.weights.architecture.rope import parse_rope
from penstock.weights.config_json import ConfigFields
from penstock.weights.gguf import header as gguf_header
from penstock.weights.gguf.header import parse_gguf_header
from penstock.weights.inspect import inspect_model
from penstock.weights.load import load_model
from penstock.weights.model_files import CONFIG, load_json, model_files
from tiny_gguf import add_bytes_tokenizer, write_gguf
from tiny_models import llama_config, random_tensors, write_model

TEXT, ARRAY, U32 = 8, 9, 4


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def header(
    keys: list[tuple[str, int, bytes]] | None = None,
    tensors: list[tuple[str, tuple[int, ...], int, int]] | None = None,
    *,
    start: bytes = b"GGUF\x03\0\0\0",
    counts: tuple[int, int] | None = None,
    data: int = 0,
    alignment: int = 32,
) -> bytes:
    """A GGUF file by hand.  A tensor is (name, dimensions, type, offset)."""
    keys, tensors = keys or [], tensors or []
    raw = start + struct.pack("<QQ", *(counts or (len(tensors), len(keys))))
    for name, kind, value in keys:
        raw += text(name) + struct.pack("<I", kind) + value
    for name, extents, number, offset in tensors:
        raw += text(name) + struct.pack("<I", len(extents)) + struct.pack(f"<{len(extents)}Q", *extents)
        raw += struct.pack("<IQ", number, offset)
    return raw + bytes(-len(raw) % alignment) + bytes(data)


F32 = ("a", (8,), 0, 0)


def test_a_sound_header() -> None:
    keys = [("n", U32, struct.pack("<I", 7)), ("words", ARRAY, struct.pack("<IQ", TEXT, 2) + text("é") + text(""))]
    found = parse_gguf_header(memoryview(header(keys, [F32, ("b", (64, 3), 8, 32)], data=32 + 204)), "f.gguf")
    assert found.metadata == {"n": 7, "words": ["é", ""]}
    assert [(info.dtype, info.shape, info.nbytes) for info in found.tensors.values()] == [
        ("F32", (8,), 32),
        ("Q8_0", (3, 64), 204),
    ]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"GGU", "not a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (header(start=b"GGUF\x01\0\0\0"), "version 1 is not known"),
        (header(start=b"GGUF\0\0\0\x03"), "big-endian"),
        (b"GGUF\x03\0\0\0" + bytes(8), "truncated, the number of metadata keys"),
        (header(counts=(1 << 40, 0)), "it says that it has 1099511627776 tensors"),
        (header(counts=(0, 1 << 63)), "metadata keys"),
        (header([("a", U32, bytes(4)), ("a", U32, bytes(4))]), "'a' stands twice"),
        (header([("a", 77, bytes(4))]), "type that is not known, number 77"),
        (header([("a", 7, b"\x02")]), "must be true or false, got 2"),
        (header([("a", TEXT, struct.pack("<Q", 1 << 50))]), "would have 1125899906842624 bytes"),
        (header([("a", TEXT, struct.pack("<Q", 500))]), "truncated"),
        (header([("a", TEXT, struct.pack("<Q", 2) + b"\xff\xff")]), "not UTF-8"),
        (header([("a", ARRAY, struct.pack("<IQ", U32, 1 << 60))]), "it says that it has"),
        (header([("a", ARRAY, struct.pack("<IQ", TEXT, 1 << 25))]), "it says that it has"),
        (header([("a", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(12))]), "array of a type that is not known"),
        (header([("general.alignment", U32, struct.pack("<I", 24))]), "must be a power of 2"),
        (header(tensors=[("a", (8, 2), 99, 0)], data=64), "its type, number 99, is not known"),
        (header(tensors=[("a", (8, 0), 0, 0)]), "bad dimensions"),
        (header(tensors=[("a", (1 << 62, 1 << 62), 0, 0)]), "bad dimensions"),
        (header(tensors=[("a", (1,) * 5, 0, 0)], data=64), "has 5 dimensions"),
        (header(tensors=[("a", (33, 2), 8, 0)], data=99), "blocks of 32 columns, which 33"),
        (header(tensors=[("a", (8,), 0, 8)], data=64), "begins at 8, no multiple of 32"),
        (header(tensors=[F32], data=31), "truncated, tensor 'a' ends"),
        (header(tensors=[F32, ("b", (8,), 0, 0)], data=64), "tensor 'b' overlaps"),
        (header(tensors=[F32, ("a", (8,), 0, 32)], data=64), "tensor 'a' stands twice"),
    ],
)
def test_what_is_wrong_is_named(raw: bytes, reason: str) -> None:
    with pytest.raises(ModelError, match=r"^f\.gguf: .*" + reason):
        parse_gguf_header(memoryview(raw), "f.gguf")


@pytest.mark.parametrize("alignment", [1, 8, 32, 64, 128, 4096])
def test_tensors_begin_where_the_files_own_alignment_says(alignment: int) -> None:
    key = ("general.alignment", U32, struct.pack("<I", alignment))
    raw = header([key], [F32], data=64, alignment=alignment)
    (info,) = parse_gguf_header(memoryview(raw), "f.gguf").tensors.values()
    assert (info.start, info.stop) == (len(raw) - 64, len(raw) - 32)


@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16"])
def test_the_same_model_as_its_safetensors(tmp_path: Path, kind: str) -> None:
    config = llama_config(vocab_size=130)
    tensors = random_tensors(config, dtype=kind)
    folder = write_model(tmp_path / "folder", config, dtype=kind)
    path = tmp_path / "model.gguf"
    types = {"fp32": Type.F32, "fp16": Type.F16, "bf16": Type.BF16}
    write_gguf(path, config, tensors, types[kind])
    spec, original = inspect_model(path), inspect_model(folder)
    assert spec == original
    ops = NativeOps(families()[0], "bf16" if kind == "bf16" else "fp32")
    loaded, wanted = load_model(path, spec, ops), load_model(folder, original, ops)
    tokens = np.arange(130, dtype=np.int32)
    x = ops.compute(np.random.default_rng(0).standard_normal((3, 64)))
    for name in ("0.qkv", "2.gate_up"):
        got = ops.to_numpy(ops.linear(x, loaded.weights[name]))
        np.testing.assert_array_equal(got, ops.to_numpy(ops.linear(x, wanted.weights[name])))
    np.testing.assert_array_equal(
        ops.embed(loaded.weights["embed"], tokens), ops.embed(wanted.weights["embed"], tokens)
    )
    np.testing.assert_array_equal(loaded.weights["1.mlp_norm"], wanted.weights["1.mlp_norm"])
    assert loaded.fingerprint != wanted.fingerprint  # bytes of another file; the same again for the same file
    assert loaded.fingerprint == load_model(path, spec, ops).fingerprint


def test_a_file_of_another_alignment_is_the_same_model(tmp_path: Path) -> None:
    config = llama_config(vocab_size=130, hidden_size=96, num_attention_heads=6)
    tensors, ops = random_tensors(config, dtype="fp32"), NativeOps(families()[0], "fp32")
    loaded = []
    for alignment in (32, 128, 4096):
        path = tmp_path / f"{alignment}.gguf"
        write_gguf(path, config, tensors, alignment=alignment)
        loaded.append(load_model(path, inspect_model(path), ops))
        np.testing.assert_array_equal(
            loaded[-1].weights["1.mlp_norm"], tensors["model.layers.1.post_attention_layernorm.weight"]
        )
    assert len({own.fingerprint for own in loaded}) == 1


def test_its_header_as_the_formats_own_package_reads_it(tmp_path: Path) -> None:
    config = llama_config()
    write_gguf(tmp_path / "m.gguf", config, random_tensors(config), Type.BF16)
    raw = (tmp_path / "m.gguf").read_bytes()
    found, other = parse_gguf_header(memoryview(raw), "m"), GGUFReader(tmp_path / "m.gguf")
    assert [(t.name, t.data_offset, t.n_bytes, tuple(t.shape.tolist())[::-1]) for t in other.tensors] == [
        (info.name, info.start, info.nbytes, info.shape) for info in found.tensors.values()
    ]
    fields = {key: field.contents() for key, field in other.fields.items() if not key.startswith("GGUF.")}
    assert dict(found.metadata) == fields


def gguf_config(tmp_path: Path, change: Any = lambda writer: None, **config: Any) -> dict[str, Any] | None:
    """The configuration that a file without layers gives."""
    path = tmp_path / "c.gguf"
    writer = GGUFWriter(str(path), "llama")
    full = llama_config(**config)
    add_settings(writer, full)
    add_bytes_tokenizer(writer, full)
    writer.add_tensor("token_embd.weight", np.zeros((full["vocab_size"], full["hidden_size"]), np.float32))
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return load_json(model_files(path), CONFIG)


def test_the_configuration_in_words_of_hugging_face(tmp_path: Path) -> None:
    found = gguf_config(tmp_path, lambda writer: writer.add_eot_token_id(5), rope_theta=500000.0)
    wanted = llama_config(rope_theta=500000.0, eos_token_id=[1, 5], tie_word_embeddings=True)
    absent = ("hidden_act", "attention_bias", "mlp_bias")
    assert found == {name: value for name, value in wanted.items() if name not in absent}


def test_control_tokens_that_end_a_turn_end_an_answer(tmp_path: Path) -> None:
    """Whatever the file says: gpt-oss names one of its three ends, and <|end|> is none of them."""
    chat, harmony = ["<|im_end|>", "<|end|>"], ["<|end|>", "<|return|>", "<|call|>"]
    for words, wanted in ((chat, [1, 10, 11]), (harmony, [1, 11, 12])):

        def change(writer: GGUFWriter, words: list[str] = words) -> None:
            tokens = [words[index - 10] if 10 <= index < 10 + len(words) else f"t{index}" for index in range(128)]
            for key, values in (("tokens", tokens), ("token_type", [3 if "<|" in token else 1 for token in tokens])):
                del writer.kv_data[0][f"tokenizer.ggml.{key}"]
                writer.add_array(f"tokenizer.ggml.{key}", values)

        found = gguf_config(tmp_path, change)
        assert found is not None
        assert found["eos_token_id"] == wanted


def test_llama_3s_factors_become_its_recipe(tmp_path: Path) -> None:
    recipe = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = llama_config(rope_theta=500000.0, rope_scaling=recipe, hidden_size=256, num_attention_heads=4)
    rope = parse_rope(ConfigFields(config, "config.json"), 64)
    plain = msgspec.structs.replace(rope, scaling=None)
    factors = (plain.inv_freq() / rope.inv_freq()).astype(np.float32)
    assert factors.max() == 32
    sizes = {"rope_theta": 500000.0, "hidden_size": 256, "num_attention_heads": 4}
    found = gguf_config(tmp_path, lambda writer: writer.add_tensor("rope_freqs.weight", factors), **sizes)
    assert found is not None
    assert found["rope_scaling"] == recipe
    factors[5] *= 1.01
    with pytest.raises(ModelError, match="follow no recipe"):
        gguf_config(tmp_path, lambda writer: writer.add_tensor("rope_freqs.weight", factors), **sizes)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda writer: writer.add_uint16("split.count", 3), "one of 3 parts; the first must be called NAME-00001-of"),
        (lambda writer: writer.add_value_length(32), "value_length is 32, heads have 16"),
        (lambda writer: writer.add_rope_dimension_count(8), "rope.dimension_count is 8, heads have 16"),
        (lambda writer: writer.add_logit_scale(0.5), "llama.logit_scale is 0.5: cannot be served"),
        (lambda writer: writer.add_pooling_type(PoolingType.MEAN), "llama.pooling_type is 1: cannot be served"),
    ],
)
def test_variants_that_are_not_computed_are_refused(tmp_path: Path, change: Any, reason: str) -> None:
    with pytest.raises(ModelError, match=r"c\.gguf: .*" + reason):
        gguf_config(tmp_path, change)


def test_unknown_tensors_and_types_are_refused(tmp_path: Path) -> None:
    config = llama_config(vocab_size=130)
    tensors = random_tensors(config)
    path = tmp_path / "m.gguf"
    write_gguf(path, config, {name: value for name, value in tensors.items() if "up_proj" not in name})
    with pytest.raises(ModelError, match=r"m\.gguf: tensor 'model.layers.0.mlp.up_proj.weight' is missing"):
        inspect_model(path)
    raw = header([("general.architecture", TEXT, text("mamba"))])
    path.write_bytes(raw)
    with pytest.raises(
        ModelError, match=r"general\.architecture is 'mamba'; of GGUF files these can be served: deepseek2, gemma"
    ):
        inspect_model(path)


def test_any_damage_to_the_header_is_refused_or_harmless(tmp_path: Path) -> None:
    """Truncated at every length up to the tensors, and 300 times another byte: no error but ModelError."""
    config = llama_config(num_hidden_layers=1)
    path = tmp_path / "m.gguf"
    write_gguf(path, config, random_tensors(config), Type.BF16)
    raw = path.read_bytes()
    end = min(info.start for info in parse_gguf_header(memoryview(raw), "m").tensors.values())
    for length in range(0, end, 31):
        with pytest.raises(ModelError, match=r"truncated|not a GGUF file|it says that it has"):
            parse_gguf_header(memoryview(raw[:length]), "m")
    rng = np.random.default_rng(0)
    for place, value in zip(rng.integers(0, end, 300), rng.integers(0, 256, 300), strict=True):
        damaged = bytearray(raw)
        damaged[place] = value
        path.write_bytes(damaged[:end] if place % 50 == 0 else damaged)
        with contextlib.suppress(ModelError):
            assert inspect_model(path).layers == 1


def test_what_becomes_objects_is_bounded_in_sum_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def array(count: int) -> bytes:
        return struct.pack("<IQ", 0, count) + bytes(count)  # of bytes

    monkeypatch.setattr(gguf_header, "MAX_ELEMENTS", 100)
    keys = [(f"k{n}", ARRAY, array(40)) for n in range(2)]
    assert len(parse_gguf_header(memoryview(header(keys)), "f.gguf").metadata) == 2
    with pytest.raises(ModelError, match="arrays have more than 100 elements together"):
        parse_gguf_header(memoryview(header([*keys, ("k2", ARRAY, array(40))])), "f.gguf")
    monkeypatch.setattr(gguf_header, "MAX_TEXTS_BYTES", 64)
    with pytest.raises(ModelError, match="its texts have more than"):
        parse_gguf_header(memoryview(header([(f"key{n}", TEXT, text("x" * 30)) for n in range(2)])), "f.gguf")
