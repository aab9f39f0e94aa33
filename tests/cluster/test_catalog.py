"""A catalogue with real processes: loaded on demand, unloaded for others, never under a running answer."""

from __future__ import annotations

import concurrent.futures
import os
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

import penstock
from tiny_models import llama_config, write_model
from tiny_readers import bert_config, write_modules, write_reader

from . import asking
from .server import PenstockServer

STORYTELLER = Path(penstock.__file__).parent / "bundled" / "storyteller"
KV = 4 << 20


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Room for the storyteller and one tiny model, or for two tiny ones and no storyteller."""
    base = tmp_path_factory.mktemp("catalogue")
    entries = [("stories", STORYTELLER, 'aliases = ["gpt-4o"]'), ("broken", base / "nowhere", "")]
    for seed, name in enumerate(("a", "b")):
        entries.append((name, write_model(base / name, llama_config(vocab_size=512), seed=seed), ""))
    path = base / "models.toml"
    path.write_text(
        "".join(
            f'[[model]]\nname = "{name}"\npath = "{folder}"\nkv_memory = {KV}\naggregated = true\nthreads = 1\n{more}\n'
            for name, folder, more in entries
        )
    )
    return path


def memory() -> int:
    weights = sum(item.stat().st_size for item in STORYTELLER.glob("*.safetensors"))
    return weights + 3 * KV


def ask(server: PenstockServer, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 8, "seed": 1} | fields
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def states(server: PenstockServer) -> dict[str, str]:
    return {card["id"]: card["state"] for card in server.get("/v1/models").json()["data"]}


def test_a_model_that_chats_and_one_that_makes_embeddings(tmp_path: Path) -> None:
    """The usual pair; each answers at its own routes, and names them at the other's."""
    write_modules(tmp_path / "emb")
    write_reader(tmp_path / "emb", bert_config())
    write_model(tmp_path / "chat", llama_config(vocab_size=512))
    path = tmp_path / "models.toml"
    settings = f"kv_memory = {KV}\nthreads = 1\n"
    path.write_text(
        "".join(f'[[model]]\nname = "{name}"\npath = "{tmp_path / name}"\n{settings}' for name in ("emb", "chat"))
    )
    with PenstockServer(["--catalogue", str(path)]) as server:

        def post(route: str, **body: Any) -> httpx.Response:
            return httpx.post(server.url + route, json=body, timeout=60)

        answer = post("/v1/embeddings", model="emb", input=["the fox", "the quick fox"])
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["data"]) == 2
        assert post("/v1/completions", model="chat", prompt=[5, 6], max_tokens=2).status_code == 200
        for route, model in (("/v1/embeddings", "chat"), ("/v1/completions", "emb")):
            refused = post(route, model=model, input="x", **({} if "emb" in route else {"prompt": "x"}))
            assert refused.status_code == 400, (route, refused.text)
        assert post("/classify", model="emb", input="x").json()["error"]["code"] == "wrong_task"


@pytest.mark.long
def test_tenants_reach_the_models(file: Path, tmp_path: Path) -> None:
    """Idempotency keys, stored responses and metrics of a model's own gateway know for whom its front asks."""
    ring = tmp_path / "keys.json"
    keys = {"one": add_key(ring, "one", "--operator"), "two": add_key(ring, "two")}
    keys["stories"] = add_key(ring, "two", "--models", "stories")
    audit = tmp_path / "audit.jsonl"
    flags = ["--catalogue", str(file), "--api-keys", str(ring), "--response-cache", "1MiB", "--audit-log", str(audit)]
    with PenstockServer(flags) as server:

        def told(tenant: str, **headers: str) -> httpx.Response:
            body = {"model": "a", "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0}
            headers |= {"authorization": f"Bearer {keys[tenant]}"}
            return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)

        refused = told("stories")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_found")
        card = httpx.get(f"{server.url}/v1/models/a", headers={"authorization": f"Bearer {keys['one']}"}, timeout=10)
        assert card.json()["state"] == "unloaded", "it is not loaded for a key that is for another model"
        server.wait_for(lambda: '"model_not_found"' in audit.read_text(), 30, "audited")
        words = [told(tenant).headers["x-penstock-response-cache"] for tenant in ("one", "one", "two", "two")]
        assert words == ["miss", "hit", "miss", "hit"]
        one, again, two = (told(tenant, **{"idempotency-key": "k"}).json() for tenant in ("one", "one", "two"))
        assert one["id"] == again["id"] != two["id"]
        assert one["choices"] == two["choices"]
        authorization = {"authorization": f"Bearer {keys['one']}"}
        page = httpx.get(f"{server.url}/metrics?model=a", headers=authorization, timeout=10).text
        labels = set(re.findall(r'tenant_requests_total\{.*tenant="([^"]+)"', page))
        assert len(labels - {"default"}) == 2


