"""A byte-level BPE tokenizer of 128,256 entries that all systems read alike.

The first entries are bytes, common words with and without a space before them (each one token, so a prompt of N words
has N tokens) and runs of letters; the last 256 are special, as in Llama 3.  A word that is in the vocabulary is that
token whatever the merges say (``ignore_merges``, as in Llama 3; llama.cpp does so for its pre-tokenizer "llama-bpe").
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from penstock.cli.benchmark.workload import WORDS

SPECIALS = 256
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 cuts text into words."""


def byte_letters() -> list[str]:
    """One printable character a byte, in the order of the bytes: that of GPT-2's byte-level BPE."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def vocabulary(size: int) -> tuple[list[str], list[str]]:
    """(entries in the order of their ids, specials included; merges as "left right")."""
    letters = byte_letters()
    space = letters[ord(" ")]
    entries = dict.fromkeys(letters)
    entries |= dict.fromkeys(word for text in WORDS for word in (text, space + text))
    merges: list[str] = []
    runs = ("".join(run) for length in (2, 3, 4) for run in product(ascii_lowercase, repeat=length))
    for run in runs:
        if len(entries) >= size - SPECIALS:
            break
        entries[run] = None
        merges.append(f"{run[:-1]} {run[-1]}")
    names = ["<|begin_of_text|>", "<|end_of_text|>"]
    names += [f"<|reserved_special_token_{i}|>" for i in range(SPECIALS - len(names))]
    return [*entries, *names], merges


def tokenizer(size: int) -> dict[str, Any]:
    """The contents of ``tokenizer.json``."""
    entries, merges = vocabulary(size)
    plain = size - SPECIALS
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    split = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": plain + i, "content": name, **flags} for i, name in enumerate(entries[plain:])],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {entry: i for i, entry in enumerate(entries[:plain])},
            "merges": merges,
        },
    }


def write_tokenizer(folder: Path, size: int, max_positions: int) -> None:
    """``tokenizer.json`` and ``tokenizer_config.json``."""
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(size), ensure_ascii=False), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|end_of_text|>",
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
