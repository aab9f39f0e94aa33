"""The file of nodes: which there are, what each may do, and by which public keys it is known.

Written by ``penstock host-keys`` in the operator's folder and copied to every host; read by all processes, which reload
it when it changes.  It has no secrets: whoever changes a copy changes what that host accepts, and no other.

::

    {"nodes": [{"name": "a", "rights": ["gateway", "worker"], "keys": [{"public": "…", "created": 1795930000}]}]}

A name of a process belongs to the node whose name it begins with: ``a-decode-0`` is the node ``a``'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from penstock.config.base import Config
from penstock.config.private_file import locked_folder, read_private_file, replace_file
from penstock.errors import ConfigError

REGISTRY_FILE = "nodes.json"
MAX_REGISTRY_BYTES = 4 << 20
MAX_REGISTERED_NODES = 4096
"""Revoked ones included: their names stay theirs."""

MAX_NODE_KEYS = 2
"""Public keys by which a node is known at a time: two while one replaces the other."""

NODE_NAME = "^[a-z0-9][a-z0-9-]{0,39}$"
_Z85 = r"^[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}$"

NodeName = Annotated[str, msgspec.Meta(pattern=NODE_NAME)]
UnixSeconds = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class NodeRight(StrEnum):
    """What a node's processes may do."""

    GATEWAY = "gateway"  # submit requests to workers
    WORKER = "worker"  # serve requests, and fetch KV pages from other workers
    OPERATOR = "operator"  # give workers of other nodes another role, drain and restart them


class NodeKey(Config, frozen=True, kw_only=True):
    """One accepted public key."""

    public: Annotated[str, msgspec.Meta(pattern=_Z85)]  # CURVE, as Z85
    created: UnixSeconds = 0


class NodeEntry(Config, frozen=True, kw_only=True, omit_defaults=True):
    """One node."""

    name: NodeName
    rights: Annotated[tuple[NodeRight, ...], msgspec.Meta(min_length=1, max_length=len(NodeRight))]
    keys: Annotated[tuple[NodeKey, ...], msgspec.Meta(min_length=1, max_length=MAX_NODE_KEYS)]  # the newest last
    revoked: UnixSeconds = 0  # when; 0: it is accepted

    def may(self, right: NodeRight) -> bool:
        """Whether it has this right, now."""
        return not self.revoked and right in self.rights


class RegistryFile(Config, frozen=True, kw_only=True):
    """The content of the file."""

    version: Literal[1] = 1
    nodes: Annotated[tuple[NodeEntry, ...], msgspec.Meta(max_length=MAX_REGISTERED_NODES)] = ()


class NodeChanges(msgspec.Struct, frozen=True):
    """Names of nodes that differ between two states of the file."""

    added: tuple[str, ...] = ()
    revoked: tuple[str, ...] = ()  # or removed
    changed: tuple[str, ...] = ()  # their rights or keys


class NodeRegistry:
    """A registry file, to look things up in.  Never changes."""

    def __init__(self, file: RegistryFile) -> None:
        self.file = file
        self._by_name = {node.name: node for node in file.nodes}
        self._by_key = {key.public.encode(): node for node in file.nodes for key in node.keys}

    def node(self, name: str) -> NodeEntry | None:
        """The node of this name, revoked or not."""
        return self._by_name.get(name)

    def holder(self, public: bytes) -> NodeEntry | None:
        """The node with this public key, as Z85; it may be revoked."""
        return self._by_key.get(public)

    def owner(self, name: str) -> NodeEntry | None:
        """The node whose process may call itself so; it may be revoked."""
        while name:
            node = self._by_name.get(name)
            if node is not None:
                return node
            name = name.rpartition("-")[0]
        return None

    @cached_property
    def accepted_keys(self) -> dict[str, frozenset[str]]:
        """Public keys of the nodes that are not revoked, by the node's name."""
        accepted = (node for node in self.file.nodes if not node.revoked)
        return {node.name: frozenset(key.public for key in node.keys) for node in accepted}

    @cached_property
    def worker_keys(self) -> tuple[bytes, ...]:
        """Public keys of all nodes that may have workers."""
        return tuple(key for node in self.file.nodes for key in self.keys_of(node.name, NodeRight.WORKER))

    def keys_of(self, name: str, right: NodeRight) -> tuple[bytes, ...]:
        """Public keys of a node, the newest first; none if it does not have the right."""
        node = self._by_name.get(name)
        if node is None or not node.may(right):
            return ()
        return tuple(key.public.encode() for key in reversed(node.keys))


def node_changes(before: RegistryFile, after: RegistryFile) -> NodeChanges:
    """What has become of the nodes."""
    old, new = ({node.name: node for node in file.nodes} for file in (before, after))
    gone = [name for name in old if name not in new]
    revoked = [name for name, node in new.items() if node.revoked and name in old and not old[name].revoked]
    return NodeChanges(
        added=tuple(name for name in new if name not in old),
        revoked=(*gone, *revoked),
        changed=tuple(name for name in new if name in old and new[name] != old[name] and name not in revoked),
    )


def load_registry(path: Path) -> RegistryFile:
    """Read and check the file.  Raises ConfigError with file and field."""
    hint = "'penstock host-keys init DIR' and 'add DIR NAME' make it"
    raw = read_private_file(path, MAX_REGISTRY_BYTES, what="the nodes", hint=hint)
    try:
        file = msgspec.json.decode(raw, type=RegistryFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    check_registry(file, str(path))
    return file


def check_registry(file: RegistryFile, where: str) -> None:
    """Raises ConfigError for nodes whose names or keys could be taken for another's."""
    names = {node.name for node in file.nodes}
    keys = [key.public for node in file.nodes for key in node.keys]
    if len(names) < len(file.nodes) or len(set(keys)) < len(keys):
        raise ConfigError(f"{where}: two nodes have the same name or key")
    for name in sorted(names):
        parts = name.split("-")
        longer = ("-".join(parts[:end]) for end in range(1, len(parts)))
        taken = next((shorter for shorter in longer if shorter in names), None)
        if taken is not None:
            raise ConfigError(
                f"{where}: the node {name!r} could be taken for a process of the node {taken!r}; "
                f"choose a name that does not begin with '{taken}-'"
            )


@contextmanager
def edit_registry(folder: Path) -> Iterator[list[RegistryFile]]:
    """The registry of the operator's folder as a list of one, which is written back on leaving; other edits wait.

    Raises ConfigError.
    """
    path = folder / REGISTRY_FILE
    with locked_folder(folder, "the nodes"):
        held = [load_registry(path)]
        before = held[0]
        yield held
        if held[0] is not before:
            write_registry(folder, held[0])


def write_registry(folder: Path, file: RegistryFile) -> None:
    """Check and write it.  Raises ConfigError."""
    check_registry(file, str(folder / REGISTRY_FILE))
    replace_file(folder / REGISTRY_FILE, encode_registry(file))


def encode_registry(file: RegistryFile) -> bytes:
    """As it is written."""
    return msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n"
