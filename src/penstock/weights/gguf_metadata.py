"""A GGUF file's metadata as ``config.json``, ``tokenizer.json`` and ``tokenizer_config.json``, so that families and
tokenizers parse one form only.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and llama.cpp's converter.  Two kinds of tokenizers:
``gpt2``, byte-level BPE with merges, whose pre-tokenizer is given by name; and ``llama``, SentencePiece's BPE, whose
merges follow from the pieces' scores.  Knows no tokenizer library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ModelError
from penstock.weights.architecture.rope import Llama3RopeScaling
from penstock.weights.gguf_file import ROPE_FACTORS, GgufHeader

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Kinds of tokens other than plain ones (``tokenizer.ggml.token_type``)."""

_SPACE = "▁"

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CASED = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


@dataclass(frozen=True, slots=True)
class PreTokenizerRule:
    """How text is cut into words before pairs are merged."""

    pattern: str | None  # None: GPT-2's own
    digits: bool = False  # each digit alone, before the pattern
    normal_form: bool = False  # NFC
    whole_words: bool = False  # a word that is a token is that token, whatever the merges say
    add_bos: bool = False  # where the file does not say


def _gpt4(digits: str) -> str:
    words = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    return words + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_LLAMA3 = PreTokenizerRule(_gpt4(r"\p{N}{1,3}"), whole_words=True, add_bos=True)
_QWEN2 = PreTokenizerRule(_gpt4(r"\p{N}"), normal_form=True)
_O200K = PreTokenizerRule(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CASED}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_CASED}+{_LOWER}*"
    rf"{_CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

PRE_TOKENIZERS: Mapping[str, PreTokenizerRule] = MappingProxyType(
    {
        "gpt-2": PreTokenizerRule(None),
        "llama-bpe": _LLAMA3,
        "llama3": _LLAMA3,
        "llama-v3": _LLAMA3,
        "qwen2": _QWEN2,
        "gpt-4o": _O200K,
        "smollm": PreTokenizerRule(None, digits=True),
        "smaug-bpe": _LLAMA3,
    }
)
"""By ``tokenizer.ggml.pre``: what the makers' own ``tokenizer.json`` says."""


def tokenizer_json(metadata: Mapping[str, Any], where: str) -> bytes:
    """What ``tokenizers`` reads.  Raises ModelError for a tokenizer that is not known."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        made = _byte_level(metadata, where)
    elif kind == "llama":
        made = _sentence_piece(metadata, where)
    else:
        raise ModelError(f"{where}: tokenizer.ggml.model is {kind!r}; 'gpt2' and 'llama' can be read")
    return json.dumps({"version": "1.0", "truncation": None, "padding": None, **made}, ensure_ascii=False).encode()


def tokenizer_config(metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Chat template and named tokens."""
    tokens = _tokens(metadata, where)
    config: dict[str, Any] = {}
    if isinstance(metadata.get("tokenizer.chat_template"), str):
        config["chat_template"] = metadata["tokenizer.chat_template"]
    for name in ("bos", "eos", "unk", "pad"):
        key = {"unk": "unknown", "pad": "padding"}.get(name, name)
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(token) is int and 0 <= token < len(tokens):
            config[f"{name}_token"] = tokens[token]
    return config


def _tokens(metadata: Mapping[str, Any], where: str) -> list[str]:
    return _texts(metadata, "tokenizer.ggml.tokens", where)


def _texts(metadata: Mapping[str, Any], key: str, where: str) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise ModelError(f"{where}: {key} must be a list of text")
    return values


def _kinds(metadata: Mapping[str, Any], count: int, where: str) -> list[int]:
    kinds = metadata.get("tokenizer.ggml.token_type", [1] * count)
    if not isinstance(kinds, list) or len(kinds) != count:
        raise ModelError(f"{where}: tokenizer.ggml.token_type must have one entry for each of {count} tokens")
    return kinds


def _vocabulary(tokens: list[str], where: str) -> dict[str, int]:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise ModelError(f"{where}: tokenizer.ggml.tokens: {twice!r} stands twice")
    return vocabulary


def _added(tokens: list[str], kinds: list[int], special: tuple[int, ...]) -> list[dict[str, Any]]:
    """Tokens that are found before text is cut: control tokens, and the makers' own words."""
    return [
        {
            "id": index,
            "content": tokens[index],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind in special,
        }
        for index, kind in enumerate(kinds)
        if kind in special or kind == _USER_DEFINED
    ]


