"""Finds and checks the draft head or draft model of ``--speculate`` and ``--draft-model``, and computes the memory that
it and LoRA adapters take, before anything is loaded.  ``speculation`` loads it.

``auto`` is decided here, as only the model's folder knows whether it has a head: its head if there is one, else lookup.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.config.base import expanded_path
from penstock.config.facts import ExtraWeights
from penstock.config.schema import MAX_DRAFTING, EngineSettings, NamedAdapter
from penstock.errors import ConfigError, ModelError
from penstock.kernels.operands import KvShape
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.config_json import parse_json_object
from penstock.weights.eagle import ARCHITECTURE, FOLDER, DraftHeadSpec, inspect_draft_head, is_draft_head
from penstock.weights.families.registry import DECODERS
from penstock.weights.inspect import inspect_model, spec_for_length
from penstock.weights.model_files import CONFIG, TOKENIZER, model_files


@dataclass(frozen=True, slots=True)
class DraftHeadFolder:
    """A draft head, without its weights."""

    path: Path
    spec: DraftHeadSpec


@dataclass(frozen=True, slots=True)
class DraftModelFolder:
    """A draft model, without its weights."""

    path: Path
    spec: ModelSpec


DraftFolder = DraftHeadFolder | DraftModelFolder

DRAFT_POSITIONS = 1024
"""Positions that a draft model must have."""


def draft_kind(kind: str, named: str | None, path: Path, model: ModelSpec) -> Literal["head", "draft"] | None:
    """What ``--speculate kind`` and ``--draft-model named`` load for the model at ``path``; None: nothing.

    Raises ConfigError for flags that contradict each other.
    """
    if model.pooler is not None or model.kv.states is not None:
        return None  # no speculation (config.resolve)
    if named is not None and kind not in ("head", "draft"):
        raise ConfigError(f"--draft-model {named}: only used by --speculate head and --speculate draft")
    if model.audio_tokens and kind in ("head", "draft"):
        raise ConfigError(f"--speculate {kind}: transcription models have no draft models; use --speculate lookup")
    if kind == "draft":
        if named is None:
            raise ConfigError("--speculate draft needs --draft-model DIR, a small model with the same tokenizer")
        return "draft"
    own = (path / FOLDER / CONFIG).exists()
    if kind == "head" and named is None and not own:
        raise ConfigError(
            f"--speculate head: {path} has no folder {FOLDER}; name a head that was trained for this model with "
            "--draft-model DIR, or use --speculate lookup"
        )
    return "head" if kind == "head" or (kind == "auto" and own) else None


def find_draft(config: EngineSettings, path: Path, model: ModelSpec) -> DraftFolder | None:
    """The draft head or model for the model at ``path``; None: none is needed.

    Raises ConfigError as ``draft_kind``, ModelError for a head or model that does not fit.
    """
    named = config.draft_model
    kind = draft_kind(config.speculate, named, path, model)
    if kind is None:
        return None
    folder = path / FOLDER if named is None else expanded_path(named, "--draft-model")
    return _found_model(folder, path, model) if kind == "draft" else _found_head(folder, model)


def _found_head(folder: Path, model: ModelSpec) -> DraftHeadFolder:
    if model.architecture not in DECODERS:
        raise ModelError(f"{folder}: models of installed packages give no hidden states to a draft head")
    return DraftHeadFolder(folder, inspect_draft_head(folder, model))


def _found_model(folder: Path, path: Path, model: ModelSpec) -> DraftModelFolder:
    if not folder.exists():
        raise ModelError(f"--draft-model {folder}: no such folder")
    if folder.is_dir() and is_draft_head(folder):
        raise ModelError(f"{folder}: is a head ({ARCHITECTURE}); use it with --speculate head")
    spec = inspect_model(folder)
    incomplete = spec.kv.shared or spec.kv.states is not None or spec.audio_tokens
    if incomplete or spec.max_positions < DRAFT_POSITIONS:
        raise ModelError(f"{folder}: a draft model needs full keys and values and {DRAFT_POSITIONS} positions")
    if _tokens(folder) != _tokens(path):
        raise ModelError(
            f"{folder}: its tokens are not those of {path}; a draft model must have the tokenizer of the model that it "
            "drafts for"
        )
    return DraftModelFolder(folder, spec_for_length(spec, DRAFT_POSITIONS))


def _tokens(path: Path) -> Any:
    """The vocabulary, to compare two models: tokens and ids of ``tokenizer.json``, or the tokenizer's files."""
    files = model_files(path)
    raw = files.read(TOKENIZER)
    if raw is None:
        named = [file for file in sorted(path.glob("*")) if file.suffix in (".model", ".tiktoken")]
        return {file.name: file.read_bytes() for file in named}
    model: Mapping[str, Any] = parse_json_object(raw, files.path_of(TOKENIZER)).get("model", {})
    return json.dumps(model.get("vocab"))


NUMBER_BYTES = 2


def extra_weights(
    config: EngineSettings, found: DraftFolder | None, loras: Sequence[NamedAdapter] = (), *, more_loras: bool = False
) -> tuple[ExtraWeights, ...]:
    """The weights that are loaded with the model: ``found`` (``find_draft``) and ``loras``.

    ``more_loras``: further adapters may be loaded later.
    """
    drafts: tuple[ExtraWeights, ...] = ()
    if found is not None:
        drafts = (
            draft_head_weights(found.spec) if isinstance(found, DraftHeadFolder) else draft_model_weights(found.spec),
        )
    adapters = adapter_weights([own.nbytes for own in loras], config.lora_memory if more_loras else None)
    return (*drafts, *adapters)


def draft_head_weights(spec: DraftHeadSpec) -> ExtraWeights:
    """A draft head and its KV memory."""
    kv = KvShape.plain(layers=1, kv_heads=spec.attention.kv_heads, head_dim=spec.attention.head_dim)
    return _draft("draft head", spec.parameters, kv)


def draft_model_weights(spec: ModelSpec) -> ExtraWeights:
    """A draft model and its KV memory."""
    return _draft("draft model", spec.parameters, spec.kv)


def adapter_weights(nbytes: Sequence[int], room: int | None) -> tuple[ExtraWeights, ...]:
    """Adapters whose files have ``nbytes``; ``room``: the most bytes of adapters that may be loaded later."""
    together = sum(nbytes)
    if not together and not room:
        return ()
    why = f"{len(nbytes)} adapters as large as their files"
    if room is None:
        return (ExtraWeights(name="LoRA adapters", shared_bytes=together, why=why),)
    more = max(0, room - together)
    return (
        ExtraWeights(
            name="LoRA adapters",
            shared_bytes=together,
            worker_bytes=more,
            why=f"{why}, and {more:,} bytes more in each worker, up to --lora-memory",
        ),
    )


def _draft(name: str, parameters: int, kv: KvShape) -> ExtraWeights:
    numbers = kv.layers * kv.kv_heads * (kv.key_dim + (0 if kv.shared else kv.value_dim))
    a_token = numbers * NUMBER_BYTES
    return ExtraWeights(
        name=name,
        shared_bytes=parameters * NUMBER_BYTES,
        worker_bytes=MAX_DRAFTING * DRAFT_POSITIONS * a_token,
        why=(
            f"{parameters / 1e6:,.1f} M weights in bf16; in each worker {MAX_DRAFTING} contexts of {DRAFT_POSITIONS:,} "
            f"tokens, {a_token:,} bytes each"
        ),
    )
