"""Vocabulary files of every kind: the ids are those of the library that the file was made for."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import small_tokenizers
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from penstock.errors import ModelError
from penstock.intake.detokenizer import Utf8Stream
from penstock.intake.tokenizer import TextTokenizer
from penstock.intake.vocabularies import ranks
from penstock.intake.vocabularies.load import load_tokenizer
from penstock.intake.vocabulary import byte_level_alphabet

SHARED = Path(os.environ.get("PENSTOCK_SHARED", Path(__file__).parents[4] / "shared")) / "data"
THEIRS = SHARED / "tokenizers"
real_files = pytest.mark.skipif(not THEIRS.is_dir(), reason="real vocabularies are not in this repository")

Encode = Callable[[str], list[int]]

MULTILINGUAL = (
    "Once upon a time, there wasn't a FOX; she'd 1234567 don'tS camelCase HTTPServer x=y**2;\n\n\tif (a != b) {}\r\n",
    "  two blanks,   three, tab\tand trailing   ",
    " leading",
    "Il était une fois à l'œuvre; Fußgänger; Łódź; İstanbul; naïve café",
    "从前有一只小狐狸\uff0c他说\uff1a「你好」。東京タワーへ行きました。 한국어 문장입니다.",
    "Жила-была лиса. Ελληνικά γράμματα. שלום עולם. مرحبا بالعالم. नमस्ते दुनिया। สวัสดีชาวโลก",
    "🦊🦊 👩‍👩‍👧‍👦 🇨🇭 e\u0301 ﬁ ½ ² \u200b\u00a0\u3000 ▁ <0x41> \ufffd \U0010ffff",
    "<s>[INST] a [/INST]</s><unk><|endoftext|><|im_start|>user<|im_end|> [BOS]<pad>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa -------------------- ================= \n\n\n\n\n          x",
    "def f(x: int) -> str:\n    return {'a': [1, 2.5e-3], \"b\": None}  # 100%\n",
)
SNIPPETS = st.lists(
    st.sampled_from(["a", "aa", " ", "  ", "\n", "ab", "é", "狐", "🦊", "Ж", "'s", "1", "-", "=", "</s>", "▁", "the "]),
    max_size=24,
).map("".join)


def check(ours: Encode, theirs: Encode, *, without: tuple[str, ...] = ("Cs",)) -> None:
    """The same ids for the corpus and for random texts, these without characters of some categories."""
    for text in MULTILINGUAL:
        assert ours(text) == theirs(text), text

    @settings(max_examples=60, deadline=None)
    @example("")
    @given(SNIPPETS | st.text(st.characters(exclude_categories=without), max_size=12))
    def same(text: str) -> None:
        assert ours(text) == theirs(text)

    same()


def encoder(tokenizer: Tokenizer) -> Encode:
    """Spellings of added tokens become these tokens."""
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def plain_encoder(tokenizer: Tokenizer) -> Encode:
    """Spellings of added tokens stay text, as ``TextTokenizer.encode_guarded`` has it."""
    plain = Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer"):
        if getattr(tokenizer, part) is not None:
            setattr(plain, part, getattr(tokenizer, part))
    return encoder(plain)


def link(folder: Path, source: Path, name: str) -> Path:
    """A model's folder with one file."""
    (folder / name).symlink_to(source)
    return folder


# --- by rank ---------------------------------------------------------------------------------------------------------


def rank_file(path: Path) -> dict[bytes, int]:
    """What tiktoken itself reads."""
    pairs = (line.split() for line in path.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def write_ranks(path: Path, words: dict[bytes, int]) -> Path:
    """A tiktoken file."""
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(word), rank) for word, rank in words.items()))
    return path.parent


def small_ranks() -> dict[bytes, int]:
    """All bytes, then words of a small corpus by length."""
    words = [bytes([byte]) for byte in range(256)]
    text = " ".join(small_tokenizers.CORPUS).encode()
    words += sorted({text[i : i + size] for size in (2, 3, 4) for i in range(len(text) - size)}, key=len)
    return {word: rank for rank, word in enumerate([*words, b"aa", b"aaa", b"aaaa", b"  ", b"   "])}


SPECIAL = {"[BOS]": 0, "[EOS]": 1, "<|im_end|>": 4}


