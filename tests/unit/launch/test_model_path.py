"""From what was typed to a folder.  The Hub itself is never asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import errors

from penstock.errors import ModelError
from penstock.launch.hub_download import download_model
from penstock.launch.model_path import ModelLocation, locate_model


def no_download(name: str) -> str:
    raise AssertionError(f"{name} was looked up")


def test_nothing_is_the_bundled_storyteller() -> None:
    located = locate_model(None, no_download)
    assert located.bundled
    assert located.name == "storyteller"
    for file in ("config.json", "model.safetensors", "README.md", "ATTRIBUTION.md"):
        assert (located.path / file).is_file()


def test_a_folder_is_called_by_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "org" / "my-model"
    folder.mkdir(parents=True)
    assert locate_model(str(folder), no_download) == ModelLocation(folder, "my-model")
    monkeypatch.chdir(tmp_path)
    assert locate_model("org/my-model", no_download) == ModelLocation(folder, "my-model")  # a folder beats the Hub
    monkeypatch.chdir(folder)
    assert locate_model(".", no_download) == ModelLocation(folder, "my-model")


def test_a_hub_name_is_downloaded_and_keeps_its_name(tmp_path: Path) -> None:
    asked = []

    def download(name: str) -> str:
        asked.append(name)
        return str(tmp_path)

    assert locate_model("meta-llama/Llama-3.2-1B", download) == ModelLocation(tmp_path, "meta-llama/Llama-3.2-1B")
    assert asked == ["meta-llama/Llama-3.2-1B"]


@pytest.mark.parametrize("name", ["/no/such/place", "./org/name", "gpt2", "a/b/c", "org/", "-x/y", "org/na me"])
def test_neither_folder_nor_hub_name(name: str) -> None:
    with pytest.raises(ModelError, match="no such folder, and no Hub name"):
        locate_model(name, no_download)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.touch()
    with pytest.raises(ModelError, match=r"is a file; expected a \.gguf file, or the folder"):
        locate_model(str(file), no_download)


def test_a_gguf_file_is_one(tmp_path: Path) -> None:
    file = tmp_path / "story-Q8_0.gguf"
    file.touch()
    assert locate_model(str(file), no_download) == ModelLocation(file.resolve(), "story-Q8_0")
    blob = tmp_path / "0123abcd"
    blob.touch()
    link = tmp_path / "story-Q2_K-00001-of-00003.gguf"
    link.symlink_to(blob)  # as in the Hub's cache
    assert locate_model(str(link), no_download) == ModelLocation(link, "story-Q2_K")


RESPONSE = httpx2.Response(403, request=httpx2.Request("GET", "https://huggingface.co"))


@pytest.mark.parametrize(
    ("error", "because"),
    [
        (errors.GatedRepoError("no", response=RESPONSE), "is gated: accept its terms at https://huggingface.co/org/m"),
        (errors.RepositoryNotFoundError("no", response=RESPONSE), "the Hub has no such model, or it is private"),
        (errors.RevisionNotFoundError("no", response=RESPONSE), "has no revision None"),
        (errors.LocalEntryNotFoundError("no"), "the Hub cannot be reached and the model is not in the local cache"),
        (errors.HfHubHTTPError("503 at the Hub", response=RESPONSE), "cannot fetch it from the Hub: 503 at the Hub"),
        (errors.OfflineModeIsEnabled("no outgoing traffic"), "cannot fetch it from the Hub: no outgoing traffic"),
        (errors.HFValidationError("no repo id"), "cannot fetch it from the Hub: no repo id"),
        (httpx2.ConnectError("no route\nto host"), "cannot fetch it from the Hub: no route"),
        (httpx2.ProxyError(""), "cannot fetch it from the Hub: ProxyError"),
        (httpx2.InvalidURL("no address"), "cannot fetch it from the Hub: no address"),
        (RuntimeError("a part of a file was lost"), "a part of a file was lost"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_goes_wrong_at_the_hub_is_one_line(
    error: Exception, because: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", fails)
    with pytest.raises(ModelError) as refusal:
        download_model("org/m")
    assert because in str(refusal.value)
    assert "\n" not in str(refusal.value)


def commit_to_cache(cache: Path, name: str) -> Path:
    """As the Hub's library keeps a model that was fetched whole; the folder that it was fetched to."""
    repo = cache / ("models--" + name.replace("/", "--"))
    commit = "a" * 40
    folder = repo / "snapshots" / commit
    folder.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("environ", [{"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}])
def test_without_a_network_a_model_comes_from_the_cache_or_is_refused_in_one_line(
    environ: dict[str, str], tmp_path: Path
) -> None:
    """By the Hub's library itself, in a process that cannot import what only tests install."""
    folder = commit_to_cache(tmp_path / "hub", "org/here")
    script = """
import sys
sys.modules["httpx"] = None
from penstock.cli.main import main
from penstock.launch.model_path import config_folder, download_in_child
print(config_folder("org/here"), download_in_child("org/here"))
for words in (["plan", "org/away"], ["serve", "org/away", "--port", "0"], ["plan", "org/..away"]):
    print(main(words))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "HF_HOME": str(tmp_path),
            "PATH": "/bin",
            **environ,
        },
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.stdout.split() == [str(folder), str(folder), "2", "2", "2"], done.stderr
    assert "Traceback" not in done.stderr
    away = [line for line in done.stderr.splitlines() if line.startswith("penstock: error: org/away: ")]
    assert len(away) == 2
    assert all("not in the local cache" in line and "give the folder of a model" in line for line in away)


@pytest.mark.parametrize(
    ("download", "outcome"),
    [
        ("lambda name: '/models/' + name", "/models/org/m"),
        ("lambda name: fail('it is gated')", "ModelError: it is gated"),
        ("lambda name: os._exit(9)", "ModelError: org/m: the download ended without a result"),
    ],
)
def test_a_download_runs_in_a_child_and_leaves_no_thread_and_no_process(download: str, outcome: str) -> None:
    script = f"""
import os, threading
from pathlib import Path
from types import SimpleNamespace
from penstock.errors import ModelError
from penstock.launch import model_path
from penstock.launch.fork_server import thread_count
def fail(text):
    raise ModelError(text)
def in_a_thread(name):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return SimpleNamespace(folder=Path(({download})(name)))
model_path.download_model = in_a_thread
before = os.listdir("/proc/self/fd")
try:
    print(model_path.download_in_child("org/m"))
except ModelError as error:
    print("ModelError:", error)
assert thread_count() == 1
assert os.listdir("/proc/self/fd") == before
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    pass
else:
    raise AssertionError("a child is left")
"""
    environ = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == outcome + "\n"
