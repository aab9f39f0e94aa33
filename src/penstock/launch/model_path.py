"""Finds the model that MODEL means: the bundled one, a folder, a GGUF file, or a name on the Hub, which is downloaded.

A child process downloads, as the Hub's library starts threads and a process with threads must not fork workers.  Knows
nothing about what is in the folder.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.bundled import STORYTELLER, storyteller
from penstock.config.base import expanded_path
from penstock.errors import ModelError
from penstock.launch.fork_server import fork
from penstock.launch.hub_download import download_model

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
GGUF = ".gguf"
_PART_NUMBER = re.compile(r"-\d{5}-of-\d{5}$")
CONFIG = "config.json"
_OK, _BAD = b"+", b"-"


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """A model's folder, or its GGUF file, and the name that clients call it by."""

    path: Path
    name: str
    bundled: bool = False


def locate_model(model: str | None, download: Callable[[str], str] | None = None) -> ModelLocation:
    """The path and name of a model.  ``download`` turns a Hub name into a folder; by default from the Hub.

    Raises ModelError, or ConfigError for a user without a home folder.
    """
    if model is None:
        return ModelLocation(storyteller(), STORYTELLER, bundled=True)
    path = expanded_path(model, "model")
    if path.is_dir():
        return ModelLocation(path.resolve(), path.resolve().name)
    if path.suffix.lower() == GGUF and path.is_file():
        # not resolved: a link of the Hub's cache has the name that tells what the file is, its target has not
        return ModelLocation(path.absolute(), _PART_NUMBER.sub("", path.stem))
    if path.exists():
        raise ModelError(f"{model} is a file; expected a .gguf file, or the folder with config.json and *.safetensors")
    if not is_hub_name(model):
        raise ModelError(
            f"{model}: no such folder, and no Hub name (org/name) either; "
            "try penstock serve ORG/NAME, or penstock serve for the bundled model"
        )
    return ModelLocation(Path((download or download_in_child)(model)), model)


def is_hub_name(name: str) -> bool:
    """Whether this may be the name of a model on the Hub."""
    return _HUB_NAME.fullmatch(name) is not None


def config_folder(model: str) -> Path:
    """The folder or file of a model's ``config.json``; from the Hub only that file is downloaded.

    Raises ModelError, ConfigError.  Starts threads for a Hub name: not for a process that is about to fork.
    """
    path = expanded_path(model, "model")
    if path.exists():
        return path
    if not is_hub_name(model):
        raise ModelError(f"{model}: no such file or folder, and no Hub name (org/name) either")
    return download_model(model, wanted=(CONFIG,)).folder


def download_in_child(name: str) -> str:
    """The folder of a Hub model, downloaded with a progress bar unless it is cached.  Raises ModelError."""
    reader, writer = os.pipe()

    def body() -> int:
        try:
            os.write(writer, _OK + os.fsencode(download_model(name).folder))
        except ModelError as error:
            os.write(writer, _BAD + str(error).encode())
        return 0

    try:
        child = fork("download", body, keep=[writer])
    finally:
        os.close(writer)
    try:
        with os.fdopen(reader, "rb") as pipe:
            answer = pipe.read()
    finally:
        child.kill(signal.SIGKILL)
        os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED)
        os.close(child.pidfd)
    if answer[:1] == _OK:
        return answer[1:].decode()
    raise ModelError(answer[1:].decode(errors="replace") or f"{name}: the download ended without a result")
