"""Law 1 with real processes for a model whose layers read differently far back.

The bundled model with a window in every other layer: its answers are no stories, but they are long and varied.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from .one_answer import assert_same_in_a_crowd, plain_answers
from .server import PenstockServer

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
    plain = plain_answers([windowed, *CONTEXT], crowd_prompt=1)
    for flags in WAYS:
        with PenstockServer([windowed, *CONTEXT, *flags, "--kv-memory", TIGHT]) as server:
            assert_same_in_a_crowd(server, plain, " ".join(flags))
