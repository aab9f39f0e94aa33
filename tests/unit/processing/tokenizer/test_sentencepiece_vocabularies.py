"""SentencePiece models: the ids are the library's own, and a broken file is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from small_vocabularies import LLAMA, SPM, trained
from tokenizers import Tokenizer
from vocabulary_checks import THEIRS, Encode, check, encoder, link, plain_encoder, real_files

from penstock.errors import ModelError
from penstock.processing.tokenizer.loader import load_tokenizer


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
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.name[-8:], marks=() if path.suffix == ".v3" else pytest.mark.long)
        for path in sorted((THEIRS / "mistral").glob("*.model.*"))
    ],
)
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
