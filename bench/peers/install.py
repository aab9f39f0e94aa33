"""Installs each peer in a virtual environment of its own, with exact versions, and builds llama.cpp for this processor.

llama.cpp's source is the one that the source archive of llama-cpp-python carries, so that a package index is all that
is needed.  Knows nothing about models and measurements.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.peers.places import HERE, LLAMA, PEERS, Workplace

LLAMA_ARCHIVE: Final = "llama-cpp-python==0.3.36"
LLAMA_TOOLS: Final = ("llama-server", "llama-bench", "llama-batched-bench", "llama-quantize")
LLAMA_FLAGS: Final = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


class InstallError(Exception):
    """A step failed; the message names the command and its log."""


def run(command: Sequence[str | Path], log: Path, *, say: str) -> None:
    """One step with its output in ``log``, and a line about it.  Raises InstallError."""
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"{say} ...", flush=True)
    began = time.monotonic()
    with log.open("ab") as file:
        code = subprocess.run([str(part) for part in command], stdout=file, stderr=file, check=False).returncode
    if code != 0:
        raise InstallError(f"{say} failed ({code}): {' '.join(map(str, command))}\nsee {log}")
    print(f"{say}: {time.monotonic() - began:.0f} s", flush=True)


def install(place: Workplace, peers: Sequence[str], *, python: str, torch_index: str | None) -> None:
    """What is not there yet.  Raises InstallError."""
    for peer in peers:
        if installed(place, peer):
            print(f"{peer}: installed already")
            continue
        _environment(place, peer, python, torch_index)
        _leave_out(place, peer)
        if peer == LLAMA:
            _build_llama(place)
        _done_file(place, peer).write_text(_requirements(peer).read_text(encoding="utf-8"), encoding="utf-8")


def installed(place: Workplace, peer: str) -> bool:
    """Whether this peer is there in the versions that are asked for."""
    done = _done_file(place, peer)
    return done.exists() and done.read_text(encoding="utf-8") == _requirements(peer).read_text(encoding="utf-8")


def missing(place: Workplace) -> list[str]:
    return [peer for peer in PEERS if not installed(place, peer)]


def _done_file(place: Workplace, peer: str) -> Path:
    return place.venv(peer) / "installed.txt"


def _requirements(peer: str) -> Path:
    return HERE / "requirements" / f"{peer}.txt"


def _environment(place: Workplace, peer: str, python: str, torch_index: str | None) -> None:
    log = place.logs / f"install-{peer}.log"
    if not place.python(peer).exists():
        run([python, "-m", "venv", place.venv(peer)], log, say=f"{peer}: virtual environment")
    command: list[str | Path] = [place.python(peer), "-m", "pip", "install", "-r", _requirements(peer)]
    if torch_index is not None:
        command += ["--extra-index-url", torch_index]
    try:
        run(command, log, say=f"{peer}: packages")
    except InstallError as error:
        if torch_index is None and "+cpu" in log.read_text(errors="replace"):
            hint = (
                "torch's CPU builds may have an index of their own: --torch-index https://download.pytorch.org/whl/cpu"
            )
            raise InstallError(f"{error}\n{hint}") from error
        raise


def _leave_out(place: Workplace, peer: str) -> None:
    unwanted = HERE / "requirements" / f"{peer}.without.txt"
    if unwanted.exists():
        command: list[str | Path] = [place.python(peer), "-m", "pip", "uninstall", "-y", "-r", unwanted]
        run(command, place.logs / f"install-{peer}.log", say=f"{peer}: taking out what breaks it")


def _build_llama(place: Workplace) -> None:
    log = place.logs / f"install-{LLAMA}.log"
    source = place.root / "source"
    source.mkdir(parents=True, exist_ok=True)
    if not list(source.glob("llama_cpp_python-*.tar.gz")):
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python", LLAMA_ARCHIVE]
        run([*pip, "-d", str(source)], log, say=f"{LLAMA}: source")
    (archive,) = source.glob("llama_cpp_python-*.tar.gz")
    folder = source / archive.name.removesuffix(".tar.gz")
    if not folder.exists():
        with tarfile.open(archive) as packed:
            packed.extractall(source, filter="data")
    tools = place.venv(LLAMA) / "bin"
    configure: list[str | Path] = [tools / "cmake", "-G", "Ninja", "-B", place.llama_build]
    configure += ["-S", folder / "vendor" / "llama.cpp", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"]
    configure += [*LLAMA_FLAGS, *_launcher()]
    run(configure, log, say=f"{LLAMA}: configuring")
    build: list[str | Path] = [tools / "cmake", "--build", place.llama_build, "--parallel", str(os.cpu_count() or 1)]
    run([*build, "--target", *LLAMA_TOOLS], log, say=f"{LLAMA}: building (some ten minutes on two cores)")


def _launcher() -> list[str]:
    if shutil.which("ccache") is None:
        return []
    return ["-DCMAKE_C_COMPILER_LAUNCHER=ccache", "-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"]
