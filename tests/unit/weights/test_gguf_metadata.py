"""A tokenizer out of GGUF metadata gives the ids of the one that the metadata was made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from penstock.errors import ModelError
from penstock.weights.gguf_metadata import PRE_TOKENIZERS, tokenizer_config, tokenizer_json

STORYTELLER = Path(__file__).parents[3] / "src/penstock/bundled/storyteller"
TEXTS = [
    "Once upon a time, there was a little girl named Lily.",
    "  two  spaces,\ttabs\n\n and lines \r\n",
    "It's 12345 o'clock; WE'LL see... naïve café, Ärger, 東京は夜, привет мир, مرحبا, 🙂👍🏽",
    "<|end|> spelled out, [INST] too",
    "",
]


def of_byte_level(source: dict[str, Any], pre: str) -> dict[str, Any]:
    """What a converter writes of a byte-level tokenizer.json."""
    vocabulary, added = source["model"]["vocab"], source["added_tokens"]
    tokens = dict.fromkeys(range(max([*vocabulary.values(), *(token["id"] for token in added)]) + 1), "")
    tokens |= {index: token for token, index in vocabulary.items()}
    tokens |= {token["id"]: token["content"] for token in added}
    control = {token["id"] for token in added if token["special"]}
    merges = source["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": list(tokens.values()),
        "tokenizer.ggml.token_type": [3 if index in control else 1 for index in tokens],
        "tokenizer.ggml.merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in merges],
    }


def test_the_bundled_tokenizer_comes_back() -> None:
    raw = (STORYTELLER / "tokenizer.json").read_text()
    steps = json.dumps(json.loads(raw)["pre_tokenizer"])
    pre = next(name for name, cut in PRE_TOKENIZERS.items() if json.dumps(cut.pattern) in steps or cut.pattern is None)
    metadata = of_byte_level(json.loads(raw), pre)
    made, original = Tokenizer.from_buffer(tokenizer_json(metadata, "m")), Tokenizer.from_str(raw)
    for text in TEXTS:
        ids = original.encode(text, add_special_tokens=False).ids
        assert made.encode(text, add_special_tokens=False).ids == ids
        assert made.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)


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
