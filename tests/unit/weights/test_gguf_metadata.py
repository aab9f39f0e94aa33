"""A tokenizer out of GGUF metadata gives the ids of the one that the metadata was made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from penstock.errors import ModelError
from penstock.weights.gguf.tokenizer import PRE_TOKENIZERS, tokenizer_config, tokenizer_json
from tiny_gguf import of_byte_level

STORYTELLER = Path(__file__).parents[3] / "src/penstock/bundled/storyteller"
TEXTS = [
    "Once upon a time, there was a little girl named Lily.",
    "  two  spaces,\ttabs\n\n and lines \r\n",
    "It's 12345 o'clock; WE'LL see... naïve café, Ärger, 東京は夜, привет мир, مرحبا, 🙂👍🏽",
    "<|end|> spelled out, [INST] too",
    "",
]


def test_the_bundled_tokenizer_comes_back() -> None:
    raw = (STORYTELLER / "tokenizer.json").read_text()
    assert json.loads(raw)["pre_tokenizer"]["type"] == "ByteLevel"
    metadata = of_byte_level(json.loads(raw), "gpt-2")
    made, original = Tokenizer.from_buffer(tokenizer_json(metadata, "m")), Tokenizer.from_str(raw)
    for text in TEXTS:
        ids = original.encode(text, add_special_tokens=False).ids
        assert made.encode(text, add_special_tokens=False).ids == ids
        assert made.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_nothing_of_a_text_is_lost_whatever_cuts_it(pre: str) -> None:
    metadata = of_byte_level(json.loads((STORYTELLER / "tokenizer.json").read_text()), pre)
    made = Tokenizer.from_buffer(tokenizer_json(metadata, "m"))
    for text in TEXTS:
        ids = made.encode(text, add_special_tokens=False).ids
        assert made.decode(ids, skip_special_tokens=False) == text


CUTS = {
    "llama-bpe": ["It", "'s", " ", "123", "45", " xY", "!!\n", " 東京"],
    "qwen2": ["It", "'s", " ", "1", "2", "3", "4", "5", " xY", "!!\n", " 東京"],
    "gpt-4o": ["It's", " ", "123", "45", " x", "Y", "!!\n", " 東京"],
    "tekken": ["It", "'s", " ", "1", "2", "3", "4", "5", " x", "Y", "!!\n", " 東京"],
    "deepseek-v3": ["It", "'s", " ", "123", "45", " xY", "!!\n", " ", "東京"],
    "deepseek-llm": ["It", "'", "s", " ", "1", "2", "3", "4", "5", " xY", "!!", "\n", " ", "東京"],
    "smollm": ["It", "'s", " ", "1", "2", "3", "4", "5", " xY", "!!", "\n", " 東京"],
    "gpt-2": ["It", "'s", " 12345", " xY", "!!", "\n", " 東京"],
}


@pytest.mark.parametrize("pre", CUTS)
def test_words_are_cut_as_the_makers_cut_them(pre: str) -> None:
    metadata = of_byte_level(json.loads((STORYTELLER / "tokenizer.json").read_text()), pre)
    text = "It's 12345 xY!!\n 東京"
    cutter = Tokenizer.from_buffer(tokenizer_json(metadata, "m")).pre_tokenizer
    assert cutter is not None
    assert [text[begin:end] for _, (begin, end) in cutter.pre_tokenize_str(text)] == CUTS[pre]


def test_white_space_behind_control_tokens_of_phi_3_belongs_to_them() -> None:
    plain = of_pieces({"a": 0.0, "\u2581": -1.0}, **{"tokenizer.ggml.add_space_prefix": False})
    tokens = [*plain["tokenizer.ggml.tokens"], "<|user|>"]
    more = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [*plain["tokenizer.ggml.token_type"], 3]}
    more["tokenizer.ggml.scores"] = [*plain["tokenizer.ggml.scores"], -1000.0]
    for architecture, wanted in (("phi3", ["<|user|>", "a"]), ("llama", ["<|user|>", "\u2581", "a"])):
        metadata = plain | more | {"general.architecture": architecture}
        made = Tokenizer.from_buffer(tokenizer_json(metadata, "m"))
        assert made.encode("<|user|> a", add_special_tokens=False).ids == [tokens.index(token) for token in wanted]


def of_pieces(scores: dict[str, float], **changes: Any) -> dict[str, Any]:
    """SentencePiece's BPE: <unk>, <s>, </s>, the bytes, then pieces."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *scores]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + list(scores.values()),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(scores),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **changes,
    }


def test_pieces_merge_by_their_scores() -> None:
    scores = {"▁a": -0.0, "ab": -1.0, "▁ab": -2.0, "▁": -3.0, "a": -4.0, "b": -5.0}
    metadata = of_pieces(scores)
    made = Tokenizer.from_buffer(tokenizer_json(metadata, "m"))
    assert made.encode("ab").tokens == ["<s>", "▁ab"]
    assert made.encode("bab a").tokens == ["<s>", "▁", "b", "ab", "▁a"]  # the piece ▁ab is made of ▁a and b only
    assert made.encode("é", add_special_tokens=False).tokens == ["▁", "<0xC3>", "<0xA9>"]
    assert made.decode(made.encode("ab é").ids) == "ab é"
    bare = of_pieces(scores, **{"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False})
    assert Tokenizer.from_buffer(tokenizer_json(bare, "m")).encode("ab b").tokens == ["ab", "▁", "b"]


def test_template_and_named_tokens() -> None:
    metadata = of_pieces({"a": 0.0}, **{"tokenizer.chat_template": "{{ messages }}"})
    assert tokenizer_config(metadata, "m") == {
        "chat_template": "{{ messages }}",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model is 't5'"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "'a' stands twice|token_type must have"),
        ({"tokenizer.ggml.tokens": [1]}, "must be a list of text"),
        ({"tokenizer.ggml.token_type": [1]}, "one entry for each of 260 tokens"),
        ({"tokenizer.ggml.scores": []}, "one entry for each of 260 tokens"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "own"}, "pre is 'own': how it cuts words"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["x y"]}, "'x y' merges what is no token"),
    ],
)
def test_what_is_not_known_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=r"^m\.gguf: .*(" + reason + ")"):
        tokenizer_json(of_pieces({"a": 0.0}, **changes), "m.gguf")
