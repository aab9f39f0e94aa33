"""What --speculate and --draft-model mean for a model, or why they mean nothing, before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.config.schema import ServeConfig
from penstock.errors import ConfigError, ModelError
from penstock.kernels.operands import StateShape
from penstock.launch.draft_model import DraftHeadFolder, DraftModelFolder, draft_kind, find_draft
from penstock.weights.inspect import inspect_model
from tiny_heads import head_config, head_tensors, write_head
from tiny_models import llama_config, write_model

MODEL = llama_config(max_position_embeddings=1024)


def found(model: Path, **flags: Any) -> DraftHeadFolder | DraftModelFolder | None:
    return find_draft(ServeConfig(**flags), model, inspect_model(model))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", MODEL)


def test_a_model_without_a_head_looks_up(model: Path) -> None:
    assert found(model, speculate="auto") is None
    assert found(model, speculate="lookup") is None
    with pytest.raises(ConfigError, match=r"has no folder head; name a head .* or use --speculate lookup"):
        found(model, speculate="head")


def test_a_head_is_the_models_own_or_the_one_named(model: Path, tmp_path: Path) -> None:
    config = head_config(MODEL)
    write_head(model / "head", config, head_tensors(config))
    write_head(tmp_path / "other", config, head_tensors(config))
    assert found(model) is None
    for kind in ("auto", "head"):
        own = found(model, speculate=kind)
        assert isinstance(own, DraftHeadFolder)
        assert own.path == model / "head"
    named = found(model, speculate="head", draft_model=str(tmp_path / "other"))
    assert isinstance(named, DraftHeadFolder)
    assert named.path == tmp_path / "other"


def test_a_draft_model_has_the_same_tokens(model: Path, tmp_path: Path) -> None:
    small = write_model(tmp_path / "small", MODEL | {"num_hidden_layers": 1})
    own = found(model, speculate="draft", draft_model=str(small))
    assert isinstance(own, DraftModelFolder)
    assert own.spec.layers == 1
    other = write_model(tmp_path / "other", MODEL | {"vocab_size": 64})
    short = write_model(tmp_path / "short", MODEL | {"max_position_embeddings": 512})
    config = head_config(MODEL)
    head = write_head(tmp_path / "head", config, head_tensors(config))
    for folder, reason in (
        (other, "its tokens are not those of"),
        (short, "a draft model needs full keys and values and 1024 positions"),
        (head, r"is a head \(LlamaForCausalLMEagle3\); use it with --speculate head"),
        (tmp_path / "none", "no such folder"),
    ):
        with pytest.raises(ModelError, match=reason):
            found(model, speculate="draft", draft_model=str(folder))


def test_what_a_model_is_decides_what_is_loaded(model: Path) -> None:
    """``plan`` counts by the same rules as ``serve`` loads."""
    spec = inspect_model(model)
    states = StateShape(layers=1, key_heads=1, heads=1, key_dim=16, value_dim=16, taps=2)
    recurrent = msgspec.structs.replace(spec, kv=replace(spec.kv, states=states))
    for kind in ("auto", "head", "draft"):
        assert draft_kind(kind, None, model, recurrent) is None
    hearing = msgspec.structs.replace(spec, audio_tokens=8)
    for kind in ("head", "draft"):
        with pytest.raises(ConfigError, match="transcription models have no draft models"):
            draft_kind(kind, "elsewhere", model, hearing)
    assert draft_kind("auto", None, model, hearing) is None


def test_flags_that_mean_nothing_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="--speculate draft needs --draft-model DIR"):
        found(model, speculate="draft")
    for kind in ("off", "auto", "lookup"):
        with pytest.raises(ConfigError, match="only used by --speculate head and --speculate draft"):
            found(model, speculate=kind, draft_model="/somewhere")
