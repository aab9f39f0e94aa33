"""``penstock pull`` from a server that speaks the Hub's routes, both as processes of their own."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hub_server import COMMIT, MODEL, HubProcess, hub_server
from penstock.cli.main import main
from penstock.launch import hub_download

WEIGHTS = bytes(range(256)) * 4000


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """What a model's repository has: files that serving needs, and the same weights in other forms."""
    folder = tmp_path / "repo"
    (folder / "original").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    for unwanted in ("consolidated.safetensors", "original/x.safetensors", "pytorch_model.bin"):
        (folder / unwanted).write_bytes(b"not needed")
    return folder


def environment(hub: HubProcess, home: Path, **more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, sys.path))
    return {"PYTHONPATH": path, "PATH": "/bin", "HF_HOME": str(home), "HF_ENDPOINT": hub.url, **more}


def pull(hub: HubProcess, home: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "pull", MODEL, *words],
        env=environment(hub, home, **more), capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    return done


def snapshot(home: Path) -> Path:
    return home / "hub" / ("models--" + MODEL.replace("/", "--")) / "snapshots" / COMMIT


def partial_file(home: Path) -> Path:
    name = hashlib.sha256(WEIGHTS).hexdigest() + ".penstock.incomplete"
    return snapshot(home).parents[1] / "blobs" / name


def test_what_serving_needs_is_downloaded_once_over_connections_that_break(repo: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with hub_server(repo, breaks={"model.safetensors": [400_000, 0, 1_000]}) as hub:
        done = pull(hub, home)
        assert done.returncode == 0, done.stderr
        assert "downloaded; 3 files, 1.0 MB, in " in done.stdout
        assert f"serve it: penstock serve {MODEL}\n" in done.stdout
        assert "the connection broke at byte 400000 " in done.stderr
    assert sorted(path.name for path in snapshot(home).iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert (snapshot(home) / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.fetched("model.safetensors") == [None, "bytes=400000-", "bytes=400000-", "bytes=401000-"]
    with hub_server(repo) as again:
        assert "nothing to download" in pull(again, home).stdout
    assert again.fetched("model.safetensors") == []
    with hub_server(tmp_path / "nothing") as gone:  # cached, so `penstock plan` and `serve` need no Hub
        pass
    env = environment(gone, home)
    script = f"from penstock.launch.model_path import locate_model; print(locate_model({MODEL!r}).path)"
    found = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=90, check=True
    )
    assert found.stdout.strip() == str(snapshot(home))


def test_a_pull_that_was_killed_goes_on_in_the_next(repo: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with hub_server(repo, stalls=["model.safetensors"]) as hub:
        command = [sys.executable, "-m", "penstock", "pull", MODEL]
        with subprocess.Popen(command, env=environment(hub, home), stderr=subprocess.PIPE, text=True) as process:
            deadline = time.monotonic() + 60
            while not partial_file(home).exists():
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            second = pull(hub, home)
            assert second.returncode == 2
            assert "another process downloads model.safetensors already" in second.stderr
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            assert "Traceback" not in process.stderr.read()
            assert process.wait(30) == 130
    kept = partial_file(home).stat().st_size
    assert kept == 1000
    with hub_server(repo) as hub:
        assert pull(hub, home).returncode == 0
    assert hub.fetched("model.safetensors") == ["bytes=1000-"]
    assert (snapshot(home) / "model.safetensors").read_bytes() == WEIGHTS
    assert not partial_file(home).exists()


@pytest.mark.long
def test_a_server_without_ranges_sends_the_whole_again(repo: Path, tmp_path: Path) -> None:
    with hub_server(repo, breaks={"model.safetensors": [400_000]}, no_ranges=True) as hub:
        assert pull(hub, tmp_path / "home").returncode == 0
    assert (snapshot(tmp_path / "home") / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("name", ["model.safetensors", pytest.param("tokenizer.json", marks=pytest.mark.long)])
def test_a_damaged_file_is_refused_and_not_kept(name: str, repo: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with hub_server(repo, damaged=[name]) as hub:
        done = pull(hub, home)
        assert done.returncode == 2
        assert f"{name} was damaged on its way" in done.stderr
        assert not (snapshot(home) / name).exists()
    with hub_server(repo) as hub:
        assert pull(hub, home).returncode == 0
    assert (snapshot(home) / name).read_bytes() == (repo / name).read_bytes()


def test_a_gated_model_needs_its_token_which_goes_to_the_hub_alone(repo: Path, tmp_path: Path) -> None:
    with hub_server(repo, token="hf_secret") as hub:
        refused = pull(hub, tmp_path / "home")
        assert refused.returncode == 2
        assert "is gated: accept its terms" in refused.stderr
        assert pull(hub, tmp_path / "home", HF_TOKEN="hf_secret").returncode == 0
        requests = hub.close()
    sent = [path for _, path, _, has_token in requests if has_token]
    assert f"/{MODEL}/resolve/{COMMIT}/model.safetensors" in sent
    assert not [path for path in sent if path.startswith("/cdn/")]


@pytest.mark.long
def test_a_revision(repo: Path, tmp_path: Path) -> None:
    with hub_server(repo) as hub:
        done = pull(hub, tmp_path / "home", "--revision", "nope")
        assert (done.returncode, done.stderr) == (
            2, f"penstock: error: {MODEL} has no revision nope: expected a branch, a tag or a commit\n",
        )  # fmt: skip
        done = pull(hub, tmp_path / "home", "--revision", "v1")
    assert f"serve it: penstock serve {snapshot(tmp_path / 'home')}\n" in done.stdout


def test_a_name_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "gpt2"]) == 2
    assert "gpt2 is no name of a model on the Hub; expected ORG/NAME" in capsys.readouterr().err


def test_space_is_checked_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage: Any = type("Usage", (), {"free": 5 * 10**9})
    monkeypatch.setattr("penstock.launch.hub_download.shutil.disk_usage", lambda path: usage)
    storage = tmp_path / "models--org--tiny"
    hub_download._check_space(MODEL, storage, 4 * 10**9)
    with pytest.raises(hub_download.ModelError, match=r"org/tiny needs 16\.0 GB more, and .* has 5\.0 GB free: make"):
        hub_download._check_space(MODEL, storage, 16 * 10**9)
    (storage / "blobs").mkdir(parents=True)
    with (storage / "blobs" / "0123.penstock.incomplete").open("wb") as file:
        file.truncate(12 * 10**9)  # was fetched before
    hub_download._check_space(MODEL, storage, 16 * 10**9)
