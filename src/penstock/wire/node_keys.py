"""The key of one node, and what it knows of the others: who may connect, and as what.

Unlike ``curve_keys.CurveKeys``, which all processes of a deployment share, each node has a pair of its own, for both
ends of its connections.  A folder holds it, made by ``penstock host-keys add`` and copied to the node's host::

    nodes.json     every node's name, rights and public keys (config.node_registry), the same on all hosts
    node.secret    this node's secret key, mode 0600; its name follows from the registry
    events.secret  only where the node may have gateways: what all of them sign event ids with

Files are looked at every ``RELOAD_S`` and read again when they have changed.  What cannot be read changes nothing;
a secret that cannot be used does not keep the registry from being taken.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import TypeAlias

import zmq

from penstock.config.node_registry import (
    REGISTRY_FILE,
    NodeChanges,
    NodeEntry,
    NodeRegistry,
    NodeRight,
    load_registry,
    node_changes,
)
from penstock.errors import ConfigError
from penstock.wire.curve_keys import CurveKeys, public_key, read_secret

SECRET_FILE, EVENTS_FILE = "node.secret", "events.secret"

RELOAD_S = 1.0
"""Between two looks at the files."""

FileStamps: TypeAlias = tuple[tuple[int, int, int], ...]
"""Time of change, size and inode of each file."""

log = logging.getLogger("penstock.wire")


class NodeKeys:
    """One node's identity.  Each process has a copy, which it reloads by itself.  Never shows its secret."""

    def __init__(self, folder: Path, secret: bytes, registry: NodeRegistry, stamp: FileStamps) -> None:
        """``stamp``: of the folder, from before the files were read: what changes meanwhile is read again.

        Raises ConfigError if the secret is no node's, or a revoked one's.
        """
        self._folder = folder
        self._stamp = stamp
        self._next_look = 0.0
        self._problem: tuple[FileStamps, str] | None = None  # what was said last, and of which files
        self._looking = threading.Lock()  # of threads that call ``current``
        self.registry = registry
        self.secret, self.public = secret, _public_of(secret, folder)
        holder = registry.holder(self.public)
        if holder is None:
            raise ConfigError(
                f"the key in {folder / SECRET_FILE} is none of those in {folder / REGISTRY_FILE}: copy both anew from "
                "the operator's folder"
            )
        if holder.revoked:
            raise ConfigError(f"the node {holder.name!r} of {folder} is revoked; 'penstock host-keys add' renews it")
        self.node = holder.name
        self.on_change: list[Callable[[NodeChanges], None]] = []
        """Called after the registry or the own key has changed, in this process."""

    def __repr__(self) -> str:
        return f"NodeKeys({self.node!r}, ...)"

    @classmethod
    def load(cls, folder: Path) -> NodeKeys:
        """Read a node's folder.  Raises ConfigError."""
        stamp = _stamp(folder)
        registry = NodeRegistry(load_registry(folder / REGISTRY_FILE))
        if not os.path.exists(folder / SECRET_FILE):
            names = ", ".join(node.name for node in registry.file.nodes) or "none yet"
            raise ConfigError(
                f"{folder} has no {SECRET_FILE}: it is the operator's folder; --keys takes a node's, such as "
                f"{folder}/NAME (nodes: {names})"
            )
        return cls(folder, read_secret(folder / SECRET_FILE), registry, stamp)

    @property
    def event_secret(self) -> bytes:
        """What all gateways share.  Raises ConfigError."""
        return read_secret(self._folder / EVENTS_FILE)

    def may(self, right: NodeRight) -> bool:
        """Whether this node has the right."""
        entry = self.registry.node(self.node)
        return entry is not None and entry.may(right)

    def sender(self, public: bytes) -> NodeEntry | None:
        """The node with this public key, as Z85, if it is accepted."""
        node = self.registry.holder(public)
        return None if node is None or node.revoked else node

    def owns(self, node: NodeEntry, name: str) -> bool:
        """Whether a process of the node may call itself ``name``."""
        return self.registry.owner(name) is node

    def accepts_worker(self, worker: str) -> bool:
        """Whether the worker's node may have workers."""
        owner = self.registry.owner(worker)
        return owner is not None and owner.may(NodeRight.WORKER)

    def may_assign(self, worker: str) -> bool:
        """Whether this node's gateways may give the worker another role or duty."""
        owner = self.registry.owner(worker)
        return self.may(NodeRight.OPERATOR) or (owner is not None and owner.name == self.node)

    def listener_keys(self, worker: str) -> tuple[bytes, ...]:
        """Public keys that the listener of this worker may have; ``worker`` empty: that of any may have."""
        if not worker:
            return self.registry.worker_keys
        owner = self.registry.owner(worker)
        return () if owner is None else self.registry.keys_of(owner.name, NodeRight.WORKER)

    def reload(self) -> bool:
        """Look at the files, if it is time; whether they have changed.  Never raises."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + RELOAD_S
        stamp = _stamp(self._folder)
        if stamp == self._stamp:
            return False
        try:
            registry = NodeRegistry(load_registry(self._folder / REGISTRY_FILE))
        except ConfigError as error:
            self._note(stamp, f"the keys of nodes stay as they were: {error}")
            return False
        try:
            secret, public = self._own_pair(registry)
        except ConfigError as error:
            ours = registry.holder(self.public)
            if ours is None or ours.name != self.node:  # a folder of another fleet, as it seems
                self._note(stamp, f"the keys of nodes stay as they were: {error}")
                return False
            # Another node's revocation must not wait until this one's secret is mended.
            self._note(stamp, f"the key of this node stays as it was: {error}")
            return self._take(registry, self.secret, self.public)
        self._stamp, self._problem = stamp, None
        return self._take(registry, secret, public)

    def current(self) -> NodeKeys:
        """A copy that stays as it is, made after ``reload``: registry and own key belong together.  Never raises.

        Any number of threads may call it, while none calls ``reload``; handlers of changes run in one of them.
        """
        with self._looking:
            self.reload()
            return copy.copy(self)

    def _own_pair(self, registry: NodeRegistry) -> tuple[bytes, bytes]:
        """The secret and the public key in the folder.  Raises ConfigError if they are not this node's."""
        secret = read_secret(self._folder / SECRET_FILE)
        public = _public_of(secret, self._folder)
        holder = registry.holder(public)
        if holder is None and secret != self.secret:
            raise ConfigError(f"the new key in {self._folder / SECRET_FILE} is not in {REGISTRY_FILE} there")
        if holder is not None and holder.name != self.node:
            raise ConfigError(f"{self._folder} holds the keys of the node {holder.name!r}, not {self.node!r}")
        return secret, public

    def _note(self, stamp: FileStamps, problem: str) -> None:
        """Once for each change of the files, however often they are read."""
        if (stamp, problem) != self._problem:
            log.error("%s", problem)
        self._problem = stamp, problem

    def _take(self, registry: NodeRegistry, secret: bytes, public: bytes) -> bool:
        changes = node_changes(self.registry.file, registry.file)
        if changes == NodeChanges() and secret == self.secret:
            return False
        if secret != self.secret:
            log.info("the node %s has another key now: %s", self.node, fingerprint(public))
        self.registry, self.secret, self.public = registry, secret, public
        if self.sender(public) is None:
            log.error("the key of this node, %s, is no longer accepted: other nodes ignore it", self.node)
        for name in changes.revoked:
            log.warning("the node %s is revoked", name)
        for name in (*changes.added, *changes.changed):
            log.info("the node %s has other keys or rights now", name)
        for handler in self.on_change:
            handler(changes)
        return True


