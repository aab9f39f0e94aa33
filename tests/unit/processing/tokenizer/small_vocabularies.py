"""A small vocabulary file of every kind, written as its makers write it."""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import Tokenizer

import small_tokenizers
from penstock.processing.tokenizer import vocabulary_files


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


def tekken(words: dict[bytes, int], *, listed: bool) -> dict[str, Any]:
    """A tekken.json with five words too many, as the real ones have."""
    entries = [{"rank": i, "token_bytes": base64.b64encode(word).decode()} for word, i in words.items()]
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    more = {"special_tokens": [{"rank": i, "token_str": name} for i, name in enumerate(names)]} if listed else {}
    size = len(words) - 5 + 30
    config = {
        "pattern": vocabulary_files.O200K,
        "default_vocab_size": size,
        "default_num_special_tokens": 30,
        "version": "v11",
    }
    return {"config": config, "vocab": entries} | more


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


def save_pair(folder: Path, *, names: tuple[str, str] = ("vocab.json", "merges.txt")) -> Tokenizer:
    """GPT-2's two files, of a small tokenizer."""
    made = small_tokenizers.byte_level()
    for path, name in zip(made.model.save(str(folder)), names, strict=True):
        shutil.move(path, folder / name)
    return made


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
