"""Tokens that a vocabulary file does not have: control tokens that tokenizer_config.json and its like name.

Knows nothing about where the vocabulary comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from penstock.errors import ModelError

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


def complete(tokenizer: Tokenizer, tokens: Mapping[int, AddedToken], *, filler: str | None = None) -> None:
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


def with_ends(tokenizer: Tokenizer, *, begin: str | None, end: str | None) -> None:
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
