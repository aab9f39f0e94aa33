"""A GGUF file's tokenizer as ``tokenizer.json`` and ``tokenizer_config.json``.

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

from penstock.errors import ModelError

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Kinds of tokens other than plain ones (``tokenizer.ggml.token_type``)."""

_SPACE = "▁"

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGITS = "digits"
"""A step that cuts out each digit."""


@dataclass(frozen=True, slots=True)
class PreTokenizerRule:
    """How text is cut into words before pairs are merged: by patterns one after the other, or by GPT-2's own."""

    steps: tuple[str, ...]
    gpt2: bool = False  # GPT-2's own pattern after the steps
    normal_form: bool = False  # NFC
    whole_words: bool = False  # a word that is a token is that token, whatever the merges say
    add_bos: bool = False  # where the file does not say


def _gpt4(digits: str) -> str:
    words = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    return rf"{words}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"


def _cased(contractions: str, digits: str, *, without: str = "", punctuation: str = r"[\r\n/]*") -> str:
    """Words are cut where small letters are followed by capitals; ``without`` is taken out of the letters."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    head = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{head}{upper}*{lower}+{contractions}|{head}{upper}+{lower}*{contractions}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{punctuation}|{_TAIL}"


_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-"
    "\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_MARKS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_HAN_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"

_GPT2 = PreTokenizerRule((), gpt2=True)
_ONE_DIGIT = PreTokenizerRule((_DIGITS,), gpt2=True)
_LLAMA3 = PreTokenizerRule((_gpt4(r"\p{N}{1,3}"),), whole_words=True, add_bos=True)
_CL100K = PreTokenizerRule((_gpt4(r"\p{N}{1,3}"),))
_QWEN2 = PreTokenizerRule((_gpt4(r"\p{N}"),), normal_form=True)
_O200K = PreTokenizerRule((_cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),))

PRE_TOKENIZERS: Mapping[str, PreTokenizerRule] = MappingProxyType(
    {
        **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt"), _GPT2),
        **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), _ONE_DIGIT),
        **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe"), _LLAMA3),
        **dict.fromkeys(("dbrx", "chatglm-bpe"), _CL100K),
        "glm4": PreTokenizerRule((_gpt4(r"\p{N}{1,3}"),), whole_words=True),
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
        "stablelm2": PreTokenizerRule((_gpt4(r"\p{N}"),)),
        **dict.fromkeys(("gpt-4o", "llama4"), _O200K),
        "tekken": PreTokenizerRule((_cased("", r"\p{N}"),), whole_words=True, add_bos=True),
        "kimi-k2": PreTokenizerRule(
            (
                r"[\p{Han}]+|"
                + _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}", without=r"&&[^\p{Han}]", punctuation=r"[\r\n]*"),
            )
        ),
        "deepseek-v3": PreTokenizerRule(
            (
                r"\p{N}{1,3}",
                _HAN_AND_KANA,
                r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
                rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}",
            )
        ),
        "deepseek-llm": PreTokenizerRule(
            (
                r"[\r\n]",
                rf"\s?[{_DEEPSEEK_LETTERS}]+",
                rf"\s?[{_DEEPSEEK_MARKS}]+",
                r"\s+$",
                _HAN_AND_HANGUL,
                _DIGITS,
            )
        ),
        "deepseek-coder": PreTokenizerRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, _DIGITS)),
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


def _added(
    tokens: list[str], kinds: list[int], special: tuple[int, ...], stripping: frozenset[str] = frozenset()
) -> list[dict[str, Any]]:
    """Tokens that are found before text is cut: control tokens, and the makers' own words.

    White space behind those in ``stripping`` is left out.
    """
    return [
        {
            "id": index,
            "content": tokens[index],
            "single_word": False,
            "lstrip": False,
            "rstrip": tokens[index] in stripping,
            "normalized": False,
            "special": kind in special,
        }
        for index, kind in enumerate(kinds)
        if kind in special or kind == _USER_DEFINED
    ]


def _stripping(metadata: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> frozenset[str]:
    """Control tokens that swallow the white space behind them: those of Phi-3, whose files do not say it."""
    if metadata.get("general.architecture") != "phi3":
        return frozenset()
    special = {tokens[index] for index, kind in enumerate(kinds) if kind == _CONTROL}
    return frozenset(special - {"<unk>", "<s>", "<|endoftext|>"})


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
    cut = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
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
    return {
        "added_tokens": _added(tokens, kinds, (_CONTROL,)),
        "normalizer": {"type": "NFC"} if cut.normal_form else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*map(_cut, cut.steps), byte_level | {"use_regex": cut.gpt2}],
        },
        "post_processor": _with_bos(metadata, tokens, cut.add_bos),
        "decoder": byte_level | {"use_regex": True},
        "model": _bpe(vocabulary, merges, ignore_merges=cut.whole_words),
    }


def _cut(step: str) -> dict[str, Any]:
    if step == _DIGITS:
        return {"type": "Digits", "individual_digits": True}
    return {"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated", "invert": False}


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
    if not isinstance(scores, list) or len(scores) != len(tokens) or isinstance(scores[0], str):
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
        "added_tokens": _added(tokens, kinds, (_CONTROL, _UNKNOWN), _stripping(metadata, tokens, kinds)),
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
