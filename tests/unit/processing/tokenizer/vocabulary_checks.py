"""Are the ids those of another library?  For a corpus of many languages, and for random texts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

SHARED = Path(os.environ.get("SHARED_FOR_TESTS", Path(__file__).parents[5] / "shared")) / "data"
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
