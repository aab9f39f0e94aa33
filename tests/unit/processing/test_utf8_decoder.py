"""Text while it arrives: whole characters only, and joined it is the whole decoded at once."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers

import small_tokenizers
from penstock.errors import ModelError
from penstock.processing.detokenizer import Utf8Decoder
from penstock.processing.tokenizer.token_bytes import TokenTable, byte_level_alphabet, decoder_steps

BYTE_LEVEL = small_tokenizers.byte_level()
SENTENCE_PIECE = small_tokenizers.sentence_piece()


def table_of(tokenizer: Tokenizer) -> TokenTable:
    special = frozenset(token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special)
    return TokenTable(tokenizer, decoder=tokenizer.decoder.__getstate__(), special=special)


TABLES = {"byte level": table_of(BYTE_LEVEL), "sentence piece": table_of(SENTENCE_PIECE)}


def streamed(table: TokenTable, tokens: list[int]) -> list[str]:
    utf8 = Utf8Decoder()
    return [*(utf8.push(table.text_bytes(token)) for token in tokens), utf8.finish()]


def test_the_alphabet_is_gpt2s():
    assert set(byte_level_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_level_alphabet().values()) == list(range(256))


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=40))
def test_any_byte_level_tokens_join_to_what_the_library_decodes(tokens: list[int]):
    assert "".join(streamed(TABLES["byte level"], tokens)) == BYTE_LEVEL.decode(tokens, skip_special_tokens=True)


@given(st.text(max_size=40), st.integers(0, 20))
def test_sentence_pieces_join_to_what_the_library_decodes(text: str, cut: int):
    tokens = SENTENCE_PIECE.encode("h" + text, add_special_tokens=False).ids
    cut = min(cut, len(tokens))
    library = SENTENCE_PIECE.decode(tokens, skip_special_tokens=True)
    joined = "".join(streamed(TABLES["sentence piece"], tokens))
    assert joined == " " + library  # the blank that the tokenizer put before the text belongs to its first token
    # An answer is the middle of a text: it keeps the blank that its first token says.
    begun = "".join(streamed(TABLES["sentence piece"], tokens[:cut]))
    if not begun.endswith("\ufffd"):
        assert begun + "".join(streamed(TABLES["sentence piece"], tokens[cut:])) == joined


@given(st.lists(st.binary(max_size=5), max_size=20))
def test_bytes_in_pieces_are_bytes_at_once(pieces: list[bytes]):
    utf8 = Utf8Decoder()
    joined = "".join(map(utf8.push, pieces)) + utf8.finish()
    assert joined == b"".join(pieces).decode(errors="replace")


@given(st.text(max_size=20), st.data())
def test_no_replacement_while_a_character_can_still_come(text: str, data: st.DataObject):
    raw = text.encode()
    cut = data.draw(st.integers(0, len(raw)))
    utf8 = Utf8Decoder()
    begun = utf8.push(raw[:cut])
    assert text.startswith(begun)  # nothing that is not there, U+FFFD included
    assert utf8.pending == (begun.encode() != raw[:cut])
    assert begun + utf8.push(raw[cut:]) + utf8.finish() == text


def test_an_unfinished_character_is_shown_at_the_end_only():
    utf8 = Utf8Decoder()
    assert utf8.push("🦊".encode()[:3]) == ""
    assert utf8.finish() == "\ufffd"


def test_special_tokens_show_nothing_and_do_not_break_characters():
    table = TABLES["byte level"]
    fox = BYTE_LEVEL.encode("🦊", add_special_tokens=False).ids
    end = BYTE_LEVEL.token_to_id("<|end|>")
    assert "".join(streamed(table, [fox[0], end, *fox[1:]])) == "🦊"
    assert table.raw(end) == b"<|end|>"


def test_parts_of_characters_are_shown_as_bytes():
    table = TABLES["sentence piece"]
    assert table.shown(SENTENCE_PIECE.token_to_id("<0xE4>")) == ("\\xe4", True)
    assert table.shown(SENTENCE_PIECE.token_to_id("▁the")) == (" the", False)
    assert table.raw(10**6) == b""


def test_decoding_is_linear():
    table = TABLES["byte level"]
    tokens = BYTE_LEVEL.encode("狐 fox 🦊 " * 2000, add_special_tokens=False).ids

    def took(count: int) -> float:
        began = time.process_time()
        streamed(table, tokens[:count])
        return time.process_time() - began

    took(len(tokens))
    small, large = min(took(2000) for _ in range(3)), min(took(16000) for _ in range(3))
    assert large < 8 * 4 * max(small, 1e-4)  # eight times the work, with a wide margin; quadratic would be 64


@pytest.mark.parametrize(
    "spec",
    [
        {"type": "BPEDecoder", "suffix": "</w>"},
        {"type": "CTC"},
        {"type": "Replace", "pattern": {"Regex": "x+"}, "content": ""},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}]},
    ],
)
def test_decoders_that_look_at_neighbours_are_refused(spec: dict[str, object]):
    with pytest.raises(ModelError, match="token by token"):
        decoder_steps(spec)


@settings(max_examples=30)
@given(st.text(st.sampled_from("▁ ab"), max_size=6))
def test_metaspace_and_strips_before_fuse(piece: str):
    (step,) = decoder_steps({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"})
    assert step(piece) == piece.replace("▁", " ")
    (strip,) = decoder_steps(
        {"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 1, "stop": 1}]}
    )
    expected = piece.removeprefix(" ")
    assert strip(piece) == (expected.removesuffix(" ") if expected else expected)


@given(
    st.lists(st.sampled_from(["the", "##s", "fox", ".", "'", "##'", "n't", "?", "狐", "##狐"]), min_size=1, max_size=12)
)
def test_word_pieces_join_to_what_the_library_decodes(pieces: list[str]):
    spec = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    library = decoders.WordPiece(prefix="##", cleanup=True)
    (step,) = decoder_steps(spec)
    # An answer is the middle of a text: the library leaves the blank before the first piece out.
    assert "".join(map(str, map(step, ["x", *pieces]))) == " " + library.decode(["x", *pieces])