def kimi_config(base: int) -> dict[str, Any]:
    """tokenizer_config.json as Kimi has it: control tokens behind the ranks, with gaps."""
    entries = {str(base + place): {"content": text, "special": True} for text, place in SPECIAL.items()}
    return {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": entries}


def check_kimi(folder: Path, words: dict[bytes, int]) -> None:
    special = {text: len(words) + place for text, place in SPECIAL.items()}
    theirs = tiktoken.Encoding("kimi", pat_str=ranks.KIMI, mergeable_ranks=words, special_tokens=special)
    tokenizer = load_tokenizer(folder, kimi_config(len(words)))
    check(encoder(tokenizer), lambda text: theirs.encode(text, allowed_special="all"))
    check(plain_encoder(tokenizer), theirs.encode_ordinary)
    assert tokenizer.id_to_token(len(words) + 3) == f"<|reserved_token_{len(words) + 3}|>"


def test_a_small_rank_file_gives_tiktokens_ids(tmp_path: Path):
    check_kimi(write_ranks(tmp_path / "tiktoken.model", small_ranks()), small_ranks())


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
    theirs = tiktoken.Encoding("h", pat_str=ranks.O200K, mergeable_ranks=rank_file(path), special_tokens=special)
    made = load_tokenizer(link(tmp_path, path, "o200k_base.tiktoken"), config)
    text = "<|start|>user<|message|>Hi 狐🦊<|end|><|start|>assistant<|channel|>final"
    assert encoder(made)(text) == theirs.encode(text, allowed_special="all")
    for text in MULTILINGUAL:
        assert plain_encoder(made)(text) == theirs.encode_ordinary(text)


@pytest.mark.long
@real_files
def test_cl100k_gives_tiktokens_ids(tmp_path: Path):
    path = THEIRS / "tiktoken" / "cl100k_base.tiktoken"
    theirs = tiktoken.Encoding("c", pat_str=ranks.CL100K, mergeable_ranks=rank_file(path), special_tokens={})
    check(encoder(load_tokenizer(link(tmp_path, path, path.name), {})), theirs.encode_ordinary)


def tekken(words: dict[bytes, int], *, listed: bool) -> dict[str, Any]:
    """A tekken.json with five words too many, as the real ones have."""
    entries = [{"rank": i, "token_bytes": base64.b64encode(word).decode()} for word, i in words.items()]
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    more = {"special_tokens": [{"rank": i, "token_str": name} for i, name in enumerate(names)]} if listed else {}
    size = len(words) - 5 + 30
    config = {"pattern": ranks.O200K, "default_vocab_size": size, "default_num_special_tokens": 30, "version": "v11"}
    return {"config": config, "vocab": entries} | more


@pytest.mark.parametrize("listed", [True, False])
def test_tekken_gives_tiktokens_ids_behind_its_control_tokens(tmp_path: Path, listed: bool):
    words = small_ranks()
    (tmp_path / "tekken.json").write_text(json.dumps(tekken(words, listed=listed)))
    made = load_tokenizer(tmp_path, {})
    kept = {word: rank for word, rank in words.items() if rank < len(words) - 5}
    theirs = tiktoken.Encoding("t", pat_str=ranks.O200K, mergeable_ranks=kept, special_tokens={})
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


# --- SentencePiece ---------------------------------------------------------------------------------------------------


def trained(**options: Any) -> bytes:
    """A small model file, made by the library itself."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(small_tokenizers.CORPUS * 4),
        model_writer=model,
        vocab_size=380,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
        **options,
    )
    return model.getvalue()


LLAMA = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
SPM = {
    "as Llama 2": LLAMA | {"remove_extra_whitespaces": False},
    "as Gemma": LLAMA
    | {
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["\n", "\n\n", "<b>", "▁▁"],
    },
    "Unigram as T5": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc"},
}


def without_controls(theirs: sentencepiece.SentencePieceProcessor, ours: Encode) -> Encode:
    """Unigram models of the library read a spelt control token as that token; SentencePiece itself does not."""
    names = [theirs.id_to_piece(i) for i in range(theirs.vocab_size()) if theirs.is_control(i) or theirs.is_unknown(i)]
    return lambda text: list(theirs.encode(text)) if not any(name in text for name in names) else ours(text)


@pytest.mark.parametrize("options", SPM.values(), ids=SPM.keys())
def test_a_small_model_gives_sentencepieces_ids(tmp_path: Path, options: dict[str, Any]):
    raw = trained(**options)
    (tmp_path / "tokenizer.model").write_bytes(raw)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=raw)
    made = load_tokenizer(tmp_path, {})
    user_defined = [token for token in made.get_added_tokens_decoder().values() if not token.special]
    plain = Tokenizer(made.model)
    plain.normalizer = made.normalizer
    plain.add_tokens(user_defined)
    ours = encoder(plain)
    if options["model_type"] == "unigram":
        # The library applies Unicode rules to a character together with its accents, SentencePiece to each alone.
        check(ours, without_controls(theirs, ours), without=("Cs", "Mn", "Mc", "Me"))
    else:
        check(ours, lambda text: list(theirs.encode(text)))


@real_files
@pytest.mark.parametrize("path", sorted((THEIRS / "mistral").glob("*.model.*")), ids=lambda path: path.name[-8:])
def test_mistrals_models_give_sentencepieces_ids(tmp_path: Path, path: Path):
    theirs = sentencepiece.SentencePieceProcessor(str(path))
    made = load_tokenizer(link(tmp_path, path, "tokenizer.model"), {})
    check(plain_encoder(made), lambda text: list(theirs.encode(text)))
    assert made.encode("a").ids == [1, *theirs.encode("a")]
    # Control tokens as text become these tokens, and what follows is encoded as SentencePiece encodes it.
    assert encoder(made)("<s>Hi</s>the fox") == [1, *theirs.encode("Hi"), 2, *theirs.encode("the fox")]


@real_files
def test_where_transformers_puts_the_blank(tmp_path: Path):
    made = load_tokenizer(
        link(tmp_path, THEIRS / "mistral" / "tokenizer.model.v1", "tokenizer.model"), {"legacy": False}
    )
    assert made.encode("Hi</s>the", add_special_tokens=False).tokens == ["▁Hi", "</s>", "the"]
    assert made.encode(" Hi", add_special_tokens=False).tokens == ["▁Hi"]


BROKEN_SPM = {
    "nothing": b"",
    "text": b"hello, this is text",
    "cut": trained(**LLAMA)[:-7],
    "no pieces": b"\x12\x00",
    "an endless number": b"\xff" * 40,
    "a long field": b"\x0a\xff\xff\xff\xff\x0f",
    "a strange type": b"\x0b\x00",
}


@pytest.mark.parametrize("raw", BROKEN_SPM.values(), ids=BROKEN_SPM.keys())
def test_a_broken_model_file_is_refused(tmp_path: Path, raw: bytes):
    (tmp_path / "tokenizer.model").write_bytes(raw)
    with pytest.raises(ModelError, match=r"tokenizer\.model is no SentencePiece model"):
        load_tokenizer(tmp_path, {})


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_flipped_byte_never_does_more_than_be_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    raw = bytearray(BROKEN_SPM["cut"])
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    folder = tmp_path_factory.mktemp("model")
    (folder / "tokenizer.model").write_bytes(bytes(raw))
    with pytest.raises(ModelError):
        load_tokenizer(folder, {})


def test_words_and_characters_are_refused(tmp_path: Path):
    (tmp_path / "tokenizer.model").write_bytes(trained(model_type="char"))
    with pytest.raises(ModelError, match="the method CHAR"):
        load_tokenizer(tmp_path, {})


# --- pairs, and what other files add ---------------------------------------------------------------------------------


def save_pair(folder: Path, *, names: tuple[str, str] = ("vocab.json", "merges.txt")) -> Tokenizer:
    """GPT-2's two files, of a small tokenizer."""
    made = small_tokenizers.byte_level()
    for path, name in zip(made.model.save(str(folder)), names, strict=True):
        shutil.move(path, folder / name)
    return made


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


def _tiktoken_kind(folder: Path) -> dict[str, Any]:
    write_ranks(folder / "tiktoken.model", small_ranks())
    return kimi_config(len(small_ranks()))


def _tekken_kind(folder: Path) -> dict[str, Any]:
    (folder / "tekken.json").write_text(json.dumps(tekken(small_ranks(), listed=True)))
    return {}


def _spm_kind(options: dict[str, Any]) -> Callable[[Path], dict[str, Any]]:
    def write(folder: Path) -> dict[str, Any]:
        (folder / "tokenizer.model").write_bytes(trained(**options))
        return {}

    return write


def _pair_kind(folder: Path) -> dict[str, Any]:
    save_pair(folder)
    return {}


KINDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "tiktoken": _tiktoken_kind,
    "tekken": _tekken_kind,
    "Llama 2": _spm_kind(SPM["as Llama 2"]),
    "Gemma": _spm_kind(SPM["as Gemma"]),
    "pair": _pair_kind,
}


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("kind")
    return TextTokenizer(folder, config=KINDS[request.param](folder), literals=["\n\n", "<b>"])


@settings(max_examples=80, deadline=None)
@given(text=SNIPPETS | st.text(st.characters(exclude_categories=("Cs",)), max_size=12))
def test_any_text_comes_back_token_by_token(kind: TextTokenizer, text: str):
    tokens = kind.encode("x" + text, add_special_tokens=False)
    special = any(name in text for name in kind.control.spellings)
    utf8 = Utf8Stream()
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
