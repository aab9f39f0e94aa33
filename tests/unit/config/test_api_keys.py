"""The file of API keys: written whole, checked when it is read, noticed when it changes."""

from __future__ import annotations

import stat
from pathlib import Path

import msgspec
import pytest

from penstock.api.auth import KEY_FILE_CHECK_S, KEY_FILE_ERROR_LOG_S, FileApiKeys
from penstock.clock import VirtualClock
from penstock.config.api_keys import (
    KeyChanges,
    KeyFile,
    ServiceClassName,
    TenantEntry,
    edit_keys,
    load_keys,
    new_key,
    parse_expiry,
)
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


# --- what a key is for -----------------------------------------------------------------------------------------------

NOW = 1_800_000_000.5  # 2027-01-15 08:00:00.5 UTC


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("1h", 1_800_003_600),
        ("30d", 1_802_592_000),
        ("2w", 1_801_209_600),
        ("2027-01-31", 1_801_353_600),
        ("2027-01-31T00:00:00+01:00", 1_801_350_000),
        ("2027-01-31T12:00Z", 1_801_396_800),
    ],
)
def test_when_a_key_expires(text: str, at: int):
    assert parse_expiry(text, NOW) == at


@pytest.mark.parametrize(
    "text", ["", "30", "d", "-1d", "30 d", "1.5d", "٣d", "soon", "2027-13-01", "2027-01-31X", "1m"]
)
def test_what_is_no_time_of_expiry(text: str):
    with pytest.raises(ConfigError, match="as 12h, 30d or 4w"):
        parse_expiry(text, NOW)


@pytest.mark.parametrize("text", ["0d", "2027-01-15", "1999-12-31", "999999w"])
def test_a_key_cannot_have_expired_before_it_is_made(text: str):
    with pytest.raises(ConfigError, match="after now"):
        parse_expiry(text, NOW)


def test_a_file_of_an_earlier_version_has_no_limits_and_is_written_as_before(tmp_path: Path):
    path = tmp_path / "keys.json"
    entry = (
        f'{{"id": "k-00000001", "tenant": "a", "sha256": "{"1" * 64}", "classes": ["batch"], "operator": true,'
        ' "created": 7}'
    )
    path.write_text(f'{{"version": 1, "salt": "{SALT}", "tenants": {{"a": {{}}}}, "keys": [{entry}]}}')
    path.chmod(0o600)
    (key,) = load_keys(path, 10).keys
    assert (key.expires, key.models, key.routes, key.max_concurrency) == (None, None, None, None)
    with edit_keys(path, 10) as held:
        held[0] = msgspec.structs.replace(held[0], share_prefixes=True)
    assert not {"expires", "models", "routes", "max_concurrency"} & set(
        msgspec.json.decode(path.read_bytes())["keys"][0]
    )


@pytest.mark.parametrize(
    "limits",
    [
        '"expires": 0',
        '"expires": 1e20',
        '"expires": "never"',
        '"models": []',
        '"models": [""]',
        f'"models": {["m"] * 65}'.replace("'", '"'),
        '"routes": ["everything"]',
        '"routes": []',
        '"max_concurrency": 0',
        '"max_concurrency": 1.5',
    ],
)
def test_limits_that_cannot_be(tmp_path: Path, limits: str):
    path = tmp_path / "keys.json"
    entry = f"{ENTRY[:-1]}, {limits}}}"
    path.write_text(f'{{"salt": "{SALT}", "tenants": {{"a": {{}}}}, "keys": [{entry}]}}')
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"keys\[0\]"):
        load_keys(path, 10)


def test_what_has_become_of_the_keys_is_told_when_the_file_is_read(tmp_path: Path):
    path, clock = tmp_path / "keys.json", VirtualClock()
    for tenant in ("a", "b", "c"):
        add(path, tenant)
    a, b, c = (key.id for key in load_keys(path, 10).keys)
    seen: list[KeyChanges] = []
    ring = FileApiKeys(path, clock, on_change=seen.append)
    with edit_keys(path, 10) as held:
        tenants = {**held[0].tenants, "a": TenantEntry(weight=2.0)}
        kept = tuple(key for key in held[0].keys if key.id != b)
        held[0] = msgspec.structs.replace(held[0], tenants=tenants, keys=kept)
    add(path, "d")
    d = load_keys(path, 10).keys[-1].id
    ring.refresh()
    assert seen == [], "not before its time"
    clock.advance(KEY_FILE_CHECK_S)
    ring.refresh()
    assert seen == [KeyChanges(added=(d,), revoked=(b,), changed=(a,))]
    path.write_text("broken")
    clock.advance(KEY_FILE_CHECK_S)
    ring.refresh()
    assert len(seen) == 1
    with pytest.raises(ConfigError):
        load_keys(path, 10)
    assert c not in (*seen[0].added, *seen[0].revoked, *seen[0].changed)
