"""Vocabularies by rank (tiktoken, tekken): the ids are tiktoken's own."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from small_vocabularies import SPECIAL, kimi_config, small_ranks, tekken, write_ranks
from vocabulary_checks import MULTILINGUAL, SHARED, THEIRS, check, encoder, link, plain_encoder, real_files

from penstock.errors import ModelError
from penstock.processing.tokenizer import vocabulary_files
from penstock.processing.tokenizer.loader import load_tokenizer


def rank_file(path: Path) -> dict[bytes, int]:
    """What tiktoken itself reads."""
    pairs = (line.split() for line in path.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def check_kimi(folder: Path, words: dict[bytes, int]) -> None:
    special = {text: len(words) + place for text, place in SPECIAL.items()}
    theirs = tiktoken.Encoding("kimi", pat_str=vocabulary_files.KIMI, mergeable_ranks=words, special_tokens=special)
    tokenizer = load_tokenizer(folder, kimi_config(len(words)))
    check(encoder(tokenizer), lambda text: theirs.encode(text, allowed_special="all"))
    check(plain_encoder(tokenizer), theirs.encode_ordinary)
    assert tokenizer.id_to_token(len(words) + 3) == f"<|reserved_token_{len(words) + 3}|>"


def test_a_small_rank_file_gives_tiktokens_ids(tmp_path: Path):
    check_kimi(write_ranks(tmp_path / "tiktoken.model", small_ranks()), small_ranks())


@pytest.mark.long
@real_files
def test_kimis_tokenizer_gives_tiktokens_ids(tmp_path: Path):
    path = THEIRS / "tiktoken" / "o200k_base.tiktoken"
    check_kimi(link(tmp_path, path, "tiktoken.model"), rank_file(path))


@pytest.mark.long
@real_files
def test_gpt_oss_gives_tiktokens_ids(tmp_path: Path):
    path = THEIRS / "tiktoken" / "o200k_base.tiktoken"
    config = json.loads((SHARED / "configs" / "gpt_oss_20b_tokenizer_config.json").read_text())
    special = {entry["content"]: int(key) for key, entry in config["added_tokens_decoder"].items()}
    theirs = tiktoken.Encoding(
        "h", pat_str=vocabulary_files.O200K, mergeable_ranks=rank_file(path), special_tokens=special
    )
    made = load_tokenizer(link(tmp_path, path, "o200k_base.tiktoken"), config)
    text = "<|start|>user<|message|>Hi 狐🦊<|end|><|start|>assistant<|channel|>final"
    assert encoder(made)(text) == theirs.encode(text, allowed_special="all")
    for text in MULTILINGUAL:
        assert plain_encoder(made)(text) == theirs.encode_ordinary(text)


@pytest.mark.long
@real_files
def test_cl100k_gives_tiktokens_ids(tmp_path: Path):
    path = THEIRS / "tiktoken" / "cl100k_base.tiktoken"
    theirs = tiktoken.Encoding("c", pat_str=vocabulary_files.CL100K, mergeable_ranks=rank_file(path), special_tokens={})
    check(encoder(load_tokenizer(link(tmp_path, path, path.name), {})), theirs.encode_ordinary)


@pytest.mark.parametrize("listed", [True, False])
def test_tekken_gives_tiktokens_ids_behind_its_control_tokens(tmp_path: Path, listed: bool):
    words = small_ranks()
    (tmp_path / "tekken.json").write_text(json.dumps(tekken(words, listed=listed)))
    made = load_tokenizer(tmp_path, {})
    kept = {word: rank for word, rank in words.items() if rank < len(words) - 5}
    theirs = tiktoken.Encoding("t", pat_str=vocabulary_files.O200K, mergeable_ranks=kept, special_tokens={})
    check(plain_encoder(made), lambda text: [token + 30 for token in theirs.encode_ordinary(text)])
    assert encoder(made)("[INST]a</s>") == [3, words[b"a"] + 30, 2]
    assert made.encode("a").ids == [1, words[b"a"] + 30]
    assert made.id_to_token(9) == ("<SPECIAL_9>" if listed else "[TOOL_CALLS]")


BROKEN_RANKS = {
    "no base64": b"YQ== 0\n*** 1\n",
    "no rank": b"YQ== 0\nYg==\n",
    "a rank twice": b"YQ== 0\nYg== 0\n",
    "few bytes": b"YQ== 0\nYg== 1\n",
    "a long token": b"YQ== 0\n" + base64.b64encode(b"x" * 2000) + b" 1\n",
}


@pytest.mark.parametrize("text", BROKEN_RANKS.values(), ids=BROKEN_RANKS.keys())
def test_a_broken_rank_file_is_refused(tmp_path: Path, text: bytes):
    (tmp_path / "tiktoken.model").write_bytes(text)
    with pytest.raises(ModelError, match=r"line 2|ranks are not|single bytes"):
        load_tokenizer(tmp_path, {"tokenizer_class": "TikTokenTokenizer"})


def test_a_rank_file_of_an_unknown_class_is_refused(tmp_path: Path):
    write_ranks(tmp_path / "tiktoken.model", small_ranks())
    with pytest.raises(ModelError, match=r"'Strange' is not one of .*TikTokenTokenizer"):
        load_tokenizer(tmp_path, {"tokenizer_class": "Strange"})


@pytest.mark.parametrize(
    "change", [{"config": {}}, {"vocab": [{}]}, {"special_tokens": [{"rank": 99, "token_str": ""}]}]
)
def test_a_broken_tekken_is_refused(tmp_path: Path, change: dict[str, Any]):
    (tmp_path / "tekken.json").write_text(json.dumps(tekken(small_ranks(), listed=True) | change))
    with pytest.raises(ModelError, match=r"tekken\.json"):
        load_tokenizer(tmp_path, {})
