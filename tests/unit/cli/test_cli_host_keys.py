"""``penstock host-keys``: nodes are added, rotated, revoked and listed; a node's folder has what its host needs."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.config import node_registry
from penstock.config.node_registry import NodeRight, load_registry
from penstock.config.schema import ServeConfig
from penstock.errors import ConfigError
from penstock.launch.compose import host_keys
from penstock.wire.curve_keys import CurveKeys
from penstock.wire.node_keys import NodeKeys, fingerprint, load_host_keys


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "operator"
    assert run("init", made) == 0
    assert run("add", made, "a", "--rights", "gateway,worker,operator") == 0
    assert run("add", made, "b") == 0
    return made


def run(verb: str, folder: Path, *words: str) -> int:
    return main(["host-keys", verb, str(folder), *words])


def test_a_nodes_folder_has_what_its_host_needs_and_no_more(folder: Path) -> None:
    assert run("add", folder, "c", "--rights", "worker") == 0
    assert {path.name for path in (folder / "b").iterdir()} == {"nodes.json", "node.secret", "events.secret"}
    assert {path.name for path in (folder / "c").iterdir()} == {"nodes.json", "node.secret"}
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert len({path.read_bytes() for path in folder.rglob("nodes.json")}) == 1
    secrets = {path.read_text().strip() for path in folder.rglob("*.secret")}
    assert not any(secret in (folder / "nodes.json").read_text() for secret in secrets)
    keys = [load_host_keys(folder, name) for name in "abc"]
    assert [key.node for key in keys if isinstance(key, NodeKeys)] == ["a", "b", "c"]
    assert [key.may(NodeRight.OPERATOR) for key in keys if isinstance(key, NodeKeys)] == [True, False, False]
    assert keys[0].event_secret == keys[1].event_secret  # type: ignore[union-attr]


def test_a_key_is_replaced_by_way_of_two(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = NodeKeys.load(folder / "b")
    assert run("rotate", folder, "b") == 0
    new = NodeKeys.load(folder / "b")
    assert new.public != old.public
    assert new.listener_keys("b-decode-0") == (new.public, old.public)
    assert run("rotate", folder, "b") == 2
    assert "two keys" in capsys.readouterr().err
    assert run("list", folder) == 0
    shown = capsys.readouterr().out
    assert fingerprint(old.public) in shown
    assert "until the rotation is finished" in shown
    assert run("rotate", folder, "b", "--finish") == 0
    assert NodeKeys.load(folder / "b").listener_keys("b-decode-0") == (new.public,)
    assert run("rotate", folder, "b", "--finish") == 2
    assert "b has one key" in capsys.readouterr().err


def test_a_revoked_node_is_known_and_not_accepted_until_it_has_another_key(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = NodeKeys.load(folder / "a"), NodeKeys.load(folder / "b")
    assert run("revoke", folder, "b") == 0
    a = NodeKeys.load(folder / "a")
    assert a.sender(b.public) is None
    assert not a.accepts_worker("b-decode-0")
    assert a.listener_keys("b-decode-0") == ()
    assert run("list", folder) == 0
    assert "revoked" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"the node 'b' of .* is revoked"):
        load_host_keys(folder, "b")
    assert run("rotate", folder, "b") == 2
    assert run("add", folder, "b", "--rights", "worker") == 0
    assert NodeKeys.load(folder / "a").accepts_worker("b-decode-0")


def test_rights_change_without_another_key(folder: Path) -> None:
    before = NodeKeys.load(folder / "b")
    assert run("rights", folder, "b", "worker") == 0
    after = NodeKeys.load(folder / "b")
    assert after.public == before.public
    assert not after.may(NodeRight.GATEWAY)
    assert not (folder / "b" / "events.secret").exists()


@pytest.mark.parametrize(
    ("words", "because"),
    [
        (["add", "a"], "has a node a already"),
        (["add", "a-1"], "choose a name that does not begin with 'a-'"),
        (["add", "A"], "a node's name has letters a-z"),
        (["add", "c", "--rights", "king"], "expected some of gateway,worker,operator"),
        (["revoke", "z"], "has no node 'z'; it has a, b"),
        (["init"], "has nodes.json already"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    folder: Path, words: list[str], because: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = load_registry(folder / "nodes.json")
    assert run(words[0], folder, *words[1:]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert because in line
    assert load_registry(folder / "nodes.json") == before
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"a", "b"}


def test_both_forms_are_told_apart(folder: Path, tmp_path: Path) -> None:
    assert run("shared", tmp_path / "shared") == 0
    assert isinstance(load_host_keys(tmp_path / "shared", "a"), CurveKeys)
    with pytest.raises(ConfigError, match="it is the operator's folder"):
        load_host_keys(folder)
    with pytest.raises(ConfigError, match="the keys of the node 'b'; the node 'a' needs its own"):
        load_host_keys(folder / "b", "a")
    assert run("rights", folder, "b", "worker") == 0
    config = ServeConfig(keys=str(folder / "b"))
    assert isinstance(host_keys(config, NodeRight.WORKER, node="b"), NodeKeys)
    with pytest.raises(ConfigError, match="no right to have a gateway"):
        host_keys(config, NodeRight.GATEWAY)


def test_a_key_whose_secret_cannot_be_written_is_in_no_registry(folder: Path) -> None:
    before = (folder / "nodes.json").read_bytes()
    (folder / "c").write_text("in the way of the folder of c")
    assert run("add", folder, "c") == 2
    secret = folder / "b" / "node.secret"
    secret.unlink()
    secret.mkdir()  # a file cannot take its place
    assert run("rotate", folder, "b") == 2
    assert (folder / "nodes.json").read_bytes() == before
    secret.rmdir()
    assert run("rotate", folder, "b") == 0
    assert NodeKeys.load(folder / "b").node == "b"


def test_a_registry_that_cannot_be_written_leaves_secrets_as_they_were(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(folder: Path, file: object) -> None:
        raise ConfigError("cannot write nodes.json: No space left on device")

    keys = NodeKeys.load(folder / "b")
    with monkeypatch.context() as patch:
        patch.setattr(node_registry, "write_registry", full)
        assert run("rotate", folder, "b") == 2
        assert run("add", folder, "c") == 2
    assert "No space left" in capsys.readouterr().err
    assert NodeKeys.load(folder / "b").secret == keys.secret
    assert {path.name for path in (folder / "b").iterdir()} == {"nodes.json", "node.secret", "events.secret"}
    assert not (folder / "c" / "node.secret").exists()
    assert run("rotate", folder, "b") == 0
    assert run("add", folder, "c") == 0
    assert {path.name for path in (folder / "b").iterdir()} == {"nodes.json", "node.secret", "events.secret"}


@pytest.mark.parametrize("words", [["revoke", "b"], ["rotate", "b"], ["rights", "b", "worker"]])
def test_copies_that_could_not_be_written_are_when_the_command_is_repeated(
    folder: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a registry in which the node is accepted could be copied to a host."""
    assert run("add", folder, "c") == 0
    copy = folder / "a" / "nodes.json"
    copy.unlink()
    copy.mkdir()  # a file cannot take its place, as none can on a full disk
    assert run(words[0], folder, *words[1:]) == 2
    assert "repeat the command" in capsys.readouterr().err
    now = (folder / "nodes.json").read_bytes()
    assert (folder / "b" / "nodes.json").read_bytes() == (folder / "c" / "nodes.json").read_bytes() == now
    copy.rmdir()
    run(words[0], folder, *words[1:])
    assert copy.read_bytes() == now == (folder / "nodes.json").read_bytes()


def test_a_secret_that_cannot_be_replaced_leaves_no_copy_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would go to the node's host with its folder."""
    before, fsync = NodeKeys.load(folder / "b").secret, os.fsync

    def full(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(folder / "b" / ".node.secret-")):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert run("rotate", folder, "b") == 2
    assert {path.name for path in (folder / "b").iterdir()} == {"nodes.json", "node.secret", "events.secret"}
    assert NodeKeys.load(folder / "b").secret == before
