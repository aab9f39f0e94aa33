"""Clients run on both loops: ``penstock bench`` uses uvloop, ``penstock chat`` asyncio's own.  A model to plan for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import uvloop

from tiny_models import llama_config

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
def llama_8b(tmp_path: Path) -> Path:
    """The configuration of Llama 3.1 8B, without weights."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(llama_config(**LLAMA_8B)))
    return path
