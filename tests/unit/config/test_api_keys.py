"""The file of API keys: written whole, checked when it is read, noticed when it changes."""

from __future__ import annotations

import stat
from pathlib import Path

import msgspec
import pytest

from penstock.api.auth import KEY_FILE_CHECK_S, KEY_FILE_ERROR_LOG_S, FileApiKeys
from penstock.clock import VirtualClock
from penstock.config.api_keys import KeyFile, ServiceClassName, TenantEntry, edit_keys, load_keys, new_key
from penstock.errors import ConfigError
from penstock.types import ServiceClass

SALT = "0" * 32
ENTRY = f'{{"id": "k-00000001", "tenant": "a", "sha256": "{"1" * 64}"}}'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "truncated"),
        ("[]", "object"),
        (f'{{"salt": "{SALT}", "extra": 1}}', "extra"),
        (f'{{"salt": "{SALT}", "keys": [{ENTRY}]}}', "tenant 'a', which is not among 'tenants'"),
        (f'{{"salt": "{SALT}", "tenants": {{"a": {{}}}}, "keys": [{ENTRY}, {ENTRY}]}}', "the same id"),
        (f'{{"salt": "{SALT}", "tenants": {{"a": {{"weight": 0}}}}}}', "weight|> 0"),
        ('{"salt": "short"}', "salt"),
    ],
)
def test_what_is_no_file_of_keys(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=says) as refused:
        load_keys(path, 10)
    assert str(path) in str(refused.value)


def test_a_file_that_others_can_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(f'{{"salt": "{SALT}"}}')
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="only its owner can write"):
        load_keys(path, 10)
    with pytest.raises(ConfigError, match="penstock keys add"):
        load_keys(tmp_path / "none.json", 10)


def test_too_many_keys_are_refused_and_not_written(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    made = [add(path, f"t{number}") for number in range(3)]
    assert len(set(made)) == 3
    with pytest.raises(ConfigError, match=r"3 keys; at most 2"):
        load_keys(path, 2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["keys.json"], "nothing else is left behind"


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.json"
    add(path, "search")
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        add(path, "other")
    assert [entry.name for entry in tmp_path.iterdir()] == ["keys.json"]
    assert path.read_bytes() == before


def test_keys_are_not_in_the_file_nor_tenants_in_their_ids(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = add(path, "search")
    assert key not in path.read_text()
    file = load_keys(path, 10)
    assert file.tenant_id("search") == file.tenant_id("search") != KeyFile(salt=SALT).tenant_id("search")
    assert "search" not in file.tenant_id("search")


@pytest.mark.parametrize("shared", [False, True])
def test_tenants_of_a_file_share_pages_only_where_it_says_so(tmp_path: Path, shared: bool) -> None:
    path = tmp_path / "keys.json"
    keys = [add(path, "search").encode(), add(path, "other").encode()]
    with edit_keys(path, 10, make=False) as held:
        held[0] = msgspec.structs.replace(held[0], share_prefixes=shared)
    ring = FileApiKeys(path, VirtualClock())
    found = [ring.find(key) for key in keys]
    assert all(found)
    salts = [tenant.salt for tenant in found if tenant is not None]
    assert salts == ["", ""] if shared else (all(salts) and salts[0] != salts[1])


def test_a_ring_follows_its_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, clock = tmp_path / "keys.json", VirtualClock()
    first = add(path, "search", classes=("batch",))
    ring = FileApiKeys(path, clock, besides=["sk-common"])
    assert not ring.is_open
    tenant = ring.find(first.encode())
    assert tenant is not None
    assert tenant.classes == (ServiceClass.BATCH,)
    common = ring.find(b"sk-common")
    assert common is not None
    assert common.id == ""
    second = add(path, "other")
    assert ring.find(second.encode()) is None
    clock.advance(KEY_FILE_CHECK_S)
    assert ring.find(second.encode()) is not None
    path.write_text("broken")
    clock.advance(KEY_FILE_CHECK_S)
    assert ring.find(second.encode()) is not None
    assert "API keys are unchanged" in caplog.text
    lines = len(caplog.records)
    for _ in range(10):
        clock.advance(KEY_FILE_CHECK_S)
        ring.find(b"")
    assert len(caplog.records) == lines
    clock.advance(KEY_FILE_ERROR_LOG_S)  # keys that were revoked since are valid until somebody has read this
    ring.find(b"")
    assert len(caplog.records) == lines + 1


def add(path: Path, tenant: str, classes: tuple[ServiceClassName, ...] = ("interactive",)) -> str:
    """As ``penstock keys add`` does it."""
    key, entry = new_key(tenant, classes)
    with edit_keys(path, 10, make=True) as held:
        tenants = {**held[0].tenants, tenant: TenantEntry()}
        held[0] = msgspec.structs.replace(held[0], tenants=tenants, keys=(*held[0].keys, entry))
    return key