def add_key(ring: Path, tenant: str, *flags: str) -> str:
    told = asking.penstock("keys", "add", str(ring), "--tenant", tenant, *flags)
    assert told.returncode == 0, told.stderr
    (key,) = re.findall(r"\bsk-[\w-]+", told.stdout)
    return str(key)


def test_models_come_and_go(file: Path) -> None:
    flags = ["--catalogue", str(file), "--model-memory", str(memory()), "--model-alias", "claude-*=gpt-4o"]
    with PenstockServer(flags) as server:
        assert states(server) == dict.fromkeys(("stories", "broken", "a", "b"), "unloaded")
        first = ask(server, "gpt-4o")
        assert (first.status_code, first.json()["model"]) == (200, "gpt-4o")
        assert ask(server, "claude-opus-5").json()["model"] == "claude-opus-5"
        told = server.get("/v1/models/claude-opus-5").json()
        assert (told["parent"], told["state"], told["context_length"]) == ("stories", "loaded", told["max_model_len"])
        assert "max_model_len" not in server.get("/v1/models/a").json()  # it was not loaded yet
        assert states(server)["stories"] == "loaded"
        failed = ask(server, "broken")
        assert failed.status_code == 503
        assert "could not be loaded" in failed.json()["error"]["message"]
        assert "nowhere" in failed.json()["error"]["message"]
        assert ask(server, "nobody").status_code == 404
        long = {"model": "stories", "prompt": "Once", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=long, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                waiting = [pool.submit(ask, server, name) for name in "ab"]
                text = "\n".join(lines)
                assert [answer.result().status_code for answer in waiting] == [200, 200]
        assert text.count('"text"') > 100
        assert "[DONE]" in text
        assert '"error"' not in text
        # Where a had answered before stories did, it was the idle one that made room for b; used again, it comes back.
        assert [ask(server, name).status_code for name in "ab"] == [200, 200]
        assert states(server) == {"stories": "unloaded", "broken": "unloaded", "a": "loaded", "b": "loaded"}
        again = ask(server, "stories")
        assert again.json()["choices"] == first.json()["choices"]
        rows = server.get("/admin/workers").json()
        loaded = {row["id"].partition("/")[0] for row in rows["workers"]}
        assert "stories" in loaded
        assert len(loaded) == 2, "the one of a and b that was used last is still there"
        assert {row["name"]: row["loads"] for row in rows["models"]}["stories"] == 2


@pytest.mark.long
def test_operators_and_deaths(file: Path) -> None:
    with PenstockServer(["--catalogue", str(file)]) as server:
        loaded = httpx.post(f"{server.url}/admin/load_model", json={"model": "a"}, timeout=60)
        assert loaded.json()["state"] == "loaded"
        assert ask(server, "a").status_code == 200
        worker = next(row for row in server.get("/admin/workers").json()["workers"] if row["id"].startswith("a/"))
        os.kill(worker["pid"], signal.SIGKILL)  # its own supervisor forks it anew
        assert ask(server, "a").status_code == 200
        gone = httpx.post(f"{server.url}/admin/unload_model", json={"model": "a"}, timeout=60)
        assert gone.json()["state"] == "unloaded"
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            names = ["a", "b", "stories", "broken"] * 4
            codes = [answer.status_code for answer in pool.map(lambda name: ask(server, name), names)]
        assert codes == [503 if name == "broken" else 200 for name in names]
        page = server.get("/metrics?model=a").text
        assert 'model_name="a"' in page
