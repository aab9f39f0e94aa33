"""Keys for nodes: the operator's folder, as ``penstock host-keys`` changes it, and the copies that hosts have."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from penstock.cli.main import main
from penstock.config.node_registry import REGISTRY_FILE
from penstock.wire.node_keys import SECRET_FILE, NodeKeys


class NodeFolder:
    """``rights``: those of each node, by name.  ``host(NAME)`` is what its host has; ``deliver_...`` renews that."""

    def __init__(self, folder: Path, **rights: str) -> None:
        self._operator, self._hosts = folder / "operator", folder / "hosts"
        self.run("init")
        for name, words in rights.items():
            self.run("add", name, "--rights", words)
        for name in rights:
            shutil.copytree(self._operator / name, self.host(name))

    def run(self, verb: str, *words: str) -> None:
        """One command of the operator."""
        assert main(["host-keys", verb, str(self._operator), *words]) == 0

    def host(self, name: str) -> Path:
        """The folder on the host of a node."""
        return self._hosts / name

    def keys(self, name: str) -> NodeKeys:
        """As a process of the node loads them."""
        return NodeKeys.load(self.host(name))

    def deliver_registry(self, *names: str) -> None:
        """Copy it to these hosts, or to all."""
        for host in [self.host(name) for name in names] or self._hosts.iterdir():
            _copy(self._operator / REGISTRY_FILE, host)

    def deliver_secret(self, name: str) -> None:
        """Copy the node's to its host."""
        _copy(self._operator / name / SECRET_FILE, self.host(name))

    def steal(self, name: str, to: Path) -> Path:
        """A copy of what the node's host has."""
        return shutil.copytree(self.host(name), to)


def _copy(file: Path, folder: Path) -> None:
    """As rsync does: in one piece."""
    new = shutil.copy2(file, folder / f".{file.name}.new")
    os.utime(new)
    os.replace(new, folder / file.name)
