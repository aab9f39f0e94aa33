"""Where ``scripts/client-packages`` has installed the packages of clients, and helm and kubectl."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("PENSTOCK_CLIENTS", ROOT / ".clients"))
UNREACHABLE = "unreachable"
"""A file that says which registry did not answer."""


def _need(path: Path) -> str:
    """The path, of what must be there.  In CI only a registry that does not answer is an excuse, and it is told."""
    why = FOLDER / UNREACHABLE
    if why.exists():  # what there is may be a part
        pytest.skip(f"NOT RUN, client packages are not installed: {why.read_text(encoding='utf-8').strip()}")
    if path.exists():
        return str(path)
    if os.environ.get("CI"):
        pytest.fail(f"{path} is missing: scripts/client-packages installs it")
    pytest.skip("client packages are not installed: scripts/client-packages does it")


def need_python(environment: str = "python") -> str:
    """The Python of the packages of PyPI; ``aider`` has an environment of its own."""
    return _need(FOLDER / environment / "bin/python")


def need_envoy() -> str:
    """Envoy, from an environment of its own: its package and the extra ``picker`` both have a module ``envoy``."""
    return _need(FOLDER / "envoy/bin/envoy")


def need_node() -> str:
    """Node, where the packages of npm are installed."""
    _need(FOLDER / "npm/node_modules")
    node = shutil.which("node")
    assert node is not None, "npm was there, and node is not"
    return node


def need_npm_command(name: str) -> str:
    """A command of a package of npm."""
    return _need(FOLDER / "npm/node_modules/.bin" / name)


def need_helm() -> str:
    """The program, as it is released."""
    return _need(FOLDER / "helm/bin/helm")


def need_kubectl() -> str:
    """The program, as it is released; there is no cluster here."""
    return _need(FOLDER / "helm/bin/kubectl")
