"""Law 1 with adapters: alone, mixed, cached, handed over, killed, loaded at the start or while serving."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

import penstock
from tiny_adapters import write_adapter

from .server import PATIENCE_S, PenstockServer
from .streams import all_answers
from .varied import varied_requests

STORYTELLER = Path(penstock.__file__).parent / "bundled" / "storyteller"
NAMES = ("storyteller", "fox", "owl")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("loras")
    return {
        "fox": write_adapter(base / "fox", STORYTELLER, rank=8, seed=1, lora_alpha=2),
        "owl": write_adapter(
            base / "owl", STORYTELLER, ("q_proj", "v_proj", "down_proj"), rank=3, seed=2, dtype="bf16"
        ),
    }


def bodies(salt: str, count: int, *, salt_each: bool = False) -> list[dict[str, Any]]:
    """Requests for the model and its adapters in turn."""
    asked = varied_requests(salt=salt, salt_each=salt_each, max_tokens=24)[:count]
    return [body | {"model": NAMES[index % len(NAMES)]} for index, body in enumerate(asked)]


def answered(server: PenstockServer, asked: list[dict[str, Any]], *, together: bool) -> list[dict[str, Any]]:
    answers = asyncio.run(all_answers(server.url, asked, together=together))
    return [answer.identical for answer in answers]


def plain(folders: dict[str, Path], count: int) -> list[dict[str, Any]]:
    """One worker, one request at a time, from nothing, adapters from the start."""
    flags = ["--aggregated", "--kv-memory", "64MiB", *(f"--lora={name}={path}" for name, path in folders.items())]
    with PenstockServer(flags) as server:
        assert [card["id"] for card in server.get("/v1/models").json()["data"]] == list(NAMES)
        return answered(server, bodies("plain", count, salt_each=True), together=False)


@pytest.fixture(scope="module")
def all_plain(folders: dict[str, Path]) -> list[dict[str, Any]]:
    return plain(folders, 20)


def load(server: PenstockServer, name: str, folder: Path) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(folder)}
    return httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=60)


def kill(server: PenstockServer, *roles: str) -> None:
    for worker in server.workers():
        if worker["role"] in roles:
            os.kill(worker["pid"], signal.SIGKILL)


@pytest.mark.long
def test_loaded_while_serving(folders: dict[str, Path]) -> None:
    """Split, mixed, with what the caches have; then workers that were started anew have the adapters again."""
    wanted = plain(folders, 6)
    with PenstockServer(["--kv-memory", "64MiB", "--allow-lora-updating"]) as server:
        for name, folder in folders.items():
            assert load(server, name, folder).status_code == 200
        asked = bodies("mixed", 6)
        for _ in range(2):
            assert answered(server, asked, together=True) == wanted
        kill(server, "prefill", "decode")
        assert answered(server, bodies("again", 3), together=True) == wanted[:3]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "flags", [["--transfer", "tcp"], ["--aggregated", "--max-chunk-tokens", "16"], ["--lend-cores"]]
)
@pytest.mark.parametrize("at_start", [True, False], ids=["at start", "while serving"])
def test_every_way(flags: list[str], at_start: bool, folders: dict[str, Path], all_plain: list[dict[str, Any]]) -> None:
    listed = [f"--lora={name}={path}" for name, path in folders.items()] if at_start else ["--allow-lora-updating"]
    with PenstockServer([*flags, "--kv-memory", "64MiB", "--max-loras", "2", *listed]) as server:
        for name, folder in {} if at_start else folders.items():
            assert load(server, name, folder).status_code == 200
        for salt, together in (("alone", False), ("alone", False), ("mixed", True), ("mixed", True)):
            assert answered(server, bodies(salt, 20), together=together) == all_plain
        for role in ("prefill", "decode", "both"):
            kill(server, role)
            assert answered(server, bodies(role, 20), together=True) == all_plain


@pytest.mark.long
def test_an_answer_outlives_its_adapters_name(folders: dict[str, Path], tmp_path: Path) -> None:
    """Unloaded in mid-answer, then its worker is killed: the answer goes on.  Changed on disk, it is another one."""
    folder = Path(shutil.copytree(folders["fox"], tmp_path / "fox"))
    body = {"model": "fox", "prompt": "Once", "max_tokens": 400, "ignore_eos": True, "seed": 1}
    with PenstockServer(["--allow-lora-updating"]) as server:
        load(server, "fox", folder)
        wanted = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"]
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            gone = httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": "fox"}, timeout=60)
            assert gone.status_code == 200
            kill(server, "decode")
            rest = "\n".join(lines)
        assert "[DONE]" in rest
        assert '"error"' not in rest
        load(server, "fox", folder)
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"] == wanted
        write_adapter(folder, STORYTELLER, rank=8, seed=9)
        before = {row["pid"] for row in server.workers()}
        kill(server, "prefill", "decode")  # what is in memory is still served; a new worker must read it again
        server.wait_for(lambda: not before & {row["pid"] for row in server.workers()}, PATIENCE_S, "forked anew")
        server.wait_all_ready()
        failed = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert failed.status_code == 503
        assert "was changed since it was listed" in failed.json()["error"]["message"]
