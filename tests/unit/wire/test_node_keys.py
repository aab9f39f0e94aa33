"""Keys of a node in a process: read again when their files change, and never replaced by what cannot be read."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import get_args

import pytest
from tests.message_samples import MESSAGES

from node_folder import NodeFolder
from penstock.config.node_registry import NodeChanges, NodeRegistry, RegistryFile, load_registry
from penstock.engine.service.gateway_exchange import SharedMessage
from penstock.errors import ConfigError
from penstock.wire import node_keys
from penstock.wire.curve_keys import read_secret
from penstock.wire.node_keys import NodeKeys, load_host_keys
from penstock.wire.peer_rights import NO_RIGHT, PeerRefusal, request_refusal


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_keys, "RELOAD_S", 0.0)


@pytest.fixture
def folder(tmp_path: Path) -> NodeFolder:
    return NodeFolder(tmp_path, a="gateway", b="worker")


def test_names_belong_to_the_node_that_they_begin_with(folder: NodeFolder) -> None:
    folder.run("add", "b2", "--rights", "worker")
    folder.deliver_registry()
    registry = folder.keys("a").registry
    owners = {name: registry.owner(name) for name in ("b", "b-0", "b-decode-0", "b2-0", "b3", "bb-0", "-", "")}
    assert {name: None if node is None else node.name for name, node in owners.items()} == {
        **dict.fromkeys(("b", "b-0", "b-decode-0"), "b"),
        "b2-0": "b2",
        **dict.fromkeys(("b3", "bb-0", "-", "")),
    }


def test_only_gateways_may_say_what_gateways_share(folder: NodeFolder) -> None:
    worker, publics = folder.keys("b"), {name: folder.keys(name).public for name in "ab"}
    shared = [message for message in MESSAGES if isinstance(message, SharedMessage)]
    assert {type(message) for message in shared} == set(get_args(SharedMessage))
    for message in shared:
        assert request_refusal(message, publics["a"], worker) is None
        refused = PeerRefusal(NO_RIGHT, "b", type(message).__name__)
        assert request_refusal(message, publics["b"], worker) == refused


def test_changed_files_are_noticed_and_said(folder: NodeFolder) -> None:
    keys, told = folder.keys("a"), list[NodeChanges]()
    keys.on_change.append(told.append)
    assert not keys.reload()
    folder.run("add", "c", "--rights", "worker")
    folder.run("revoke", "b")
    folder.run("rights", "a", "gateway,operator")
    folder.deliver_registry()
    assert keys.reload()
    assert told == [NodeChanges(added=("c",), revoked=("b",), changed=("a",))]
    assert keys.may_assign("c-0")
    folder.run("rotate", "a")
    folder.deliver_registry()
    first = keys.public
    assert keys.reload()
    assert keys.public == first
    folder.deliver_secret("a")
    assert keys.reload()
    assert keys.public != first
    assert not keys.reload()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("nodes.json", b"{"),
        ("nodes.json", b'{"nodes": [{"name": "b", "rights": ["king"], "keys": []}]}'),
        ("nodes.json", b"x" * ((4 << 20) + 1)),
        ("node.secret", b"short"),
        ("node.secret", None),  # that of another node
        ("node.secret", b"D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs"),  # of a rotation whose registry has not come yet
        ("nodes.json", b""),
    ],
)
def test_what_cannot_be_read_changes_nothing_and_is_said_once(
    folder: NodeFolder, name: str, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    keys = folder.keys("a")
    before = keys.registry, keys.secret
    other = (folder.host("b") / "node.secret").read_bytes()
    (folder.host("a") / name).write_bytes(other if content is None else content)
    with caplog.at_level(logging.ERROR):
        assert not keys.reload()
        assert not keys.reload()
    assert (keys.registry, keys.secret) == before
    assert len(caplog.records) == 1
    folder.deliver_registry()
    folder.deliver_secret("a")
    folder.run("revoke", "b")
    folder.deliver_registry()
    assert keys.reload()
    assert not keys.accepts_worker("b-0")


@pytest.mark.parametrize("secret", [b"short", None, b"D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs"])
def test_a_secret_that_cannot_be_used_holds_up_no_revocation(
    folder: NodeFolder, secret: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    """``None``: it is another node's."""
    keys, stranger = folder.keys("a"), folder.keys("b").public
    own = keys.secret
    other = (folder.host("b") / "node.secret").read_bytes()
    (folder.host("a") / "node.secret").write_bytes(other if secret is None else secret)
    assert not keys.reload()
    assert keys.sender(stranger) is not None
    caplog.clear()
    folder.run("revoke", "b")
    folder.deliver_registry()
    assert keys.reload()
    assert keys.sender(stranger) is None
    assert keys.secret == own
    assert "the key of this node stays as it was" in caplog.text, "the files are others than before"
    assert not keys.reload()


