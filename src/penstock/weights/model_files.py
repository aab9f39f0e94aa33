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
from penstock.weights.files import MappedFile
from penstock.weights.gguf_file import ROPE_FACTORS, GgufHeader, is_gguf, parse_gguf_header
from penstock.weights.gguf_metadata import config_json, tokenizer_config, tokenizer_json

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
        file = MappedFile(path)
        try:
            raw = file.view(0, file.size)
            self._header = parse_gguf_header(raw, str(path))
            factors = self._header.tensors.get(ROPE_FACTORS)
            self._factors = None
            if factors is not None and factors.dtype == "F32":
                self._factors = np.frombuffer(raw[factors.start : factors.stop], np.float32).copy()
            del raw
        finally:
            file.close()

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
