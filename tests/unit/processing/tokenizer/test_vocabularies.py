"""Pairs of files, what other files add, and what holds for vocabularies of all kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from small_vocabularies import KINDS, save_pair
from tokenizers import AddedToken, Tokenizer
from vocabulary_checks import MULTILINGUAL, SNIPPETS, THEIRS, check, encoder, link, plain_encoder, real_files

import small_tokenizers
from penstock.errors import ModelError
from penstock.processing.detokenizer import Utf8Decoder
from penstock.processing.tokenizer.loader import load_tokenizer
from penstock.processing.tokenizer.token_bytes import byte_level_alphabet
from penstock.processing.tokenizer.tokenizer import TextTokenizer


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")])
def test_gpt2s_pair_gives_the_same_ids(tmp_path: Path, names: tuple[str, str]):
    saved = save_pair(tmp_path, names=names)
    check(encoder(load_tokenizer(tmp_path, {})), plain_encoder(saved))


@real_files
def test_gpt2s_own_files(tmp_path: Path):
    for name in ("encoder.json", "vocab.bpe"):
        link(tmp_path, THEIRS / "gpt2" / name, name)
    made = load_tokenizer(tmp_path, {"tokenizer_class": "GPT2Tokenizer"})
    alphabet = byte_level_alphabet()
    words = {bytes(map(alphabet.__getitem__, word)): i for word, i in made.get_vocab().items() if i != 50256}
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    theirs = tiktoken.Encoding("g", pat_str=pattern, mergeable_ranks=words, special_tokens={"<|endoftext|>": 50256})
    check(encoder(made), lambda text: theirs.encode(text, allowed_special="all"))


def test_a_pair_of_an_unknown_class_is_refused(tmp_path: Path):
    save_pair(tmp_path)
    with pytest.raises(ModelError, match="none of GPT2Tokenizer and Qwen2Tokenizer"):
        load_tokenizer(tmp_path, {"tokenizer_class": "Strange"})
    (tmp_path / "vocab.json").write_text("[]")
    with pytest.raises(ModelError, match="are no vocabulary"):
        load_tokenizer(tmp_path, {})


@real_files
def test_a_real_tokenizer_json_keeps_its_ids(tmp_path: Path):
    source = THEIRS / "small_hf_llama_test"
    link(tmp_path, source / "tokenizer.json", "tokenizer.json")
    config = json.loads((source / "tokenizer_config.json").read_text())
    theirs = Tokenizer.from_file(str(source / "tokenizer.json"))
    made = TextTokenizer(tmp_path, config=config)
    for text in MULTILINGUAL:
        assert list(made.encode(text, add_special_tokens=True)) == theirs.encode(text).ids
    made.close()


def test_tokens_that_only_the_configuration_names_get_their_ids(tmp_path: Path):
    made = small_tokenizers.byte_level()
    small_tokenizers.save(made, tmp_path)
    size = made.get_vocab_size()
    config = {"added_tokens_decoder": {str(size + 1): {"content": "<two>", "special": True}, "0": {"content": "<s>"}}}
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<one>": size}))
    assert encoder(load_tokenizer(tmp_path, config))("<two><one>") == [size + 1, size]
    config["added_tokens_decoder"][str(size + 9)] = {"content": "<far>"}
    with pytest.raises(ModelError, match=f"'<far>' should have the id {size + 9} and has {size + 2}"):
        load_tokenizer(tmp_path, config)


@pytest.mark.parametrize("entries", [[], {"x": {"content": "a"}}, {"1": {}}, {"1": "a"}])
def test_an_entry_that_is_no_token_is_refused(tmp_path: Path, entries: Any):
    small_tokenizers.save(small_tokenizers.byte_level(), tmp_path)
    if entries == []:
        entries = [1]
    with pytest.raises(ModelError, match="added_tokens_decoder"):
        load_tokenizer(tmp_path, {"added_tokens_decoder": entries})


def test_a_folder_without_a_vocabulary_says_what_would_work(tmp_path: Path):
    with pytest.raises(ModelError, match=r"no vocabulary\. Penstock reads tokenizer\.json, tekken\.json, tiktoken"):
        load_tokenizer(tmp_path, {})


# --- streaming and guarding, for all kinds ---------------------------------------------------------------------------


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("kind")
    return TextTokenizer(folder, config=KINDS[request.param](folder), literals=["\n\n", "<b>"])


@settings(max_examples=80, deadline=None)
@given(text=SNIPPETS | st.text(st.characters(exclude_categories=("Cs",)), max_size=12))
def test_any_text_comes_back_token_by_token(kind: TextTokenizer, text: str):
    tokens = kind.encode("x" + text, add_special_tokens=False)
    special = any(name in text for name in kind.control.spellings)
    utf8 = Utf8Decoder()
    joined = "".join(utf8.push(kind.table.raw(token)) for token in tokens) + utf8.finish()
    assert joined.removeprefix(" ").replace("▁", " ") == ("x" + text).replace("▁", " ") or special


@settings(max_examples=60, deadline=None)
@given(text=SNIPPETS)
def test_what_a_client_writes_is_never_a_control_token(kind: TextTokenizer, text: str):
    spelt = f"{text}{''.join(kind.control.spellings[:3])}{text}"
    control = kind.control
    tokens = kind.encode_guarded(control.guarded(control.mark(spelt)))
    assert not {kind.token_id(name) for name in control.spellings} & set(tokens)


def test_white_space_tokens_are_no_control_tokens(tmp_path: Path):
    made = small_tokenizers.byte_level()
    made.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("<b>", normalized=False)])
    tokenizer = TextTokenizer(small_tokenizers.save(made, tmp_path), literals=["<b>\n\n"])
    assert "\n\n" not in tokenizer.control.spellings
    assert "<b>" in tokenizer.control.spellings
    tokenizer.close()
