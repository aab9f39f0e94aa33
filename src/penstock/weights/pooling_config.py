"""Pooling models: whether a model is one, and how it pools, from the name of its architecture, its ``config.json``
and sentence-transformers' files in its folder (``modules.json``, ``1_Pooling/config.json``,
``sentence_bert_config.json``)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from types import MappingProxyType

import msgspec

from penstock.errors import ModelError
from penstock.weights.architecture.decoder import DecoderConfig
from penstock.weights.architecture.encoder import NO_KV
from penstock.weights.architecture.spec import ModelSpec, PoolerConfig, PoolingType, ScoreFunction
from penstock.weights.config_json import ConfigFields, parse_json_objects
from penstock.weights.model_files import ModelFiles, load_json

MODULES = "modules.json"
SENTENCES = "sentence_bert_config.json"
CLASSIFIER = "ForSequenceClassification"
LANGUAGE_MODEL_HEAD = "LMHeadModel"
MAX_LABELS = 65_536

_MODES: Mapping[str, PoolingType] = MappingProxyType(
    {
        "pooling_mode_cls_token": PoolingType.CLS,
        "pooling_mode_mean_tokens": PoolingType.MEAN,
        "pooling_mode_lasttoken": PoolingType.LAST,
        "lasttoken": PoolingType.LAST,
        **{mode.value: mode for mode in PoolingType},
    }
)
"""As switches, or as the value of ``pooling_mode``."""
_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def with_pooler(spec: ModelSpec, architecture: str, config: ConfigFields, files: ModelFiles | None) -> ModelSpec:
    """The specification with its pooler; unchanged for a generative model.

    ``files``: those in the folder of the configuration, if there is one.  Raises ModelError for what cannot be served.
    """
    if spec.audio_tokens:  # it writes what it hears
        return spec
    decodes = isinstance(spec.details, DecoderConfig)
    causal = config.get("is_causal", bool, True) if decodes else False
    modules = _modules(files) if files is not None else None
    if architecture.endswith(CLASSIFIER):
        pooler = _classifier(config, decodes=decodes, causal=causal)
    elif modules is not None and files is not None:
        pooler = _sentences(modules, files, causal=causal)
        spec = _at_most(spec, files)
    elif decodes and not _lacks_head(architecture):
        if not causal:
            raise config.error(f"is_causal is false: such a model writes no text, and for vectors it has no {MODULES}")
        return spec
    else:
        # As sentence-transformers takes an encoder that says nothing.
        pooler = PoolerConfig(
            pooling=PoolingType.LAST if decodes else PoolingType.MEAN, causal=causal, normalised=decodes
        )
    if pooler.causal and pooler.pooling is PoolingType.CLS:
        raise config.error("the first token's state is to stand for a text, but that token reads nothing of it")
    return msgspec.structs.replace(spec, pooler=pooler, kv=spec.kv if pooler.causal else NO_KV)


def _lacks_head(architecture: str) -> bool:
    """Whether a decoder was saved without its language model head: LlamaModel, but not GPT2LMHeadModel."""
    return architecture.endswith("Model") and not architecture.endswith(LANGUAGE_MODEL_HEAD)


def _at_most(spec: ModelSpec, files: ModelFiles) -> ModelSpec:
    """The specification with texts limited to the length that the model's files name."""
    values = load_json(files, SENTENCES)
    own = ConfigFields(values or {}, files.path_of(SENTENCES))
    if not own.has("max_seq_length"):
        return spec
    return msgspec.structs.replace(spec, max_positions=min(spec.max_positions, own.positive_int("max_seq_length")))


# --- labels ----------------------------------------------------------------------------------------------------------


def _classifier(config: ConfigFields, *, decodes: bool, causal: bool) -> PoolerConfig:
    names = config.get("id2label", dict, {})
    labels = len(names) or config.positive_int("num_labels", 2)
    if labels > MAX_LABELS:
        raise config.error(f"id2label has {labels} labels; at most {MAX_LABELS} can be served")
    return PoolerConfig(
        pooling=PoolingType.LAST if decodes else PoolingType.CLS,
        causal=causal,
        labels=labels,
        scores=_scores(config, labels),
        dense=not decodes,
    )


def _scores(config: ConfigFields, labels: int) -> ScoreFunction:
    """What sentence-transformers and transformers' pipelines make of the head's outputs."""
    own = config.get("sentence_transformers", dict, {}).get("activation_fn")
    activation = own or config.get("sbert_ce_default_activation_function", str, "")
    kinds = {
        "": None,
        "Identity": ScoreFunction.RAW,
        "Sigmoid": ScoreFunction.SIGMOID,
        "Softmax": ScoreFunction.SOFTMAX,
    }
    name = str(activation).rpartition(".")[2]
    if name not in kinds:
        raise config.error(f"scores go through {activation!r}; Identity, Sigmoid and Softmax can be served")
    named = kinds[name]
    if named is not None:
        return named
    problem = config.get("problem_type", str, "")
    if problem == "regression":
        return ScoreFunction.RAW
    return ScoreFunction.SIGMOID if labels == 1 or problem == "multi_label_classification" else ScoreFunction.SOFTMAX


# --- sentence-transformers -------------------------------------------------------------------------------------------


def _modules(files: ModelFiles) -> list[ConfigFields] | None:
    """The entries of ``modules.json``; None if there is no such file."""
    raw, where = files.read(MODULES), files.path_of(MODULES)
    if raw is None:
        return None
    modules = [ConfigFields(entry, where) for entry in parse_json_objects(raw, where)]
    if not modules:
        raise ModelError(f"{where}: names no modules")
    return modules


def _sentences(modules: list[ConfigFields], files: ModelFiles, *, causal: bool) -> PoolerConfig:
    kinds = [module.get("type", str).rpartition(".")[2] for module in modules]
    usual = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
    if kinds not in usual:
        raise modules[0].error(
            f"its modules are {', '.join(kinds)}; a Transformer with Pooling, and Normalize behind it, can be served"
        )
    return PoolerConfig(pooling=_pooling(modules[1], files), causal=causal, normalised="Normalize" in kinds)


def _pooling(module: ConfigFields, files: ModelFiles) -> PoolingType:
    folder = module.get("path", str)
    if not _FOLDER.fullmatch(folder):
        raise module.error(f"path {folder!r} is no folder next to it")
    name = str(PurePosixPath(folder, "config.json"))
    values = load_json(files, name)
    if values is None:
        raise ModelError(f"{files.path_of(name)}: is missing, though {MODULES} names it")
    config = ConfigFields(values, files.path_of(name))
    if not config.get("include_prompt", bool, True):
        raise config.error("include_prompt is false; only models that pool their prompt too can be served")
    if isinstance(mode := values.get("pooling_mode"), str):
        chosen = [mode]
    else:
        chosen = [key for key, value in values.items() if key.startswith("pooling_mode_") and value is True]
    found = _MODES.get(chosen[0]) if len(chosen) == 1 else None
    if found is None:
        known = "the first token's state, the last token's or the mean can be served"
        raise config.error(f"pools by {', '.join(chosen) or 'nothing'}; {known}")
    return found
