"""A model's small files (configuration, tokenizer, chat template): from its folder, or made from a GGUF file's
metadata."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from penstock.errors import ModelError
from penstock.weights.config_json import MAX_CONFIG_BYTES, parse_json_object
from penstock.weights.gguf.config import config_json
from penstock.weights.gguf.header import GgufHeader, is_gguf
from penstock.weights.gguf.parts import close_parts, joined_header, open_parts
from penstock.weights.gguf.tensors import RECIPES
from penstock.weights.gguf.tokenizer import tokenizer_config, tokenizer_json

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
MAX_BYTES = MAX_CONFIG_BYTES
"""Cap on any of these files: what is longer is none of them."""


class ModelFiles(Protocol):
    """Files by name."""

    def read(self, name: str) -> bytes | None:
        """The file, None if there is none.  Raises ModelError if it cannot be read or is too large."""
        ...

    def path_of(self, name: str) -> str:
        """The file's name in error messages."""
        ...


def model_files(model: Path) -> ModelFiles:
    """The files of a model folder or a GGUF file.  Raises ModelError."""
    return _OfGguf(model) if is_gguf(model) else _OfFolder(model)


def load_json(files: ModelFiles, name: str) -> dict[str, Any] | None:
    """A JSON object, read strictly; None if there is no such file.  Raises ModelError."""
    raw = files.read(name)
    return None if raw is None else parse_json_object(raw, files.path_of(name))


class _OfFolder:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path_of(self, name: str) -> str:
        return str(self._folder / name)

    def read(self, name: str) -> bytes | None:
        path = self._folder / name
        if not path.is_file():
            return None
        try:
            with path.open("rb") as file:
                raw = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from error
        if len(raw) > MAX_BYTES:
            raise ModelError(f"{path}: larger than {MAX_BYTES} bytes, which no such file is")
        return raw


class _OfGguf:
    """Files made from a GGUF file's metadata on demand; it is parsed once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        parts = open_parts(path)
        try:
            self._header = joined_header(parts)
            self._factors = {
                info.name: np.frombuffer(part.file.view(info.start, info.stop), np.float32).copy()
                for part in parts
                for info in part.header.tensors.values()
                if info.name in RECIPES and info.dtype == "F32"
            }
        finally:
            close_parts(parts)

    @property
    def header(self) -> GgufHeader:
        return self._header

    def path_of(self, name: str) -> str:
        return str(self._path)

    def read(self, name: str) -> bytes | None:
        if name == CONFIG:
            return json.dumps(config_json(self._header, self._factors, str(self._path))).encode()
        if name == TOKENIZER:
            return self._tokenizer
        if name == TOKENIZER_CONFIG:
            return json.dumps(tokenizer_config(self._header.metadata, str(self._path))).encode()
        return None

    @cached_property
    def _tokenizer(self) -> bytes:
        return tokenizer_json(self._header.metadata, str(self._path))
