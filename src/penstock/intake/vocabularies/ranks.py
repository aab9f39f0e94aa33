"""Vocabularies in order of rank: tiktoken's files (Kimi, Llama 3 as Meta publishes it, GPT) and Mistral's tekken.json.

Such a file lists byte strings; of two neighbours the pair with the lowest rank is joined first (openai/tiktoken).  The
same order in the words of the ``tokenizers`` library is a list of merges: every way to cut a byte string into two that
are in the list, too, by rank.  How a text is first cut into words is no part of tiktoken's files, but of the models'
own code: the patterns stand here under the names of those classes.

Knows nothing about chat templates.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from penstock.errors import ModelError
from penstock.intake.vocabulary import byte_level_alphabet

MAX_TOKENS = 1 << 20
MAX_TOKEN_BYTES = 1 << 10
FILLER = "<|reserved_token_{}|>"

_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
CL100K = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"


def _cased(letters_out: str, tail: str) -> str:
    """Words cut where small letters are followed by capitals; ``letters_out`` is taken out of the classes."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{letters_out}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{letters_out}]"
    head = r"[^\r\n\p{L}\p{N}]?"
    return rf"{head}{upper}*{lower}+{_SHORT}?|{head}{upper}+{lower}*{_SHORT}?|\p{{N}}{{1,3}}|{tail}"


O200K = _cased("", _TAIL.replace(r"[\r\n]*", r"[\r\n/]*", 1))
KIMI = r"[\p{Han}]+|" + _cased(r"&&[^\p{Han}]", _TAIL)

_BY_FILE = {"cl100k_base.tiktoken": CL100K, "o200k_base.tiktoken": O200K, "o200k_harmony.tiktoken": O200K}
_BY_CLASS = {
    "TikTokenTokenizer": KIMI,
    "ChatGLM4Tokenizer": CL100K,
    "LlamaTokenizer": CL100K,
    "PreTrainedTokenizerFast": CL100K,
}
"""``tokenizer_class`` of tokenizer_config.json, the last two for Llama 3."""

_TEKKEN_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""The control tokens of a tekken.json that lists none (mistral-common, before v11)."""

_ALPHABET = {byte: char for char, byte in byte_level_alphabet().items()}
_TO_ALPHABET = {byte: _ALPHABET[byte] for byte in range(256)}


def is_tiktoken(path: Path) -> bool:
    """Does the file begin with a line of base64 and a rank?"""
    with path.open("rb") as file:
        line = file.readline(MAX_TOKEN_BYTES * 2)
    fields = line.split()
    if len(fields) != 2 or not fields[1].isdigit():
        return False
    try:
        base64.b64decode(fields[0], validate=True)
    except binascii.Error:
        return False
    return True


def read_tiktoken(path: Path, config: Mapping[str, Any], tokens: Mapping[int, AddedToken]) -> Tokenizer:
    """A tokenizer out of a tiktoken file; ``tokens`` come after it.  Raises ModelError."""
    pattern = _BY_FILE.get(path.name) or _BY_CLASS.get(str(config.get("tokenizer_class")))
    if pattern is None:
        raise ModelError(
            f"{path} does not say how words are cut, and tokenizer_config.json's tokenizer_class "
            f"{config.get('tokenizer_class')!r} is not one of {', '.join(_BY_CLASS)}. A tokenizer.json would work."
        )
    with path.open("rb") as file:
        pairs = [_tiktoken_line(path, number, line) for number, line in enumerate(file, 1) if line.strip()]
    vocabulary = {_written(token): rank for token, rank in pairs}
    if sorted(vocabulary.values()) != list(range(len(pairs))):
        raise ModelError(f"{path}: the ranks are not all the numbers from 0 to {len(pairs) - 1}, each once.")
    return _tokenizer(vocabulary, vocabulary, pattern)


def read_tekken(path: Path) -> tuple[Tokenizer, dict[int, AddedToken]]:
    """A tokenizer out of a tekken.json, its control tokens already in.  Raises ModelError."""
    try:
        data = json.loads(path.read_bytes())
        settings = data["config"]
        specials, size, pattern = (
            settings["default_num_special_tokens"],
            settings["default_vocab_size"],
            settings["pattern"],
        )
        entries = data["vocab"][: max(0, size - specials)]
        words = {_written(base64.b64decode(entry["token_bytes"], validate=True)): entry["rank"] for entry in entries}
        listed = data.get("special_tokens") or [
            {"rank": rank, "token_str": text} for rank, text in enumerate(_TEKKEN_SPECIAL)
        ]
        names = {entry["rank"]: entry["token_str"] for entry in listed}
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} is no tekken.json: {type(error).__name__}: {error}") from error
    if sorted(words.values()) != list(range(len(entries))) or len(words) + specials > MAX_TOKENS:
        raise ModelError(f"{path}: the ranks are not all the numbers from 0 to {len(entries) - 1}, each once.")
    controls = [str(names.get(rank, f"<SPECIAL_{rank}>")) for rank in range(specials)]
    if len(set(controls) | words.keys()) != specials + len(words) or max(names, default=0) >= specials:
        raise ModelError(f"{path}: a control token is written like another token, or has a rank above {specials - 1}.")
    vocabulary = {name: rank for rank, name in enumerate(controls)}
    vocabulary |= {word: rank + specials for word, rank in words.items()}
    tokenizer = _tokenizer(vocabulary, words, pattern)
    return tokenizer, {rank: AddedToken(name, normalized=False, special=True) for rank, name in enumerate(controls)}


def _tiktoken_line(path: Path, number: int, line: bytes) -> tuple[bytes, int]:
    fields = line.split()
    try:
        token, rank = base64.b64decode(fields[0], validate=True), int(fields[1])
    except (binascii.Error, ValueError, IndexError) as error:
        raise ModelError(f"{path}, line {number}: expected a token in base64 and its rank.") from error
    if number > MAX_TOKENS or len(token) > MAX_TOKEN_BYTES:
        raise ModelError(
            f"{path}, line {number}: at most {MAX_TOKENS} tokens of at most {MAX_TOKEN_BYTES} bytes are read."
        )
    return token, rank


def _written(token: bytes) -> str:
    """Bytes in GPT-2's alphabet."""
    return token.decode("latin-1").translate(_TO_ALPHABET)


def _merges(words: Iterable[str], known: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every cut of a word into two known ones, in the order of the words."""
    merges: list[tuple[str, str]] = []
    for word in words:
        for i in range(1, len(word)):
            left = word[:i]
            if left in known and (right := word[i:]) in known:
                merges.append((left, right))
    return merges


def _tokenizer(vocabulary: dict[str, int], words: Mapping[str, int], pattern: str) -> Tokenizer:
    missing = [char for char in _ALPHABET.values() if char not in words]
    if missing:
        raise ModelError(
            f"The vocabulary lacks {len(missing)} of the 256 single bytes; some texts would have no tokens."
        )
    merges = _merges(sorted(words, key=words.__getitem__), words)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    try:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"The tokenizer's pattern is none that the tokenizers library can read: {error}") from error
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