def test_the_folder_of_another_fleet_changes_nothing(folder: NodeFolder, tmp_path: Path) -> None:
    keys = folder.keys("a")
    before = keys.registry, keys.secret
    (tmp_path / "other").mkdir()
    other = NodeFolder(tmp_path / "other", a="worker", z="gateway")
    for name in ("nodes.json", "node.secret"):
        (folder.host("a") / name).write_bytes((other.host("z") / name).read_bytes())
    assert not keys.reload()
    assert (keys.registry, keys.secret) == before


def test_a_revocation_that_comes_while_keys_are_loaded_is_noticed(
    folder: NodeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = folder.keys("b").public

    def read_meanwhile(path: Path) -> bytes:
        folder.run("revoke", "b")
        folder.deliver_registry()
        return read_secret(path)

    with monkeypatch.context() as patch:
        patch.setattr(node_keys, "read_secret", read_meanwhile)
        keys = folder.keys("a")
    assert keys.sender(stranger) is not None
    assert keys.reload()
    assert keys.sender(stranger) is None


def test_a_registry_that_others_can_write_is_refused(folder: NodeFolder) -> None:
    (folder.host("a") / "nodes.json").chmod(0o666)
    with pytest.raises(ConfigError, match="only its owner can write"):
        folder.keys("a")


def test_a_revoked_nodes_own_processes_go_on_and_say_so(folder: NodeFolder, caplog: pytest.LogCaptureFixture) -> None:
    keys = folder.keys("b")
    folder.run("revoke", "b")
    folder.deliver_registry()
    with caplog.at_level(logging.ERROR):
        assert keys.reload()
    assert "no longer accepted" in caplog.text
    with pytest.raises(ConfigError, match="is revoked"):
        folder.keys("b")


def test_a_secret_is_in_no_text(folder: NodeFolder) -> None:
    keys = folder.keys("a")
    assert keys.secret.decode() not in repr(keys)
    assert isinstance(keys, NodeKeys)


def test_ambiguous_registries_are_refused(folder: NodeFolder, tmp_path: Path) -> None:
    file = load_registry(folder.host("a") / "nodes.json")
    assert NodeRegistry(RegistryFile()).owner("a") is None
    from msgspec import json, structs

    a, b = file.nodes
    for nodes in ((a, a), (a, structs.replace(b, keys=a.keys)), (a, structs.replace(b, name="a-b"))):
        path = tmp_path / "nodes.json"
        path.write_bytes(json.encode(RegistryFile(nodes=nodes)))
        path.chmod(0o600)
        with pytest.raises(ConfigError, match=r"same name or key|could be taken for"):
            load_registry(path)


def test_a_folder_that_may_not_be_looked_into_is_refused_with_its_name(tmp_path: Path) -> None:
    """A name that is too long stands for one without permission, which root would have."""
    with pytest.raises(ConfigError, match=r"cannot read the key .*File name too long"):
        load_host_keys(tmp_path / ("k" * 300), "a")
