"""From what was typed to a folder.  The Hub itself is never asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ModelError
from penstock.launch.locate import Located, locate


def no_download(name: str) -> str:
    raise AssertionError(f"{name} was looked up")


def test_nothing_is_the_bundled_storyteller() -> None:
    located = locate(None, no_download)
    assert located.bundled
    assert located.name == "storyteller"
    for file in ("config.json", "model.safetensors", "README.md", "ATTRIBUTION.md"):
        assert (located.path / file).is_file()


def test_a_folder_is_called_by_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "org" / "my-model"
    folder.mkdir(parents=True)
    assert locate(str(folder), no_download) == Located(folder, "my-model")
    monkeypatch.chdir(tmp_path)
    assert locate("org/my-model", no_download) == Located(folder, "my-model")  # a folder beats the Hub
    monkeypatch.chdir(folder)
    assert locate(".", no_download) == Located(folder, "my-model")


def test_a_hub_name_is_downloaded_and_keeps_its_name(tmp_path: Path) -> None:
    asked = []

    def download(name: str) -> str:
        asked.append(name)
        return str(tmp_path)

    assert locate("meta-llama/Llama-3.2-1B", download) == Located(tmp_path, "meta-llama/Llama-3.2-1B")
    assert asked == ["meta-llama/Llama-3.2-1B"]


@pytest.mark.parametrize("name", ["/no/such/place", "./org/name", "gpt2", "a/b/c", "org/", "-x/y", "org/na me"])
def test_neither_folder_nor_hub_name(name: str) -> None:
    with pytest.raises(ModelError, match="no such folder, and no Hub name"):
        locate(name, no_download)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(ModelError, match="is a file; expected the folder"):
        locate(str(file), no_download)
