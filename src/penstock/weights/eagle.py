# ruff: noqa: N815  (field names carry shapes)
"""Draft heads in the format of EAGLE-3 (arXiv:2503.01840): their ``config.json`` and tensors.

One decoder layer that reads hidden states of the model it was trained for, and guesses that model's next token.  It has
that model's embedding and vocabulary, and its output matrix unless it brings one for a part of the vocabulary.  Knows
what a head is made of, not how it is computed (``engine.models.eagle``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import ModelError
from penstock.kernels.operands import PackedLinear
from penstock.kernels.ops import Ops
from penstock.weights.architecture.decoder import AttentionConfig, MlpConfig
from penstock.weights.architecture.rope import parse_rope
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.checkpoint_reader import Checkpoint
from penstock.weights.config_json import ConfigFields
from penstock.weights.families.fields import parse_activation, parse_sizes
from penstock.weights.model_files import CONFIG, load_json, model_files

ARCHITECTURE = "LlamaForCausalLMEagle3"

FOLDER = "head"
"""Where a model's folder has its head."""

LAYER_NAMES = ("midlayer.", "layers.0.")
"""What the layer is called: by its makers, and in other releases."""

MAX_TAPS = 16
UNREAD = frozenset({"t2d"})
"""Tensors that say nothing new."""


class DraftHeadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A head, without its weights.  Sizes are checked."""

    where: str
    hidden: int
    vocab: int  # of the model
    outputs: int  # tokens that it can guess
    attention: AttentionConfig
    mlp: MlpConfig
    eps: float
    tapped: tuple[int, ...]  # layers of the model whose outputs it reads
    target: str | None = None  # hash of the weights that it was trained for, if its file says

    @property
    def parameters(self) -> int:
        """Weights of its tensors, an output matrix for tokens of its own among them."""
        attention, width = self.attention, self.hidden
        queries, keys = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
        inward = len(self.tapped) * width + 2 * (queries + 2 * keys) + 2 * self.mlp.intermediate
        outward = queries + self.mlp.intermediate + (self.outputs if self.outputs != self.vocab else 0)
        return (inward + outward + 4) * width


@dataclass(frozen=True, slots=True)
class LoadedDraftHead:
    """A head in memory.  ``weights``: by the names of ``engine.models.eagle``."""

    spec: DraftHeadSpec
    weights: Mapping[str, Any]
    ids_V: NDArray[np.int32] | None  # the model's token of each of its outputs; None: the same


def is_draft_head(path: Path) -> bool:
    """Whether this folder holds a draft head and no model.  Raises ModelError for a ``config.json`` that is none."""
    fields = _fields(path)
    return fields is not None and fields.get("architectures", list, []) == [ARCHITECTURE]


def inspect_draft_head(path: Path, model: ModelSpec) -> DraftHeadSpec:
    """What the folder's head is, for this model.

    Raises ModelError if it is not one, or one for a model of other sizes.
    """
    config = _fields(path)
    if config is None:
        raise ModelError(f"{path}: has no {CONFIG}; expected the folder of an EAGLE-3 head")
    if config.get("architectures", list, []) != [ARCHITECTURE]:
        raise config.error(f"architectures must be ['{ARCHITECTURE}'] of a head")
    sizes = parse_sizes(config)
    if config.get("norm_before_residual", bool, False):
        raise config.error("norm_before_residual is true; heads whose residual stream is not normed can be served")
    if sizes.layers != 1:
        raise config.error(f"num_hidden_layers must be 1, got {sizes.layers}: heads of one layer can be served")
    for name, own, wanted in (
        ("hidden_size", sizes.hidden, model.hidden),
        ("target_hidden_size", config.positive_int("target_hidden_size", model.hidden), model.hidden),
        ("vocab_size", config.positive_int("vocab_size"), model.vocab),
    ):
        if own != wanted:
            raise config.error(f"{name} is {own}, the model's is {wanted}: this is another model's head")
    outputs = config.positive_int("draft_vocab_size", model.vocab)
    if outputs > model.vocab:
        raise config.error(f"draft_vocab_size {outputs} is more than the vocabulary of {model.vocab}")
    section = config.section("penstock")
    return DraftHeadSpec(
        where=config.where,
        hidden=sizes.hidden,
        vocab=model.vocab,
        outputs=outputs,
        attention=sizes.attention(parse_rope(config, sizes.head_dim)),
        mlp=MlpConfig(
            intermediate=config.positive_int("intermediate_size"),
            activation=parse_activation(config, "hidden_act", "silu"),
        ),
        eps=config.positive_float("rms_norm_eps", 1e-6),
        tapped=_tapped(config, model.layers),
        target=None if section is None else section.get("target", str),
    )


def _fields(path: Path) -> ConfigFields | None:
    files = model_files(path)
    values = load_json(files, CONFIG)
    return None if values is None else ConfigFields(values, files.path_of(CONFIG))


def _tapped(config: ConfigFields, layers: int) -> tuple[int, ...]:
    """Behind how many layers hidden states are read: as the file says, in either of two ways, or as usual."""
    section = config.section("eagle_config") or ConfigFields({}, config.where)
    name = "eagle_aux_hidden_state_layer_ids"
    if config.has(name):
        ids, first = config.get(name, list), 0
    else:  # there they count the layers whose output is read
        ids, first = section.get(name, list, [1, layers // 2 - 1, layers - 4]), 1
    if not 1 <= len(ids) <= MAX_TAPS or not all(type(item) is int and 0 <= item + first < layers for item in ids):
        raise config.error(f"{name} must name layers of the model, which has {layers}, got {ids!r}")
    if len(set(ids)) < len(ids):
        raise config.error(f"{name} names a layer twice: {ids!r}")
    return tuple(item + first for item in ids)


def load_draft_head(path: Path, spec: DraftHeadSpec, weights_hash: str, ops: Ops) -> LoadedDraftHead:
    """Its weights, packed.  ``weights_hash``: of the model it is to guess for.

    Raises ModelError if it was trained for other weights, or its tensors are not those of such a head.
    """
    if spec.target is not None and spec.target != weights_hash:
        raise ModelError(
            f"{spec.where}: this head was trained for a model with the weights {spec.target[:16]}..., this model has "
            f"{weights_hash[:16]}...: its guesses would be of no use"
        )
    with Checkpoint(path) as checkpoint:
        return _DraftHeadTensors(checkpoint, spec, ops).load()


class _DraftHeadTensors:
    """Reads every tensor once and refuses files with unknown ones."""

    def __init__(self, checkpoint: Checkpoint, spec: DraftHeadSpec, ops: Ops) -> None:
        self._checkpoint = checkpoint
        self._spec = spec
        self._ops = ops
        self._left = set(checkpoint.names) - UNREAD
        found = [name for name in LAYER_NAMES if f"{name}hidden_norm.weight" in checkpoint]
        self._layer = found[0] if found else LAYER_NAMES[0]

    def load(self) -> LoadedDraftHead:
        spec, ops = self._spec, self._ops
        width, attention = spec.hidden, spec.attention
        keys = attention.kv_heads * attention.head_dim
        queries = attention.heads * attention.head_dim
        qkv = np.concatenate(
            [
                self._layer_array(f"self_attn.{name}_proj.weight", rows, 2 * width)
                for name, rows in (("q", queries), ("k", keys), ("v", keys))
            ]
        )
        inner = spec.mlp.intermediate
        weights = {
            "fuse": self._matrix("fc.weight", rows=width, columns=len(spec.tapped) * width),
            "qkv_embed": ops.pack_linear(qkv[:, :width]),
            "qkv_feature": ops.pack_linear(qkv[:, width:]),
            "out": self._matrix(f"{self._layer}self_attn.o_proj.weight", rows=width, columns=queries),
            "gate_up": self._matrix(
                f"{self._layer}mlp.gate_proj.weight", f"{self._layer}mlp.up_proj.weight", rows=inner, columns=width
            ),
            "down": self._matrix(f"{self._layer}mlp.down_proj.weight", rows=width, columns=inner),
            "norm": ops.vector(self._array("norm.weight", width)),
        }
        for weight, name in (
            ("norm_embed", "input_layernorm"),
            ("norm_feature", "hidden_norm"),
            ("norm_mlp", "post_attention_layernorm"),
        ):
            weights[weight] = ops.vector(self._layer_array(f"{name}.weight", width))
        for weight, name in (("embed", "embed_tokens.weight"), ("head", "lm_head.weight")):
            if name in self._checkpoint:
                rows = spec.vocab if weight == "embed" else spec.outputs
                weights[weight] = self._matrix(name, rows=rows, columns=width)
        ids_V = self._ids()
        if self._left:
            raise ModelError(f"{spec.where}: tensor {min(self._left)!r} is not part of an EAGLE-3 head")
        return LoadedDraftHead(spec, MappingProxyType(weights), ids_V)

    def _matrix(self, *names: str, rows: int, columns: int) -> PackedLinear:
        """These, one below the other; compressed ones stay so where the kernels compute from that."""
        arrays = [self._array(name, rows, columns) for name in names]  # checked against their hashes
        parts = [part for name in names if (part := self._checkpoint.compressed_matrix(name)) is not None]
        packed = self._ops.pack_compressed(parts) if len(parts) == len(names) else None
        return packed or self._ops.pack_linear(np.concatenate(arrays))

    def _layer_array(self, name: str, *shape: int) -> NDArray[Any]:
        return self._array(self._layer + name, *shape)

    def _array(self, name: str, *shape: int) -> NDArray[Any]:
        """Aligned, whatever the file's."""
        self._left.discard(name)
        found = self._checkpoint.info(name).shape
        if found != shape:
            raise ModelError(
                f"{self._checkpoint.path_of(name)}: tensor {name!r} has shape {list(found)}, "
                f"by config.json it must have {list(shape)}"
            )
        return np.array(self._checkpoint.array(name))

    def _ids(self) -> NDArray[np.int32] | None:
        """The model's token of each output: its number, and what ``d2t`` adds."""
        self._left.discard("d2t")
        spec = self._spec
        if "d2t" not in self._checkpoint:
            if spec.outputs != spec.vocab:
                raise ModelError(f"{spec.where}: draft_vocab_size is {spec.outputs}, but there is no tensor 'd2t'")
            return None
        info, path = self._checkpoint.info("d2t"), self._checkpoint.path_of("d2t")
        if info.dtype != "I64" or info.shape != (spec.outputs,) or "lm_head.weight" not in self._checkpoint:
            raise ModelError(
                f"{path}: tensor 'd2t' must be {spec.outputs} numbers of type I64, with an lm_head.weight of as many "
                "rows"
            )
        ids = np.frombuffer(self._checkpoint.raw("d2t"), np.int64) + np.arange(spec.outputs)
        if ids.min() < 0 or ids.max() >= spec.vocab:
            raise ModelError(f"{path}: tensor 'd2t' leads out of the vocabulary of {spec.vocab}")
        return ids.astype(np.int32)