HostKeys: TypeAlias = CurveKeys | NodeKeys
"""What ``--keys`` names: keys that all hosts share, or those of one node."""


def load_host_keys(folder: Path, node: str = "") -> HostKeys:
    """The keys in a folder, in whichever form they are.

    ``node``: the node that they are for; its folder may lie within this one, as in the operator's.  Raises ConfigError.
    """
    if node and os.path.exists(folder / node / SECRET_FILE):  # False, too, where it may not be looked at
        folder = folder / node
    if not os.path.exists(folder / REGISTRY_FILE):
        return CurveKeys.load(folder)
    keys = NodeKeys.load(folder)
    if node and keys.node != node:
        raise ConfigError(f"{folder} has the keys of the node {keys.node!r}; the node {node!r} needs its own")
    return keys


def fingerprint(public: bytes) -> str:
    """16 hexadecimal digits by which people can compare public keys."""
    return blake2b(public, digest_size=8, person=b"penstock nodes").hexdigest()


def new_secret() -> tuple[bytes, bytes]:
    """A new public and secret key, as Z85."""
    public, secret = zmq.curve_keypair()
    return public, secret


def _public_of(secret: bytes, folder: Path) -> bytes:
    public = public_key(secret)
    if public is None:
        raise ConfigError(f"{folder / SECRET_FILE} holds no key")
    return public


def _stamp(folder: Path) -> FileStamps:
    """Changes when one of the files does."""
    stamps = []
    for name in (REGISTRY_FILE, SECRET_FILE):
        try:
            facts = (folder / name).stat()
            stamps.append((facts.st_mtime_ns, facts.st_size, facts.st_ino))
        except OSError:
            stamps.append((0, 0, 0))
    return tuple(stamps)