def _with_bos(metadata: Mapping[str, Any], tokens: list[str], default: bool) -> dict[str, Any] | None:
    """What is put before a text that is no chat."""
    token = metadata.get("tokenizer.ggml.bos_token_id")
    if not metadata.get("tokenizer.ggml.add_bos_token", default) or type(token) is not int:
        return None
    if not 0 <= token < len(tokens):
        return None
    name = tokens[token]
    begin, text = {"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text, begin, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {name: {"id": name, "ids": [token], "tokens": [name]}},
    }


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], **changes: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges,
        **changes,
    }


def _byte_level(metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    name = metadata.get("tokenizer.ggml.pre", "gpt-2")
    cut = PRE_TOKENIZERS.get(name)
    if cut is None:
        raise ModelError(
            f"{where}: tokenizer.ggml.pre is {name!r}: how it cuts words is not known here; "
            f"these are: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    tokens = _tokens(metadata, where)
    kinds = _kinds(metadata, len(tokens), where)
    vocabulary = _vocabulary(tokens, where)
    merges = [_pair(line, vocabulary, where) for line in _texts(metadata, "tokenizer.ggml.merges", where)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    steps: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True}] if cut.digits else []
    if cut.pattern is not None:
        steps.append({"type": "Split", "pattern": {"Regex": cut.pattern}, "behavior": "Isolated", "invert": False})
    steps.append(byte_level | {"use_regex": cut.pattern is None})
    return {
        "added_tokens": _added(tokens, kinds, (_CONTROL,)),
        "normalizer": {"type": "NFC"} if cut.normal_form else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": _with_bos(metadata, tokens, cut.add_bos),
        "decoder": byte_level | {"use_regex": True},
        "model": _bpe(vocabulary, merges, ignore_merges=cut.whole_words),
    }


def _pair(line: str, vocabulary: Mapping[str, int], where: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
        raise ModelError(f"{where}: tokenizer.ggml.merges: {line!r} merges what is no token")
    return left, right


def _sentence_piece(metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    tokens = _tokens(metadata, where)
    kinds = _kinds(metadata, len(tokens), where)
    vocabulary = _vocabulary(tokens, where)
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelError(f"{where}: tokenizer.ggml.scores must have one entry for each of {len(tokens)} tokens")
    plain = {token: index for token, index in vocabulary.items() if kinds[index] == 1}
    unknown = next((tokens[index] for index, kind in enumerate(kinds) if kind == _UNKNOWN), None)
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    replace_back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    steps: list[dict[str, Any]] = [{"type": "Prepend", "prepend": _SPACE}] if prefixed else []
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    decoders: list[dict[str, Any]] = [replace_back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefixed:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "added_tokens": _added(tokens, kinds, (_CONTROL, _UNKNOWN)),
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": _with_bos(metadata, tokens, default=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocabulary, _merges_of(plain, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def _merges_of(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a piece of two pieces; what makes the piece of the highest score is merged first."""
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, index in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = vocabulary.get(piece[:cut]), vocabulary.get(piece[cut:])
            if left is not None and right is not None:
                merges.append((-scores[index], left, right, piece[:cut], piece[cut:]))
    return [(left, right) for *_, left, right in sorted(merges)]


ARCHITECTURES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "llama": ("LlamaForCausalLM", "llama"),
        "qwen2": ("Qwen2ForCausalLM", "qwen2"),
        "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    }
)
"""``general.architecture`` to the architecture and model_type of Hugging Face."""

_SIZES: Mapping[str, str] = MappingProxyType(
    {
        "hidden_size": "embedding_length",
        "num_hidden_layers": "block_count",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "max_position_embeddings": "context_length",
    }
)
_REALS: Mapping[str, str] = MappingProxyType(
    {"rms_norm_eps": "attention.layer_norm_rms_epsilon", "rope_theta": "rope.freq_base"}
)
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What all Llama 3 models with stretched frequencies have in common."""

_FACTORS_AGREE = 1e-4


def config_json(header: GgufHeader, factors: NDArray[np.float32] | None, where: str) -> dict[str, Any]:
    """The configuration.  ``factors``: the tensor ``rope_freqs.weight`` if there is one.

    Raises ModelError for what a ``config.json`` could not say.
    """
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{where}: general.architecture is {architecture!r}; of GGUF files these can be served: "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )
    _refuse_variants(metadata, str(architecture), where)
    name, model_type = ARCHITECTURES[str(architecture)]
    config: dict[str, Any] = {"architectures": [name], "model_type": model_type}
    for field, key in _SIZES.items():
        if f"{architecture}.{key}" in metadata:
            config[field] = metadata[f"{architecture}.{key}"]
    for field, key in _REALS.items():
        if f"{architecture}.{key}" in metadata:
            config[field] = _shortest(metadata[f"{architecture}.{key}"])
    table = header.tensors.get("token_embd.weight")
    if table is None:
        raise ModelError(f"{where}: tensor 'token_embd.weight' is missing")
    config["vocab_size"] = table.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    config |= _end_tokens(metadata)
    scaling = _scaling(metadata, str(architecture), config, factors, where)
    return config | ({"rope_scaling": scaling} if scaling else {})


def _refuse_variants(metadata: Mapping[str, Any], architecture: str, where: str) -> None:
    """What the same architecture may also mean, and would be computed otherwise."""
    if metadata.get("split.count", 0) not in (0, 1):
        raise ModelError(
            f"{where}: is one of {metadata['split.count']} parts; llama.cpp's llama-gguf-split --merge joins them"
        )
    if metadata.get(f"{architecture}.expert_count", 0):
        raise ModelError(f"{where}: a mixture of experts out of a GGUF file cannot be served")
    hidden, heads = (metadata.get(f"{architecture}.{key}") for key in ("embedding_length", "attention.head_count"))
    head_dim = hidden // heads if type(hidden) is int and type(heads) is int and heads > 0 else None
    head_dim = metadata.get(f"{architecture}.attention.key_length", head_dim)
    for key in ("attention.value_length", "rope.dimension_count"):
        size = metadata.get(f"{architecture}.{key}", head_dim)
        if size != head_dim:
            raise ModelError(f"{where}: {architecture}.{key} is {size}, heads have {head_dim}: cannot be served")


def _end_tokens(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A chat model's turns end with another token than its texts: whatever ends either ends an answer."""
    found: dict[str, Any] = {}
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    ends = [metadata[key] for key in keys if key in metadata]
    if ends:
        found["eos_token_id"] = list(dict.fromkeys(ends))
    if "tokenizer.ggml.bos_token_id" in metadata:
        found["bos_token_id"] = metadata["tokenizer.ggml.bos_token_id"]
    return found


def _scaling(
    metadata: Mapping[str, Any],
    architecture: str,
    config: Mapping[str, Any],
    factors: NDArray[np.float32] | None,
    where: str,
) -> dict[str, Any] | None:
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if kind != "none":
        scaling = {"rope_type": kind}
        for field, key in (("factor", "factor"), ("original_max_position_embeddings", "original_context_length")):
            if f"{architecture}.rope.scaling.{key}" in metadata:
                scaling[field] = _shortest(metadata[f"{architecture}.rope.scaling.{key}"])
        return scaling
    return None if factors is None else _llama3(config, factors, where)


def _llama3(config: Mapping[str, Any], factors: NDArray[np.float32], where: str) -> dict[str, Any]:
    """The recipe that gives these factors.  Raises ModelError if it is none that is known."""
    recipe = {"rope_type": "llama3", "factor": _shortest(float(factors.max())), **_LLAMA3_ROPE}
    theta = float(config.get("rope_theta", 10_000.0))
    stretched = Llama3RopeScaling(
        factor=recipe["factor"],
        low_freq_factor=_LLAMA3_ROPE["low_freq_factor"],
        high_freq_factor=_LLAMA3_ROPE["high_freq_factor"],
        original_max_positions=int(_LLAMA3_ROPE["original_max_position_embeddings"]),
    )
    plain = theta ** -(np.arange(len(factors)) / len(factors))
    if recipe["factor"] <= 1 or not np.allclose(plain / factors, stretched.of(plain, theta), rtol=_FACTORS_AGREE):
        raise ModelError(f"{where}: tensor {ROPE_FACTORS!r}: its factors follow no recipe that is known here")
    return recipe


def _shortest(value: Any) -> Any:
    """A real number as its makers wrote it: 1e-05, not what is left of it in 32 bits."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
