"""Finds the vocabulary in a model's folder or GGUF file, and loads it.

The first of these counts: tokenizer.json; tekken.json; a tiktoken file (tiktoken.model, ``*.tiktoken``, or a
tokenizer.model that is one); SentencePiece's tokenizer.model or spiece.model; vocab.json with merges.txt.  Control
tokens that only tokenizer_config.json or added_tokens.json name are added with the ids given there.  Whatever the
file, the result is a ``Tokenizer`` of the ``tokenizers`` library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from penstock.errors import ModelError, PenstockError
from penstock.processing.tokenizer.vocabulary_files import (
    FILLER,
    PAIRS,
    is_tiktoken,
    read_merges,
    read_sentencepiece,
    read_tekken,
    read_tiktoken,
)
from penstock.weights.gguf.header import is_gguf
from penstock.weights.model_files import TOKENIZER, model_files

MAX_ADDED = 65_536
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def configured_tokens(config: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[int, AddedToken]:
    """By id, the tokens of ``added_tokens_decoder`` and of added_tokens.json (``extra``).  Raises ModelError."""
    entries = config.get("added_tokens_decoder") or {}
    if not isinstance(entries, dict) or len(entries) + len(extra) > MAX_ADDED:
        raise ModelError(f"tokenizer_config.json: added_tokens_decoder is no object of at most {MAX_ADDED} tokens.")
    tokens = {index: AddedToken(text, normalized=False, special=True) for text, index in extra.items() if _is_id(index)}
    for key, entry in entries.items():
        if not key.isdecimal() or not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise ModelError(
                f"tokenizer_config.json: added_tokens_decoder has an entry that is no token: {key[:40]!r}."
            )
        flags = {name: entry[name] for name in _FLAGS if isinstance(entry.get(name), bool)}
        tokens[int(key)] = AddedToken(entry["content"], **flags)
    return tokens


def add_tokens(tokenizer: Tokenizer, tokens: Mapping[int, AddedToken], *, filler: str | None = None) -> None:
    """Adds ``tokens`` so that each gets its own id; those in the vocabulary become added tokens where they are.

    Ids left out between two tokens get the name ``filler`` with the id in place of ``{}``, or are refused without one.
    """
    known = tokenizer.get_added_tokens_decoder()
    for index in sorted(tokens):
        token = tokens[index]
        if index in known and known[index].content == token.content:
            continue
        for missing in range(tokenizer.get_vocab_size(), index):
            if filler is None:
                break
            tokenizer.add_tokens([AddedToken(filler.format(missing), normalized=False, special=True)])
        tokenizer.add_tokens([token])
        got = tokenizer.token_to_id(token.content)
        if got != index:
            raise ModelError(
                f"The tokenizer's files disagree: {token.content!r} should have the id {index} and has {got}. "
                "Use the tokenizer.json of the model's makers."
            )


def add_begin_and_end(tokenizer: Tokenizer, *, begin: str | None, end: str | None) -> None:
    """Encoding with special tokens puts ``begin`` before and ``end`` after a text."""
    named = [token for token in (begin, end) if token is not None]
    if named:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*_one(begin), "$A", *_one(end)],
            pair=[*_one(begin), "$A", *_one(end), *_one(begin), "$B", *_one(end)],
            special_tokens=[(token, _id(tokenizer, token)) for token in dict.fromkeys(named)],
        )


def named_token(config: Mapping[str, Any], name: str) -> str | None:
    """``bos_token`` and its like, a string or an object with one."""
    value = config.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _one(token: str | None) -> list[str]:
    return [] if token is None else [token]


def _id(tokenizer: Tokenizer, token: str) -> int:
    index = tokenizer.token_to_id(token)
    if index is None:
        raise ModelError(f"tokenizer_config.json names a token that the vocabulary does not have: {token[:80]!r}.")
    return int(index)


def _is_id(value: object) -> bool:
    if type(value) is not int or value < 0:
        raise ModelError("added_tokens.json has a value that is no token id.")
    return True


MAX_FILE_BYTES = 256 << 20
_WANTED = "tokenizer.json, tekken.json, tiktoken.model, tokenizer.model, or vocab.json with merges.txt"


def load_tokenizer(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of the model in ``folder``; ``config`` is its tokenizer_config.json.  Raises ModelError."""
    if is_gguf(folder):
        return _read_gguf(folder)
    tokens = configured_tokens(config, _extra(folder))
    if (path := _file(folder, "tokenizer.json")) is not None:
        tokenizer = _read_library_file(path)
        # What this file says counts; the others may only add to it.
        unknown = {i: token for i, token in tokens.items() if tokenizer.token_to_id(token.content) is None}
        add_tokens(tokenizer, unknown)
        return tokenizer
    if (path := _file(folder, "tekken.json")) is not None:
        tokenizer, own = read_tekken(path)
        add_tokens(tokenizer, own | tokens)
        add_begin_and_end(tokenizer, begin="<s>", end=None)
        return tokenizer
    if (path := _file(folder, "tiktoken.model", "*.tiktoken", "tokenizer.model")) is not None and is_tiktoken(path):
        tokenizer = read_tiktoken(path, config, tokens)
        add_tokens(tokenizer, tokens, filler=FILLER)
        return _with_configured_ends(tokenizer, config, begin=False)
    if (path := _file(folder, "tokenizer.model", "spiece.model", "*.model", "tokenizer.model.*")) is not None:
        tokenizer, own = read_sentencepiece(path, config)
        add_tokens(tokenizer, own | tokens)
        return _with_configured_ends(tokenizer, config, begin="<s>" in (token.content for token in own.values()))
    for names in PAIRS:
        vocabulary, merges = (_file(folder, name) for name in names)
        if vocabulary is not None and merges is not None:
            tokenizer, own = read_merges(vocabulary, merges, config)
            add_tokens(tokenizer, own | tokens)
            return _with_configured_ends(tokenizer, config, begin=False)
    raise ModelError(f"{folder} has no vocabulary. Penstock reads {_WANTED}.")


def _file(folder: Path, *patterns: str) -> Path | None:
    """The first file that fits, of a size that may be read."""
    for pattern in patterns:
        found = sorted(path for path in folder.glob(pattern) if path.is_file())
        if found:
            if found[0].stat().st_size > MAX_FILE_BYTES:
                raise ModelError(f"{found[0]} is larger than {MAX_FILE_BYTES} bytes.")
            return found[0]
    return None


def _read_library_file(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path} is not a tokenizer that the tokenizers library can read: {error}") from error


def _read_gguf(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(model_files(path).read(TOKENIZER) or b"")
    except PenstockError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path}: its tokenizer is none that the tokenizers library can read: {error}") from error


def _with_configured_ends(tokenizer: Tokenizer, config: Mapping[str, Any], *, begin: bool) -> Tokenizer:
    """``add_bos_token`` and ``add_eos_token``; ``begin`` is what the former is by default."""
    begins = config.get("add_bos_token", begin) is True
    ends = config.get("add_eos_token", False) is True
    add_begin_and_end(
        tokenizer,
        begin=(named_token(config, "bos_token") or "<s>") if begins else None,
        end=(named_token(config, "eos_token") or "</s>") if ends else None,
    )
    return tokenizer


def _extra(folder: Path) -> dict[str, Any]:
    path = _file(folder, "added_tokens.json")
    if path is None:
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object.")
    return value
