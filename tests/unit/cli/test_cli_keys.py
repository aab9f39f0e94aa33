from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.config.api_keys import load_keys
from penstock.wire.curve_keys import CurveKeys


@pytest.mark.parametrize("command", ["host-keys", "keys"])
def test_host_keys_are_written_once_and_for_their_owner_only(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """``penstock host-keys DIR`` is the older name."""
    folder = tmp_path / "keys"
    assert main([command, str(folder)]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.split()]
    assert {path.parent for path in paths} == {folder}
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}
    first = CurveKeys.load(folder)
    assert main([command, str(folder)]) == 2
    assert "File exists" in capsys.readouterr().err
    assert CurveKeys.load(folder) == first


def test_a_tenants_keys_come_and_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "made" / "keys.json"
    words = ["--tenant", "nightly", "--classes", "batch", "--weight", "0.5", "--tokens-per-minute", "1000"]
    assert main(["keys", "add", str(path), *words]) == 0
    key, line = capsys.readouterr().out.splitlines()
    name = line.split()[0]
    assert main(["keys", "add", str(path), "--tenant", "nightly"]) == 0
    assert main(["keys", "add", str(path), "--tenant", "search", "--weight", "3"]) == 0
    file = load_keys(path, 10)
    assert file.keys[0].sha256 == hashlib.sha256(key.encode()).hexdigest()
    assert file.tenants["nightly"].weight == 0.5, "a second key leaves its tenant as it is"
    capsys.readouterr()
    assert main(["keys", "list", str(path)]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[1].split()[:6] == [name, "nightly", file.tenant_id("nightly"), "batch", "0.5", "1000"]
    assert len(shown.splitlines()) == 4
    assert main(["keys", "revoke", str(path), name]) == 0
    assert [own.tenant for own in load_keys(path, 10).keys] == ["nightly", "search"]
    assert main(["keys", "revoke", str(path), name]) == 2
    assert f"has no key {name}" in capsys.readouterr().err


def test_what_a_key_is_for_is_written_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "keys.json"
    limits = [
        "--expires",
        "2999-01-31",
        "--models",
        "a, b,a",
        "--routes",
        "embeddings,rerank",
        "--max-concurrency",
        "3",
    ]
    assert main(["keys", "add", str(path), "--tenant", "rag", *limits]) == 0
    assert "until 2999-01-31T00:00:00Z, for a, b, at embeddings, rerank, 3 requests at once:" in capsys.readouterr().out
    assert main(["keys", "add", str(path), "--tenant", "ops", "--operator"]) == 0
    key, plain = load_keys(path, 10).keys
    assert (key.models, key.routes, key.max_concurrency) == (("a", "b"), ("embeddings", "rerank"), 3)
    assert (plain.models, plain.routes, plain.max_concurrency, plain.expires) == (None, None, None, None)
    capsys.readouterr()
    assert main(["keys", "list", str(path)]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split()[-6:] == ["EXPIRES", "MODELS", "ROUTES", "AT", "ONCE", "OPERATOR"]
    assert first.split()[-5:] == ["2999-01-31T00:00:00Z", "a,b", "embeddings,rerank", "3", "-"]
    assert second.split()[-5:] == ["-", "-", "-", "-", "yes"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["add", "FILE", "--tenant", "a", "--expires", "soon"], "--expires 'soon': expected a duration"),
        (["add", "FILE", "--tenant", "a", "--expires", "1999-01-01"], "a key must expire after now"),
        (["add", "FILE", "--tenant", "a", "--models", "b,,c"], "--models 'b,,c': expected names"),
        (
            ["add", "FILE", "--tenant", "a", "--routes", "chat,all"],
            "--routes: there is no 'all', but chat, completions",
        ),
        (["add", "FILE", "--tenant", "a", "--max-concurrency", "0"], "max_concurrency"),
        (["add", "FILE"], "the following arguments are required: --tenant"),
        (["add", "FILE", "--tenant", "a b"], "--tenant 'a b': a name has letters"),
        (["add", "FILE", "--tenant", "a", "--classes", "urgent"], "expected interactive, batch, or both"),
        (["add", "FILE", "--tenant", "a", "--weight", "-1"], "weight"),
        (["add"], "required: FILE"),
        (["list", "FILE"], "No such file"),
        (["revoke", "FILE"], "required: ID"),
        (["remove", "FILE"], "invalid choice: 'remove' (choose from 'add', 'list', 'revoke')"),
    ],
)
def test_what_cannot_be(tmp_path: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "keys.json"
    try:
        code = main(["keys", *(str(path) if word == "FILE" else word for word in words)])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert says in capsys.readouterr().err
    assert not path.exists()
