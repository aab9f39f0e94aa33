"""What the intake reads of a model's small files: named tokens, the vocabulary's size, what ends an answer."""

from __future__ import annotations

import json
from typing import Any

from penstock.errors import ModelError
from penstock.weights.model_files import GENERATION_CONFIG, ModelFiles


def read_json(files: ModelFiles, name: str, *, required: bool = True) -> dict[str, Any]:
    """The object in a file; empty if there is none and none is required.  Raises ModelError."""
    raw, path = files.read(name), files.path_of(name)
    if raw is None:
        if required:
            raise ModelError(f"{path} is missing.")
        return {}
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object.")
    return value


def named_tokens(*sources: dict[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like, as text; the first source that names one counts."""
    named: dict[str, str] = {}
    for source in sources:
        for key, value in source.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                named.setdefault(key, text)
    return named


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Where the configuration of a model that also sees has what concerns text."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else {}


def vocabulary_size(config: dict[str, Any]) -> int:
    """Rows of the embedding.  Raises ModelError."""
    size = config.get("vocab_size", _text_part(config).get("vocab_size"))
    if type(size) is not int or size < 1:
        raise ModelError("config.json has no vocab_size.")
    return size


def end_tokens(files: ModelFiles, config: dict[str, Any], eos_token: int | None) -> tuple[int, ...]:
    """Ids that end an answer: generation_config.json's, else config.json's, and the tokenizer's own.

    Those that the model can draw: a tokenizer may know more tokens than its model.
    """
    generation = read_json(files, GENERATION_CONFIG, required=False)
    given = generation.get("eos_token_id", config.get("eos_token_id", _text_part(config).get("eos_token_id")))
    ids = given if isinstance(given, list) else [given]
    known = range(vocabulary_size(config))
    return tuple(dict.fromkeys(token for token in (*ids, eos_token) if type(token) is int and token in known))
