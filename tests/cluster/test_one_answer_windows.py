"""Law 1 with real processes for a model whose layers read differently far back.

The bundled model with a window in every other layer: its answers are no stories, but they are long and varied.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from .server import PenstockServer
from .streams import all_answers
from .test_one_answer import (
    ROOMS,
    answers_with_a_kill,
    assert_it_took_place,
    compare,
    crowd_until_somebody_gives_way,
)
from .varied import crowd, varied_requests

WINDOW = 100
CONTEXT = ("--max-model-len", "1600")
TIGHT = "1856KiB"  # 116 pages of half the layers: one full context, and far less than the crowd's two answers (156)
WAYS = (
    ("--max-chunk-tokens", "16"),
    ("--max-chunk-tokens", "128", "--transfer", "tcp", "--speculate", "lookup"),
    ("--max-chunk-tokens", "64", "--aggregated"),
)


@pytest.fixture(scope="module")
def windowed(plain_storyteller: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "storyteller"
    shutil.copytree(plain_storyteller, folder)
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    config |= {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "no_rope_layers": [1] * layers,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_windows_give_one_answer(windowed: str) -> None:
    """Split and aggregated, in chunks, in too little memory, in a batch, with a kill, then from the cache."""
    with PenstockServer([windowed, *CONTEXT, "--aggregated", "--kv-memory", ROOMS["roomy"]]) as server:
        plain = asyncio.run(all_answers(server.url, varied_requests(salt_each=True), together=False))
        crowded = asyncio.run(all_answers(server.url, crowd(), together=False))
    wanted = [answer.identical for answer in plain]
    for flags in WAYS:
        with PenstockServer([windowed, *CONTEXT, *flags, "--kv-memory", TIGHT]) as server:
            for kill in (True, False):
                where = f"{flags} kill={kill}"
                bodies = varied_requests(salt=where)
                if kill:
                    compare(asyncio.run(answers_with_a_kill(server, bodies, wanted, together=True)), wanted, where)
                compare(asyncio.run(all_answers(server.url, bodies, together=True)), wanted, where)
            crowd_until_somebody_gives_way(server, [answer.identical for answer in crowded], f"{flags} crowded")
            assert_it_took_place(server, split="--aggregated" not in flags, tight=True)
