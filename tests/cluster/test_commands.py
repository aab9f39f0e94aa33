"""The commands and examples that talk to a service, against a real one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiers import of_default

from .asking import penstock
from .conftest import Serve
from .examples import EXAMPLES, run_example
from .server import PenstockServer

ROOT = Path(__file__).resolve().parents[2]
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
RUN_ELSEWHERE = {
    "read_compressed.py",
    "image.py",
    "embeddings.py",
    "transcribe.py",
}  # on a file, or on models of other kinds
TALKING = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name not in RUN_ELSEWHERE)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with PenstockServer() as server:
        yield server.url


def test_commands_that_talk_to_a_service(url: str) -> None:
    story = ("chat", "--seed", "3", "--max-tokens", "30", "Tell me a story.")
    asked = [penstock(*story, PENSTOCK_URL=url) for _ in range(2)]
    assert {run.returncode for run in asked} == {0}
    assert asked[0].stdout == asked[1].stdout != ""
    assert "tokens, first after" in asked[0].stderr

    words = ("--num-prompts", "8", "--random-input-len", "64", "--random-output-len", "8", "--ignore-eos", "--json")
    for endpoint in ("/v1/completions", "/v1/chat/completions"):
        run = penstock("bench", "--endpoint", endpoint, *words, "--max-concurrency", "4", PENSTOCK_URL=url)
        assert run.returncode == 0, run.stderr
        found = json.loads(run.stdout)
        assert (found["completed"], found["failed"]) == (8, 0)
        assert found["output_tokens"] == 64
        assert found["prompt_tokens"] == 512, found["prompts"]
        assert found["ttft_s"]["p50"] > 0

    run = penstock("status", "--json", PENSTOCK_URL=url)
    assert {row["state"] for row in json.loads(run.stdout)["workers"]} == {"ready"}
    assert penstock("doctor", PENSTOCK_URL=url).returncode == 0


@pytest.mark.parametrize("example", of_default("openai_client.py", "reproduce_seed.py", among=TALKING))
def test_examples_run(example: str, url: str, tmp_path: Path) -> None:
    assert len(run_example(example, url, tmp_path)) > 50


@needs_curl
def test_the_start_up_log_tells_how_to_talk_to_it(serve: Serve) -> None:
    server = serve("--api-key", "k e y")
    server.wait_for(lambda: "or: curl" in server.read_log(), 60.0, "announced")
    line = next(line for line in server.read_log().splitlines() if "or: curl" in line)
    environ = os.environ | {"PENSTOCK_API_KEY": "k e y"}
    command = line.partition("or: ")[2]
    run = subprocess.run(["bash", "-c", command], env=environ, capture_output=True, text=True, timeout=110, check=False)
    assert "data: [DONE]" in run.stdout, run.stdout + run.stderr


@needs_curl
def test_the_curl_example_runs(url: str) -> None:
    environ = os.environ | {"PENSTOCK_URL": url}
    run = subprocess.run(["bash", ROOT / "examples/curl.sh"], env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "data: [DONE]" in run.stdout
