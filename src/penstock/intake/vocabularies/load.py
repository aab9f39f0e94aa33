"""Finds the vocabulary in a model's folder, or in its GGUF file, and reads it.

The first of these counts: tokenizer.json; tekken.json; a tiktoken file (tiktoken.model, ``*.tiktoken``, or a
tokenizer.model that is one); SentencePiece's tokenizer.model or spiece.model; vocab.json with merges.txt.
Tokens that only tokenizer_config.json or added_tokens.json name are added with the ids they have there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from penstock.errors import ModelError, PenstockError
from penstock.intake.vocabularies.added import complete, configured_tokens, named_token, with_ends
from penstock.intake.vocabularies.merges import PAIRS, read_merges
from penstock.intake.vocabularies.ranks import FILLER, is_tiktoken, read_tekken, read_tiktoken
from penstock.intake.vocabularies.sentencepiece import read_sentencepiece
from penstock.weights.gguf.file import is_gguf
from penstock.weights.model_files import TOKENIZER, model_files

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
        complete(tokenizer, unknown)
        return tokenizer
    if (path := _file(folder, "tekken.json")) is not None:
        tokenizer, own = read_tekken(path)
        complete(tokenizer, own | tokens)
        with_ends(tokenizer, begin="<s>", end=None)
        return tokenizer
    if (path := _file(folder, "tiktoken.model", "*.tiktoken", "tokenizer.model")) is not None and is_tiktoken(path):
        tokenizer = read_tiktoken(path, config, tokens)
        complete(tokenizer, tokens, filler=FILLER)
        return _with_configured_ends(tokenizer, config, begin=False)
    if (path := _file(folder, "tokenizer.model", "spiece.model", "*.model", "tokenizer.model.*")) is not None:
        tokenizer, own = read_sentencepiece(path, config)
        complete(tokenizer, own | tokens)
        return _with_configured_ends(tokenizer, config, begin="<s>" in (token.content for token in own.values()))
    for names in PAIRS:
        vocabulary, merges = (_file(folder, name) for name in names)
        if vocabulary is not None and merges is not None:
            tokenizer, own = read_merges(vocabulary, merges, config)
            complete(tokenizer, own | tokens)
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
    with_ends(
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
